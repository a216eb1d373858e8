"""Whether a process of a test has ended, and what it has started."""

import os
import time
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 10.0  # its parent has to reap it


def stays_alive(pid: int) -> bool:
    """Whether a process is still there after a while in which it may end."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def with_descendants(pid: int) -> frozenset[int]:
    """A process and all that it, or what it started, has started."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(file.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found, left = set[int](), [pid]
    while left:
        found.add(left[-1])
        left += children.get(left.pop(), [])
    return frozenset(found)
