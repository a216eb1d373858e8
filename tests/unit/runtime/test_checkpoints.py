"""When a checkpoint exists, and when those that could not be written end a run."""

from pathlib import Path

import pytest

from orchestrator.config import RunConfig
from orchestrator.core.durable import CheckpointFile, CheckpointPart
from orchestrator.core.slot import CheckpointFailed
from orchestrator.runtime.checkpoints import Checkpoints
from orchestrator.runtime.progress import Progress

TEXT = """
run: {{name: r, storage_path: {folder}}}
training: {{task: "m:t", global_batch: 8, steps: 100}}
cluster:
  source: emulated
  offers: [{{pool: p, kind: t4, price_per_hour: 1.0}}]
budget: {{average_per_hour_usd: 1.0}}
failure: {{max_checkpoint_failures: {most}}}
"""


def made(folder: Path, *, most: int = 1) -> Checkpoints:
    config = RunConfig.parse(TEXT.format(folder=folder, most=most))
    return Checkpoints(config, num_layers=1, num_samples=800, restore=None)


def tell(checkpoints: Checkpoints, progress: Progress, step: int, problem: str = "") -> None:
    files = () if problem else (CheckpointFile(0, "layer-000.safetensors", 1, "x"),)
    progress.part(CheckpointPart(step, 1, files, problem))
    checkpoints.follow(progress, lambda: None)


def test_what_must_be_on_record_first_is_and_if_it_cannot_be_there_is_no_checkpoint(
    tmp_path: Path,
) -> None:
    checkpoints, progress = made(tmp_path), Progress(50)

    def fail() -> None:
        raise OSError("the ledger is full")

    progress.part(CheckpointPart(10, 1, (CheckpointFile(0, "x", 1, "x"),)))
    with pytest.raises(OSError, match="the ledger is full"):  # dollars are never lost
        checkpoints.follow(progress, fail)
    assert checkpoints.newest is None
    assert not list(tmp_path.rglob("manifest.json"))


def test_only_failures_in_a_row_end_the_run(tmp_path: Path) -> None:
    """ray-project/ray#47939, #55350: one hiccup of the object store ends training."""
    checkpoints, progress = made(tmp_path, most=1), Progress(50)
    tell(checkpoints, progress, 10, "full")
    tell(checkpoints, progress, 20)
    tell(checkpoints, progress, 30, "full")
    assert checkpoints.failures() == (
        CheckpointFailed(10, "full"),
        CheckpointFailed(30, "full"),
    )
    assert checkpoints.newest_step == 20
    tell(checkpoints, progress, 40, "still full")
    assert checkpoints.failures() == (CheckpointFailed(40, "still full", ends_run=True),)


def test_those_that_came_to_exist_are_told_once_with_what_they_took(tmp_path: Path) -> None:
    checkpoints, progress = made(tmp_path), Progress(50)
    tell(checkpoints, progress, 10)
    tell(checkpoints, progress, 20, "full")
    files = (CheckpointFile(0, "layer-000.safetensors", 7, "x"),)
    parts = [CheckpointPart(30, 1, files, write_s=2.0), CheckpointPart(30, 1, (), write_s=0.5)]
    checkpoints.write(30, 1, parts, lambda: None)
    first, last = checkpoints.written()
    assert (first.step, first.size_bytes) == (10, 1)
    assert (last.step, last.size_bytes, last.write_s) == (30, 7, 2.0)
    assert last.unix_s is not None
    assert first.unix_s is not None
    assert first.unix_s <= last.unix_s
    assert checkpoints.written() == ()


def test_failures_without_end_are_allowed(tmp_path: Path) -> None:
    checkpoints, progress = made(tmp_path, most=-1), Progress(100)
    for step in range(10, 100, 10):
        tell(checkpoints, progress, step, "full")
    assert not any(failure.ends_run for failure in checkpoints.failures())


def test_a_manifest_that_cannot_be_written_is_a_failure_and_nothing_else(tmp_path: Path) -> None:
    checkpoints, progress = made(tmp_path), Progress(50)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "checkpoints").touch()  # no folder
    tell(checkpoints, progress, 10)
    (failure,) = checkpoints.failures()
    assert "checkpoints/step-000010" in failure.reason
    (tmp_path / "r" / "checkpoints").unlink()
    tell(checkpoints, progress, 20)
    assert (checkpoints.newest_step, checkpoints.failures()) == (20, ())


def test_a_store_that_hangs_is_told_though_it_raises_nothing(tmp_path: Path) -> None:
    now = [0.0]
    config = RunConfig.parse(TEXT.format(folder=tmp_path, most=1), ["failure.timeout_s=60"])
    checkpoints = Checkpoints(
        config, num_layers=1, num_samples=8000, restore=None, clock=lambda: now[0]
    )
    for next_step, at_s, told in (
        (150, 500.0, 0),  # one was due: it may be under way
        (250, 50.0, 0),  # fast steps: nothing is late yet
        (250, 61.0, 1),
        (350, 62.0, 0),  # and not again with every look
        (450, 130.0, 1),
    ):
        now[0] = at_s
        checkpoints.follow(Progress(next_step), lambda: None)
        found = checkpoints.failures()
        assert len(found) == told, (next_step, at_s)
        assert all("2 were due; the storage is slow, or hangs" in f.reason for f in found)
        assert not any(f.ends_run for f in found)
