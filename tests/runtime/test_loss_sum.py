import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from workers.loss_sum import LossSum

pytestmark = pytest.mark.runtime

NUM_CASES = 20


def couples(weight: float, dtype: torch.dtype, *, by_sample: bool) -> int:
    """How often a loss is said to couple two samples, given outputs beside a penalty of each.

    A sample's penalty is its own, or what both together come to divided by their number.
    """
    found = 0
    for seed in range(NUM_CASES):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(2, 16, 50, generator=generator)
        target = torch.randint(50, (2, 16), generator=generator)
        penalty = torch.rand(2, generator=generator).to(dtype)
        together = penalty.sum() if by_sample else penalty.mean()

        def loss(output: tuple[Tensor, Tensor], batch: Tensor) -> tuple[Tensor, int]:
            logits, penalty = (t.float() for t in output)
            term = cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum")
            return term + weight * penalty, len(batch)

        alone = [((logits[k : k + 1], penalty[k]), target[k : k + 1]) for k in range(2)]
        found += LossSum(loss, 0, 1).couples(alone, target, [logits.to("meta"), together])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [10.0, 1e-1, 1e-3, 1e-5])
def test_a_small_term_is_no_coupling_where_the_loss_or_the_term_is_rounded(
    weight: float, dtype: torch.dtype
) -> None:
    """As routers of experts have it, beside a cross-entropy in 32 bits."""
    assert couples(weight, dtype, by_sample=True) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_in_such_a_term_is_found_down_to_what_rounding_hides(dtype: torch.dtype) -> None:
    assert couples(1e-1, dtype, by_sample=False) == NUM_CASES
