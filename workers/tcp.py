"""Our own TCP transport: authenticated connections between all pairs of workers."""

import hmac
import logging
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stub
from torch.distributed.distributed_c10d import PrefixStore, Store

from workers.addresses import LOOPBACK, address_towards
from workers.lanes import GroupLane
from workers.links import LinkTransport, PeerLostError, wait_for_keys
from workers.messages import Channel

logger = logging.getLogger(__name__)

_MAGIC = b"lyray/1\n"
_HELLO = struct.Struct("<8si32s")  # magic, rank of the caller, proof that it knows the secret
_SOCKET_BUFFER_BYTES = 4 << 20
_HELLO_TIMEOUT_S = 2.0  # a stranger that connects and says nothing is dropped after this
_MAX_BUFFERS = 64  # of one sendmsg; the system's limit is 1024


class _SocketChannel:
    """Bytes to and from one peer over a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection = connection

    def write(self, buffers: Sequence[memoryview]) -> None:
        waiting = [buffer for buffer in buffers if buffer.nbytes]
        while waiting:
            sent = self._connection.sendmsg(waiting[:_MAX_BUFFERS])
            while waiting and sent >= waiting[0].nbytes:
                sent -= waiting.pop(0).nbytes
            if sent:
                waiting[0] = waiting[0][sent:]

    def read_into(self, buffer: memoryview) -> None:
        while buffer.nbytes:
            received = self._connection.recv_into(buffer)
            if not received:
                raise EOFError("the connection was closed")
            buffer = buffer[received:]

    def close(self) -> None:
        with suppress(OSError):  # the peer was faster
            self._connection.shutdown(socket.SHUT_RDWR)  # frees a thread that is blocked in it
        self._connection.close()


def _local_address(store: Store) -> str:
    # The interface that reaches the store reaches the other workers; without a network, loopback.
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return LOOPBACK
    return address_towards(store.host, store.port or 1) or LOOPBACK


def _proof(secret: bytes, caller: int, called: int) -> bytes:
    return hmac.digest(secret, f"{caller}->{called}".encode(), "sha256")


def _say_hello(connection: socket.socket, secret: bytes, rank: int, peer: int) -> None:
    connection.sendall(_HELLO.pack(_MAGIC, rank, _proof(secret, rank, peer)))


def _hear_hello(connection: socket.socket, secret: bytes, rank: int) -> int | None:
    """The rank of the caller; None when it is a stranger."""
    heard = b""
    try:
        while len(heard) < _HELLO.size:
            received = connection.recv(_HELLO.size - len(heard))
            if not received:
                return None
            heard += received
    except OSError:
        return None
    magic, peer, proof = _HELLO.unpack(heard)
    known = magic == _MAGIC and hmac.compare_digest(proof, _proof(secret, peer, rank))
    return int(peer) if known else None


class _Reception:
    """Accepts the higher ranks; strangers are dropped without holding up anybody."""

    def __init__(self, listener: socket.socket, secret: bytes, rank: int) -> None:
        self._listener, self._secret, self._rank = listener, secret, rank
        self._changed = threading.Condition()
        self._accepted: dict[int, socket.socket] = {}
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError:
                return  # closed: everybody is here, or the time is over
            threading.Thread(target=self._greet, args=(connection, host), daemon=True).start()

    def _greet(self, connection: socket.socket, host: str) -> None:
        connection.settimeout(_HELLO_TIMEOUT_S)
        peer = _hear_hello(connection, self._secret, self._rank)
        with self._changed:
            if peer is None or peer <= self._rank or peer in self._accepted:
                connection.close()
                logger.warning("a stranger at %s was refused: it does not prove to be a peer", host)
                return
            _say_hello(connection, self._secret, self._rank, peer)
            self._accepted[peer] = connection
            self._changed.notify_all()

    def wait(self, peers: Sequence[int], deadline_s: float) -> dict[int, socket.socket]:
        with self._changed:
            while any(peer not in self._accepted for peer in peers):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    missing = [peer for peer in peers if peer not in self._accepted]
                    raise TimeoutError(f"ranks {missing} did not connect to rank {self._rank}")
                self._changed.wait(left_s)
            return dict(self._accepted)


def _connect(
    address: str, secret: bytes, ranks: tuple[int, int], deadline_s: float
) -> socket.socket:
    (rank, peer), (host, port) = ranks, address.rsplit(":", 1)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    connection.settimeout(max(0.001, deadline_s - time.monotonic()))
    try:
        connection.connect((host, int(port)))
        _say_hello(connection, secret, rank, peer)
        known = _hear_hello(connection, secret, rank) == peer
    except OSError as error:
        connection.close()
        raise PeerLostError(peer, f"{address}: {error}") from error
    if not known:
        connection.close()
        raise PeerLostError(peer, f"{address} did not answer as that rank")
    return connection


def tcp_channels(
    rank: int, world_size: int, store: Store, *, secret: bytes, timeout_s: float
) -> dict[int, Channel]:
    """Return one TCP connection to every other rank; of two, the higher one connects.

    Addresses travel through ``store``, which must be fresh. Whoever does not prove to know
    ``secret``, which all of this world share and nobody else, is dropped.

    Raises:
        TimeoutError: If a rank does not come within ``timeout_s``.
        PeerLostError: If a rank came and is gone again.
    """
    deadline_s = time.monotonic() + timeout_s
    address = _local_address(store)
    with socket.create_server((address, 0), backlog=max(128, world_size)) as listener:
        # On the listener: what it accepts inherits the sizes, which the handshake already needs.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
        store.set(f"tcp/{rank}", f"{address}:{listener.getsockname()[1]}")
        wait_for_keys(store, [f"tcp/{peer}" for peer in range(world_size)], timeout_s)
        reception = _Reception(listener, secret, rank)
        connections: dict[int, socket.socket] = {}
        try:
            for peer in range(rank):
                connections[peer] = _connect(
                    store.get(f"tcp/{peer}").decode(), secret, (rank, peer), deadline_s
                )
            connections |= reception.wait(range(rank + 1, world_size), deadline_s)
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        finally:
            # Closing alone would leave the accepting thread blocked for ever.
            listener.shutdown(socket.SHUT_RDWR)
    return {peer: _SocketChannel(c) for peer, c in connections.items()}


def tcp_transport(
    rank: int,
    world_size: int,
    store: Store,
    *,
    secret: bytes,
    timeout_s: float,
    lanes_on: torch.device | None = None,
) -> LinkTransport:
    """Return a Transport over ``tcp_channels``, which see for what it raises.

    Tensors on the device ``lanes_on`` do not take the connection but a lane of torch.distributed
    beside it.
    """
    channels = tcp_channels(rank, world_size, store, secret=secret, timeout_s=timeout_s)
    if lanes_on is None:
        return LinkTransport(rank, channels)
    ways = PrefixStore("lanes", store)
    lanes = {peer: GroupLane(rank, peer, ways, timeout_s, lanes_on) for peer in channels}
    return LinkTransport(rank, channels, lanes)
