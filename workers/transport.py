"""How tensors travel between workers: the Transport protocol, its gloo form, the table of both."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
)

from workers.links import (
    LinkTransport,
    PeerLostError,
    Ticket,
    TransportClosedError,
    wait_for_keys,
)
from workers.messages import Message
from workers.tcp import tcp_transport

__all__ = [
    "TRANSPORTS",
    "Message",
    "PeerLostError",
    "Ticket",
    "Transport",
    "TransportClosedError",
    "TransportFactory",
    "gloo_transport",
]


class Transport(Protocol):
    """Point-to-point messages between workers that joined each other; peers go by rank.

    A message is a tuple of tensors of any shape and dtype; both always travel with it, so
    unequal microbatches need no agreement beforehand. Messages of one rank and tag arrive in
    the order in which they were sent, unless their priorities differ.
    """

    def expect(self, src: int, tag: int) -> Ticket:
        """Ask for the next message of a rank and tag. Raises ValueError on a stranger."""

    def receive(self, ticket: Ticket, timeout_s: float) -> Message:
        """Block for the message, without the GIL.

        Raises:
            PeerLostError: At once when the peer is lost, unless the message had come before.
            TransportClosedError: At once when this side closes.
            TimeoutError: After ``timeout_s``; names rank and tag, and harms nothing.
        """

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

        A message of a lower ``priority`` number overtakes what is queued for the same peer.

        Raises:
            ValueError: On a rank that is no peer, a negative tag or a dtype that cannot travel.
            PeerLostError: If the peer is known to be gone.
            TransportClosedError: If this side is closed.
        """

    def cut(self, peer: int) -> None:
        """Give up the link to one rank, which both ends see as the other's loss."""

    def flush(self, timeout_s: float) -> None:
        """Block until everything queued was handed to the network.

        Raises:
            TimeoutError: After ``timeout_s``, naming the peer.
            PeerLostError: If a peer was lost before it got everything.
        """

    def close(self) -> None:
        """Free every blocked receiver, here and at the peers. Any thread, any time, even twice."""


class TransportFactory(Protocol):
    """Joins workers of a run; collective, returns when all are connected."""

    def __call__(self, rank: int, world_size: int, store: Store, *, timeout_s: float) -> Transport:
        """Connect to every other rank. ``store`` must be fresh: a prefix for this time only.

        Raises:
            TimeoutError: If a rank does not come within ``timeout_s``.
        """


class _GlooChannel:
    """Bytes to and from one rank over torch's gloo. One tag and one reader keep the order."""

    def __init__(self, group: ProcessGroup, peer: int) -> None:
        self._group, self._peer = group, peer

    def write(self, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            if buffer.nbytes:
                self._group.send(
                    [torch.frombuffer(buffer, dtype=torch.uint8)], self._peer, 0
                ).wait()

    def read_into(self, buffer: memoryview) -> None:
        if buffer.nbytes:
            self._group.recv([torch.frombuffer(buffer, dtype=torch.uint8)], self._peer, 0).wait()

    def close(self) -> None:
        """Nothing: only the goodbyes of both sides, or a death, end a receive of gloo."""


# A gloo wait that expires closes the pair, so a reader's never may; ``receive`` keeps its own time.
_NEVER = timedelta(days=365)


def gloo_transport(rank: int, world_size: int, store: Store, *, timeout_s: float) -> LinkTransport:
    """Return a Transport over a gloo process group of its own; see ``TransportFactory``."""
    everybody = [f"gloo/{peer}" for peer in range(world_size)]
    store.set(everybody[rank], "here")
    wait_for_keys(store, everybody, timeout_s)  # gloo itself would wait for _NEVER
    group = ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, _NEVER)
    peers = (peer for peer in range(world_size) if peer != rank)
    # torch's stub of the class lacks its send and recv.
    links = {peer: _GlooChannel(cast("ProcessGroup", group), peer) for peer in peers}
    return LinkTransport(rank, links)


TRANSPORTS: dict[str, TransportFactory] = {"tcp": tcp_transport, "gloo": gloo_transport}
"""Name to factory."""
