"""The contract of every Transport in the table, over loopback."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

from workers.meeting import Meeting
from workers.transport import (
    TRANSPORTS,
    Message,
    PeerLostError,
    Transport,
    TransportClosedError,
)

pytestmark = [
    pytest.mark.runtime,
    pytest.mark.parametrize("name", ["gloo", "tcp"]),
]
LONG_S = 30.0  # never waited out: something must end the wait earlier
SECRET = b"known"
AT_ONCE_S = 5.0  # generous on a busy machine, far below LONG_S


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@contextmanager
def connected(name: str, world_size: int = 2) -> Iterator[list[Transport]]:
    store = HashStore()
    with ThreadPoolExecutor(world_size) as pool:
        transports = list(
            pool.map(
                lambda rank: TRANSPORTS[name](
                    rank, world_size, PrefixStore("life", store), secret=SECRET, timeout_s=LONG_S
                ),
                range(world_size),
            )
        )
    try:
        yield transports
    finally:
        for transport in transports:
            transport.close()


def receive(transport: Transport, src: int, tag: int, timeout_s: float = LONG_S) -> Message:
    return transport.receive(transport.expect(src, tag), timeout_s)


def waiting_for(
    receiver: Transport, src: int, tag: int, *, cause: Callable[[], None]
) -> tuple[BaseException | None, float]:
    """What a blocked receive raises after ``cause``, and how long after it."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receive, receiver, src, tag)
        threading.Event().wait(0.2)  # lets the receive block; a late one finds the same end
        start_s = time.monotonic()
        cause()
        return waiting.exception(timeout=LONG_S), time.monotonic() - start_s


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.randn(3, 1, 2, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
        torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        torch.tensor([1, -(2**62)]),
        torch.tensor([[True], [False]]),
        torch.empty(0, 7),
        torch.tensor(3.5),
        torch.tensor(7, dtype=torch.int32),
        torch.ones(2, 2, 2, 2, 2, 2, 2, 2),
        torch.full((3,), 0.5, dtype=torch.float16, requires_grad=True),
    ],
    ids=lambda t: f"{t.dtype}-{list(t.shape)}".removeprefix("torch."),
)
def test_a_tensor_arrives_with_its_shape_dtype_and_bits(name: str, tensor: torch.Tensor) -> None:
    with connected(name) as (first, second):
        first.send((tensor,), 1, 5, vtime=1.25)
        message = receive(second, 0, 5)
    (arrived,) = message.tensors
    assert message.vtime == 1.25
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(arrived, tensor)
    assert not arrived.requires_grad


def test_a_message_holds_any_number_of_unlike_tensors(name: str) -> None:
    tensors = (torch.ones(2, 3), torch.tensor([True]), torch.empty(0), torch.arange(4))
    with connected(name) as (first, second):
        first.send(tensors, 1, 0)
        first.send((), 1, 1)
        arrived, nothing = receive(second, 0, 0).tensors, receive(second, 0, 1).tensors
    assert [t.dtype for t in arrived] == [t.dtype for t in tensors]
    assert all(torch.equal(a, b) for a, b in zip(arrived, tensors, strict=True))
    assert nothing == ()


def test_tensors_of_sixteen_mebibytes_cross_both_ways_at_once(name: str) -> None:
    """NVIDIA/nccl#794, #1136: large sums hang between unlike hosts (here: gloo and TCP)."""
    big = torch.arange(4 << 20, dtype=torch.float32)
    with connected(name) as (first, second):
        first.send((big,), 1, 0)
        second.send((big + 1,), 0, 0)
        assert torch.equal(receive(second, 0, 0).tensors[0], big)
        assert torch.equal(receive(first, 1, 0).tensors[0], big + 1)


def test_shapes_may_change_from_message_to_message_of_one_tag(name: str) -> None:
    shapes = [(4, 2), (1, 2), (9, 2), (0, 2)]
    with connected(name) as (first, second):
        for shape in shapes:
            first.send((torch.zeros(shape),), 1, 3)
        assert [tuple(receive(second, 0, 3).tensors[0].shape) for _ in shapes] == shapes


def test_messages_of_one_tag_keep_their_order_and_tags_do_not_wait_for_each_other(
    name: str,
) -> None:
    with connected(name) as (first, second):
        for number in range(20):
            first.send((torch.tensor(number),), 1, number % 2)
        odd = [int(receive(second, 0, 1).tensors[0]) for _ in range(10)]
        even = [int(receive(second, 0, 0).tensors[0]) for _ in range(10)]
    assert (even, odd) == (list(range(0, 20, 2)), list(range(1, 20, 2)))


def test_every_rank_talks_to_every_other(name: str) -> None:
    with connected(name, 4) as transports:
        for rank, transport in enumerate(transports):
            for peer in {0, 1, 2, 3} - {rank}:
                transport.send((torch.tensor(10 * rank + peer),), peer, 0)
        for rank, transport in enumerate(transports):
            for peer in {0, 1, 2, 3} - {rank}:
                assert int(receive(transport, peer, 0).tensors[0]) == 10 * peer + rank


def test_an_urgent_message_overtakes_what_is_queued(name: str) -> None:
    bulk = torch.zeros(4 << 20)
    arrived: list[int] = []
    with connected(name) as (first, second):
        for tag in range(6):
            first.send((bulk,), 1, tag, priority=2)
        first.send((torch.tensor(1),), 1, 9, priority=0)
        with ThreadPoolExecutor(7) as pool:
            for tag in (*range(6), 9):
                pool.submit(lambda t=tag: (receive(second, 0, t), arrived.append(t)))
    assert sorted(arrived) == [0, 1, 2, 3, 4, 5, 9]
    assert arrived.index(9) < 5  # the first of the bulk may be on its way already


def test_flush_returns_when_the_tensors_may_be_written_again(name: str) -> None:
    tensor = torch.ones(1 << 20)
    with connected(name) as (first, second):
        first.send((tensor,), 1, 0)
        first.flush(LONG_S)
        tensor.zero_()
        assert float(receive(second, 0, 0).tensors[0].min()) == 1.0


def test_a_timeout_names_rank_and_tag_and_the_link_goes_on_working(name: str) -> None:
    with connected(name) as (first, second):
        with pytest.raises(TimeoutError, match="rank 0 under tag 17"):
            receive(second, 0, 17, timeout_s=0.05)
        first.send((torch.tensor(1),), 1, 17)
        assert int(receive(second, 0, 17).tensors[0]) == 1


def test_a_closed_peer_fails_the_waiting_receive_at_once(name: str) -> None:
    with connected(name) as (first, second):
        error, elapsed_s = waiting_for(second, 0, 0, cause=first.close)
        assert isinstance(error, PeerLostError)
        assert error.rank == 0
        assert elapsed_s < AT_ONCE_S
        with pytest.raises(PeerLostError):
            second.send((torch.tensor(1),), 0, 0)


def test_a_closed_peer_leaves_the_others_alone(name: str) -> None:
    with connected(name, 3) as (first, second, third):
        first.close()
        second.send((torch.tensor(1),), 2, 0)
        assert int(receive(third, 1, 0).tensors[0]) == 1


def test_a_peer_that_left_with_nothing_owed_to_it_does_not_fail_flush(name: str) -> None:
    with connected(name) as (first, second):
        first.send((torch.tensor(1),), 1, 0)
        assert int(receive(second, 0, 0).tensors[0]) == 1
        second.close()
        first.flush(LONG_S)


def test_what_was_sent_before_the_peer_closed_is_still_received(name: str) -> None:
    with connected(name) as (first, second):
        first.send((torch.tensor(4),), 1, 0)
        first.flush(LONG_S)
        first.close()
        assert int(receive(second, 0, 0).tensors[0]) == 4
        with pytest.raises(PeerLostError):
            receive(second, 0, 0)


def test_close_from_another_thread_frees_a_blocked_receiver(name: str) -> None:
    with connected(name) as (_, second):
        error, elapsed_s = waiting_for(second, 0, 0, cause=second.close)
    assert isinstance(error, TransportClosedError)
    assert elapsed_s < AT_ONCE_S


def test_close_twice_and_use_after_close(name: str) -> None:
    with connected(name) as (first, _):
        first.close()
        first.close()
        with pytest.raises(TransportClosedError):
            first.send((torch.tensor(1),), 1, 0)
        with pytest.raises(TransportClosedError):
            receive(first, 1, 0)


def test_nonsense_is_refused_with_its_value(name: str) -> None:
    with connected(name) as (first, _):
        with pytest.raises(ValueError, match=r"rank 0 has no link to rank 7"):
            first.send((torch.tensor(1),), 7, 0)
        with pytest.raises(ValueError, match=r"no link to rank 0"):
            first.expect(0, 0)
        with pytest.raises(ValueError, match=r"tag is -1"):
            first.send((torch.tensor(1),), 1, -1)
        with pytest.raises(ValueError, match=r"float8"):
            first.send((torch.zeros(1, dtype=torch.float8_e4m3fn),), 1, 0)


def test_a_missing_rank_is_named_when_connecting(name: str) -> None:
    with pytest.raises(TimeoutError, match="tcp/1"):
        TRANSPORTS[name](0, 2, PrefixStore("life", HashStore()), secret=SECRET, timeout_s=0.2)


def _child(name: str, port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    life = PrefixStore("life", store)
    transport = TRANSPORTS[name](1, 3, life, secret=SECRET, timeout_s=LONG_S)
    transport.send((torch.tensor(os.getpid()),), 0, 0)
    receive(transport, 0, 99)


def test_a_killed_peer_fails_the_waiting_receive_at_once(name: str) -> None:
    meeting = Meeting("127.0.0.1")
    port = meeting.invitation.port
    child = multiprocessing.get_context("spawn").Process(
        target=_child, args=(name, port), daemon=True
    )
    child.start()

    def join(rank: int) -> Transport:
        own_store = TCPStore("127.0.0.1", port, is_master=False)
        life = PrefixStore("life", own_store)
        return TRANSPORTS[name](rank, 3, life, secret=SECRET, timeout_s=LONG_S)

    with ThreadPoolExecutor(2) as pool:
        first, third = pool.map(join, (0, 2))
    try:
        pid = int(receive(first, 1, 0).tensors[0])
        error, elapsed_s = waiting_for(first, 1, 1, cause=lambda: os.kill(pid, signal.SIGKILL))
        assert isinstance(error, PeerLostError)
        assert error.rank == 1
        assert elapsed_s < AT_ONCE_S
        third.send((torch.tensor(2),), 0, 0)
        assert int(receive(first, 2, 0).tensors[0]) == 2
    finally:
        first.close()
        third.close()
        child.join()


def _leave(name: str, port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    life = PrefixStore("life", store)
    transport = TRANSPORTS[name](1, 2, life, secret=SECRET, timeout_s=LONG_S)
    transport.send((torch.tensor(3),), 0, 0)
    transport.flush(LONG_S)
    transport.close()


def test_a_process_that_closed_its_transport_ends_cleanly(name: str) -> None:
    meeting = Meeting("127.0.0.1")
    port = meeting.invitation.port
    child = multiprocessing.get_context("spawn").Process(target=_leave, args=(name, port))
    child.start()
    own_store = TCPStore("127.0.0.1", port, is_master=False)
    life = PrefixStore("life", own_store)
    first = TRANSPORTS[name](0, 2, life, secret=SECRET, timeout_s=LONG_S)
    assert int(receive(first, 1, 0).tensors[0]) == 3
    child.join(LONG_S)
    first.close()
    assert child.exitcode == 0
