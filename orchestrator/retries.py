"""Trying again what may pass: one hiccup of a store must not end a training."""

import errno
import logging
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

WAITS_S = (0.5, 1.0, 2.0, 4.0)
"""Before each further try."""

LONGEST_S = 15.0
"""After this long nothing is tried again: drivers of object stores try by themselves, some for half
a minute, and whoever waits has a time-out."""

_MAY_PASS = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN",
        "EHOSTUNREACH", "EINTR", "EIO", "ENETDOWN", "ENETRESET", "ENETUNREACH", "EPIPE",
        "EREMOTEIO", "ESTALE", "ETIMEDOUT",
    )
    if hasattr(errno, name)
)  # fmt: skip
_FOR_GOOD = (ImportError, TypeError, ValueError, NotImplementedError)
"""Raised by a driver that is missing, misused, or cannot do what was asked: waiting mends none."""


def patiently(action: Callable[[], T]) -> T:
    """Return what ``action`` does, tried again while its error may pass.

    Give it only what may be done twice. Blocks for ``LONGEST_S`` and one action at most.

    Raises:
        OSError: What will not pass by itself, or the last error.
    """
    started_s = time.monotonic()
    for wait_s in WAITS_S:
        try:
            return action()
        except OSError as error:
            if not may_pass(error) or time.monotonic() - started_s > LONGEST_S:
                raise
            logger.warning("%s; trying again in %s s", error, wait_s)
            time.sleep(wait_s)
    return action()


def may_pass(error: OSError) -> bool:
    """Whether an error of a file system may be gone in a moment: no full disk, no missing right."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if error.errno is not None:
        return error.errno in _MAY_PASS
    # Drivers of object stores raise classes of their own: what they cannot name may be anything.
    cause = error.__cause__
    if isinstance(cause, ConnectionError | TimeoutError):
        return True
    return (
        cause is not None
        and not isinstance(cause, (OSError, *_FOR_GOOD))
        and "Credential" not in type(cause).__name__
    )
