"""Where processes listen for connections, as the system tells it."""

import struct
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_LISTENING = "0A"


def listening(pids: Iterable[int]) -> frozenset[tuple[str, int]]:
    """Address and port of every TCP socket on which these processes accept connections."""
    addresses = _listening_sockets()
    found = set()
    for pid in pids:
        with suppress(FileNotFoundError):  # it has ended
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    target = str(file.readlink())
                    if target in addresses:
                        found.add(addresses[target])
    return frozenset(found)


def _listening_sockets() -> dict[str, tuple[str, int]]:
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                host, port = fields[1].split(":")
                found[f"socket:[{fields[9]}]"] = (_address(host), int(port, 16))
    return found


def _address(told: str) -> str:
    """The address that the kernel tells as words of 32 bits, each in the machine's own order."""
    words = bytes.fromhex(told)
    raw = b"".join(struct.pack("=I", word) for word in struct.unpack(f">{len(words) // 4}I", words))
    address: IPv4Address | IPv6Address = ip_address(raw)
    return str(getattr(address, "ipv4_mapped", None) or address)
