"""Which sizes of numbers make sense in a run file, by the unit in the key: slips of a unit."""

from collections.abc import Iterator, Mapping

from orchestrator.storage import Json

RANGES: Mapping[str, tuple[float, float, str]] = {
    "count": (1, 10_000, ""),
    "joined": (1, 10_000, ""),
    "seed": (1, 2.0**63, ""),
    "_per_hour": (1e-6, 1e9, " dollars"),
    "_usd": (1e-6, 1e12, " dollars"),
    "_usd_per_gb": (1e-9, 1e6, " dollars"),
    "_gib": (1e-6, 1e6, " GiB"),
    "_gbytes_per_s": (1e-6, 1e6, " GB/s"),
    "][1]": (1.0, 1e15, " bytes/s"),  # of a point (bytes, bytes/s)
    "_hours": (1e-6, 1e6, " hours"),
    "discount_ratio": (1e-6, 10.0, ""),
    "_ratio": (1e-6, 1e6, ""),
    "_scale": (1e-6, 1e9, ""),
    "_speedup": (1e-6, 1e9, ""),
    "slot_s": (1e-2, 1e8, " seconds"),
    "hysteresis_slots": (1, 1e6, ""),
    "timeout_s": (1.0, 1e6, " seconds"),
    "latency_s": (1e-9, 3600.0, " seconds"),
    "minimum_s": (1e-9, 1e7, " seconds"),
    "quantum_s": (1e-9, 1e7, " seconds"),
    "_s": (1e-9, 1e9, " seconds"),
    "": (1e-15, 1e15, ""),
}
"""Key, or end of a key, to the least and largest size other than 0; the first that fits counts."""

_FREE = ("training.task_args", "training.optimizer")
"""What is the user's own, or torch's."""


def range_problems(data: Json, path: str = "") -> Iterator[str]:
    """Return what is far too small or large, one message each: dotted path, value, range."""
    if isinstance(data, dict):
        for key, value in data.items():
            below = f"{path}.{key}" if path else key
            if below not in _FREE:
                yield from range_problems(value, below)
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from range_problems(value, f"{path}[{index}]")
    elif isinstance(data, int | float) and not isinstance(data, bool) and data:
        least, most, unit = _range_of(path)
        least = max(least, 1) if isinstance(data, int) else least
        if not least <= abs(data) <= most:
            yield f"{path} is {_short(data)}; write {least:g} to {most:g}{unit}"


def _range_of(path: str) -> tuple[float, float, str]:
    key = path.rpartition(".")[2]
    return next(found for end, found in RANGES.items() if key.endswith(end))


def _short(value: float) -> str:
    return str(value) if abs(value) < 1e15 else f"{float(value):g}"
