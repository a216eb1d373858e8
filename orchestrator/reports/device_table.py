"""The catalogue of device kinds, on a terminal and as a page."""

from collections.abc import Iterable

from rich.table import Table

from orchestrator.core.cluster import DeviceKind, UsualPrice
from orchestrator.reports import figures

HEAD = ("kind", "fp32", "fp16", "bf16", "memory", "GB/s", "$/h on demand", "$/h spot")
_FIGURES = range(1, len(HEAD))

_PAGE = """# Device kinds

Written by `lyray devices --markdown` from `orchestrator/core/devices.toml`. `cluster.offers` names these kinds; any other needs `speed_ratio` and `memory_gib`.

Peaks are dense rates in TFLOP/s, memory is what a model can use. Kinds without measured times are priced from these figures (docs/model.md, section 3.2).
Prices say what was usual somewhere on some day: a hint for `price_per_hour`. Nothing is ever billed by them.
"""  # noqa: E501 - lines of a page


def device_table(kinds: Iterable[DeviceKind]) -> Table:
    """One row a kind."""
    table = Table()
    for index, name in enumerate(HEAD):
        table.add_column(name, justify="right" if index in _FIGURES else "left")
    for kind in kinds:
        table.add_row(*_cells(kind))
    return table


def device_page(kinds: Iterable[DeviceKind]) -> str:
    """The page ``docs/devices.md``."""
    kinds = tuple(kinds)
    rules = ("---", *("---:" for _ in _FIGURES))
    rows = (HEAD, rules, *map(_cells, kinds))
    figures_of = [_line(row) for row in rows]
    sources = [f"- {kind.kind}: {kind.source}" for kind in kinds]
    prices = [f"- {kind.kind}: {price}; {price.source}" for kind in kinds for price in kind.prices]
    parts = (_PAGE, *figures_of, "\n## Where the figures come from\n", *sources)
    return "\n".join([*parts, "\n## Where the prices come from\n", *prices, ""])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(kind: DeviceKind) -> tuple[str, ...]:
    rates = (kind.fp32_flop_per_s, kind.fp16_flop_per_s, kind.bf16_flop_per_s)
    bandwidth = kind.memory_bandwidth_bytes_per_s
    return (
        kind.kind,
        *(figures.number(None if rate is None else rate / 1e12) for rate in rates),
        figures.size(kind.memory_bytes),
        figures.number(None if bandwidth is None else bandwidth / 1e9),
        _price([p for p in kind.prices if p.market == "on demand"]),
        _price([p for p in kind.prices if p.market == "spot"]),
    )


def _price(prices: list[UsualPrice]) -> str:
    return ", ".join(f"{p.usd_per_hour:.2f} {p.provider}" for p in prices) or "-"
