"""Figures as people read them: three digits, a unit, a dash where nothing was measured."""

import math

_DASH = "-"


def number(value: float | None) -> str:
    """Three significant digits, thousands with separators, never an exponent for usual sizes."""
    if value is None or not math.isfinite(value):
        return _DASH
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.2e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def seconds(value: float | None) -> str:
    """A duration: microseconds to days."""
    if value is None or not math.isfinite(value):
        return _DASH
    size = abs(value)
    if size == 0:
        return "0 s"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (120.0, 1.0, "s"),
                                (7200.0, 1 / 60, "min"), (172800.0, 1 / 3600, "h")):  # fmt: skip
        if size < limit:
            return f"{number(value * factor)} {unit}"
    return f"{number(value / 86400)} d"


def usd(value: float | None) -> str:
    """Dollars: cents, and more digits below one dollar."""
    if value is None or not math.isfinite(value):
        return _DASH
    digits = 4 if 5e-5 <= abs(value) < 1 else 2
    return f"{'-' if value < 0 else ''}${abs(value):,.{digits}f}"


def usd_number(value: float | None) -> str:
    """Dollars with three digits, as other numbers have."""
    return _DASH if value is None or not math.isfinite(value) else f"${number(value)}"


def size(value_bytes: float | None) -> str:
    """Bytes in binary units."""
    if value_bytes is None or not math.isfinite(value_bytes):
        return _DASH
    value, unit = float(value_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{number(value)} {unit}" if unit != "B" else f"{value:.0f} B"


def count(value: float | None) -> str:
    """A large number in decimal units: 3.41 M."""
    if value is None or not math.isfinite(value):
        return _DASH
    for limit, unit in ((1e3, ""), (1e6, " k"), (1e9, " M"), (1e12, " G")):
        if abs(value) < limit:
            return f"{number(value * 1e3 / limit)}{unit}"
    return f"{number(value / 1e12)} T"


def percent(ratio: float | None) -> str:
    """A ratio as a percentage."""
    if ratio is None or not math.isfinite(ratio):
        return _DASH
    if 0 < ratio < 0.001:
        return "< 0.1 %"
    return f"{100 * ratio:.1f} %" if abs(ratio) < 0.1 else f"{100 * ratio:.0f} %"


def difference(measured: float | None, predicted: float | None) -> str:
    """How far a measurement lies from its prediction, signed, in percent."""
    if measured is None or not predicted:
        return _DASH
    return f"{100 * (measured / predicted - 1):+.1f} %"
