"""The plan over time as a picture: a band a device, and above them lanes of what happened."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from orchestrator.reports import figures
from orchestrator.reports.lives import Life, Place, Stretch
from orchestrator.reports.rows import Row, number_of
from orchestrator.reports.svg import CHARACTER_WIDTH, element, fitted, svg, text
from orchestrator.reports.time_axis import LEFT, RIGHT, WIDTH, TimeAxis

MAX_STRETCHES = 4000
"""Stretches that are drawn one by one; of more, each column shows what lasted longest in it."""

_CELLS = 60_000  # columns times devices, beyond that
_SHADES = 4  # of stages: later ones are paler
_GUIDES = 40  # most re-plans whose lines cross the bands
_MARK = 8  # pixels that a mark takes
_TOLD = 3  # events that the title of one mark tells
_ROW_HEIGHTS = ((24, 20), (60, 14), (120, 9))  # up to so many devices; else:
_LEAST_HEIGHT = 6
_NAMED = 9  # least height of a row that has its name beside it
_LABELLED = 14  # and that has its place written in it


@dataclass(frozen=True, slots=True)
class Lane:
    """Events of some kinds on a line of their own; ``path`` draws a mark around 0, 0."""

    name: str
    kinds: tuple[str, ...]
    path: str
    colour: str


LANES = (
    Lane("re-plans", ("replan",), "M-4 -3h8l-4 7z", "c0"),
    Lane("budget", ("budget_changed", "budget"), "M0 -4l4 4-4 4-4-4z", "c3"),
    Lane("losses", ("lost", "failed"), "M-4 -4l8 8M4 -4l-8 8", "bad"),
    Lane("notices", ("notice",), "M-1 -5h2v6h-2zM-1 3h2v2h-2z", "c2"),
    Lane("recoveries", ("recovered", "resumed"), "M-1 -4h2v3h3v2h-3v3h-2v-3h-3v-2h3z", "good"),
    Lane("joins", ("joined",), "M-3 -4l7 4-7 4z", "c1"),
    Lane("scaling", ("scale",), "M0 -4l4 4h-3v4h-2v-4h-3z", "c5"),
    Lane("stragglers", ("straggler",), "M-5 -1h10v3h-10z", "bad"),
    Lane("prices", ("price",), "M-3 -3h6v6h-6z", "c4"),
    Lane("checkpoints", ("checkpoint",), "M-2 -4h4l2 2v4l-2 2h-4l-2-2v-4z", "c7"),
    Lane("warnings", ("alarm", "warning", "fallback", "skipped"), "M0 -5l5 9h-10z", "c4"),
)


def band_chart(lives: Sequence[Life], events: Sequence[Row], axis: TimeAxis) -> str:
    """The picture with its legend; '' where no device was there for any time."""
    if not any(life.stretches for life in lives):
        return ""
    height = next((h for most, h in _ROW_HEIGHTS if len(lives) <= most), _LEAST_HEIGHT)
    parts: list[str] = []
    top = 8.0
    for lane in LANES:
        its = [e for e in events if e.get("kind") in lane.kinds]
        if its:
            parts.append(text(LEFT - 10, top + 11, lane.name, class_="soft", text_anchor="end"))
            parts += _marks(lane, its, axis, top + 7)
            top += 17
    top += 6
    bottom = top + len(lives) * height
    num_stretches = sum(len(life.stretches) for life in lives)
    exact = num_stretches <= MAX_STRETCHES
    parts += axis.grid(top - 2, bottom)
    for i, life in enumerate(lives):
        y = top + i * height
        row = _Row(axis, y, height)
        parts += _exact(life, row) if exact else _snapped(life, row, len(lives))
        if height >= _NAMED:
            name = fitted(life.device, LEFT - 12)
            size = {"font_size": 9} if height < _LABELLED else {}
            parts.append(text(LEFT - 10, y + height / 2 + 4, name, text_anchor="end", **size))
    parts += _losses(lives, events, axis, top, height)
    parts += _guides(events, axis, top - 2, bottom)
    if height < _NAMED:
        parts += _pools(lives, top, height)
    parts += axis.labels(bottom)
    label = f"plan over time: {len(lives)} devices over {axis.told}"
    drawing = svg(WIDTH, bottom + 40, parts, label, description=_HELP)
    note = "" if exact else (
        f'<p class="soft">{num_stretches:,} stretches are too many to draw: each column shows what '
        "lasted longest in it. devices.csv of --csv has all.</p>"
    )  # fmt: skip
    return f'{_legend(lives, height)}{note}<div class="card">{drawing}</div>'


_HELP = (
    "A thick band is a device in a group, its colour; paler ones are later stages. A thin line is a"
    " device that is there and idle, a gap one that is not there, a line below a band a straggler,"
    " a cross a loss."
)


def _legend(lives: Sequence[Life], height: int) -> str:
    used = [s.place for life in lives for s in life.stretches if s.place]
    groups = sorted({min(p.group, 8) for p in used})
    keys = [
        f'<span class="key"><i style="background:var(--c{g})"></i>group {g}</span>'
        for g in groups if g < 8
    ]  # fmt: skip
    if 8 in groups:
        keys.append('<span class="key soft">later groups in the same colours again</span>')
    for what, drawing in (
        ("idle", element("path", d="M0 6h16", class_="idle")),
        ("straggler", element("path", d="M0 9h16", class_="slow")),
        ("lost", element("path", d="M4 2l8 8M12 2l-8 8", class_="lost")),
    ):
        picture = element("svg", drawing, width=16, height=12, aria_hidden="true", class_="sign")
        keys.append(f'<span class="key">{picture}{what}</span>')
    notation = " · 1.0 x 12: group 1, first stage, 12 samples of a step" * (height >= _LABELLED)
    return (
        f'<p>{"".join(keys)}</p><p class="soft">Stages of a group from strong to pale{notation}</p>'
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """Where the band of a device is."""

    axis: TimeAxis
    y: float
    height: int


def _exact(life: Life, row: _Row) -> Iterator[str]:
    """Every stretch, with what it was in its title."""
    axis, y, height = row.axis, row.y, row.height
    for stretch in life.stretches:
        x, width = axis.x(stretch.from_s), axis.x(stretch.to_s) - axis.x(stretch.from_s)
        told = f"{life.device}, {axis.span(stretch.from_s, stretch.to_s)}: {_words(stretch)}"
        title = f"<title>{escape(told)}</title>"
        if stretch.place is None:
            yield element("path", title, d=_line(x, y + height / 2, width), class_="idle")
            continue
        yield element(
            "rect", title, x=x, y=y + 1, width=max(0.7, width - 0.5), height=height - 2,
            class_=_look(stretch.place),
        )  # fmt: skip
        if height >= _LABELLED:
            yield from _label(stretch.place, x, y + height / 2 + 4, width)
        if stretch.slow:
            yield element("path", d=_line(x, y + height - 1.5, width), class_="slow")


def _label(place: Place, x: float, y: float, width: float) -> Iterator[str]:
    """As much of a place as fits."""
    short = f"{place.group}.{place.stage}"
    middle = f"{short} x {place.samples}"
    whole = f"{middle}, {layers(place)}"
    for content in (whole, middle, short):
        if len(content) * CHARACTER_WIDTH + 6 <= width:
            yield text(x + 4, y, content)
            return


def _snapped(life: Life, row: _Row, num_lives: int) -> Iterator[str]:
    """One path for all stretches that look alike."""
    axis, y, height = row.axis, row.y, row.height
    columns = int(max(100, min((WIDTH - LEFT - RIGHT) / 2, _CELLS / num_lives)))
    lines: dict[str, list[str]] = {}
    for stretch in _longest(life.stretches, axis.end_s, columns):
        x, width = axis.x(stretch.from_s), axis.x(stretch.to_s) - axis.x(stretch.from_s)
        look = "idle" if stretch.place is None else _look(stretch.place)
        lines.setdefault(look, []).append(_line(x, y + height / 2, width))
        if stretch.slow:
            lines.setdefault("slow", []).append(_line(x, y + height - 1.0, width))
    title = f"<title>{escape(_who(life))}</title>"
    for look in sorted(lines, key=lambda look: look == "slow"):
        bold = {} if look in ("idle", "slow") else {"stroke_width": height - 1}
        kind = look if look in ("idle", "slow") else f"{look} many"
        yield element("path", title, d="".join(lines[look]), class_=kind, **bold)


def _longest(stretches: Sequence[Stretch], end_s: float, columns: int) -> Iterator[Stretch]:
    """Stretches that begin and end with columns: what took most of each; equal ones as one."""
    best: list[tuple[float, Stretch | None]] = [(0.0, None)] * columns
    there = [0.0] * columns
    for stretch in stretches:
        first = int(stretch.from_s / end_s * columns)
        last = min(columns - 1, int(stretch.to_s / end_s * columns))
        for c in range(first, last + 1):
            low_s, high_s = c * end_s / columns, (c + 1) * end_s / columns
            length_s = min(high_s, stretch.to_s) - max(low_s, stretch.from_s)
            there[c] += length_s
            if length_s > best[c][0]:
                best[c] = (length_s, stretch)
    chosen = [
        stretch if there[c] * 2 * columns >= end_s else None
        for c, (_, stretch) in enumerate(best)
    ]  # fmt: skip
    starts = [c for c in range(columns) if c == 0 or not _alike(chosen[c - 1], chosen[c])]
    for c, after in pairwise([*starts, columns]):
        found = chosen[c]
        if found is not None:
            low_s, high_s = c * end_s / columns, after * end_s / columns
            yield Stretch(low_s, high_s, found.place, found.slow)


def _alike(a: Stretch | None, b: Stretch | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.place and _look(a.place), a.slow) == (b.place and _look(b.place), b.slow)


def _marks(lane: Lane, events: Iterable[Row], axis: TimeAxis, y: float) -> Iterator[str]:
    """One mark for events that would cover each other; its title tells the first of them."""
    found: dict[int, list[Row]] = {}
    for event in events:
        x = axis.x(number_of(event, "time_s") or 0.0)
        found.setdefault(int((x - LEFT) / _MARK), []).append(event)
    for its in found.values():
        x = axis.x(number_of(its[0], "time_s") or 0.0)
        told = [_told(event, axis) for event in its[:_TOLD]]
        if len(its) > _TOLD:
            told.append(f"and {len(its) - _TOLD} more")
        title = f"<title>{escape(chr(10).join(told))}</title>"
        yield element(
            "path", title, d=lane.path, fill=f"var(--{lane.colour})", stroke_width=1.4,
            stroke=f"var(--{lane.colour})", transform=f"translate({x:.1f} {y:.1f})",
        )  # fmt: skip


def _losses(
    lives: Sequence[Life], events: Sequence[Row], axis: TimeAxis, top: float, height: int
) -> Iterator[str]:
    """A cross on the band of a device where it was lost."""
    rows = {life.device: i for i, life in enumerate(lives)}
    for event in events:
        row = rows.get(str(event.get("device", "")))
        if event.get("kind") == "lost" and row is not None:
            size = max(2, min(5, height / 3))
            title = f"<title>{escape(_told(event, axis))}</title>"
            d = f"M-{size} -{size}L{size} {size}M{size} -{size}L-{size} {size}"
            x, y = axis.x(number_of(event, "time_s") or 0.0), top + (row + 0.5) * height
            at = f"translate({x:.1f} {y:.1f})"
            yield element("path", title, d=d, class_="lost", transform=at)


def _guides(events: Sequence[Row], axis: TimeAxis, top: float, bottom: float) -> Iterator[str]:
    """Lines through all bands where the plan changed, while they are few."""
    times_s = [number_of(e, "time_s") or 0.0 for e in events if e.get("kind") == "replan"]
    for time_s in times_s if len(times_s) <= _GUIDES else ():
        x = axis.x(time_s)
        yield element("line", x1=x, x2=x, y1=top, y2=bottom, class_="guide")


def _pools(lives: Sequence[Life], top: float, height: int) -> Iterator[str]:
    """Beside rows too low for names: each pool with a line along its devices."""
    first = 0
    for i in range(1, len(lives) + 1):
        if i < len(lives) and lives[i].pool == lives[first].pool:
            continue
        low, high = top + first * height + 1, top + i * height - 1
        yield element("line", x1=LEFT - 6, x2=LEFT - 6, y1=low, y2=high, class_="axis")
        name = fitted(f"{lives[first].pool} ({i - first})", LEFT - 16)
        yield text(LEFT - 12, (low + high) / 2 + 4, name, text_anchor="end")
        first = i


def layers(place: Place) -> str:
    """Which layers, as a person counts them: both ends included."""
    last = place.end_layer - 1
    return f"layers {place.first_layer}-{last}" if last > place.first_layer else f"layer {last}"


def _words(stretch: Stretch) -> str:
    place = stretch.place
    if place is None:
        return "there and idle"
    share = figures.percent(place.samples / place.of_samples if place.of_samples else None)
    return (
        f"group {place.group}, stage {place.stage}, {layers(place)}, "
        f"{place.samples} samples a step ({share})" + ", straggling" * stretch.slow
    )


def _who(life: Life) -> str:
    return f"{life.device} ({life.kind or 'kind unknown'}, pool {life.pool or 'unknown'})"


def _told(event: Row, axis: TimeAxis) -> str:
    device = f" {event.get('device')}" if event.get("device") else ""
    detail = str(event.get("detail", ""))
    detail = detail if len(detail) <= 160 else f"{detail[:159]}…"
    return f"{axis.at(number_of(event, 'time_s') or 0.0)}, {event.get('kind')}{device}: {detail}"


def _look(place: Place) -> str:
    return f"b{place.group % 8} s{min(place.stage, _SHADES - 1)}"


def _line(x: float, y: float, width: float) -> str:
    return f"M{x:.1f} {y:.1f}h{max(0.7, width):.1f}"
