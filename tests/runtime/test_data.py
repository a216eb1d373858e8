"""The order of samples, and what a dataset draws, are functions of the seed and the position."""

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from orchestrator.errors import ConfigError, UserCodeError
from workers import sequence
from workers.data import SampleSource, to_device

pytestmark = pytest.mark.runtime


def order(dataset: Any, positions: range | list[int], seed: int = 0) -> list[Any]:
    return SampleSource(dataset, list, seed).batch(positions)


def test_every_epoch_uses_every_sample_once_in_another_order() -> None:
    epochs = [order(range(10), range(10 * e, 10 * e + 10), seed=3) for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_any_way_of_asking_gives_the_same_samples() -> None:
    """huggingface/transformers#40245: part of the data was never seen after a change of size."""
    in_order = order(range(7), range(21), seed=1)
    positions = [20, 0, 6, 7, 13, 14, 5, *range(21)]
    assert order(range(7), positions, seed=1) == [in_order[p] for p in positions]
    assert Counter(in_order) == Counter(dict.fromkeys(range(7), 3))


def test_the_seed_changes_the_order() -> None:
    assert order(range(20), range(20), seed=0) != order(range(20), range(20), seed=1)


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_a_batch_may_hold_many_epochs(num_samples: int) -> None:
    found = order(range(num_samples), range(64 * num_samples))
    for epoch in range(64):
        mine = found[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(mine) == list(range(num_samples))


@pytest.mark.parametrize("num_samples", [1, 2, 3, 17, 64, 100, 1023])
def test_the_order_of_a_large_dataset_is_computed_and_as_good(
    monkeypatch: pytest.MonkeyPatch, num_samples: int
) -> None:
    monkeypatch.setattr(sequence, "LARGEST_TABLE", 0)
    epochs = [
        order(range(num_samples), range(num_samples * e, num_samples * (e + 1))) for e in range(2)
    ]
    assert all(sorted(epoch) == list(range(num_samples)) for epoch in epochs)
    assert num_samples < 17 or epochs[0] != epochs[1]


def test_a_dataset_too_large_for_a_table_of_its_order_needs_none() -> None:
    large = range(10**15)
    assert len(set(order(large, range(1000)))) == 1000


def test_a_batch_is_collated_in_the_order_of_its_positions() -> None:
    dataset = [(torch.tensor([float(i)]), i) for i in range(5)]
    inputs, labels = SampleSource(dataset, None, seed=0).batch([3, 4, 5])  # straddles two epochs
    wanted = order(range(5), [3, 4, 5])
    assert inputs.tolist() == [[float(i)] for i in wanted]
    assert labels.tolist() == wanted


def test_the_users_collate_is_used() -> None:
    assert SampleSource(range(4), sum, seed=0).batch(range(4)) == 6


def test_the_first_layer_gets_the_first_entry_of_a_tuple_or_list_else_all() -> None:
    source = SampleSource([1], None, 0)
    assert source.first_input((1, 2), [0]) == 1
    assert source.first_input([3, 4], [0]) == 3
    assert source.first_input({"x": 1}, [0]) == {"x": 1}
    assert SampleSource([1], None, 0, inputs=len).first_input((1, 2), [0]) == 2


def test_what_the_inputs_draw_is_a_function_of_the_position() -> None:
    def source(inputs: Any, seed: int = 0) -> SampleSource:
        return SampleSource([1], None, seed, inputs)

    noise = source(torch.randn_like)
    batch = torch.zeros(4, 3)
    whole = noise.first_input(batch, [7, 8, 9, 10])
    parts = noise.first_input(batch[:1], [7]), noise.first_input(batch[1:], [8, 9, 10])
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(
        source(torch.randn_like, seed=1).first_input(batch, [7, 8, 9, 10]), whole
    )
    with pytest.raises(ValueError, match=r"Task\.inputs draws .* shape \(3,\) for 4 samples"):
        source(lambda batch: batch + torch.rand(3)).first_input(batch, [7, 8, 9, 10])


# What a dataset draws at random ---------------------------------------------------------------


class Augmented(Dataset[Tensor]):
    """Ten numbers drawn in all the ways that datasets do."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        drawn = [
            torch.rand(1).item(), torch.randn(()).item(), torch.randint(1000, ()).item(),
            torch.randint(5, 900, (1,)).item(), torch.randperm(50)[0].item(),
            torch.bernoulli(torch.full((8,), 0.5)).sum().item(), torch.empty(()).uniform_().item(),
            torch.normal(0.0, 1.0, ()).item(), torch.multinomial(torch.ones(99), 1).item(),
            torch.rand_like(torch.ones(1)).item(), torch.randint_like(torch.ones(1), 999).item(),
            functional.dropout(torch.ones(64), 0.5).sum().item(), random.random(),
            float(np.random.rand()),  # noqa: NPY002 - as datasets do
        ]  # fmt: skip
        return torch.tensor([index, *drawn])


def test_what_a_dataset_draws_is_a_function_of_seed_and_position() -> None:
    before = torch.get_rng_state()
    whole = SampleSource(Augmented(), None, 5).batch(range(12))
    torch.manual_seed(99)
    other = SampleSource(Augmented(), None, 5)
    apart = [other.batch(range(p, p + 3)) for p in (9, 0, 6, 3)]
    assert torch.equal(whole[9:], apart[0])
    assert torch.equal(whole[:9], torch.cat([apart[1], apart[3], apart[2]]))
    assert (whole[:, 1:].std(0) > 0).all()  # each position has its own
    assert not torch.equal(whole[:, 1:], SampleSource(Augmented(), None, 6).batch(range(12))[:, 1:])
    torch.set_rng_state(before)


def test_layers_and_dataset_do_not_share_torchs_generator() -> None:
    class Seeds(Augmented):
        def __getitem__(self, index: int) -> Tensor:
            torch.manual_seed(index)
            return torch.cat([torch.rand(2), torch.get_rng_state()[:4]])

    before = torch.get_rng_state()
    found = SampleSource(Seeds(), None, 0).batch(range(12))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        wanted = [torch.rand(2, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    for row, index in zip(found, order(range(6), range(12)), strict=True):
        assert torch.equal(row[:2], wanted[index])
    drawn = torch.rand(3)
    torch.set_rng_state(before)
    assert torch.equal(torch.rand(3), drawn)


def test_what_a_collate_draws_is_the_same_on_the_first_and_the_last_stage() -> None:
    def mask(samples: list[int]) -> Tensor:
        return torch.rand(len(samples))

    first, last = (SampleSource(range(8), mask, 0) for _ in range(2))
    first.batch(range(4))
    assert torch.equal(first.batch(range(4, 8)), last.batch(range(4, 8)))


def test_one_thread_at_a_time_calls_the_dataset() -> None:
    inside = threading.Lock()

    class Alone:
        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: int) -> int:
            assert inside.acquire(blocking=False)
            threading.Event().wait(0.001)
            inside.release()
            return index

    file = Alone()
    source, evaluated = (
        SampleSource(file, None, 0),
        SampleSource(file, None, 0, order=sequence.as_given),
    )
    with ThreadPoolExecutor(4) as pool:
        told = pool.map(lambda k: evaluated.batch(range(10 * k, 10 * k + 10)), range(5))
        batches = list(pool.map(lambda k: source.batch(range(10 * k, 10 * k + 10)), range(5)))
    assert sorted(torch.cat(batches).tolist()) == list(range(50))
    assert torch.cat(list(told)).tolist() == list(range(50))  # in its own order


# What is no dataset, and what fails -----------------------------------------------------------


def generator() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "empty; give at least one sample"),
        (None, "a NoneType; give a map-style dataset, with __len__ and __getitem__, or an iter"),
        (3, "a int; give a map-style dataset"),
        ("data.json", "a str; give a dataset: an object with __len__ and __getitem__"),
        ({"x": [1]}, "a dict; give a dataset"),
        (Augmented, "the class Augmented, not an object of it; give a dataset"),
        (generator(), "a generator, which can be read only once; give an object whose __iter__"),
        (iter([1]), "a list_iterator, which can be read only once"),
        (DataLoader(Augmented()), r"a DataLoader; .* give what it loads from \(loader.dataset"),
        (type("Rows", (Dataset,), {"__getitem__": len})(), "a Rows, which has no __len__; add"),
    ],
)  # fmt: skip
def test_what_is_no_dataset_is_refused_by_its_type(dataset: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^training.task: Task.dataset is {message}"):
        SampleSource(dataset, None, seed=0)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "empty; give at least one sample"),
        (3, "a int; give a map-style dataset, with __len__ and __getitem__$"),
        (generator(), "a generator; give a map-style dataset"),
        ({"x": [1]}, "a dict; give a dataset"),
        (DataLoader(Augmented()), r"a DataLoader; .* \(loader.dataset\) as Task.eval_dataset, and"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_by_its_type(dataset: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^training.task: Task.eval_dataset is {message}"):
        SampleSource(dataset, None, seed=0, order=sequence.as_given)


class Faulty:
    """Four samples, of which one is what ``act`` makes of it."""

    def __init__(self, act: Any, length: Any = lambda: 4) -> None:
        self.act, self.length = act, length

    def __len__(self) -> int:
        return self.length()

    def __getitem__(self, index: int) -> Any:
        return self.act() if index == 2 else torch.zeros(3)


def fail(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("dataset", "collate", "message"),
    [
        (Faulty(lambda: fail(OSError("gone"))), None,
         "step 7: Task.dataset, at position 1 (sample 2 of 4), raised OSError: gone"),
        (Faulty(lambda: fail(IndexError("end"))), None, "(sample 2 of 4), raised IndexError: end"),
        (Faulty(lambda: fail(StopIteration())), None, "(sample 2 of 4), raised StopIteration"),
        (Faulty(lambda: fail(SystemExit(3))), None, "(sample 2 of 4), raised SystemExit: 3"),
        (Faulty(lambda: None), None, "raised TypeError: it returned None; return a sample, or"),
        (Faulty(lambda: torch.zeros(2)), None,
         "step 7: torch's default_collate (Task.collate replaces it), of the samples at positions "
         "0 to 3, raised RuntimeError: stack expects each tensor to be equal size"),
        (range(4), lambda samples: fail(KeyError("word")),
         "step 7: Task.collate, of the samples at positions 0 to 3, raised KeyError: 'word'"),
    ],
)  # fmt: skip
def test_an_error_names_step_position_and_sample(dataset: Any, collate: Any, message: str) -> None:
    source = SampleSource(dataset, collate, seed=2)
    with pytest.raises(UserCodeError) as caught:
        source.batch(range(4), "step 7: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("length", [lambda: fail(RuntimeError("no length")), lambda: -1])
def test_a_length_that_raises_is_the_users_error(length: Any) -> None:
    with pytest.raises(UserCodeError, match=r"len\(Task.dataset\) raised "):
        SampleSource(Faulty(lambda: 0, length), None, seed=0)


# What batches may be --------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    label: str


@dataclass
class Named:
    x: Tensor
    inner: dict[str, Any]


class Own:
    def __init__(self) -> None:
        self.device: Any = None

    def to(self, device: torch.device) -> "Own":
        self.device = device
        return self


def test_tensors_of_a_batch_are_moved_wherever_they_stand() -> None:
    meta = torch.device("meta")
    x = torch.ones(2)
    moved = to_device([Pair(x, "a"), Named(x, {"y": (x, 1, None)}), "text", Own()], meta)
    assert (moved[0].x.device, moved[0].label, type(moved[0])) == (meta, "a", Pair)
    assert moved[1].x.device == moved[1].inner["y"][0].device == meta
    assert moved[1].inner["y"][1:] == (1, None)
    assert (moved[2], moved[3].device) == ("text", meta)


def test_datasets_of_torch_and_sequences_are_taken_as_they_are() -> None:
    rows = TensorDataset(torch.arange(6.0), torch.arange(6))
    columns = type("Columns", (), {
        "__len__": lambda self: 6, "__getitem__": lambda self, i: {"x": float(i), "name": str(i)},
    })()  # fmt: skip
    for dataset in (
        rows, Subset(rows, [3, 1]), ConcatDataset([rows, rows]), torch.arange(12).view(6, 2).t(),
        np.arange(6), [1, 2.5], [("a", np.ones(2))], columns,
    ):  # fmt: skip
        SampleSource(dataset, None, 0).batch(range(len(dataset)))
