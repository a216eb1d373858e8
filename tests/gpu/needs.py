"""What every test here needs: a GPU that torch can use. Elsewhere it says why it does not run."""

import pytest
import torch

DEVICE = "cuda"


def gpu_tests(least: int = 1) -> list[pytest.MarkDecorator]:
    """Marks of a test that wants so many GPUs."""
    found = torch.cuda.device_count()
    reason = f"needs {least} GPU(s); torch {torch.__version__} finds {found}"
    return [
        pytest.mark.gpu,
        pytest.mark.timeout(120),
        pytest.mark.skipif(DEVICE == "cuda" and found < least, reason=reason),
    ]
