"""What the profiler says of layers whose bytes and FLOP can be counted by hand."""

import time
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.core.training import OptimizerOptions, Task, TrainingOptions
from orchestrator.errors import UserCodeError
from workers import profiler
from workers.profiler import profile_model
from workers.splitting import split

pytestmark = pytest.mark.runtime
WIDTH = 8


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "BUDGET_S", 0.0)
    torch.set_num_threads(1)


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output.square().sum(), len(output)


def profile(
    layers: list[nn.Module], microbatch: int = 4, *, wall: bool = False, **optimizer: Any
) -> Any:
    task = Task(layers=layers, loss=loss, dataset=[(torch.ones(WIDTH), 0)] * 5)
    name = optimizer.pop("name", "sgd")
    options = TrainingOptions(
        task="tests:task",
        global_batch=16,
        microbatch=microbatch,
        steps=1,
        optimizer=OptimizerOptions(name=name, lr=0.1, arguments=optimizer),
    )
    return profile_model(split(task), task, options, wall=wall)


def linear(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out)


class Branches(nn.Module):
    """Saves its input three times, in one storage, and passes two tensors on."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * x, x.t().matmul(x).expand(len(x), WIDTH, WIDTH).sum(2)


class Join(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def test_bytes_and_flop_are_those_counted_by_hand() -> None:
    found = profile([linear(), nn.Sigmoid(), linear(3)])
    (sizes,) = found.sizes
    assert found.layers == ("0", "1", "2")
    assert sizes.param_bytes == (4 * (64 + 8), 0, 4 * (24 + 3))
    assert sizes.boundary_bytes_per_sample == (32, 32, 0)  # nothing leaves the last layer
    # Linear keeps its input, Sigmoid its output, the loss what it squares.
    assert sizes.stash_bytes_per_sample == (32, 32, 32 + 12)
    assert found.forward_flop_per_sample == (2 * 64, 0, 2 * 24)
    assert found.edges == ((0, 1), (1, 2))
    assert found.dtype == "fp32"


def test_frozen_parameters_are_told_and_cost_no_update() -> None:
    frozen, half, last = linear(), linear(), linear(3)
    frozen.requires_grad_(False)
    half.bias.requires_grad_(False)
    found = profile([frozen, half, last])
    assert found.sizes[0].param_bytes == (4 * (64 + 8), 4 * (64 + 8), 4 * (24 + 3))
    assert found.sizes[0].frozen_bytes == (4 * (64 + 8), 4 * 8, 0)
    assert found.times[0].update_s[0] == 0
    assert found.times[0].update_s[1] > 0


def test_a_storage_kept_twice_counts_once_and_a_border_of_two_tensors_counts_both() -> None:
    (sizes,) = profile([linear(), Branches(), Join()]).sizes
    assert sizes.stash_bytes_per_sample[1] == 32
    assert sizes.boundary_bytes_per_sample[1] == 64


@pytest.mark.parametrize(("microbatch", "sizes"), [(1, (1,)), (6, (1, 3, 6)), (8, (1, 2, 4, 8))])
def test_microbatches_are_halved_down_to_one(microbatch: int, sizes: tuple[int, ...]) -> None:
    found = profile([linear(), linear()], microbatch)
    assert tuple(t.microbatch for t in found.times) == sizes


def test_like_layers_share_their_times_and_unlike_ones_do_not() -> None:
    found = profile([linear(), linear(), linear(), nn.Sigmoid(), nn.Linear(WIDTH, 1)])
    # All times of a layer together: two layers' medians may meet by chance in one of them.
    measured = [
        tuple((times.forward_s[layer], times.backward_s[layer]) for times in found.times)
        for layer in range(5)
    ]
    assert measured[1] == measured[2]
    assert measured[0] != measured[1]  # its input wants no gradient
    assert len({*measured}) == 4


def test_pauses_of_the_processor_show_in_wall_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "MIN_REPEATS", 12)

    class Paused(nn.Linear):  # as a quota of processor time does it: now and then, for long
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            time.sleep(0.06 if self.calls % 4 == 0 else 0.0)
            return super().forward(x)

    told_s = []
    for wall in (False, True):
        times = profile([Paused()], 1, wall=wall).times[0]
        told_s.append(sum(times.forward_s) + sum(times.backward_s))
    assert told_s[0] < 0.010 < told_s[1]  # every fourth call takes 60 ms


def test_a_layer_with_hundred_times_the_work_takes_longer_and_one_disturbance_does_not_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, lost_s = count(), 0.0

    def disturbed() -> float:
        nonlocal lost_s
        if next(calls) % 50 == 0:
            lost_s += 0.05
        return time.perf_counter() + lost_s

    monkeypatch.setattr(profiler._Bench, "_stopwatch", lambda _: disturbed)
    big = nn.Sequential(nn.Linear(WIDTH, 4000), nn.ReLU(), nn.Linear(4000, WIDTH))
    found = profile([nn.Sigmoid(), big, linear()])
    largest = found.times[-1]
    assert largest.forward_s[1] > largest.forward_s[0]
    assert largest.update_s[1] > largest.update_s[0] == 0
    assert max(largest.forward_s + largest.backward_s) < 0.05


@pytest.mark.parametrize(
    ("options", "ratio"),
    [
        ({"name": "sgd"}, 1.0),
        ({"name": "sgd", "momentum": 0.9}, 2.0),
        ({"name": "adamw"}, 3.0),
        ({"name": "adam", "amsgrad": True}, 4.0),
        ({"name": "rmsprop"}, 2.0),
    ],
    ids=str,
)
def test_optimizer_state_is_measured_gradient_included(
    options: dict[str, Any], ratio: float
) -> None:
    layers = [nn.Linear(WIDTH, 100), nn.Linear(100, WIDTH)]
    assert profile(layers, **options).optimizer_bytes_per_param_byte == pytest.approx(ratio)


def test_a_shared_parameter_is_a_tie_with_its_bytes() -> None:
    first, last = linear(), linear()
    last.weight = first.weight
    found = profile([first, nn.ReLU(), last])
    assert found.ties == ((0, 2),)
    assert found.tie_bytes == (4 * 64,)


def test_profiling_leaves_no_trace() -> None:
    layers = [linear(), nn.Dropout(0.5), linear()]
    before = [p.detach().clone() for layer in layers for p in layer.parameters()]
    state = torch.get_rng_state()
    profile(layers, name="adamw")
    after = [p for layer in layers for p in layer.parameters()]
    assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)
    assert torch.equal(state, torch.get_rng_state())


def test_a_frozen_stage_has_no_backward_and_no_update() -> None:
    frozen = linear().requires_grad_(False)
    times = profile([frozen, linear()]).times[-1]
    assert times.update_s[0] == 0
    assert times.backward_s[0] < times.backward_s[1]


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("no such head")


def test_an_error_in_a_layer_names_the_layer() -> None:
    with pytest.raises(UserCodeError, match=r"layer 1 \(1\) raised KeyError: 'no such head'"):
        profile([linear(), Broken()])
