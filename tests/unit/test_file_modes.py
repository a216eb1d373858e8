"""What is written is as private as the umask says, and what may hold traces is the user's alone."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import lines, storage
from orchestrator.errors import as_told
from orchestrator.runtime.folder import alone_in


@pytest.fixture(params=[0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    try:
        yield request.param
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_files_and_folders_of_a_run_have_the_modes_that_the_umask_leaves(
    umask: int, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "one"
    storage.write_bytes(str(run / "checkpoints" / "step-000001" / "manifest.json"), b"{}")
    lines.append_lines(str(run / "steps.jsonl"), ["{}"])
    with alone_in(str(run)):
        files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
        folders = [path for path in (tmp_path / "runs").rglob("*") if path.is_dir()]
    assert len(files) == 3
    assert {mode(path) for path in files} == {0o666 & ~umask}
    assert {mode(path) for path in folders} == {0o777 & ~umask}


def test_what_is_overwritten_never_lies_in_a_folder_that_others_write_to(tmp_path: Path) -> None:
    """A temporary file in /tmp with a name that can be guessed could be another's link."""
    seen = []
    replace = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append(self)
        return replace(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", watched)
        storage.write_bytes(str(tmp_path / "file"), b"x")
    assert [path.parent for path in seen] == [tmp_path]
    assert re.fullmatch(r"file\.tmp-[0-9a-f]{32}", seen[0].name)


def test_the_trace_of_an_error_of_ours_is_for_the_user_alone(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = [str(as_told(RuntimeError("ftp://u:hunter2@host"))) for _ in range(2)]
    logs = sorted(tmp_path.glob("lyray-*.log"))
    assert len(logs) == 2, "each has a name of its own"
    assert all(any(str(log) in text for text in told) for log in logs)
    assert {mode(log) for log in logs} == {0o600}
    assert not any("hunter2" in log.read_text() for log in logs)
