"""How tensors travel between workers: the Transport protocol, and the table of its forms."""

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch.distributed.distributed_c10d import Store

from workers.device import PROCESSOR, driven_gpu
from workers.links import LinkTransport, PeerLostError, Ticket, TransportClosedError
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

    def __call__(
        self, rank: int, world_size: int, store: Store, *, secret: bytes, timeout_s: float
    ) -> Transport:
        """Connect to every other rank, which must prove to know ``secret``.

        ``store`` must be fresh: a prefix for this time only.

        Raises:
            TimeoutError: If a rank does not come within ``timeout_s``.
        """


def _with_nccl(
    rank: int, world_size: int, store: Store, *, secret: bytes, timeout_s: float
) -> LinkTransport:
    gpu = driven_gpu()
    return tcp_transport(rank, world_size, store, secret=secret, timeout_s=timeout_s, lanes_on=gpu)


TRANSPORTS: dict[str, TransportFactory] = {
    "tcp": tcp_transport,
    "gloo": partial(tcp_transport, lanes_on=PROCESSOR),
    "nccl": _with_nccl,
}
"""Name to factory. All have our own connections; the last two carry tensors by torch.distributed.

``tcp`` is what runs use: see docs/operations.md, section GPUs.
"""
