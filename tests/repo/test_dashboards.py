import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator.telemetry.metrics import METRICS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build", ROOT / "dashboards" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_committed_dashboard_is_what_the_source_builds(build: ModuleType) -> None:
    committed = (ROOT / "dashboards" / "overview.json").read_text("utf-8")
    assert committed == build.as_json(build.overview()), "run `make dashboards`"


def test_every_query_names_an_exported_metric_and_its_labels(build: ModuleType) -> None:
    """ray-project/kuberay#1493: panels that ask for what nobody exports stay empty."""
    for panel in build.OVERVIEW:
        for legend, expression in panel.queries.items():
            (name,) = re.findall(r"lyray_(\w+)", expression)
            metric = METRICS[name]
            labels = set(re.findall(r"\{\{(\w+)\}\}", legend))
            assert labels <= {*metric.labels, "run"}, (panel.title, legend)


def test_datasource_is_a_variable(build: ModuleType) -> None:
    """sgl-project/sglang#2677: a data source id written in the JSON leaves panels empty."""
    text = (ROOT / "dashboards" / "overview.json").read_text("utf-8")
    assert set(re.findall(r'"uid": "(.*?)"', text)) == {"${datasource}", "lyray-overview"}
