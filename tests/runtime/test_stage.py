"""What one stage asks of the user's loss."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.errors import UserCodeError
from workers.scaling import LossScale
from workers.stage import Stage, StageWork


def finish(loss: Any) -> Stage:
    work = StageWork(
        first_layer=0, layers=(nn.Linear(2, 1),), names=("0",), seed=0, precision="fp32",
        device=torch.device("cpu"), loss=loss, loss_scale=LossScale("fp32"),
    )  # fmt: skip
    stage = Stage(work)
    stage.start_step()
    output = stage.forward(0, 3, (0, 1), torch.ones(2, 2))
    stage.finish(0, 3, output, None, num_samples=2)
    stage.tally(3)
    return stage


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_a_weight_that_counts_nothing_is_the_users_error(weight: float) -> None:
    with pytest.raises(
        UserCodeError, match=rf"step 3: the loss .*loss returned the weight {weight}"
    ):
        finish(lambda output, batch: (output.sum(), weight))


def test_a_microbatch_may_have_no_weight_at_all() -> None:
    assert finish(lambda output, batch: (0.0 * output.sum(), 0)).weight_sum == 0.0
