"""One GPU by itself: random masks, copies, marks in its queue, its kind, its memory, NCCL alone."""

import pytest
import torch
from torch import nn
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn import functional

from orchestrator.core.products import product_kind
from orchestrator.core.training import TrainingOptions
from orchestrator.runtime.products import seen_here
from tests.gpu.needs import DEVICE, gpu_tests
from workers.device import (
    between_s,
    brought,
    device_memory_bytes,
    facts,
    finish,
    forget_peak,
    give_back,
    is_out_of_memory,
    lent,
    mark,
    peak_memory_bytes,
    pinned,
    place,
    ready,
    settled,
    take,
)
from workers.process_groups import ProcessGroups
from workers.profiler import profile_model
from workers.randomness import sample_randomness
from workers.splitting import load_task, split
from workers.sums import DIRECT, choose_backend

pytestmark = gpu_tests()


@pytest.fixture(scope="module")
def device() -> torch.device:
    return take(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_and_noise_are_those_of_a_processor(device: torch.device, dtype: torch.dtype) -> None:
    def drawn(on: torch.device) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 6 * 40).reshape(6, 40).to(on, dtype).requires_grad_()
        with sample_randomness(3, 5, range(10, 16), 2):
            dropped = functional.dropout(x, 0.3)
            noise = torch.rand_like(x), torch.randn_like(x), torch.rand(6, 2, device=on)
            gone = nn.Dropout1d(0.5)(x.reshape(6, 4, 10))
        (gradient,) = torch.autograd.grad(dropped.float().sum(), x)
        return [t.detach().cpu() for t in (dropped, gradient, *noise, gone)]

    for here, there in zip(drawn(torch.device("cpu")), drawn(device), strict=True):
        assert torch.equal(here, there)


def test_dropout_under_autocast_drops_what_it_drops_on_a_processor(device: torch.device) -> None:
    layer = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5))

    def zeros(on: torch.device) -> torch.Tensor:
        x = torch.ones(4, 16, device=on)
        with (
            lent(layer, on),
            torch.autocast(on.type, torch.bfloat16),
            sample_randomness(0, 0, range(4), 1),
            torch.no_grad(),
        ):
            return (layer(x) == 0).cpu()

    assert torch.equal(zeros(torch.device("cpu")), zeros(device))


def test_copies_to_and_from_the_device_hold_up_nobody_and_lose_nothing(
    device: torch.device,
) -> None:
    there = brought(pinned(torch.arange(1 << 20)), device)
    assert there.device.type == DEVICE
    for round_ in range(20):  # memory is used again at once: a copy that came late would show
        there = brought(pinned(torch.full((1 << 18,), float(round_))), device)
        made = there * 2 + 1
        at = ready((made,))
        del there
        (back,) = settled((made.reshape(512, 512).t(),), at, (False,))
        assert bool((back == 2.0 * round_ + 1).all())
        assert back.is_contiguous()


def test_a_mark_is_reached_when_the_work_before_it_is_done(device: torch.device) -> None:
    if DEVICE != "cuda":
        pytest.skip("a processor has no queue")
    start = mark(device)
    torch.cuda._sleep(1 << 28)
    end = mark(device)
    assert end.event is not None
    assert not end.event.query()  # nobody has waited
    finish(device)
    assert end.event.query()
    assert between_s(start, end) > 0


def test_a_module_that_is_placed_or_lent_keeps_its_parameters_and_buffers(
    device: torch.device,
) -> None:
    module, other = nn.BatchNorm1d(4), nn.Linear(4, 4)
    other.bias = module.bias  # shared
    tensors = [*module.parameters(), *module.buffers()]
    with lent(module, device):
        assert {t.device.type for t in tensors} == {DEVICE}
        module(torch.ones(3, 4, device=device)).sum().backward()
    assert {t.device.type for t in tensors} == {"cpu"}
    assert int(module.num_batches_tracked) == 0
    place(module, device)
    assert {t.device.type for t in tensors} == {DEVICE}
    assert other.bias is module.bias


def test_memory_is_counted_and_its_end_is_told_as_that(device: torch.device) -> None:
    free = device_memory_bytes(device)
    forget_peak(device)
    block = torch.zeros(1 << 26, dtype=torch.uint8, device=device)
    peak = peak_memory_bytes(device)
    del block
    if DEVICE == "cuda":
        assert peak is not None
        assert 1 << 26 <= peak < 1 << 30
    assert device_memory_bytes(device) > free - (1 << 28)  # what torch keeps can be had again
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    assert is_out_of_memory(caught.value)
    give_back(device)


def test_the_kind_is_found_by_the_drivers_name(device: torch.device) -> None:
    (first, *_) = seen_here()
    told = facts(device)
    assert (told.name, told.memory_bytes) == (first.name, first.memory_bytes)
    assert told.identity
    if product_kind(first.name, first.memory_bytes) is None:
        pytest.skip(f"{first.name!r} is not in the catalogue: it wants a label lyray.kind")


def test_layers_are_profiled_on_the_device_and_stay_where_they_were(device: torch.device) -> None:
    task = load_task("tests.runtime.models:language", {"double": False}, 0)
    model = split(task)
    before = [p.detach().clone() for layer in model.layers for p in layer.parameters()]
    options = TrainingOptions(task="m:t", global_batch=8, microbatch=4, steps=1)
    here = profile_model(model, task, options)
    there = profile_model(model, task, options, kind="gpu", device=device)
    after = [p for layer in model.layers for p in layer.parameters()]
    assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True))
    assert all(s > 0 for times in there.times for s in (*times.forward_s, *times.backward_s))
    assert (here.sizes[0].param_bytes, here.forward_flop_per_sample) == (
        there.sizes[0].param_bytes,
        there.forward_flop_per_sample,
    )


def test_nccl_adds_up_a_world_of_one_and_is_broken_off(device: torch.device) -> None:
    told = facts(device)
    if not told.collectives:
        pytest.skip(f"torch {torch.__version__} has no NCCL")
    assert choose_backend([told]) == (DIRECT, "")
    store = HashStore()
    for life in ("first", "second"):  # what was broken off can be joined anew
        groups = ProcessGroups(
            PrefixStore(life, store), rank=0, world_size=1, host="127.0.0.1", timeout_s=30.0,
            directly_on=device,
        )  # fmt: skip
        assert groups.can_be_direct()
        groups.break_off()
        groups.close()
