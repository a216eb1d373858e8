import math

import pytest

from orchestrator.core.model import LayerSizes, LayerTimes, ModelProfile, microbatch_sizes
from orchestrator.core.training import TrainingOptions


@pytest.mark.parametrize(("largest", "sizes"), [(1, (1,)), (6, (6, 3, 1)), (8, (8, 4, 2, 1))])
def test_microbatch_sizes_are_the_largest_and_its_halves(largest, sizes):
    assert microbatch_sizes(largest) == sizes


def test_a_run_has_whole_steps_or_whole_epochs():
    assert TrainingOptions(task="m:t", global_batch=8, steps=3).num_samples(10) == 24
    assert TrainingOptions(task="m:t", global_batch=8, epochs=3).num_samples(10) == 30


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_figure_that_cannot_be_is_refused_with_its_layer(value):
    with pytest.raises(ValueError, match=r"backward_s of kind 'gpu' \(team 2, microbatch 4\) is"):
        LayerTimes("gpu", 2, 4, (1.0, 1.0), (1.0, value), (0.0, 0.0))
    with pytest.raises(ValueError, match=f"teams of 2 is {value} in layer 1; it must be finite"):
        LayerSizes(2, (1.0, value), (0.0, 0.0), (0.0, 0.0))


def test_sizes_stand_smallest_team_first_whatever_their_order_in_a_file():
    sizes = tuple(LayerSizes(q, (8.0 / q,), (1.0,), (1.0,)) for q in (2, 1, 4))
    times = (LayerTimes("gpu", 1, 1, (1.0,), (1.0,), (0.0,)),)
    profile = ModelProfile("m", "fp32", ("layer",), sizes, times)
    assert [size.team_size for size in profile.sizes] == [1, 2, 4]
    assert profile.sizes[0].param_bytes == (8.0,)  # what moves and sums send: the whole layer
