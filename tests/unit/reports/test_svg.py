"""Pictures as SVG text."""

import re

import pytest

from orchestrator.reports.svg import Series, line_chart, page, table, thinned


def test_a_curve_of_one_point_is_a_dot_and_one_of_two_a_line() -> None:
    one, two = (
        line_chart([Series("loss", points, 0)], x_title="step", y_title="loss", label="loss")
        for points in (((1.0, 2.0),), ((1.0, 2.0), (2.0, 1.0)))
    )
    assert ("<circle" in one, "<polyline" in one) == (True, False)
    assert ("<circle" in two, "<polyline" in two) == (False, True)


def test_what_is_counted_is_marked_at_whole_numbers_only() -> None:
    def marked(*xs: float) -> list[str]:
        points = [(x, 1.0) for x in xs]
        drawn = line_chart([Series("s", points, 0)], x_title="slot", y_title="s", label="s")
        return re.findall(r'text-anchor="middle">([^<]*)<', drawn)

    assert marked(1, 2) == ["1", "2"]
    assert marked(0, 0.5) == ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]


def test_the_name_of_a_device_stays_in_one_piece() -> None:
    shown = table(("plan",), [("8: big-0[0:4] >\nsmall-10[4:9]",)])
    assert "8: <span class=w>big-0[0:4]</span> &gt;<br><span class=w>small-10[4:9]</span>" in shown


def test_large_figures_beside_an_axis_are_short() -> None:
    drawn = line_chart([Series("s", ((0.0, 0.0), (3e6, 2e9)), 0)], x_title="", y_title="", label="")
    marked = set(re.findall(r">([^<]*)</text>", drawn))
    assert {"0", "500 M", "2 G", "1 M", "3 M"} <= marked


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1])  # light, dark
def test_every_colour_of_text_can_be_read_on_what_it_stands_on(scheme: int) -> None:
    """WCAG 2.2, 1.4.3."""
    block = re.findall(r":root \{(.*?)\}", page("", ()), re.DOTALL)[scheme]
    colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
    for text in ("ink", "soft", "good", "bad"):
        for paper in ("paper", "card"):
            assert contrast(colours[text], colours[paper]) >= 4.5, (text, paper)
    for index in range(8):
        assert contrast(colours["on"], colours[f"c{index}"]) >= 4.5, index


def test_thinning_keeps_ends_and_peaks() -> None:
    points = [(float(i), 1.0) for i in range(10_000)]
    points[5_001] = (5_001.0, 9.0)
    points[7_777] = (7_777.0, -9.0)
    kept = thinned(points)
    assert len(kept) < 500
    assert {points[0], points[-1], points[5_001], points[7_777]} <= set(kept)
    assert list(kept) == sorted(kept)
    assert thinned(points[:300]) == tuple(points[:300])
