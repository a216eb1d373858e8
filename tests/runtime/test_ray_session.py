"""What is left of an embedded Ray that was taken down: nothing."""

import signal
import subprocess
from pathlib import Path

import pytest

from orchestrator.runtime.session import _end_rest

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
