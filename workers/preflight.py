"""Whether a worker reaches others, before they join: with messages of several sizes."""

import hmac
import socket
import struct
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from workers.addresses import LOOPBACK, address_towards

SIZES_BYTES = (1, 4096, 1 << 16)
"""Of the messages that must come back: below, about and far above what one packet holds."""

MOST_BYTES = 1 << 26
"""Of a message that is sent back."""

_LENGTH = struct.Struct("<Q")
_AT_ONCE = 32  # others that are tried at the same time: an unreachable one takes the whole time


class Echo:
    """Sends back what comes from whoever knows the secret; strangers hear nothing."""

    def __init__(self, host: str, secret: bytes, timeout_s: float) -> None:
        """Listen on the interface that reaches ``host``.

        Args:
            host: Where the head is.
            secret: What a caller begins with.
            timeout_s: How long a caller may be silent.
        """
        self._secret, self._timeout_s = secret, timeout_s
        self._listener = socket.create_server((address_towards(host) or LOOPBACK, 0), backlog=128)
        address, port = self._listener.getsockname()[:2]
        self.address = f"{address}:{port}"
        threading.Thread(target=self._accept, name="echo", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(caller,), daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        with caller, suppress(OSError, EOFError):
            caller.settimeout(self._timeout_s)
            if not hmac.compare_digest(receive(caller, len(self._secret)), self._secret):
                return
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:  # until the caller has heard enough
                (size,) = _LENGTH.unpack(receive(caller, _LENGTH.size))
                caller.sendall(receive(caller, min(size, MOST_BYTES)))

    def close(self) -> None:
        """Listen no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # frees the accepting thread
        self._listener.close()


def reach(
    addresses: Mapping[str, str], secret: bytes, timeout_s: float
) -> tuple[tuple[str, str, str], ...]:
    """Send messages to the echoes of other devices and wait until they come back.

    Args:
        addresses: Of each device's echo.
        secret: What they want to hear first.
        timeout_s: Longest wait for each device.

    Returns:
        (device, address, why) for each that was not reached.
    """

    def why_not(address: str) -> str:
        return _why_not(address, secret, timeout_s)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reasons = pool.map(why_not, addresses.values())
        return tuple(
            (device, address, reason)
            for (device, address), reason in zip(addresses.items(), reasons, strict=True)
            if reason
        )


def _why_not(address: str, secret: bytes, timeout_s: float) -> str:
    host, port = address.rsplit(":", 1)
    deadline_s, what = time.monotonic() + timeout_s, "no connection"
    try:
        with socket.create_connection((host, int(port)), timeout_s) as connection:
            connection.sendall(secret)
            for size in SIZES_BYTES:
                what = f"a message of {size} bytes did not come back"
                sent = bytes(range(256)) * (size // 256) or b"x"
                connection.settimeout(max(0.001, deadline_s - time.monotonic()))
                if exchange(connection, sent) != sent:
                    return f"a message of {size} bytes came back changed"
    except (OSError, EOFError) as error:
        return f"{what}: {error}"
    return ""


def exchange(connection: socket.socket, message: bytes) -> bytearray:
    """Send a message to an echo and return what comes back.

    Raises:
        OSError: If that takes longer than the connection's time-out.
        EOFError: If the other side closes.
    """
    connection.sendall(_LENGTH.pack(len(message)))
    connection.sendall(message)
    return receive(connection, len(message))


def receive(connection: socket.socket, size: int) -> bytearray:
    """So many bytes. Raises EOFError when the other side closes before."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        got = connection.recv_into(rest)
        if not got:
            raise EOFError("the connection was closed")
        rest = rest[got:]
    return data
