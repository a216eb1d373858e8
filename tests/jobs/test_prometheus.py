"""A real Prometheus scrapes a real run, and every panel of the dashboards shows something."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.jobs import Jobs, job_server
from tests.jobs.prometheus import Prometheus, prometheus
from tests.rendering import DASHBOARDS, module

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

draw = module("draw")
OPTIONS = (
    "--set", "training.steps=1000000",
    "--set", "training.eval_every_steps=20",
    "--set", "training.checkpoint_every_steps=20",
    "--set", "budget.average_per_hour_usd=1.5",  # of 2: money has a price
)  # fmt: skip


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    with job_server(None) as found:
        yield found


def test_a_run_is_found_scraped_and_forgotten(jobs: Jobs, work: Path, tmp_path: Path) -> None:
    """ray-project/kuberay#1493; sgl-project/sglang#2677: data in Prometheus, empty panels."""
    runs = work.parent / "runs"
    folder = tmp_path / "prometheus"
    folder.mkdir()
    with prometheus(jobs.cluster, folder, runs) as server:
        jobs.start("scraped", work, "lyray", "run", "one.yaml", *OPTIONS)
        jobs.wait_until(lambda: reached(server, "lyray_steps_total > 100"),
                        lambda: jobs.logs("scraped"))  # fmt: skip
        assert (runs / "one.prometheus.json").exists()
        assert {a["labels"]["run"] for a in active(server)} == {"one"}
        answers = {
            expression: server.history(draw.filled(expression, "one"), 60)
            for path in DASHBOARDS
            for expression in draw.expressions(path)
        }
        assert [expression for expression, found in answers.items() if not found] == []
        names = {rule["name"] for group in server.ask("rules")["groups"] for rule in group["rules"]}
        assert {"LyrayNoProgress", "run:lyray_samples_per_usd:avg1h"} <= names
        jobs.ray("job", "stop", "scraped")
        jobs.wait_until(lambda: not active(server), lambda: str(active(server)))
    assert list(runs.glob("*.prometheus.json")) == []
    check_panels_are_drawn(answers, tmp_path / "drawn")


def check_panels_are_drawn(answers: dict[str, object], out: Path) -> None:
    """With Grafana's own library; pictures of each dashboard are in ``out``."""
    if reason := draw.why_not():
        pytest.skip(f"scraped, but not drawn: {reason}")
    out.mkdir()
    draw.bundle(out)
    for path, theme in product(DASHBOARDS, ("dark", "light")):
        page = draw.draw(path, answers, out, theme)
        for panel in json.loads(path.read_text())["panels"]:
            assert f">{panel['title']}<" in page
        num_series = len([p for p in json.loads(path.read_text())["panels"] if p["type"] != "stat"])
        assert page.count("<canvas") == num_series
        assert "no data" not in page


def reached(server: Prometheus, expression: str) -> bool:
    return bool(server.query(expression))


def active(server: Prometheus) -> list[dict[str, Any]]:
    """Targets that are scraped now."""
    found: list[dict[str, Any]] = server.ask("targets", state="active")["activeTargets"]
    return found
