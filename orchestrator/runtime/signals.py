"""SIGINT and SIGTERM of the job process, noted and passed on as a wish to stop."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType


class StopSignals:
    """SIGINT and SIGTERM, noted and passed on as a wish to stop.

    The handler raises nothing: it may run inside Ray's own code, which does not survive that.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._stop: Callable[[str], object] | None = None

    @property
    def reason(self) -> str:
        """Why the run stops, as one line."""
        return f"stopped by {self.seen[0]}"

    def caught(self) -> AbstractContextManager[None]:
        """Catch both inside the block; other handlers are back at its end."""
        return handled(self._note)

    def catch(self) -> None:
        """Put the handler in place."""
        if _is_main_thread():
            for number in _STOP_SIGNALS:
                signal.signal(number, self._note)

    def stop_with(self, stop: Callable[[str], object] | None) -> None:
        """Call ``stop`` with the reason at the first signal, or now if one has come already."""
        self._stop = stop
        if stop is not None and self.seen:
            stop(self.reason)

    def _note(self, number: int, frame: FrameType | None) -> None:
        stay()
        self.seen.append(signal.Signals(number).name)
        if self._stop is not None and len(self.seen) == 1:
            self._stop(self.reason)


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Let it handle SIGINT and SIGTERM inside the block; other handlers are back at its end.

    Only in the main thread: Python hands signals to no other.
    """
    if not _is_main_thread():
        yield
        return
    old = {number: signal.signal(number, handler) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


def stay() -> None:
    """Call off the end that Ray has set: we end by ourselves.

    While ray.init is under way a handler in Ray's C++ stands before ours. It passes the signal
    on, but first asks for an alarm, which aborts the process after 3 s.
    """
    signal.alarm(0)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
