"""Pictures as SVG text."""

import re

from orchestrator.reports.svg import Series, line_chart, table


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
