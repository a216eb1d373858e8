"""The results page: sections that are renewed one by one, losses of scenarios in them."""

from benchmarks.all import as_markdown, section, sections_of

REPORT: dict[str, object] = {
    "benchmark": "scenarios",
    "seed": 0,
    "wall_s": 1.0,
    "figures": [{"name": "S0_lost", "value": 1.0, "unit": "cases", "bar": "", "holds": True}],
    "table": [
        {
            "scenario": "S0", "case": "a", "strategy": name, "role": role, "samples_per_s": rate,
            "low": rate, "high": rate, "usd_per_hour": 1.0, "of_ours_pct": 25 * rate, "note": "",
        }
        for name, role, rate in (("grid", "strong", 5.0), ("joint", "ours", 4.0))
    ],
    "scenarios": {
        "S0": {"title": "a title", "says": "why", "refused": ""},
        "S6": {"title": "another", "says": "what", "refused": "not yet"},
    },
}  # fmt: skip


def test_a_page_falls_into_the_sections_that_it_was_made_of() -> None:
    parts = {name: section({**REPORT, "benchmark": name}) for name in ("one", "two")}
    assert sections_of(as_markdown(parts.values())) == parts


def test_a_scenario_that_is_lost_or_refused_stands_on_the_page() -> None:
    text = section(REPORT)
    assert text.index("| a | grid (strong) | 5 ") < text.index("| a | **joint** (ours) | 4 ")
    assert "Refused: not yet." in text
