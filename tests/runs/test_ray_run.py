"""Whole runs on an embedded Ray: two emulated devices, a few seconds each."""

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from orchestrator.config import RunConfig
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, RunEvent
from orchestrator.core.training import Task
from orchestrator.errors import ConfigError, LostWorkerError, UserCodeError
from orchestrator.reports.run_report import read_run
from orchestrator.runtime.budget_edit import edit_budget
from orchestrator.runtime.driver import Trainer, exit_code, run_job
from orchestrator.runtime.news import Comparing
from orchestrator.runtime.session import ray_session
from orchestrator.runtime.signals import StopSignals
from tests.runtime.models import mlp
from tests.runtime.processes import stays_alive
from tests.runtime.small_runs import (
    TEXT,
    Watcher,
    check_books,
    config,
    losses_alone,
    once_at,
    read,
)

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(120)]


def pid_of(run: RunConfig, device_id: str) -> int:
    log = (Path(run.run.run_url) / "logs" / "head.log").read_text("utf-8")
    return int(re.findall(rf"{device_id}: process (\d+) ", log)[-1])


def head_pid_of(run: RunConfig) -> int:
    log = (Path(run.run.run_url) / "logs" / "head.log").read_text("utf-8")
    return int(re.findall(r"the head is process (\d+)", log)[-1])


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.delenv("RAY_ADDRESS", raising=False)
        with ray_session(2):
            yield


def test_a_run_trains_as_one_process_would_and_keeps_its_books(tmp_path: Path) -> None:
    """ray-project/ray#28285: neither Prometheus nor Grafana is there."""
    run = config(tmp_path)
    view = Watcher()
    outcome = run_job(run, view=view, comparing=Comparing(("even-split",), num_steps=4))
    assert (outcome.status, exit_code(outcome)) == ("finished", 0)
    check_books(run, outcome)
    losses = [row["loss"] for row in read(run, "steps.jsonl")]
    assert losses == pytest.approx(losses_alone(run), rel=1e-5)
    manifest = Path(run.run.run_url) / "checkpoints" / "step-000030" / "manifest.json"
    assert manifest.exists()
    compared = json.loads((Path(run.run.run_url) / "compare.json").read_text("utf-8"))
    assert [row["strategy"] for row in compared] == ["joint", "even-split", "joint"]
    for row in compared:
        assert row["measured_step_s"] == pytest.approx(row["predicted_step_s"], rel=0.05)
    for record in view.slots:
        if record.measured.step_s is not None and record.predicted.step_s is not None:
            assert record.measured.step_s == pytest.approx(record.predicted.step_s, rel=0.05)


def test_a_device_lost_while_strategies_are_compared_does_not_end_the_run(tmp_path: Path) -> None:
    run = config(tmp_path)
    view = Watcher()
    killed: list[int] = []

    def kill(text: str) -> None:
        if text.startswith("comparing") and not killed:
            killed.append(pid_of(run, "slow-0"))
            os.kill(killed[0], signal.SIGKILL)

    view.phase = kill  # type: ignore[method-assign]
    outcome = run_job(run, view=view, comparing=Comparing(("even-split",), num_steps=40))
    assert outcome.status == "finished"
    check_books(run, outcome)
    assert [e.device for e in view.events if e.kind == "lost"] == ["slow-0"]
    assert [row["loss"] for row in read(run, "steps.jsonl")] == pytest.approx(
        losses_alone(run), rel=1e-5
    )


def test_a_stopped_run_resumes_with_the_losses_of_an_unbroken_one(tmp_path: Path) -> None:
    """ray-project/ray#46814: restored, yet the loss is high and the epoch is 1.

    meta-pytorch/torchft#58: users must track where the loader goes on.
    """
    run = config(tmp_path, steps=40)
    stop = once_at(12, lambda: os.kill(os.getpid(), signal.SIGTERM))
    stopped = run_job(run, view=Watcher(stop))
    assert (stopped.status, stopped.reason, stopped.resumable) == (
        "stopped",
        "stopped by SIGTERM",
        True,
    )
    assert exit_code(stopped) == 143
    check_books(run, stopped)
    assert 12 < len(read(run, "steps.jsonl")) < 40
    stopped_at = len(read(run, "steps.jsonl"))
    again = Watcher()
    finished = run_job(run, view=again)
    assert finished.status == "finished"
    assert [e.detail for e in again.events if e.kind == "resumed"] == [f"at step {stopped_at}"]
    check_books(run, finished)
    losses = [row["loss"] for row in read(run, "steps.jsonl")]
    assert losses == pytest.approx(losses_alone(run), rel=1e-5)
    assert run_job(run).status == "finished"
    assert len(read(run, "steps.jsonl")) == 40


@pytest.mark.parametrize(
    ("num_fast", "killed", "strategy", "source"),
    [
        # Which plan is the best hangs on how long layers take on this machine today.
        (1, "slow-0", "even-pipeline", "checkpoint of step"),
        (2, "fast-1", "even-split", "replicas in other groups"),
    ],
)
def test_a_killed_worker_changes_neither_losses_nor_dollars(
    tmp_path: Path, num_fast: int, killed: str, strategy: str, source: str
) -> None:
    """SymbioticLab/Oobleck#15: a fault-tolerant trainer dies when one real process is killed.

    meta-pytorch/torchft#329: 948 s from the fault to full speed.
    """
    text = TEXT.format(folder=tmp_path, task="tests.runtime.models:mlp", steps=60, events="")
    text = text.replace("a100-40, count: 1", f"a100-40, count: {num_fast}")
    run = RunConfig.parse(text, [f"control.strategy={strategy}"])
    pids: list[int] = []

    def kill() -> None:
        pids.extend(pid_of(run, device_id) for device_id in ("fast-0", killed))
        os.kill(pids[1], signal.SIGKILL)

    watcher = Watcher(once_at(23, kill))
    outcome = run_job(run, view=watcher)
    assert outcome.status == "finished"
    check_books(run, outcome)
    steps = read(run, "steps.jsonl")
    assert [row["step"] for row in steps] == list(range(60))
    assert [row["loss"] for row in steps] == pytest.approx(losses_alone(run), rel=1e-5)
    result = json.loads((Path(run.run.run_url) / "result.json").read_text("utf-8"))
    assert result["recoveries"] == 1
    (recovered,) = [e for e in watcher.events if e.kind == "recovered" and not e.device]
    assert source in recovered.detail
    assert recovered.duration_s is not None  # told, and shorter than any time-out
    assert 0 < recovered.duration_s < run.failure.timeouts.receive_s
    assert not any(stays_alive(pid) for pid in pids)
    # Whoever was left was held, and billed, all the time.
    held = sorted(
        (e["from_s"], e["to_s"]) for e in read(run, "ledger.jsonl") if e["device"] == "fast-0"
    )
    assert all(to == pytest.approx(after) for (_, to), (after, _) in pairwise(held))


def test_all_workers_killed_at_once_are_started_anew(tmp_path: Path) -> None:
    """kubeflow/trainer#2000, #1509: ranks time out at different times and never meet again.

    pytorch/pytorch#67742, #91943, #150916: the rendezvous lived on the host of the first rank.
    """
    run = config(tmp_path, steps=60)
    pids: list[int] = []

    def kill() -> None:
        pids.extend(pid_of(run, device_id) for device_id in ("fast-0", "slow-0"))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    watcher = Watcher(once_at(23, kill))
    outcome = run_job(run, view=watcher)
    assert outcome.status == "finished"
    check_books(run, outcome)
    assert [row["loss"] for row in read(run, "steps.jsonl")] == pytest.approx(
        losses_alone(run), rel=1e-5
    )
    told = [(e.kind, e.device) for e in watcher.events if e.kind in ("lost", "joined")]
    assert {("lost", "fast-0"), ("lost", "slow-0"), ("joined", "fast-0")} <= set(told)


def test_a_stop_while_nobody_is_left_ends_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    run = config(tmp_path, steps=60)

    def kill_and_stop() -> None:
        for device_id in ("fast-0", "slow-0"):
            os.kill(pid_of(run, device_id), signal.SIGKILL)
        signal.raise_signal(signal.SIGTERM)

    stopped = run_job(run, view=Watcher(once_at(23, kill_and_stop)))
    assert (stopped.status, stopped.reason) == ("stopped", "stopped by SIGTERM")
    assert exit_code(stopped) == 143
    check_books(run, stopped)
    assert len(read(run, "steps.jsonl")) in {20, 30}  # the newest checkpoint by then
    finished = run_job(run)
    assert finished.status == "finished"
    check_books(run, finished)
    assert [row["loss"] for row in read(run, "steps.jsonl")] == pytest.approx(
        losses_alone(run), rel=1e-5
    )


def test_a_budget_edited_while_the_run_goes_on_applies_at_a_slot_edge_and_is_history(
    tmp_path: Path,
) -> None:
    """A wrong edit by hand, and a right one by command."""
    run = config(tmp_path, steps=60)
    folder = Path(run.run.run_url)

    def write_wrong() -> None:
        text = (folder / "config.yaml").read_text("utf-8")
        (folder / "config.yaml").write_text(text.replace("usd: 10.0", "usd: -10"), "utf-8")

    class Editor(Watcher):
        def event(self, event: RunEvent) -> None:
            super().event(event)
            if event.detail.startswith("budget_refused"):
                edit_budget(run.run.run_url, None, ["budget.average_per_hour_usd=3.5"])

    watcher = Editor(once_at(8, write_wrong))
    outcome = run_job(run, view=watcher)
    assert outcome.status == "finished"
    check_books(run, outcome)
    (refused,) = [e.detail for e in watcher.events if e.detail.startswith("budget_refused")]
    assert "config.yaml: budget.average_per_hour_usd is -10.0; it must be positive" in refused
    found = read_run(run.run.run_url)
    (change,) = found.budget_changes
    assert (change["old"], change["new"], change["source"]) == (10.0, 3.5, "config.yaml")
    (edge_s,) = [slot.time_s for slot in found.slots if slot.slot == change["slot"]]
    assert edge_s == change["time_s"]
    last = found.slots[-1]
    assert last.budget_usd == pytest.approx((10 * edge_s + 3.5 * (last.time_s - edge_s)) / 3600)
    assert found.bound_held
    result = json.loads((folder / "result.json").read_text("utf-8"))
    assert result["budget_per_hour_usd"] == 3.5


def test_a_killed_head_is_replaced_and_the_ledger_has_no_gap(tmp_path: Path) -> None:
    """ray-project/kuberay#2153, #2161: training cannot survive the death of the head."""
    run = config(tmp_path, steps=45)
    edit = once_at(3, lambda: edit_budget(run.run.run_url, None, ["budget.total_usd=500"]))
    kill = once_at(23, lambda: os.kill(head_pid_of(run), signal.SIGKILL))

    def edit_and_kill(step: CommittedStep) -> None:
        edit(step)
        kill(step)

    watcher = Watcher(edit_and_kill)
    outcome = run_job(run, view=watcher)
    assert outcome.status == "finished"
    check_books(run, outcome)
    assert len(read_run(run.run.run_url).budget_changes) == 1  # it stays, and is told once
    assert {r.budget.total_usd for r in watcher.slots[-3:] if r.budget} == {500.0}
    assert [row["loss"] for row in read(run, "steps.jsonl")] == pytest.approx(
        losses_alone(run), rel=1e-5
    )
    (resumed,) = [e for e in watcher.events if e.kind == "resumed"]
    assert resumed.detail in {"at step 20", "at step 30"}  # the newest by then
    held = sorted(
        (e["from_s"], e["to_s"]) for e in read(run, "ledger.jsonl") if e["device"] == "fast-0"
    )
    assert all(to == pytest.approx(after) for (_, to), (after, _) in pairwise(held))
    result = json.loads((Path(run.run.run_url) / "result.json").read_text("utf-8"))
    assert result["recoveries"] == 1


def test_a_killed_worker_beyond_the_budget_ends_the_run_naming_its_device_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    text = TEXT.format(folder=tmp_path, task="tests.runtime.models:mlp", steps=200, events="")
    run = RunConfig.parse(text, ["failure.max_failures=0"])
    kill = once_at(12, lambda: os.kill(pid_of(run, "slow-0"), signal.SIGKILL))
    with pytest.raises(LostWorkerError, match=r"device slow-0 .* its process was killed") as lost:
        run_job(run, view=Watcher(kill))
    assert "rank" not in str(lost.value)
    assert lost.value.exit_code == 6
    for device_id in ("fast-0", "slow-0"):
        assert not stays_alive(pid_of(run, device_id))
    steps = read(run, "steps.jsonl")
    assert [row["step"] for row in steps] == list(range(len(steps)))


def test_a_storage_that_fails_is_named_and_no_step_before_a_checkpoint_is_lost(
    tmp_path: Path,
) -> None:
    text = TEXT.format(folder=tmp_path, task="tests.runtime.models:mlp", steps=30, events="")
    run = RunConfig.parse(text, ["control.slot_s=5"])  # the checkpoint of step 10 lies inside
    ledger = Path(run.run.run_url) / "ledger.jsonl"
    aside = tmp_path / "aside.jsonl"

    def spoil() -> None:
        if ledger.exists():  # on a slow machine a slot has ended by then
            ledger.rename(aside)
        ledger.mkdir()

    with pytest.raises(ConfigError, match=r"ledger\.jsonl: Is a directory"):
        run_job(run, view=Watcher(once_at(12, spoil)))
    ledger.rmdir()
    if aside.exists():
        aside.rename(ledger)
    assert run_job(run).status == "finished"
    # The next life bills what was held in the slot that nobody could write down.
    assert max(row["to_s"] for row in read(run, "ledger.jsonl")) > 5 * 60
    assert [row["step"] for row in read(run, "steps.jsonl")] == list(range(30))


def test_a_signal_calls_off_the_abort_that_ray_has_set() -> None:
    signals = StopSignals()
    with signals.caught():
        signal.alarm(60)
        signal.raise_signal(signal.SIGTERM)
        assert signal.alarm(0) == 0
    assert signals.seen == ["SIGTERM"]


def test_an_error_of_the_users_comes_with_the_users_traceback(tmp_path: Path) -> None:
    """ray-project/ray#29927, #28314, #22511: the others sit in a collective, the driver waits.

    ray-project/ray#50640: retries without end pay for a bug of the user's own.
    """
    text = TEXT.format(
        folder=tmp_path, task="tests.runtime.ray_tasks:fails_at_sample", steps=30, events=""
    )
    run = RunConfig.parse(text, ["failure.max_failures=-1"])  # without end, but not for a bug
    with pytest.raises(UserCodeError, match="sample 40 is broken") as raised:
        run_job(run)
    assert raised.value.exit_code == 5
    assert not any(stays_alive(pid_of(run, device_id)) for device_id in ("fast-0", "slow-0"))
    assert "ray_tasks.py" in raised.value.user_traceback
    assert "/workers/" not in raised.value.user_traceback
    result = json.loads((Path(run.run.run_url) / "result.json").read_text("utf-8"))
    assert result["status"] == "user_error"


def test_a_script_trains_a_function_of_its_own_and_hears_of_every_step(tmp_path: Path) -> None:
    steps: list[int] = []
    samples: list[int] = []
    trainer = Trainer(
        mlp,
        config(tmp_path, task="nowhere:task", steps=8),
        on_step=lambda step: steps.append(step.step),
        on_slot=lambda record: samples.append(record.samples),
    )
    result = trainer.fit()
    assert result.error is None
    assert result.metrics["status"] == "finished"
    assert steps == list(range(8))
    assert samples[-1] == 64
    assert result.checkpoint == f"{result.path}/checkpoints/step-000008"


def test_a_task_that_workers_cannot_import_is_refused(tmp_path: Path) -> None:
    def hidden() -> Task:
        return mlp()

    with pytest.raises(ConfigError, match="hidden lies inside another function"):
        Trainer(hidden, config(tmp_path))


def test_a_broken_profile_ends_the_run_naming_the_file(tmp_path: Path) -> None:
    run = config(tmp_path)
    broken = tmp_path / "model.json"
    run = run.model_copy(update={"cluster": replace(run.cluster, profile=str(broken))})
    broken.write_text("{")
    with pytest.raises(ConfigError, match=r"cluster\.profile .*model\.json' is no JSON: line 1"):
        run_job(run)


def test_a_script_hears_of_evaluations_and_a_callback_that_raises_is_told_once(
    tmp_path: Path,
) -> None:
    text = TEXT.format(folder=tmp_path, task="tests.runtime.models:judged", steps=30, events="")
    overrides = [
        "training.eval_every_steps=10",
        "training.keep_best={}",
        "metrics.tensorboard=true",
    ]
    run = RunConfig.parse(text, overrides)
    heard: list[int] = []

    def on_evaluation(evaluation: Evaluation) -> None:
        heard.append(evaluation.step)
        if evaluation.step == 20 and len(heard) == 2:
            raise KeyError("a callback of mine")

    first = Trainer(None, run, on_evaluation=on_evaluation).fit()
    assert isinstance(first.error, UserCodeError)
    assert "on_evaluation raised KeyError: 'a callback of mine'" in str(first.error)
    assert first.metrics["status"] == "stopped"
    done = Trainer(None, run, on_evaluation=on_evaluation).fit()
    assert (done.error, done.metrics["status"], heard[-1]) == (None, "finished", 30)
    evaluations = read(run, "evaluations.jsonl")
    assert [row["step"] for row in evaluations] == [10, 20, 30]
    best = [row["step"] for row in evaluations if row["best"]][-1]
    assert done.best_checkpoint == f"{run.run.run_url}/checkpoints/step-{best:06d}"
    assert list((Path(run.run.run_url) / "tensorboard").iterdir())
