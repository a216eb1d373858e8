"""What both transports share: a mailbox, one sender and one reader a peer."""

import heapq
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import Store

from workers.lanes import Lane
from workers.messages import Channel, Message, Parts, encoder, goodbye, read_message

_CLOSE_GRACE_S = 0.5  # for the goodbyes to pass; a peer that hangs must not hold us up


class PeerLostError(RuntimeError):
    """The worker of ``rank`` is gone: nothing more will come from it."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason

    def __str__(self) -> str:
        return f"lost contact with rank {self.rank}: {self.reason}"


class TransportClosedError(RuntimeError):
    """This side's transport was closed, perhaps by another thread, perhaps while receiving."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A receive that was asked for."""

    src: int
    tag: int


def wait_for_keys(store: Store, keys: Sequence[str], timeout_s: float) -> None:
    """Block until every key is in the store; each is set by the rank it names.

    Raises:
        TimeoutError: After ``timeout_s``, naming the missing keys.
    """
    try:
        store.wait(list(keys), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [key for key in keys if not store.check([key])]
        raise TimeoutError(
            f"missing after {timeout_s} s: {', '.join(missing)} (name/rank)"
        ) from error


class Mailbox:
    """Arrived messages by (rank, tag), in order; wakes every receiver that waits in vain."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self._lost: dict[int, str] = {}
        self._closed = False

    def deliver(self, src: int, tag: int, message: Message) -> None:
        """Hand a message to whoever waits for it, now or later."""
        with self._changed:
            self._arrived[src, tag].append(message)
            self._changed.notify_all()

    def lose(self, src: int, reason: str) -> None:
        """Fail every receive of a peer, waiting or to come, that has no message yet.

        The first reason stays.
        """
        with self._changed:
            self._lost.setdefault(src, reason)
            self._changed.notify_all()

    def close(self) -> None:
        """Fail every receive."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def check(self, peer: int) -> None:
        """Raise TransportClosedError or PeerLostError when talking to a peer has no point."""
        if self._closed:
            raise TransportClosedError("the transport is closed")
        if peer in self._lost:
            raise PeerLostError(peer, self._lost[peer])

    def take(self, ticket: Ticket, timeout_s: float) -> Message:
        """Block for the next message of the ticket's rank and tag.

        Raises:
            PeerLostError: If the peer is lost and sent no such message before.
            TransportClosedError: If this side closes.
            TimeoutError: After ``timeout_s``.
        """
        key = (ticket.src, ticket.tag)
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                waiting = self._arrived.get(key)
                if waiting and not self._closed:
                    message = waiting.popleft()
                    if not waiting:
                        del self._arrived[key]
                    return message
                self.check(ticket.src)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(
                        f"nothing came from rank {ticket.src} under tag {ticket.tag} "
                        f"within {timeout_s} s"
                    )
                self._changed.wait(left_s)


@dataclass(order=True, slots=True)
class _Outgoing:
    priority: int
    sequence: int
    encode: Callable[[], Parts] = field(compare=False)


class _Sender:
    """Writes one peer's messages, lowest priority number first, then in order.

    Its thread starts with the first message.
    """

    def __init__(
        self, peer: int, channel: Channel, mailbox: Mailbox, lane: Lane | None = None
    ) -> None:
        self._peer, self._channel, self._mailbox, self._lane = peer, channel, mailbox, lane
        self._changed = threading.Condition()
        self._heap: list[_Outgoing] = []
        self._num_put = self._num_open = self._num_dropped = 0  # open: queued, or being written
        self._dropped_s: float | None = None
        self._thread: threading.Thread | None = None
        self._ended = False

    def put(self, encode: Callable[[], Parts], priority: int, *, final: bool = False) -> None:
        with self._changed:
            if self._ended:
                self._num_dropped += not final
                return
            heapq.heappush(self._heap, _Outgoing(priority, self._num_put, encode))
            self._num_put += 1
            self._num_open += 1
            self._ended = final
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"send-to-{self._peer}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._heap:
                    if self._ended:
                        return
                    self._changed.wait()
                outgoing = heapq.heappop(self._heap)
            try:
                self._write(outgoing)
            except (OSError, RuntimeError, ValueError) as error:  # ValueError: a closed socket
                self._mailbox.lose(self._peer, str(error))
                self.abandon()
                self._count_written(dropped=True)
                return
            self._count_written(dropped=False)
            del outgoing  # frees the tensors before the next wait

    def _count_written(self, *, dropped: bool) -> None:
        with self._changed:
            self._num_open -= 1
            self._num_dropped += dropped
            self._changed.notify_all()

    def _write(self, outgoing: _Outgoing) -> None:
        buffers, given = outgoing.encode()
        self._channel.write(buffers)
        for tensor in given:
            assert self._lane is not None, "nothing is given without a lane"
            self._lane.give(tensor)

    def abandon(self) -> None:
        """Forget what is queued: nobody will read it."""
        with self._changed:
            self._drop()
            self._ended = True

    def _drop(self) -> None:
        # What is being written may have come: the peer that left may have left after it.
        self._num_dropped += len(self._heap)
        self._num_open -= len(self._heap)
        self._heap.clear()
        self._dropped_s = time.monotonic()
        self._changed.notify_all()

    def flush(self, deadline_s: float, timeout_s: float) -> None:
        with self._changed:
            while self._num_open:
                end_s = deadline_s
                if self._dropped_s is not None:
                    end_s = min(end_s, self._dropped_s + _CLOSE_GRACE_S)
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    self._mailbox.check(self._peer)
                    raise TimeoutError(
                        f"{self._num_open} messages to rank {self._peer} were not sent "
                        f"within {timeout_s} s"
                    )
                self._changed.wait(left_s)
            if self._num_dropped:  # a peer that left with nothing owed to it is no failure
                self._mailbox.check(self._peer)

    def say_goodbye(self) -> None:
        """End the thread after a last word, which overtakes what is queued."""
        with self._changed:
            self._drop()
        self.put(goodbye, 0, final=True)

    def join(self, timeout_s: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)


class LinkTransport:
    """A Transport over one Channel a peer, and where there is one a Lane beside it."""

    def __init__(
        self,
        rank: int,
        channels: Mapping[int, Channel],
        lanes: Mapping[int, Lane] | None = None,
    ) -> None:
        self.rank = rank
        self._channels, self._lanes = dict(channels), dict(lanes or {})
        self._mailbox = Mailbox()
        self._senders = {
            peer: _Sender(peer, channel, self._mailbox, self._lanes.get(peer))
            for peer, channel in self._channels.items()
        }
        self._closing = threading.Lock()
        self._readers = [
            threading.Thread(target=self._read, args=link, name=f"read-from-{link[0]}", daemon=True)
            for link in self._channels.items()
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, peer: int, channel: Channel) -> None:
        try:
            while True:
                tag, message = read_message(channel, self._lanes.get(peer))
                self._mailbox.deliver(peer, tag, message)
                del message  # frees the tensors before the next wait
        except (OSError, EOFError, RuntimeError, ValueError) as error:  # ValueError: closed socket
            self._mailbox.lose(peer, str(error))
            if peer in self._lanes:
                self._lanes[peer].close()
            self._senders[peer].say_goodbye()

    def _check_peer(self, peer: int) -> None:
        if peer not in self._channels:
            raise ValueError(
                f"rank {self.rank} has no link to rank {peer}; "
                f"its peers are {sorted(self._channels)}"
            )

    def expect(self, src: int, tag: int) -> Ticket:
        """Ask for the next message of a rank and tag. Raises ValueError on a stranger."""
        self._check_peer(src)
        return Ticket(src, tag)

    def receive(self, ticket: Ticket, timeout_s: float) -> Message:
        """Block for the message; see ``Mailbox.take`` for what it raises."""
        return self._mailbox.take(ticket, timeout_s)

    def send(
        self,
        tensors: Sequence[torch.Tensor],
        dst: int,
        tag: int,
        *,
        vtime: float = 0.0,
        priority: int = 0,
    ) -> None:
        """Queue a message and return; do not write into the tensors before ``flush``.

        Raises:
            ValueError: On a rank that is no peer, a negative tag or a dtype that cannot travel.
            PeerLostError: If the peer is known to be gone.
            TransportClosedError: If this side is closed.
        """
        self._check_peer(dst)
        if tag < 0:
            raise ValueError(f"tag is {tag}; it must not be negative")
        self._mailbox.check(dst)
        self._senders[dst].put(encoder(tuple(tensors), tag, vtime, self._lanes.get(dst)), priority)

    def flush(self, timeout_s: float) -> None:
        """Block until everything queued was handed to the network.

        Raises:
            TimeoutError: After ``timeout_s``, naming the peer.
            PeerLostError: If a peer was lost before it got everything.
        """
        deadline_s = time.monotonic() + timeout_s
        for sender in self._senders.values():
            sender.flush(deadline_s, timeout_s)

    def cut(self, peer: int) -> None:
        """Give up the link to one rank, which both ends see as the other's loss."""
        self._check_peer(peer)
        self._mailbox.lose(peer, "the link was cut")
        self._senders[peer].say_goodbye()

    def close(self) -> None:
        """Free every blocked receiver, here and at the peers; what was not sent is dropped.

        Any thread, any time.
        """
        self._mailbox.close()
        with self._closing:
            for sender in self._senders.values():
                sender.say_goodbye()
            for lane in self._lanes.values():
                lane.close()
            deadline_s = time.monotonic() + _CLOSE_GRACE_S
            for sender in self._senders.values():
                sender.join(max(0.0, deadline_s - time.monotonic()))
            for channel in self._channels.values():
                channel.close()
            # A reader that is still inside gloo when the interpreter ends brings the process down.
            deadline_s = time.monotonic() + _CLOSE_GRACE_S
            for reader in self._readers:
                reader.join(max(0.0, deadline_s - time.monotonic()))
