"""What a loss must return, told in the same words wherever it is called."""

from typing import Any

import torch


def two_sums(returned: Any) -> tuple[Any, Any]:
    """Return (sum over samples, weight) as the user's loss gave them.

    Raises:
        TypeError: If it gave something else than two values.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        kind = "Tensor" if torch.is_tensor(returned) else type(returned).__name__
        raise TypeError(
            f"loss returned a {kind}, not two values; return (sum over "
            "samples, weight) with the number of samples, or of tokens, as the weight"
        )
    loss_sum, weight = returned
    return loss_sum, weight
