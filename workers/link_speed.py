"""How long messages of several sizes take to another worker, over the network that steps use."""

import socket
import time
from statistics import median

from workers.preflight import exchange

SIZES_BYTES = (1, 1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""From what has only latency to what has hardly any."""

REPEATS = 7
BUDGET_S = 2.0
"""A size is repeated this long at most; where one message takes longer, no larger one is sent."""

Timings = tuple[tuple[int, float], ...]
"""Message bytes, seconds one way."""


def one_way(address: str, secret: bytes, timeout_s: float) -> Timings:
    """Half of what messages take to an ``Echo`` and back: the median of a few, by size.

    Raises:
        OSError: If the other side is not reached, or a message takes longer than ``timeout_s``.
        EOFError: If it closes.
    """
    host, port = address.rsplit(":", 1)
    found: list[tuple[int, float]] = []
    with socket.create_connection((host, int(port)), timeout_s) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(secret)
        exchange(connection, b"x")  # the first one wakes everybody up
        for size in SIZES_BYTES:
            taken = _repeated(connection, bytes(size))
            found.append((size, median(taken) / 2.0))
            if max(taken) > BUDGET_S:
                break
    return tuple(found)


def _repeated(connection: socket.socket, message: bytes) -> list[float]:
    taken: list[float] = []
    while len(taken) < REPEATS and sum(taken) <= BUDGET_S:
        start_s = time.perf_counter()
        exchange(connection, message)
        taken.append(time.perf_counter() - start_s)
    return taken
