import json
import tempfile
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.telemetry.discovery import announce, withdraw


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


def test_a_run_in_a_bucket_is_found_next_to_rays_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for bucket in ("memory://one", "memory://two"):
        announce(f"{bucket}/demo", "demo", ("127.0.0.1", 9401))
    one, two = sorted((tmp_path / "ray").glob("lyray-demo-*.prometheus.json"))
    assert json.loads(one.read_text()) == json.loads(two.read_text())
    withdraw("memory://one/demo")
    assert sum(file.exists() for file in (one, two)) == 1
    withdraw("memory://two/demo")
    assert list((tmp_path / "ray").iterdir()) == []
    assert storage.list_names("memory://one") == ()


def test_a_run_that_cannot_be_found_trains_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ray-project/ray#28285: without its neighbour something fails; a run needs none."""
    (tmp_path / "a-file").touch()
    announce(str(tmp_path / "a-file" / "demo"), "demo", ("127.0.0.1", 9401))
    assert "Prometheus cannot find the metrics of this run: " in caplog.text
