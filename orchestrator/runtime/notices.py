"""Notices of preemption from outside: a file or an address that names devices about to go."""

import json
import logging
import time
from collections.abc import Mapping

from orchestrator import storage

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""How often the board is read."""


class NoticeBoard:
    """Reads who will be taken away, from a URL that may not exist yet.

    The content is one JSON object, device to seconds from the time it is first seen:
    ``{"mid-0": 30}``. A device that is no longer named may be used again.
    """

    def __init__(self, url: str | None) -> None:
        """``url``: a path, or any URL that fsspec opens (http, s3); None: no notices."""
        self._url = url
        self._read_s = float("-inf")
        self._deadlines_s: dict[str, float] = {}
        self._complaint = ""

    def read(self, now_s: float) -> Mapping[str, float]:
        """Devices under notice, and when they go, in the time of ``now_s``."""
        if self._url is not None and time.monotonic() > self._read_s + POLL_S:
            self._read_s = time.monotonic()
            self._deadlines_s = self._deadlines(self._url, now_s)
        return self._deadlines_s

    def _deadlines(self, url: str, now_s: float) -> dict[str, float]:
        try:
            told = parse_notices(storage.read_bytes(url, patient=False).decode())
        except FileNotFoundError:
            return {}  # nobody is under notice
        except (OSError, ValueError) as error:
            if str(error) != self._complaint:  # once, not every second
                self._complaint = str(error)
                logger.warning("failure.notices %s: %s; the last notices hold", url, error)
            return self._deadlines_s
        self._complaint = ""
        known = self._deadlines_s
        return {device: known.get(device, now_s + in_s) for device, in_s in told.items()}


def parse_notices(text: str) -> dict[str, float]:
    """Seconds that are left, by device.

    Raises:
        ValueError: If the text is not such an object, with what it should be.
    """
    found = json.loads(text) if text.strip() else {}
    if not isinstance(found, dict):
        raise ValueError('it is no JSON object; write {"device": seconds}')  # noqa: TRY004
    for device, in_s in found.items():
        if isinstance(in_s, bool) or not isinstance(in_s, int | float) or not 0 <= in_s < 1e9:
            raise ValueError(f"{device!r} is {in_s!r}; write the seconds that are left to it")
    return {str(device): float(in_s) for device, in_s in found.items()}
