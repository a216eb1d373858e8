import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator.telemetry.metrics import METRICS

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "dashboards").glob("*.json"))


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build", ROOT / "dashboards" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_committed_dashboards_are_what_the_source_builds(build: ModuleType) -> None:
    assert {page.name for page in build.PAGES} == {path.stem for path in FILES}
    for page in build.PAGES:
        committed = (ROOT / "dashboards" / f"{page.name}.json").read_text("utf-8")
        assert committed == build.as_json(build.build(page)), "run `make dashboards`"


def test_every_query_names_exported_metrics_and_their_labels(build: ModuleType) -> None:
    """ray-project/kuberay#1493: panels that ask for what nobody exports stay empty."""
    for page in build.PAGES:
        for panel in page.panels:
            assert len(panel.queries) <= 4, "letters A to D"
            for legend, expression in panel.queries.items():
                names = re.findall(r"lyray_(\w+?)(?:_sum|_count)?\{", expression)
                assert names
                known = {label for name in names for label in METRICS[name].labels}
                labels = set(re.findall(r"\{\{(\w+)\}\}", legend))
                assert labels <= {*known, "run"}, (panel.title, legend)


def test_every_query_asks_for_the_chosen_run(build: ModuleType) -> None:
    for page in build.PAGES:
        for panel in page.panels:
            for expression in panel.queries.values():
                assert expression.count('run="$run"') == expression.count("lyray_")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_datasource_is_a_variable(path: Path) -> None:
    """sgl-project/sglang#2677: a data source id written in the JSON leaves panels empty."""
    text = path.read_text("utf-8")
    assert set(re.findall(r'"uid": "(.*?)"', text)) == {"${datasource}", f"lyray-{path.stem}"}


MOST_BYTES = 300_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_has_its_picture_in_the_docs(path: Path) -> None:
    picture = ROOT / "docs" / "img" / f"{path.stem}.png"
    assert picture.read_bytes().startswith(b"\x89PNG"), "run `make pictures`"
    assert picture.stat().st_size <= MOST_BYTES
    shown = (ROOT / "docs" / "how-to" / "monitor.md").read_text("utf-8")
    assert f"](../img/{picture.name})" in shown


def test_the_readme_shows_one_of_them() -> None:
    assert "](docs/img/overview.png)" in (ROOT / "README.md").read_text("utf-8")
