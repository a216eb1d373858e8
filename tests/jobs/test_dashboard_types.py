"""Dashboards are what Grafana's own types allow: ``@grafana/schema`` and its compiler."""

from collections.abc import Mapping

import pytest

from tests.rendering import DASHBOARDS, module

draw, grafana_types = module("draw"), module("grafana_types")

SLIPS = {
    "title": ('"title": "Now"', '"titel": "Now"', "'\"titel\"' does not exist"),
    "refresh": ('"refresh": "10s"', '"refresh": 10', "'number' is not assignable"),
    "unit": ('"unit": "none"', '"unot": "none"', "'\"unot\"' does not exist"),
}


@pytest.fixture(scope="module")
def said() -> Mapping[str, str]:
    """What the compiler says of each dashboard, and of one with a slip of the pen."""
    if reason := draw.why_not():
        pytest.skip(reason)
    draw.install()
    texts = {path.stem: path.read_text("utf-8") for path in DASHBOARDS}
    wrong = {f"slip-{n}": texts["overview"].replace(old, new) for n, (old, new, _) in SLIPS.items()}
    found = grafana_types.slips(texts | wrong)
    return {name: "".join(x for x in found if f"/{name}.ts(" in x) for name in texts | wrong}


@pytest.mark.parametrize("name", [path.stem for path in DASHBOARDS])
def test_a_dashboard_is_what_grafanas_schema_allows(said: Mapping[str, str], name: str) -> None:
    assert said[name] == ""


@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_in_a_dashboard_is_found(said: Mapping[str, str], name: str) -> None:
    assert SLIPS[name][2] in said[f"slip-{name}"]
