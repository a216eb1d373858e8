import json
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.telemetry.discovery import announce, discovery_file, withdraw


def test_a_run_is_found_beside_its_folder_until_it_ends(tmp_path: Path) -> None:
    run_url, file = str(tmp_path / "demo"), tmp_path / "demo.prometheus.json"
    announce(run_url, "demo", ("127.0.0.1", 9401))
    assert json.loads(file.read_text()) == [
        {"targets": ["127.0.0.1:9401"], "labels": {"job": "lyray", "run": "demo"}}
    ]
    announce(run_url, "demo", ("127.0.0.1", 9402))  # the next head
    assert "9402" in file.read_text()
    for _ in range(2):
        withdraw(run_url)
        assert not file.exists()


def test_nothing_is_written_to_a_bucket_where_prometheus_cannot_look() -> None:
    run_url = "memory://runs/demo"
    assert discovery_file(run_url) is None
    announce(run_url, "demo", ("127.0.0.1", 9401))
    withdraw(run_url)
    assert storage.list_names("memory://runs") == ()


def test_a_run_that_cannot_be_found_trains_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ray-project/ray#28285: without its neighbour something fails; a run needs none."""
    (tmp_path / "a-file").touch()
    announce(str(tmp_path / "a-file" / "demo"), "demo", ("127.0.0.1", 9401))
    assert "Prometheus cannot find the metrics of this run: " in caplog.text
