"""The head dies after any slot: from its state, as written, a new loop decides as the old one."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from orchestrator.core.budget import BudgetOptions
from orchestrator.core.durable import ControlState
from orchestrator.core.slot import Candidate, PlanningProblem, SlotRecord
from orchestrator.simulation.traces import TraceEvent
from orchestrator.storage import from_json, to_json
from orchestrator.strategies.registry import Strategy
from tests.simulation.closed_loop import PER_HOUR, Menu, Rehearsal, demo_cluster, rehearsal

NUM_SLOTS = 26

BUDGETS = (
    BudgetOptions(average_per_hour_usd=100.0, horizon_hours=4),
    BudgetOptions(average_per_hour_usd=2.0, horizon_hours=4),
    BudgetOptions(average_per_hour_usd=4.0, horizon_hours=4, total_usd=2.0),
)


def trouble(seed: int) -> list[TraceEvent]:
    """Slow-downs and recoveries, slow loaders, congested links and prices, drawn at random."""
    rng = np.random.default_rng(seed)
    devices = [f"{pool}-{i}" for pool in PER_HOUR for i in range(2)]
    times = iter(rng.uniform(60.0, 60.0 * NUM_SLOTS, 16).tolist())
    events = [
        TraceEvent(
            at_s=next(times),
            device=str(rng.choice(devices)),
            speed_ratio=float(rng.choice([0.1, 0.4, 0.7, 1.0])),
        )
        for _ in range(8)
    ]
    events += [
        TraceEvent(
            at_s=next(times),
            device=str(rng.choice(devices)),
            input_s_per_sample=float(rng.choice([0.0, 0.1, 0.5])),
        )
        for _ in range(4)
    ]
    events += [
        TraceEvent(at_s=next(times), links=("all",), bandwidth_ratio=0.02, cause="congestion")
    ]
    for pool in rng.choice(list(PER_HOUR), 3):
        price = float(rng.uniform(0.1, 8.0)) * PER_HOUR[str(pool)] / 3600
        events.append(TraceEvent(at_s=next(times), pool=str(pool), price_usd_per_s=price))
    return events


def read_back(state: ControlState) -> ControlState:
    return from_json(ControlState, json.loads(json.dumps(to_json(state), allow_nan=False)))


def killed_after_every_slot(
    first: Rehearsal, budget: BudgetOptions, make: Callable[[], Strategy]
) -> list[Rehearsal]:
    """One life a slot, over the cluster of ``first``, which goes on."""
    lives = [first]
    while len(lives) < NUM_SLOTS and lives[-1].loop.outcome is None:
        lives[-1].loop.tick()
        state = read_back(lives[-1].states[-1])
        assert state == lives[-1].states[-1]
        lives.append(rehearsal(budget=budget, state=state, backend=first.backend, strategy=make()))
    return lives


def undisturbed_and_killed(
    seed: int, make: Callable[[], Strategy]
) -> tuple[Rehearsal, list[Rehearsal]]:
    budget, events = BUDGETS[seed % len(BUDGETS)], trouble(seed)
    one = rehearsal(budget=budget, events=events, strategy=make()).run(max_slots=NUM_SLOTS - 1)
    other = rehearsal(budget=budget, events=events, strategy=make())
    return one, killed_after_every_slot(other, budget, make)


@pytest.mark.parametrize("seed", range(6))
def test_killed_after_every_slot_a_run_is_the_same_bit_by_bit(seed: int) -> None:
    """Records, dollars and events of a run whose every slot is another life's.

    The strategy has no memory. ``joint`` has one, of what it found in earlier slots, which is not
    kept: it may then find other plans.
    """
    one, lives = undisturbed_and_killed(seed, Menu)
    records = [record for life in lives for record in life.records]
    assert len({record.generation for record in records}) > 2
    assert list(map(without_display, records)) == list(map(without_display, one.records))
    assert [entry for life in lives for entry in life.ledger] == one.ledger
    assert [step for life in lives for step in life.steps] == one.steps
    told = [event for life in lives for event in life.events if event.kind != "resumed"]
    assert [e for e in told if e.kind != "warning"] == [
        e for e in one.events if e.kind != "warning"
    ]
    assert lives[-1].loop.problem() == one.loop.problem()


class _Killed(BaseException):
    """What ends a process; nothing else is done in it."""


class _Dies(Menu):
    """Is killed at its second decision."""

    def __init__(self) -> None:
        super().__init__()
        self._num_decisions = 0

    def propose(
        self, problem: PlanningProblem, *, out_of_time: Callable[[], bool]
    ) -> tuple[Candidate, ...]:
        self._num_decisions += 1
        if self._num_decisions > 2:
            raise _Killed
        return super().propose(problem, out_of_time=out_of_time)


def test_a_head_that_is_killed_while_it_decides_has_billed_the_slot_before_once() -> None:
    budget = BUDGETS[0]
    lives = [rehearsal(budget=budget, strategy=_Dies())]
    for _ in range(6):
        with pytest.raises(_Killed):
            lives[-1].run(max_slots=9)
        state = read_back(lives[-1].states[-1])
        lives.append(
            rehearsal(budget=budget, state=state, backend=lives[0].backend, strategy=_Dies())
        )
    slots = [record.slot for life in lives for record in life.records]
    assert slots == list(range(len(slots)))
    ledger = [entry for life in lives for entry in life.ledger]
    spent_usd = lives[-2].states[-1].spent_usd
    assert sum(e.usd + e.egress_usd for e in ledger) == pytest.approx(spent_usd)
    for device in {entry.device for entry in ledger}:
        spans = sorted((e.from_s, e.to_s) for e in ledger if e.device == device)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_the_state_does_not_grow_with_the_run() -> None:
    """FlagScale#1215: a detector that keeps its samples for ever."""
    events = [
        TraceEvent(at_s=60.0 * k, device=f"{pool}-0", speed_ratio=(0.5, 1.0)[k % 2])
        for k in range(2, 300)
        for pool in PER_HOUR
    ]
    run = rehearsal(budget=BUDGETS[0], events=events, strategy=Menu(), num_samples=1_000_000).run(
        max_slots=300
    )
    sizes = [len(json.dumps(to_json(state))) for state in run.states]
    assert max(sizes[60:]) < 1.1 * max(sizes[:60])
    per_device = len(json.dumps(to_json(run.states[-1].estimates))) / len(demo_cluster().devices)
    assert per_device < 2500


def test_a_state_without_estimates_still_loads() -> None:
    """Files of earlier versions know slow-downs only."""
    events = [TraceEvent(at_s=70.0, device="fast-0", speed_ratio=0.4)]
    run = rehearsal(budget=BUDGETS[0], events=events).run(max_slots=6)
    data = to_json(run.states[-1])
    assert isinstance(data, dict)
    for name in (
        "spent_rest_usd", "estimates", "granted", "moves", "run_until_s", "seed", "budget",
        "allowance", "inherited_usd",
    ):  # fmt: skip
        del data[name]
    state = from_json(ControlState, data)
    again = rehearsal(budget=BUDGETS[0], state=state)
    (device,) = (d for d in again.loop.problem().cluster.devices if d.device_id == "fast-0")
    assert device.slowdown == pytest.approx(2.5)
    again.run(max_slots=3)


def without_display(record: SlotRecord) -> SlotRecord:
    """But for what is remembered over slots only to be shown, and starts anew with a life."""
    return replace(record, coherence_s=None, marginal_values=())
