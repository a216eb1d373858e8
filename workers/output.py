"""Where a process's stdout and stderr go, native libraries' included."""

import os
import sys
from pathlib import Path


def send_output_to(path: Path) -> None:
    """Append stdout and stderr of this process to a file from now on.

    gloo and Ray print from C++: redirecting Python's streams would not be enough.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
