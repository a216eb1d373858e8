"""What a worker asks of its device: the same lines run for a processor and for a GPU."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from orchestrator.errors import ConfigError
from workers import process_groups
from workers.clock import RealClock
from workers.device import (
    PROCESSOR,
    DeviceFacts,
    brought,
    device_memory_bytes,
    facts,
    fetched,
    is_out_of_memory,
    lent,
    mark,
    peak_memory_bytes,
    pinned,
    place,
    ready,
    take,
)
from workers.sums import DIRECT, GLOO, choose_backend, watch

pytestmark = pytest.mark.runtime

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def gpu(identity: str, collectives: str = "nccl 2.28.9") -> DeviceFacts:
    return DeviceFacts("cuda", "NVIDIA L4", 23 << 30, identity, collectives)


@pytest.mark.parametrize(
    ("everybody", "backend", "reason"),
    [
        ([gpu("1"), gpu("2"), gpu("3")], DIRECT, ""),
        ([gpu("1")], DIRECT, ""),
        ([DeviceFacts("cpu"), DeviceFacts("cpu")], GLOO, "not every device is a GPU"),
        ([gpu("1"), DeviceFacts("cpu")], GLOO, "not every device is a GPU"),
        ([gpu("1"), gpu("1")], GLOO, "two workers share a GPU"),
        ([gpu("1"), gpu("2", "nccl 2.27.3")], GLOO, "nccl 2.27.3, nccl 2.28.9"),
        ([gpu("1"), gpu("2", "rccl 2.27.7")], GLOO, "unlike libraries"),
        ([gpu("1", ""), gpu("2", "")], GLOO, "none"),
        ([gpu(""), gpu("")], GLOO, "does not tell the GPUs apart"),
    ],
)
def test_gpus_add_up_among_themselves_only_where_all_can(
    everybody: list[DeviceFacts], backend: str, reason: str
) -> None:
    for order in (everybody, everybody[::-1]):  # every worker comes to the same
        found, why_not = choose_backend(order)
        assert found == backend
        assert reason in why_not
        assert bool(why_not) == (backend == GLOO)


def pair(timeout_s: float = 30.0) -> list[ProcessGroupGloo]:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda rank: ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s)),
                range(2),
            )
        )


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_a_watched_sum_ends_when_it_is_there() -> None:
    first, second = pair()
    mine, other = torch.ones(3), torch.full((3,), 2.0)
    begun, answer = first.allreduce([mine]), second.allreduce([other])
    watch(begun, time.monotonic() + 30, lambda: True)
    answer.wait()
    assert mine.tolist() == [3.0] * 3


def test_a_sum_in_which_others_do_not_come_in_time_is_given_up() -> None:
    groups = pair()
    begun = groups[0].allreduce([torch.ones(3)])
    with pytest.raises(RuntimeError, match="did not come in time"):
        watch(begun, time.monotonic() + 0.05, lambda: True)
    groups[1].allreduce([torch.ones(3)]).wait()
    begun.wait()


def test_a_sum_that_another_thread_breaks_off_is_given_up_at_once() -> None:
    groups, is_open = pair(), threading.Event()
    is_open.set()
    begun = groups[0].allreduce([torch.ones(3)])
    threading.Timer(0.05, is_open.clear).start()
    with pytest.raises(RuntimeError, match="broken off"):
        watch(begun, time.monotonic() + 30, is_open.is_set)
    groups[1].allreduce([torch.ones(3)]).wait()
    begun.wait()
    with pytest.raises(RuntimeError, match="broken off"):  # what is there is no sum then
        watch(begun, time.monotonic() + 30, is_open.is_set)


def test_a_sum_that_failed_raises_what_torch_says() -> None:
    groups = pair(timeout_s=0.2)
    begun = groups[0].allreduce([torch.ones(3)])
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        watch(begun, time.monotonic() + 30, lambda: True)


def test_who_breaks_a_direct_world_off_ends_its_sums_and_can_join_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With gloo in the place of NCCL, which wants a GPU; a world of one."""
    monkeypatch.setattr(process_groups, "DIRECT", GLOO)
    store = HashStore()
    for life in ("first", "second"):
        groups = process_groups.ProcessGroups(
            PrefixStore(life, store), rank=0, world_size=1, host="127.0.0.1", timeout_s=30.0,
            directly_on=PROCESSOR,
        )  # fmt: skip
        assert groups.can_be_direct()
        groups.break_off()
        with pytest.raises(process_groups.LostContactError, match="broken off"):
            groups.try_out(30.0)
        groups.close()
        groups.close()


def test_on_a_processor_nothing_is_copied_or_waited_for() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert brought(tensor, PROCESSOR) is tensor
    assert pinned(tensor) is tensor
    assert ready((tensor,)) is None
    assert fetched(tensor).data_ptr() == tensor.data_ptr()
    straight = fetched(tensor.t())
    assert straight.is_contiguous()
    assert torch.equal(straight, tensor.t())
    assert mark(PROCESSOR).event is None
    assert peak_memory_bytes(PROCESSOR) is None
    assert 2**20 < device_memory_bytes(PROCESSOR) < 2**50
    assert facts(PROCESSOR) == DeviceFacts("cpu")


def test_a_module_is_placed_and_lent_without_becoming_another_one() -> None:
    module = torch.nn.BatchNorm1d(4)
    before = [id(t) for t in (*module.parameters(), *module.buffers())]
    place(module, PROCESSOR)
    with lent(module, PROCESSOR):
        assert [id(t) for t in (*module.parameters(), *module.buffers())] == before
    assert [id(t) for t in (*module.parameters(), *module.buffers())] == before


@NO_GPU
def test_a_gpu_that_torch_cannot_use_is_refused_with_the_mend() -> None:
    with pytest.raises(ConfigError, match=r"Ray gave this worker a GPU, but torch .* --num-gpus=0"):
        take("cuda")


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (KeyError("memory"), False),
    ],
)
def test_whether_memory_ran_out_is_told_from_the_error(error: Exception, full: bool) -> None:
    assert is_out_of_memory(error) is full


def test_memory_that_runs_out_in_a_sum_is_not_taken_for_a_lost_worker() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError),
        process_groups.contact("the sum of gradients"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with (
        pytest.raises(process_groups.LostContactError, match="the sum of gradients: closed"),
        process_groups.contact("the sum of gradients"),
    ):
        raise RuntimeError("closed by peer")


def test_waiting_counts_only_as_far_as_the_device_was_idle() -> None:
    clock = RealClock(PROCESSOR)
    clock.begin_step(0, time.monotonic())
    time.sleep(0.04)
    clock.start("F", 1, 0.0)
    time.sleep(0.02)
    clock.finish()
    clock.start("B", 1, 0.0)
    clock.finish()
    assert clock.end_work(0.001) == 1.0  # all of the wait
    assert clock.times.num_operations == 2
    assert clock.times.compute_s >= 0.02
    idle_s = clock.times.end_s - clock.times.compute_s
    clock.times.compute_s = 0.0
    share = clock.end_work(1e6)  # as if it had waited while the device was at work
    assert 0.04 / 1e6 <= share <= idle_s / 1e6
