"""What the heaviest device takes is what planning says (NVIDIA-NeMo/Megatron-Bridge#5077)."""

import pytest

from benchmarks.fleet import preload
from benchmarks.memory import ADAMW, MODELS, SGD, measure_all
from orchestrator.core.training import Precision

preload("benchmarks.hub_models", "benchmarks.allocated")

GPT2 = "benchmarks.hub_models:hub"


@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", ADAMW), ("bf16", SGD)])
def test_the_predicted_peak_of_the_heaviest_device_is_the_measured_one_or_little_more(
    precision: Precision, optimizer: dict[str, object]
) -> None:
    rows = measure_all(MODELS, [(precision, optimizer)], ("uneven", "gpipe, again"))
    rows += measure_all([GPT2], [(precision, optimizer)], ("uneven",), name="gpt2", double=False)
    ratios = {(row["task"], row["plan"]): float(str(row["ratio"])) for row in rows}
    assert min(ratios.values()) >= 1, ratios
    assert max(ratios.values()) <= 1.15, ratios
