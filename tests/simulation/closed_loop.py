"""A small demo cluster and everything a closed loop on a virtual clock needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from benchmarks.builders import make_cluster, make_device, make_profile
from orchestrator.control.books import LoopOptions
from orchestrator.control.loop import ControlLoop
from orchestrator.control.scaling import Autoscaler
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.cluster import ClusterState, Link, Offer
from orchestrator.core.durable import ControlState, LedgerEntry
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Group
from orchestrator.core.slot import (
    Candidate,
    CommittedStep,
    PlanningProblem,
    RunEvent,
    SlotJournal,
    SlotRecord,
    first_problem,
)
from orchestrator.core.training import TrainingOptions
from orchestrator.planning.assignment import SlotAssignment
from orchestrator.planning.cost import CostModel
from orchestrator.planning.lyapunov import ControlOptions
from orchestrator.simulation.backend import SimulatedBackend, SimulationOptions
from orchestrator.simulation.traces import TraceEvent
from orchestrator.strategies.explorer import Explorer, candidate_of, idle_candidate
from orchestrator.strategies.registry import Strategy, make_strategy
from orchestrator.strategies.tuned import plans_of_all_prices

PER_HOUR = {"fast": 3.67, "mid": 0.90, "slow": 0.35}
SLOT_S = 60.0
GLOBAL_BATCH = 16


def demo_cluster(**offer: object) -> ClusterState:
    """2 fast, 2 mid devices in z1 and 2 slow ones in z2, behind 20 MB/s; dollars of real hours."""
    devices = [
        *(make_device(f"fast-{i}", kind="fast", node_id="fast-node0") for i in range(2)),
        *(make_device(f"mid-{i}", kind="mid", node_id="mid-node0") for i in range(2)),
        *(make_device(f"slow-{i}", kind="slow", zone="z2") for i in range(2)),
    ]
    inside = [Link(z, z, 1e-4, 3e9) for z in ("z1", "z2")]
    across = [Link(*ends, 2e-3, 2e7, 1e-11) for ends in (("z1", "z2"), ("z2", "z1"))]
    offers = tuple(
        replace(
            Offer(pool, pool, "z2" if pool == "slow" else "z1", price / 3600, quantum_s=1.0),
            **offer,  # type: ignore[arg-type]
        )
        for pool, price in PER_HOUR.items()
    )
    return replace(make_cluster(devices, links=[*inside, *across]), offers=offers)


def demo_model() -> ModelProfile:
    """6 layers; 0.6 s a sample on a fast device, 3 and 4.5 times that on the others."""
    return make_profile(
        {"fast": [0.033] * 6, "mid": [0.1] * 6, "slow": [0.15] * 6},
        microbatches=(1, 2),
        param_bytes=2e5,
        boundary_bytes=8192.0,
        step_overhead_s=0.03,
    )


@dataclass
class Rehearsal:
    """A closed loop and all it has shown."""

    loop: ControlLoop
    backend: SimulatedBackend
    records: list[SlotRecord]
    states: list[ControlState]
    steps: list[CommittedStep] = field(default_factory=list)
    ledger: list[LedgerEntry] = field(default_factory=list)
    events: list[RunEvent] = field(default_factory=list)

    def book(self, journal: SlotJournal) -> None:
        self.steps += journal.steps
        self.ledger += journal.ledger
        self.events += journal.events

    def run(self, max_slots: int = 10_000) -> "Rehearsal":
        """Tick until the run has ended or so many slots have passed."""
        for _ in range(max_slots):
            if self.loop.outcome is not None:
                break
            self.loop.tick()
        return self


def rehearsal(  # noqa: PLR0913 - a builder names every choice
    *,
    budget: BudgetOptions,
    events: Sequence[TraceEvent] = (),
    num_samples: int = 16_000,
    cluster: ClusterState | None = None,
    strategy: str | Strategy = "joint",
    control: ControlOptions | None = None,
    billing_speedup: float = 1.0,
    state: ControlState | None = None,
    backend: SimulatedBackend | None = None,
    stopwatch: Callable[[], float] = lambda: 0.0,
    price_max_age_s: float | None = None,
    max_failures: int = -1,
    autoscaler: Autoscaler | None = None,
) -> Rehearsal:
    """The demo cluster under a budget; ``state`` and ``backend`` continue an earlier one."""
    cluster, model = cluster or demo_cluster(), demo_model()
    control = control or ControlOptions(slot_s=SLOT_S)
    num_steps = -(-num_samples // GLOBAL_BATCH)
    training = training_of(num_steps)
    backend = backend or SimulatedBackend(
        cluster,
        model,
        training,
        SimulationOptions(
            slot_s=control.slot_s,
            num_samples=num_samples,
            start_s=state.time_s if state else 0.0,
            next_step=state.next_step if state else 0,
        ),
        events,
    )
    records: list[SlotRecord] = []
    states: list[ControlState] = []
    loop = ControlLoop(
        backend=backend,
        strategy=make_strategy(strategy) if isinstance(strategy, str) else strategy,
        assignment=_assignment(),
        options=LoopOptions(
            training=training,
            budget=budget,
            control=control,
            billing_speedup=billing_speedup,
            price_max_age_s=price_max_age_s,
            num_steps=num_steps,
            num_samples=num_samples,
            max_failures=max_failures,
        ),
        cluster=cluster,
        model=model,
        state=state,
        autoscaler=autoscaler,
        sinks=(records.append,),
        save=states.append,
        stopwatch=stopwatch,
    )
    found = Rehearsal(loop, backend, records, states)
    loop.book = found.book
    return found


class Menu:
    """Proposes the plans that a search has found at all prices of money: no slot searches anew.

    For what money does with plans, not for which plans there are. What is not present, or too
    large, is left out.
    """

    deals_shares = True

    def __init__(self) -> None:
        self._cost: CostModel | None = None

    def propose(
        self, problem: PlanningProblem, *, out_of_time: Callable[[], bool]
    ) -> tuple[Candidate, ...]:
        known = self._cost.following(problem) if self._cost else None
        self._cost = cost = known or CostModel(problem)
        cluster = problem.cluster
        found = [
            candidate_of(cost, groups, "1f1b")
            for groups in _menu()
            if all(cluster.has(d) for group in groups for d in group.device_ids)
        ]
        return tuple(sorted([*found, idle_candidate(cost)], key=lambda c: -c.score))


@cache
def _menu() -> tuple[tuple[Group, ...], ...]:
    """Plans of the demo cluster that no cheaper one outruns."""
    problem = first_problem(demo_cluster(), demo_model(), training_of(1))
    seen = plans_of_all_prices(Explorer(), problem, lambda: False)
    best: dict[tuple[Group, ...], float] = {}
    for trial in sorted(seen, key=lambda t: t.estimate.cost_usd_per_s):
        groups = trial.space.placed(trial, None)
        if groups and trial.estimate.samples_per_s > max(best.values(), default=0.0):
            best[groups] = trial.estimate.samples_per_s
    return tuple(best)


def training_of(num_steps: int) -> TrainingOptions:
    return TrainingOptions(
        task="examples:task", global_batch=GLOBAL_BATCH, microbatch=2, steps=num_steps
    )


@cache
def _assignment() -> SlotAssignment:
    """One for all tests: compiling the problem takes longer than a short rehearsal."""
    return SlotAssignment(2.0)
