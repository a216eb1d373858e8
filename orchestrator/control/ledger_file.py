"""Lines of ``ledger.jsonl``: of those that differ in their devices alone, one is encoded or read.

A pool bills its devices by the same stretch and price: there are few unlike ones in a slot.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from operator import attrgetter

from orchestrator import storage
from orchestrator.core.durable import LedgerEntry
from orchestrator.decoding import field_names

_NO_DEVICE = '"device": ""'
_DEVICE = re.compile(r'"device": "([^"\\]*)"')  # quotes within a text have a backslash before them
_BUT_DEVICE = attrgetter(*(n for n in field_names(LedgerEntry) if n != "device"))


def ledger_lines(entries: Iterable[LedgerEntry]) -> Iterator[str]:
    """The lines of entries, without line breaks."""
    known: dict[tuple[object, ...], tuple[str, str]] = {}
    for entry in entries:
        rest = _BUT_DEVICE(entry)
        if rest not in known:
            before, _, after = storage.json_text(replace(entry, device="")).partition(_NO_DEVICE)
            known[rest] = before + _NO_DEVICE[:-2], after
        before, after = known[rest]
        yield f"{before}{storage.json_text(entry.device)}{after}"


def ledger_entry(line: str) -> LedgerEntry:
    """What a line says. Raises ValueError where it is none of the ledger."""
    found = _DEVICE.search(line)
    return _read(line) if found is None else replace(charge(line), device=found[1])


def charge(line: str) -> LedgerEntry:
    """The same for whoever asks no device: alike lines are one object.

    Raises:
        ValueError: Where it is no line of the ledger.
    """
    return _read(_DEVICE.sub(_NO_DEVICE, line, count=1))


@lru_cache(maxsize=1000)
def _read(line: str) -> LedgerEntry:
    return storage.from_json(LedgerEntry, storage.parse_json(line))
