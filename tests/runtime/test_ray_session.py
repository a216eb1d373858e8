"""An embedded Ray that does not start, and what is left of one that was taken down: nothing."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.reports.run_report import read_run
from orchestrator.runtime.driver import Trainer, run_job
from orchestrator.runtime.session import _embed, _end_rest, _lies_in
from tests.runtime.small_runs import config

pytestmark = [
    pytest.mark.runtime,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are found in /proc"),
]


def test_whoever_still_writes_into_the_folder_is_ended_and_nobody_else(tmp_path: Path) -> None:
    """learning-at-home/hivemind#624: two swarms, each with its own truth."""
    with (tmp_path / "agent.log").open("w") as log, (tmp_path.parent / "other.log").open("w") as no:
        agent = subprocess.Popen(["sleep", "60"], stdout=log)
        other = subprocess.Popen(["sleep", "60"], stdout=no)
    _end_rest(str(tmp_path))
    assert agent.wait(10) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait(10)


def test_a_file_that_was_closed_since_it_was_seen_hides_no_other(tmp_path: Path) -> None:
    with (tmp_path / "agent.log").open("w") as log:
        entry = Path(f"/proc/self/fd/{log.fileno()}")
        assert _lies_in(entry, str(tmp_path))
    assert not _lies_in(entry, str(tmp_path))


def test_a_ray_that_does_not_start_is_one_error_of_ours(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 107)  # its sockets would have longer paths than the system takes
    with pytest.raises(OrchestratorError, match=r"^Ray did not start on this machine: .*ulimit"):
        _embed(str(folder), 1)


def test_a_run_that_ends_before_its_first_slot_says_why_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nowhere:port")
    run = config(tmp_path, steps=4)
    with pytest.raises(ConfigError, match="cannot join the Ray cluster at RAY_ADDRESS=nowhere"):
        run_job(run)
    result = json.loads((Path(run.run.run_url) / "result.json").read_text("utf-8"))
    assert (result["status"], result["steps"], result["resumable"]) == ("bad_config", 0, True)
    found = read_run(run.run.run_url)
    assert found.status == "bad_config"
    assert found.reason.startswith("cannot join the Ray cluster at RAY_ADDRESS=nowhere")
    with pytest.raises(ConfigError, match="cannot join"):  # a script hears the same
        Trainer(None, run).fit()
