"""Which address and interface of this machine reach another one: those are what others reach."""

import fcntl
import socket
import struct

LOOPBACK = "127.0.0.1"
"""Of a machine that has no way to the others."""

_SIOCGIFADDR = 0x8915


def address_towards(host: str, port: int = 1) -> str | None:
    """Address of this machine on the way to ``host``; None: there is no way. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """Name of the network interface that reaches ``host``; None where the system does not say.

    gloo binds to the address that the host name resolves to, which on many machines is not
    the one that its peers can reach.
    """
    address = address_towards(host)
    if address is None:
        return None  # torch's own error says more
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
