"""Prometheus' rules: about metrics that exist, held to cases, each with a page that helps."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.telemetry.metrics import METRICS, REASONS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


ALERTS = [rule["alert"] for rule in rules() if "alert" in rule]


@pytest.mark.parametrize("command", [("check", "config", "prometheus.yml"),
                                     ("test", "rules", "rules_test.yml")])  # fmt: skip
def test_promtool_finds_no_fault(command: tuple[str, ...]) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool (Debian: apt-get install prometheus)")
    done = subprocess.run(
        ["promtool", *command], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_name_metrics_of_the_table_and_their_labels() -> None:
    """ray-project/kuberay#1493: an alert about what nobody exports never fires."""
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        expression = rule["expr"]
        names = re.findall(r"[\w:]*lyray_[\w:]+", expression)
        assert names or "up{" in expression, expression
        for name in names:
            assert name in recorded or name.removeprefix("lyray_") in METRICS, name
        for reason in re.findall(r'reason=~?"([^"]+)"', expression):
            assert any(re.fullmatch(reason, known) for known in REASONS)
        for label in re.findall(r"\$labels\.(\w+)", str(rule.get("annotations", ""))):
            known = {
                x
                for n in names
                for x in METRICS.get(n.removeprefix("lyray_"), METRICS["loss"]).labels
            }
            assert label in {"run", *known}


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_has_a_case_and_a_line_in_the_operations_guide(alert: str) -> None:
    assert f"alertname: {alert}" in (FOLDER / "rules_test.yml").read_text()
    assert f"`{alert}`" in (ROOT / "docs" / "operations.md").read_text()


FOR = {"2m": "2 minutes", "5m": "5 minutes", "10m": "10 minutes", "15m": "15 minutes",
       "30m": "half an hour", "1h": "an hour"}  # fmt: skip


def test_the_table_of_the_operations_guide_has_every_alert_and_how_long_each_waits() -> None:
    """ray-project/kuberay#1493, of alerts: a page about what is not shipped helps nobody."""
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = dict(re.findall(r"^\| `(Lyray\w+)` \| (.*?) \|", page, re.MULTILINE))
    assert set(rows) == set(ALERTS)
    waits = {rule["alert"]: rule["for"] for rule in rules() if "for" in rule}
    assert [alert for alert, wait in waits.items() if FOR[wait] not in rows[alert]] == []
