"""Notices of preemption from outside: a file or an address that names devices about to go."""

import logging
import threading
import time
from collections.abc import Mapping

from orchestrator import storage

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How often the board is read."""

GLANCE_S = 0.1
"""How long the run waits for what it says; what takes longer is looked at later."""

ANSWER_S = 5.0
"""When a reading is given up."""


class NoticeBoard:
    """Reads who will be taken away, from a URL that may not exist yet.

    The content is one JSON object, device to seconds from the time it is first seen:
    ``{"mid-0": 30}``. A device that is no longer named may be used again.
    """

    def __init__(self, url: str | None) -> None:
        """``url``: a path, or any URL that fsspec opens (http, s3); None: no notices."""
        self._url = url
        self._read_s = float("-inf")
        self._reading: _Reading | None = None  # under way
        self._deadlines_s: dict[str, float] = {}
        self._complaint = ""

    def read(self, now_s: float) -> Mapping[str, float]:
        """Devices under notice, and when they go, in the time of ``now_s``."""
        if self._url is None:
            return self._deadlines_s
        since_s = time.monotonic() - self._read_s
        if self._reading is None and since_s > POLL_S:
            self._read_s, since_s = time.monotonic(), 0.0
            self._reading = _Reading(self._url)
            self._reading.start()
            self._reading.join(GLANCE_S)
        if self._reading is not None:
            if not self._reading.is_alive():
                self._note(self._reading, now_s)
                self._reading = None
            elif since_s > ANSWER_S:  # no driver breaks off a disk that hangs
                self._complain(f"{self._url}: no answer within {ANSWER_S:.0f} s")
        return self._deadlines_s

    def _note(self, reading: "_Reading", now_s: float) -> None:
        """Take over what a reading brought."""
        if reading.problem:
            self._complain(reading.problem)
            return
        self._complaint = ""
        known = self._deadlines_s
        self._deadlines_s = {d: known.get(d, now_s + in_s) for d, in_s in reading.told.items()}

    def _complain(self, problem: str) -> None:
        """Say it once, not every second."""
        if problem != self._complaint:
            self._complaint = problem
            logger.warning("failure.notices %s; the last notices hold", problem)


class _Reading(threading.Thread):
    """One look at the board: the run does not stand still while it takes its time."""

    def __init__(self, url: str) -> None:
        super().__init__(name="notices", daemon=True)
        self._url = url
        self.told: dict[str, float] = {}
        self.problem = ""

    def run(self) -> None:
        """Read; ``told`` or ``problem`` say the rest."""
        try:
            self.told = parse_notices(storage.read_bytes(self._url, timeout_s=ANSWER_S).decode())
        except FileNotFoundError:
            pass  # nobody is under notice
        except (OSError, ValueError) as error:
            known = self._url in str(error)
            self.problem = str(error) if known else f"{self._url}: {error}"


def parse_notices(text: str) -> dict[str, float]:
    """Seconds that are left, by device.

    Raises:
        ValueError: If the text is not such an object, with what it should be.
    """
    found = storage.parse_json(text) if text.strip() else {}
    if not isinstance(found, dict):
        raise ValueError('it is no JSON object; write {"device": seconds}')  # noqa: TRY004
    for device, in_s in found.items():
        if isinstance(in_s, bool) or not isinstance(in_s, int | float) or not 0 <= in_s < 1e9:
            raise ValueError(f"{device!r} is {in_s!r}; write the seconds that are left to it")
    return {str(device): float(in_s) for device, in_s in found.items()}
