import pytest

from orchestrator.core.model import TrainingOptions, microbatch_sizes


@pytest.mark.parametrize(("largest", "sizes"), [(1, (1,)), (6, (6, 3, 1)), (8, (8, 4, 2, 1))])
def test_microbatch_sizes_are_the_largest_and_its_halves(largest, sizes):
    assert microbatch_sizes(largest) == sizes


def test_a_run_has_whole_steps_or_whole_epochs():
    assert TrainingOptions(task="m:t", global_batch=8, steps=3).num_samples(10) == 24
    assert TrainingOptions(task="m:t", global_batch=8, epochs=3).num_samples(10) == 30
