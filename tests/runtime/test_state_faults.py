"""The first error is told, with the user's frames only, and nobody waits for a time-out."""

import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.fleet import ChildError, Fleet, make_plan
from orchestrator.core.slot import WorkerFailed
from orchestrator.runtime.trouble import SYMPTOMS
from tests.runtime.harness import make_spec
from workers.clock import StepTimes
from workers.executor import Patience
from workers.faults import NO_FAULTS
from workers.scaling import LossScale
from workers.step import Samples, StepRunner, StepTrace, Window
from workers.update import Verdict

PLAN = make_plan([([("a", 2), ("b", 2)], (2, 2)), ([("c", 4)], (2, 2))])
TIMEOUT_S = 50.0  # of collectives; nothing here may come near it


def failures(fleet: Fleet, ranks: list[int]) -> dict[str, WorkerFailed]:
    items = [i for news in fleet.all("news", ranks=ranks) for i in news]
    return {i.device_id: i for i in items if isinstance(i, WorkerFailed)}


def run_all(fleet: Fleet) -> tuple[int, list[int]]:
    """Let all run, and return once steps are done; the order that all but rank 1 will answer."""
    order: tuple[int, list[int]] = fleet.send("run", ranks=[0, 2])
    fleet.send("run", ranks=[1])
    while not any(r.step >= 2 for news in fleet.all("news", ranks=[0, 2]) for r in news):
        pass
    return order


@pytest.mark.parametrize(
    ("place", "message", "quoted"),
    [
        ("layer", "layer 2 (2) raised KeyError", "raise KeyError"),
        ("loss", "the loss raised ZeroDivisionError: a loss of mine", "raise ZeroDivisionError"),
        ("data", "raised OSError: a file of mine", "raise OSError"),
    ],
)
def test_error_of_the_user_is_told_with_the_users_own_frames(
    tmp_path: Path, place: str, message: str, quoted: str
) -> None:
    spec = make_spec(
        "failing", str(tmp_path), task_args={"place": place}, global_batch=8, timeout_s=TIMEOUT_S
    )
    started_s = time.monotonic()
    with Fleet(tuple("abc")) as fleet:
        fleet.start(spec)
        fleet.install(PLAN, first_step=0, end_step=100)
        ends = fleet.all("run")
        told = failures(fleet, [0, 1, 2])
    assert {end.reason for end in ends} == {"failed"}
    assert set(told) == set("abc")
    blamed = [f for f in told.values() if f.user_traceback]
    assert blamed
    for failure in blamed:
        assert message in failure.message
        assert failure.message.startswith(f"step {failure.step}: ")
        assert quoted in failure.user_traceback
        assert "/workers/" not in failure.user_traceback
        assert "/torch/nn/modules/module.py" not in failure.user_traceback.split("\n", 3)[1]
    for failure in told.values():
        assert failure.user_traceback or "lost contact with" in failure.message
    assert time.monotonic() - started_s < TIMEOUT_S


def test_memory_that_runs_out_is_told_as_that_and_not_as_the_users_error(tmp_path: Path) -> None:
    spec = make_spec(
        "failing", str(tmp_path), task_args={"place": "memory"}, global_batch=8, timeout_s=TIMEOUT_S
    )
    with Fleet(tuple("abc")) as fleet:
        fleet.start(spec)
        fleet.install(PLAN, first_step=0, end_step=100)
        fleet.all("run")
        told = failures(fleet, [0, 1, 2])
    full = [f for f in told.values() if f.out_of_memory]
    assert full
    for failure in full:
        assert re.fullmatch(
            r"step \d: layer 2 \(2\): RuntimeError: .*allocate memory: .*", failure.message
        )
        assert failure.user_traceback == ""
        assert failure.would_recur


def test_killed_worker_frees_all_others_at_once(tmp_path: Path) -> None:
    """pytorch/gloo#521, pytorch/pytorch#158128: an operation with a dead peer never ends."""
    spec = make_spec(
        "mlp", str(tmp_path), task_args={"num_layers": 4}, global_batch=8, steps=100_000,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    with Fleet(tuple("abcd")) as fleet:
        fleet.start(spec)
        fleet.install(PLAN, first_step=0, end_step=100_000)
        order = run_all(fleet)
        fleet.processes[1].kill()
        killed_s = time.monotonic()
        ends = fleet.receive(order)
        took_s = time.monotonic() - killed_s
        told = failures(fleet, [0, 2])
    assert {end.reason for end in ends} == {"failed"}
    assert took_s < 0.2 * TIMEOUT_S
    # Who waits for a message of b names it; of a collective torch does not say who is gone.
    known = r"lost contact with (b: |another worker in the (vote on a step|sum of gradients): )"
    assert re.match(known, told["a"].message)
    assert "lost contact with another worker in" in told["c"].message
    assert not told["a"].user_traceback


def test_a_stopped_worker_is_waited_for_no_longer_than_a_time_out(tmp_path: Path) -> None:
    """pytorch/gloo#521, pytorch/pytorch#158128: an operation with a silent peer never ends."""
    spec = make_spec(
        "mlp", str(tmp_path), task_args={"num_layers": 4}, global_batch=8, steps=100_000,
        timeout_s=2.0,
    )  # fmt: skip
    with Fleet(tuple("abc")) as fleet:
        fleet.start(spec)
        fleet.install(PLAN, first_step=0, end_step=100_000)
        order = run_all(fleet)
        os.kill(fleet.processes[1].pid, signal.SIGSTOP)
        ends = fleet.receive(order)
        told = failures(fleet, [0, 2])
        fleet.processes[1].kill()
    assert {end.reason for end in ends} == {"failed"}
    assert all(failure.message.startswith(SYMPTOMS) for failure in told.values())
    assert not any(failure.user_traceback for failure in told.values())


def test_closing_a_worker_on_purpose_is_no_failure_of_its_own(tmp_path: Path) -> None:
    spec = make_spec(
        "mlp", str(tmp_path), task_args={"num_layers": 4}, global_batch=8, steps=100_000,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    with Fleet(tuple("abc")) as fleet:
        fleet.start(spec)
        fleet.install(PLAN, first_step=0, end_step=100_000)
        order = fleet.send("run")
        while not any(r.step >= 2 for r in fleet.all("news", ranks=[0])[0]):
            pass
        fleet.all("close", ranks=[0])
        ends = fleet.receive(order)
        told = failures(fleet, [0, 1, 2])
        fleet.all("close")  # twice is fine
    assert {end.reason for end in ends} == {"failed"}
    assert set(told) == {"b", "c"}


@pytest.mark.parametrize("name", ["lbfgs", "nonsense"])
def test_optimizer_that_cannot_be_used_is_refused_by_name(tmp_path: Path, name: str) -> None:
    spec = make_spec("mlp", str(tmp_path), global_batch=4, optimizer={"name": name, "lr": 0.1})
    plan = make_plan([([("a", 6)], (4,))])
    with Fleet(("a",)) as fleet:
        fleet.start(spec)
        with pytest.raises(ChildError, match=rf"training.optimizer.name is '{name}'"):
            fleet.install(plan, first_step=0, end_step=1)


def test_whoever_waits_for_a_silent_neighbour_is_freed_once_the_head_knows(
    tmp_path: Path,
) -> None:
    """meta-pytorch/torchft#164, #196: a node is known to be dead, the others wait for time-outs."""
    spec = make_spec(
        "mlp", str(tmp_path), task_args={"num_layers": 4}, global_batch=8, steps=100_000,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    with Fleet(tuple("ab")) as fleet:
        fleet.start(spec)
        chain = make_plan([([("a", 2), ("b", 2)], (4, 4))])
        fleet.install(chain, first_step=0, end_step=100_000)
        order = fleet.send("run", ranks=[0])
        fleet.send("run", ranks=[1])
        while not any(r.step >= 2 for news in fleet.all("news", ranks=[0]) for r in news):
            pass
        os.kill(fleet.processes[1].pid, signal.SIGSTOP)
        time.sleep(0.5)  # now it waits
        known_s = time.monotonic()
        fleet.all("abort", ranks=[0])
        (end,) = fleet.receive(order)
        assert time.monotonic() - known_s < 0.2 * TIMEOUT_S
        assert end.reason == "failed"
        fleet.processes[1].kill()


SLOW_S, SHORT_S = 3.0, 1.0


@pytest.mark.parametrize(
    "groups",
    [[([("a", 1), ("b", 2)], (2, 2))], [([("a", 3)], (2,)), ([("b", 3)], (2,))]],
    ids=["message", "sum"],
)
def test_others_are_waited_for_as_long_as_the_head_says_and_no_longer(
    groups: list[Any], tmp_path: Path
) -> None:
    """learning-at-home/hivemind#676: a peer that is slow comes; one that is silent is given up.

    The time-out of joining the others, which is fixed, decides neither.
    """
    with Fleet(tuple("ab")) as fleet:
        slow = {"phase": "forward", "pid": fleet.processes[0].pid, "delay_s": SLOW_S}
        since = tmp_path / "since"  # while the model is looked at it is as fast as others
        spec = make_spec(
            "sleepy", str(tmp_path), task_args={**slow, "since": str(since)}, global_batch=4,
            microbatch=2, timeout_s=2.0,
        )  # fmt: skip
        fleet.start(spec)
        fleet.install(make_plan(groups), first_step=0, end_step=1)
        since.touch()
        fleet.all("extend", 1, 60.0)
        assert {end.next_step for end in fleet.all("run")} == {1}
        fleet.all("extend", 2, SHORT_S)
        started_s = time.monotonic()
        order = fleet.send("run", ranks=[0])
        assert {end.reason for end in fleet.all("run", ranks=[1])} == {"failed"}
        assert time.monotonic() - started_s < SLOW_S
        assert failures(fleet, [1])["b"].message.startswith(SYMPTOMS)
        fleet.receive(order)


def test_all_waits_of_a_step_end_with_it_and_who_was_slow_itself_still_grants_a_receive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waits at the end of a long step must give up before the head does, which ends all."""
    now_s, waits = [100.0], {}

    def run(share: object, clock: object, patience: Patience) -> None:
        waits["message"] = patience.left_s(now_s[0])
        now_s[0] += 20.0

    def add_up(under_way: object, patience_s: float) -> None:
        waits["sum"] = patience_s
        now_s[0] += 8.0

    def vote(ballot: object, patience_s: float, under_way: object) -> Verdict:
        waits["vote"] = patience_s
        return Verdict(1.0, 8.0, 1.0, finite=True, hold=False, end_step=9, end_s=0.0)

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    clock = SimpleNamespace(begin_step=lambda *_: None, end_step=lambda _: 1.0, times=StepTimes())
    executor = SimpleNamespace(run=run, faults=NO_FAULTS, receive_s=0.0, data_s=0.0, transfers=())
    stage = SimpleNamespace(
        weight_sum=8.0, loss_sum=1.0, peak_stash_bytes=0,
        work=SimpleNamespace(device=SimpleNamespace(type="cpu"), loss_scale=LossScale("fp32")),
    )  # fmt: skip
    parts: dict[str, Any] = {
        "executor": executor, "clock": clock, "stage": stage, "trace": StepTrace(),
        "sums": SimpleNamespace(run=add_up, counted=lambda: ()),
        "vote": SimpleNamespace(cast=vote),
        "updater": SimpleNamespace(apply=lambda *_: None, lr=lambda _: 0.1),
        "place": SimpleNamespace(group_index=0),
    }  # fmt: skip
    plan = make_plan([([("a", 3)], (8,))])
    runner = StepRunner(
        device_id="a", plan=plan, samples=Samples(8, 80), emulated=False,
        state_bytes=lambda: 0, clock_zero_s=0.0, receive_s=5.0, **parts,
    )  # fmt: skip
    runner.run(0, 100.0, Window(hold=False, end_step=9, patience_s=30.0))
    assert waits == {"message": 30.0, "sum": 10.0, "vote": 5.0}
