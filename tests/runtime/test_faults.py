"""Whole runs on forked workers that are broken on purpose: they end as if nothing had happened."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import chaos
from benchmarks.chaos import NUM_LAYERS, NUM_STEPS, Case, Forked, make_config, run_case
from benchmarks.forked_run import run_forked
from benchmarks.invariants import STATE_TOLERANCE, breaches, hits
from orchestrator.control.faults import PHASES, FaultPlan, Phase
from orchestrator.control.persistence import RunStore
from orchestrator.errors import LostWorkerError
from tests.runtime.reference import largest_difference, saved_parameters, train_alone
from workers.faults import Injector, ProcessFault
from workers.worker import WorkerSpec

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Case:
    return run_case(folder, "undisturbed", FaultPlan(), Forked(), None)


def run(folder: Path, name: str, plan: FaultPlan, undisturbed: Case, *overrides: str) -> Case:
    case = run_case(folder, name, plan, Forked(), undisturbed.config, *overrides)
    assert case.breaches == ()
    return case


def test_a_run_without_faults_trains_as_one_process_would(undisturbed: Case) -> None:
    assert undisturbed.breaches == ()
    training, url = undisturbed.config.training, undisturbed.config.run.run_url
    spec = WorkerSpec(
        task=training.task, task_args=training.task_args, options=training, seed=0, run_url=url
    )
    layers, losses = train_alone(spec, NUM_STEPS)
    assert [row["loss"] for row in RunStore(url).read("steps")] == pytest.approx(losses, abs=1e-12)
    saved = saved_parameters(url, NUM_STEPS, NUM_LAYERS)
    assert largest_difference(layers, saved) <= STATE_TOLERANCE


@pytest.mark.parametrize("phase", PHASES["fail"])
def test_a_worker_may_be_killed_in_any_phase(folder: Path, undisturbed: Case, phase: Phase) -> None:
    """User case SymbioticLab/Oobleck#15: kill -9, on real processes; of each stage one."""
    plan = FaultPlan().fail_at(9, "fast-1", phase).fail_at(23, "slow-0", phase)
    case = run(folder, f"fail-{phase}", plan, undisturbed)
    assert [hit["phase"] for hit in hits(case.config)] == [phase] * len(hits(case.config))
    assert hits(case.config)
    lost = [event.device for event in case.events if event.kind == "lost"]
    assert lost == [hit["owner"] for hit in hits(case.config)]


def test_a_worker_that_hangs_is_ended_and_gone_on_without(folder: Path, undisturbed: Case) -> None:
    case = run(folder, "hang", FaultPlan().hang_at(12, "fast-0", "reduce"), undisturbed)
    (lost,) = [event for event in case.events if event.kind == "lost"]
    assert lost.device == "fast-0"
    assert "answered nothing" in lost.detail


@pytest.mark.parametrize(("device", "peer"), [("fast-0", "slow-0"), ("slow-1", "slow-0")])
def test_workers_whose_link_is_cut_are_joined_again(
    folder: Path, undisturbed: Case, device: str, peer: str
) -> None:
    """pytorch/gloo#521: nobody is dead, and yet nothing comes any more; used or not."""
    plan = FaultPlan().cut_link_at(12, device, peer)
    chain = "control.strategy=balanced-pipeline"
    case = run(folder, f"cut-{device}", plan, undisturbed, chain)
    assert [hit["kind"] for hit in hits(case.config)] == ["cut_link"]
    assert not [event for event in case.events if event.kind == "lost"]


@pytest.mark.long
def test_a_job_that_is_killed_goes_on_with_the_same_command(
    tmp_path: Path, undisturbed: Case
) -> None:
    """ray-project/ray#46814: resume is the default, and nothing is lost or done twice.

    ray-project/ray#65025: whatever a job's status says, the folder says how far the run is.
    """
    config = make_config(tmp_path, "killed-job")
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    (tmp_path / "chaos.yaml").write_text("faults: [{kind: kill_driver, at_step: 15}]")
    command = [sys.executable, "-m", "orchestrator", "run", str(tmp_path / "run.yaml")]
    command += ["--chaos", str(tmp_path / "chaos.yaml")]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, check=False) for _ in range(2)
    )
    assert first.returncode == -signal.SIGKILL
    assert second.returncode == 0, second.stderr.decode()
    assert breaches(config, undisturbed.config) == ()


def test_a_worker_may_hang_in_the_last_checkpoint(folder: Path, undisturbed: Case) -> None:
    """All steps are done then, and nobody looks for silent workers any more."""
    case = run(folder, "last-hang", FaultPlan().hang_at(37, "fast-0", "save"), undisturbed)
    assert [event.device for event in case.events if event.kind == "lost"] == ["fast-0"]


def test_steps_that_are_lost_with_the_last_checkpoint_are_run_again(
    folder: Path, undisturbed: Case
) -> None:
    """One chain of all devices: nobody else has the layers of the one that is killed."""
    plan = FaultPlan().fail_at(37, "fast-0", "save")
    chain = "control.strategy=balanced-pipeline"
    case = run(folder, "last-fail", plan, undisturbed, chain)
    (recovered,) = [e for e in case.events if (e.kind, e.device) == ("recovered", "")]
    assert "return to the checkpoint of step 36; 4 steps are run again" in recovered.detail


def test_a_full_disk_of_the_head_ends_the_run_and_the_same_command_goes_on(
    folder: Path, undisturbed: Case
) -> None:
    case = run(folder, "disk", FaultPlan().disk_full_at(15), undisturbed)
    assert case.num_restarts == 1
    assert [(hit["kind"], hit["owner"]) for hit in hits(case.config)] == [("disk_full", "head")]


def test_a_price_and_a_delay_change_dollars_and_times_only(folder: Path, undisturbed: Case) -> None:
    plan = FaultPlan().price_at(11, "fast", 1.5).slow_at(14, "slow-0", "forward", 0.03)
    case = run(folder, "world", plan, undisturbed)
    assert {event.kind for event in case.events} >= {"price", "straggler"}
    assert next(e.device for e in case.events if e.kind == "straggler") == "slow-0"
    assert hits(case.config) == ()


def stragglers(case: Case) -> set[tuple[str, str]]:
    """Who was named in a run, and what of it."""
    told = (e for e in case.events if e.kind == "straggler")
    found = (e for e in told if not e.detail.startswith("lasting"))
    return {(event.device, event.detail.split(":")[0]) for event in found}


def test_a_slow_loader_is_named_and_planned_around(folder: Path, undisturbed: Case) -> None:
    """traceopt-ai/traceml#165: a slow loader makes its peers look slow."""
    case = run(folder, "loader", FaultPlan().slow_at(10, "fast-1", "loader", 0.05), undisturbed)
    assert ("fast-1", "input") in stragglers(case)
    assert {device for device, _ in stragglers(case)} == {"fast-1"}
    assert "replan" in {e.kind for e in case.events if "fast-1 runs" in e.detail}


def test_a_link_that_carries_less_is_named_and_none_of_its_ends(
    folder: Path, undisturbed: Case
) -> None:
    """traceopt-ai/traceml#165: who waits for a message is not slow, nor is who sent it."""
    thin = "cluster.links=[{within: zone, bandwidth_gbytes_per_s: 0.00003}, " \
        "{between: [z1, z2], bandwidth_gbytes_per_s: 0.00003}]"  # fmt: skip
    plan = FaultPlan().slow_link_at(10, "fast-0", "fast-1", 0.2)
    case = run(folder, "link", plan, undisturbed, thin, "control.strategy=even-pipeline")
    named = stragglers(case)
    assert named
    assert {what.split(" to ")[0] for _, what in named} == {"link"}
    assert {device for device, _ in named} <= {"fast-0", "fast-1"}


@pytest.mark.long
def test_drawn_faults_are_survived() -> None:
    result = chaos.run(argparse.Namespace(quick=True, seed=0, runs=0))
    assert [row for row in result.table if row["breaches"]] == []
    assert [figure.name for figure in result.figures if not figure.holds] == []


def test_a_fault_hits_once_whoever_asks(tmp_path: Path) -> None:
    faults = (ProcessFault(0, "disk_full", 3, "save"), ProcessFault(1, "disk_full", 4, "save"))
    injector = Injector("a", faults, str(tmp_path))
    injector.reach(2, "save")
    injector.reach(3, "vote")
    with pytest.raises(OSError, match=r"No space left on device \(a fault injected on purpose\)"):
        injector.reach(5, "save")
    anew = Injector("a", faults, str(tmp_path))  # another process, or another life
    with pytest.raises(OSError, match="No space left on device"):
        anew.reach(5, "save")
    for found in (anew, Injector("a", faults, str(tmp_path))):
        found.reach(9, "save")


@pytest.mark.parametrize(("kind", "ends_by"), [("fail", signal.SIGKILL), ("hang", signal.SIGSTOP)])
def test_a_process_is_broken_from_within(
    tmp_path: Path, kind: str, ends_by: signal.Signals
) -> None:
    pid = os.fork()
    if pid == 0:
        fault = ProcessFault(0, kind, 3, "vote")  # type: ignore[arg-type]
        Injector("a", (fault,), str(tmp_path)).reach(3, "vote")
        os._exit(0)
    _, status = os.waitpid(pid, os.WUNTRACED)
    seen = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)
    assert seen == ends_by
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_sample_that_no_process_survives_ends_a_run_that_would_recover_for_ever(
    tmp_path: Path,
) -> None:
    run = make_config(
        tmp_path,
        "deadly",
        "training.task=tests.runtime.models:deadly",
        "training.task_args={}",
        "training.steps=25",
        "failure.max_failures=-1",
        "control.slot_s=0.7",
    )
    with pytest.raises(LostWorkerError, match="5 times in a row without coming further than step"):
        run_forked(run)
