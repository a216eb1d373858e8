"""Whether a process of a test has ended."""

import os
import time

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
