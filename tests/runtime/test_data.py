"""The order of samples is a function of the seed alone."""

from collections import Counter

import pytest
import torch

from orchestrator.errors import ConfigError, UserCodeError
from workers.data import SampleSource

pytestmark = pytest.mark.runtime


def test_every_epoch_uses_every_sample_once_in_another_order() -> None:
    source = SampleSource(range(10), None, seed=3)
    epochs = [[source.sample_index(10 * e + i) for i in range(10)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_any_way_of_asking_gives_the_same_samples() -> None:
    """huggingface/transformers#40245: part of the data was never seen after a change of size."""
    whole = SampleSource(range(7), None, seed=1)
    in_order = [whole.sample_index(p) for p in range(21)]
    jumping = SampleSource(range(7), None, seed=1)
    positions = [20, 0, 6, 7, 13, 14, 5, *range(21)]
    assert [jumping.sample_index(p) for p in positions] == [in_order[p] for p in positions]
    assert Counter(in_order) == Counter(dict.fromkeys(range(7), 3))


def test_the_seed_changes_the_order() -> None:
    orders = [[SampleSource(range(20), None, s).sample_index(p) for p in range(20)] for s in (0, 1)]
    assert orders[0] != orders[1]


def test_a_batch_is_collated_in_the_order_of_its_positions() -> None:
    dataset = [(torch.tensor([float(i)]), i) for i in range(5)]
    source = SampleSource(dataset, None, seed=0)
    inputs, labels = source.batch([3, 4, 5])  # straddles two epochs
    wanted = [source.sample_index(p) for p in (3, 4, 5)]
    assert inputs.tolist() == [[float(i)] for i in wanted]
    assert labels.tolist() == wanted


def test_the_users_collate_is_used() -> None:
    assert SampleSource(range(4), sum, seed=0).batch(range(4)) == 6


def test_the_first_layer_gets_the_first_entry_of_a_tuple_or_list_else_all() -> None:
    source = SampleSource([1], None, 0)
    assert source.first_input((1, 2)) == 1
    assert source.first_input([3, 4]) == 3
    assert source.first_input({"x": 1}) == {"x": 1}
    assert SampleSource([1], None, 0, inputs=len).first_input((1, 2)) == 2


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        SampleSource([], None, seed=0)


@pytest.mark.parametrize("dataset", [None, iter([1]), 3])
def test_a_dataset_without_length_or_items_is_refused_by_its_type(dataset: object) -> None:
    with pytest.raises(ConfigError, match=r"Task.dataset is a .*; give a map-style dataset"):
        SampleSource(dataset, None, seed=0)


def test_a_length_that_raises_is_the_users_error() -> None:
    class Broken:
        def __len__(self) -> int:
            raise RuntimeError("no length")

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(UserCodeError, match=r"len\(Task.dataset\) raised RuntimeError: no length"):
        SampleSource(Broken(), None, seed=0)
