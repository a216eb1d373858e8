"""Inline SVG and the HTML page around it: no script, no outside resource, light and dark."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

CHARACTER_WIDTH = 6.6
"""Pixels that a character of the 12-pixel font takes on average, rounded up."""

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --card: #f6f7f9; --ink: #1b2430;
  --soft: #5c6876; --line: #d5dae1; --c0: #3b6fd4; --c1: #137c6b; --c2: #b9511a; --c3: #8e5bd0;
  --c4: #8a6500; --c5: #c2386b; --c6: #4d7c0f; --c7: #5b7083; --good: #16794a;
  --bad: #b42318; --on: #ffffff; }
@media screen and (prefers-color-scheme: dark) { :root { --paper: #12161c; --card: #1b2129;
  --ink: #e6eaf0; --soft: #9aa6b4; --line: #333c48; --c0: #6f9bf0; --c1: #3fc1a8; --c2: #f08a4b;
  --c3: #b48cf0; --c4: #e0b13c; --c5: #ee6c9a; --c6: #93c34a; --c7: #90a4b8; --good: #4cc38a;
  --bad: #ff7b72; --on: #10141a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px; max-width: 1180px; background: var(--paper);
  color: var(--ink); font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 16px; margin: 28px 0 8px; }
p { margin: 4px 0; } .soft { color: var(--soft); } .good { color: var(--good); }
.bad { color: var(--bad); } code { font-family: ui-monospace, monospace; font-size: 12px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(160px, 1fr));
  gap: 12px; margin: 16px 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 14px; } .tile b { display: block; font-size: 18px;
  overflow-wrap: anywhere; }
.tile span { color: var(--soft); font-size: 12px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 12px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--line);
  vertical-align: top; } th { color: var(--soft); font-weight: 600; font-size: 12px; }
td.n, th.n { text-align: right; } td.n, th.n, .w { white-space: nowrap; }
tr.chosen td { font-weight: 600; }
tr { break-inside: avoid; } h2 { break-after: avoid; } summary { cursor: pointer; padding: 6px 0; }
svg { display: block; max-width: none; } svg.sign { display: inline-block; margin-right: 6px;
  vertical-align: -1px; } svg text { fill: var(--ink); font: 12px system-ui,
  -apple-system, "Segoe UI", Roboto, sans-serif; } svg .soft { fill: var(--soft); }
svg .on { fill: var(--on); font-weight: 600; } svg .grid { stroke: var(--line); }
svg .axis { stroke: var(--soft); } .key { display: inline-block; margin-right: 16px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px; vertical-align: -1px; }
.b0 { fill: var(--c0); stroke: var(--c0); } .b1 { fill: var(--c1); stroke: var(--c1); }
.b2 { fill: var(--c2); stroke: var(--c2); } .b3 { fill: var(--c3); stroke: var(--c3); }
.b4 { fill: var(--c4); stroke: var(--c4); } .b5 { fill: var(--c5); stroke: var(--c5); }
.b6 { fill: var(--c6); stroke: var(--c6); } .b7 { fill: var(--c7); stroke: var(--c7); }
.s0 { fill-opacity: .45; } .s1 { fill-opacity: .32; } .s2 { fill-opacity: .22; }
.s3 { fill-opacity: .13; } .many { fill: none; } .many.s0 { stroke-opacity: .9; }
.many.s1 { stroke-opacity: .65; } .many.s2 { stroke-opacity: .45; }
.many.s3 { stroke-opacity: .3; } .idle { fill: none; stroke: var(--soft); stroke-width: 1.5; }
.slow { fill: none; stroke: var(--bad); stroke-width: 2.5; }
.lost { fill: none; stroke: var(--bad); stroke-width: 2; }
.guide { stroke: var(--ink); stroke-opacity: .4; stroke-dasharray: 2 4; }
@media (min-width: 1000px) { .card > svg { max-width: 100%; height: auto; } }
@media print { body { padding: 0; max-width: none; } svg { max-width: 100%; height: auto; }
  svg.sign { max-width: none; } * { print-color-adjust: exact; } .card { overflow: visible; } }
"""


@dataclass(frozen=True, slots=True)
class Series:
    """One curve of a chart; ``colour`` is a number of the palette."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: int = 0
    dashed: bool = False


def page(title: str, body: Iterable[str]) -> str:
    """A whole HTML document of its own."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(body)
        + "</body></html>\n"
    )


def element(name: str, content: str = "", **attributes: object) -> str:
    """One SVG element; ``_`` in an attribute's name stands for ``-``, a last one is dropped."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """Text with its baseline at ``y``."""
    return element("text", escape(content), x=x, y=y, **attributes)


def svg(
    width: float, height: float, children: Iterable[str], label: str, *, description: str = ""
) -> str:
    """A drawing of so many pixels; ``label`` tells what it shows to those who cannot see it.

    ``description`` tells them how to read it.
    """
    described = element("desc", escape(description)) if description else ""
    return element(
        "svg", described + "".join(children), width=width, height=height, role="img",
        viewBox=f"0 0 {_plain(width)} {_plain(height)}", aria_label=label,
    )  # fmt: skip


def fitted(line: str, width: float) -> str:
    """The text, cut with an ellipsis where it would be wider than so many pixels."""
    most = int(width / CHARACTER_WIDTH)
    if len(line) <= most:
        return line
    return line[: max(0, most - 1)] + "…" if most > 1 else ""


def tiles(values: Mapping[str, str]) -> str:
    """The few figures that matter most, large."""
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
            for name, value in values.items()
        )
        + "</div>"
    )


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[int] = (),
    chosen: int = -1,
) -> str:
    """A table of plain text; columns ``right`` hold figures, row ``chosen`` stands out."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in right else ''}>{_broken(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "".join(
        f"<tr{' class=chosen' if i == chosen else ''}>{cells('td', row)}</tr>"
        for i, row in enumerate(rows)
    )
    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    return f'<div class="card"><table>{top}<tbody>{body}</tbody></table></div>'


def legend(names: Mapping[str, int], dashed: Collection[str] = ()) -> str:
    """Names with the colours of the palette they are drawn in; ``dashed`` ones have a gap."""
    keys = []
    for name, colour in names.items():
        fill = f"var(--c{colour % 8})"
        if name in dashed:
            fill = f"linear-gradient(90deg, {fill} 36%, transparent 36% 64%, {fill} 64%)"
        keys.append(f'<span class="key"><i style="background:{fill}"></i>{escape(name)}</span>')
    return f"<p>{''.join(keys)}</p>"


def ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """Round values between ``low`` and ``high``, about ``count`` of them."""
    if not high > low:
        return (low,)
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return tuple(i * step for i in range(first, math.floor(high / step + 1e-9) + 1))


MAX_POINTS = 400
"""A curve of more is thinned out: its picture has no more pixels."""


def thinned(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The least and the most of every few points, so that no peak is lost."""
    every = -(-2 * len(points) // MAX_POINTS)
    if every <= 2:
        return tuple(points)
    kept = []
    for first in range(0, len(points), every):
        some = range(first, min(first + every, len(points)))
        ends = {min(some, key=lambda i: points[i][1]), max(some, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(ends | {first} if first == 0 else ends)]
    return (*kept, points[-1]) if kept[-1] != points[-1] else tuple(kept)


def line_chart(
    series: Sequence[Series],
    *,
    x_title: str,
    y_title: str,
    label: str,
    left: float = 64,
    x_span: tuple[float, float] | None = None,
) -> str:
    """Curves over a common axis, with grid and legend; '' when there is nothing to draw.

    ``left``: where the axis begins, in pixels; ``x_span``: its ends, else those of the points.
    """
    points = [p for s in series for p in s.points]
    if not points:
        return ""
    width, height, top, bottom = 1080, 270, 28, 40
    x_low, x_high = x_span or (min(x for x, _ in points), max(x for x, _ in points))
    y_low, y_high = min(0.0, *(y for _, y in points)), max(y for _, y in points)
    marks = ticks(y_low, y_high)
    if len(marks) > 1 and marks[-1] < y_high:  # up to a figure, so that the top can be read
        marks = (*marks, 2 * marks[-1] - marks[-2])
        y_high = marks[-1]
    x_size, y_size = (x_high - x_low) or 1.0, (y_high - y_low) or 1.0

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = left + (point[0] - x_low) / x_size * (width - left - 20)
        return x, height - bottom - (point[1] - y_low) / y_size * (height - top - bottom)

    parts = []
    for y in marks:
        at = place((x_low, y))[1]
        parts.append(element("line", x1=left, x2=width - 20, y1=at, y2=at, class_="grid"))
        parts.append(text(left - 8, at + 4, _tick(y), class_="soft", text_anchor="end"))
    # there is no slot 1.5
    counted = x_span is None and all(x == int(x) for x, _ in points)
    for x in ticks(x_low, x_high, 8):
        if counted and abs(x - round(x)) > 1e-9:
            continue
        at = place((x, y_low))[0]
        parts.append(text(at, height - bottom + 18, _tick(x), class_="soft", text_anchor="middle"))
    parts.append(text(width - 20, height - 4, x_title, class_="soft", text_anchor="end"))
    parts.append(text(4, 12, y_title, class_="soft"))
    for curve in series:
        if len(curve.points) == 1:  # a line of one point draws nothing
            x, y = place(curve.points[0])
            parts.append(element("circle", cx=x, cy=y, r=4, fill=f"var(--c{curve.colour % 8})"))
            continue
        path = " ".join(f"{_plain(x)},{_plain(y)}" for x, y in map(place, curve.points))
        dash = {"stroke_dasharray": "6 4"} if curve.dashed else {}
        parts.append(
            element("polyline", points=path, fill="none", stroke=f"var(--c{curve.colour % 8})",
                    stroke_width=2, stroke_linejoin="round", **dash)
        )  # fmt: skip
    names = {curve.name: curve.colour for curve in series}
    dashed = {curve.name for curve in series if curve.dashed}
    drawing = svg(width, height, parts, label)
    return f'{legend(names, dashed)}<div class="card">{drawing}</div>'


def _tick(value: float) -> str:
    """A round figure beside an axis, short enough for its place."""
    for size, unit in ((1e9, " G"), (1e6, " M")):
        if abs(value) >= size:
            return f"{value / size:,.10g}{unit}"
    return f"{value:,.10g}"


def bar_chart(bars: Sequence[tuple[str, float]], *, unit: str, label: str) -> str:
    """Named bars from zero, one under the other, each with its value."""
    if not bars:
        return ""
    width, row, left = 760.0, 24.0, 20 + CHARACTER_WIDTH * max(len(name) for name, _ in bars)
    longest = max(value for _, value in bars) or 1.0
    parts = []
    for i, (name, value) in enumerate(bars):
        top, length = row * i + 4, (width - left - 120) * value / longest
        parts.append(text(left - 8, top + 13, name, text_anchor="end"))
        parts.append(element("rect", x=left, y=top, width=max(1.0, length), height=row - 7, rx=3,
                             fill="var(--c0)"))  # fmt: skip
        parts.append(text(left + length + 8, top + 13, f"{value:.4g} {unit}", class_="soft"))
    return f'<div class="card">{svg(width, row * len(bars) + 6, parts, label)}</div>'


def _broken(cell: str) -> str:
    # Names of devices, fast-0[0:4], are not torn at their hyphens.
    whole = re.sub(r"\S+-\S+", r"<span class=w>\g<0></span>", escape(cell))
    return whole.replace("\n", "<br>")


def _plain(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
