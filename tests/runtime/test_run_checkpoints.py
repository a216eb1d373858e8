"""Checkpoints of whole runs: some cannot be written, some are damaged, and the run says so."""

import json
import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from urllib.request import urlopen

import pytest

from benchmarks.forked_run import run_forked
from orchestrator.callbacks import Callbacks, only
from orchestrator.config import RunConfig
from orchestrator.control.persistence import CheckpointStore
from orchestrator.core.slot import SlotRecord
from orchestrator.errors import ConfigError, OrchestratorError
from orchestrator.telemetry.discovery import discovery_file
from tests.runtime.small_runs import (
    TEXT,
    Watcher,
    check_books,
    check_undisturbed,
    config,
    once_at,
    read,
)

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(240)]


def bar(run: RunConfig, step: int) -> None:
    """Let no checkpoint of a step be written: a file stands where its folder would."""
    folder = Path(run.run.run_url) / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"step-{step:06d}").touch()


def damage(run: RunConfig, step: int) -> None:
    file = Path(CheckpointStore(run.run.run_url).url(step, "layer-001.safetensors"))
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


class Page(Watcher):
    """What a run last showed of its metrics."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__()
        self._file = discovery_file(run.run.run_url)
        self.text = ""

    def slot(self, record: SlotRecord) -> None:
        with suppress(OSError):  # the last slot is told of when nobody listens any more
            (target,) = json.loads(self._file.read_text("utf-8"))[0]["targets"]
            with urlopen(f"http://{target}/metrics", timeout=5) as page:
                self.text = page.read().decode()


def warnings(run: RunConfig) -> list[str]:
    return [str(e["detail"]) for e in read(run, "events.jsonl") if e["kind"] == "warning"]


def test_a_checkpoint_that_cannot_be_written_or_read_costs_steps_but_not_the_run(
    tmp_path: Path,
) -> None:
    """Lightning-AI/pytorch-lightning#19970, ray-project/ray#47939: the one before serves."""
    run = config(tmp_path, steps=60)
    bar(run, 10)  # the first one: a later one is left out where this is still being written

    def stop() -> None:
        raise InterruptedError

    view = Callbacks([only("on_step", once_at(32, stop))], Watcher())
    stopped = run_forked(run, view=view)
    assert stopped.status == "stopped"
    check_books(run, stopped)
    (warning,) = warnings(run)
    assert warning.startswith("checkpoint_failed: of step 10: ")
    assert "checkpoints/step-000010" in warning
    older, newest = CheckpointStore(run.run.run_url).steps()
    assert 10 not in (older, newest)

    damage(run, newest)
    page = Page(run)
    finished = run_forked(run, view=page)
    check_undisturbed(run, finished)
    (told,) = warnings(run)[1:]
    assert told.startswith("checkpoint_damaged: ")
    assert re.search(r'lyray_warnings_total{reason="checkpoint_damaged",.*} 1\.0', page.text)
    assert told.endswith(f"going on from the one of step {older}")
    resumed = [e for e in read(run, "events.jsonl") if e["kind"] == "resumed"]
    assert resumed[-1]["detail"] == f"at step {older}"
    # Devices were held while the newest one was passed over.
    passed_over_s, again_s = (float(str(e["time_s"])) for e in resumed[-2:])
    assert again_s > passed_over_s
    rows = [r for r in read(run, "ledger.jsonl") if r["device"] == "fast-0"]
    held = sorted(
        (float(str(r["from_s"])), float(str(r["to_s"])))
        for r in rows
        if float(str(r["to_s"])) > passed_over_s and float(str(r["from_s"])) < again_s
    )
    assert held[0][0] <= passed_over_s
    assert held[-1][1] >= again_s
    assert all(to_s >= after_s for (_, to_s), (after_s, _) in pairwise(held))


def test_checkpoints_that_fail_in_a_row_end_the_run_naming_the_place(tmp_path: Path) -> None:
    """ray-project/ray#47939, #55350: only N failures in a row end it."""
    text = TEXT.format(folder=tmp_path, task="tests.runtime.models:mlp", steps=200, events="")
    run = RunConfig.parse(text, ["failure.max_checkpoint_failures=1"])
    for step in range(20, 200, 10):  # a busy machine leaves some out: one is still being written
        bar(run, step)
    with pytest.raises(OrchestratorError, match=r"step (\d+) could .*checkpoints/step-0*\1\b") as e:
        run_forked(run)
    assert (e.value.status, e.value.exit_code) == ("failed", 1)
    steps = read(run, "steps.jsonl")
    assert 30 <= len(steps) < 200
    check_bill(run)

    damage(run, 10)  # the only one
    refused = r"layer-001\.safetensors is damaged: .*; no older checkpoint is left: put a copy back"
    with pytest.raises(ConfigError, match=refused):
        run_forked(run)
    assert CheckpointStore(run.run.run_url).steps() == (10,)  # nothing was thrown away
    check_bill(run)


def check_bill(run: RunConfig) -> None:
    """A run that ended in an error can go on, and has booked what it spent."""
    result = json.loads((Path(run.run.run_url) / "result.json").read_text("utf-8"))
    assert result["resumable"]
    ledger = read(run, "ledger.jsonl")
    assert result["spent_usd"] == pytest.approx(sum(row["usd"] for row in ledger), abs=1e-9)
