"""From a problem to candidates: search with a memory, exact times, layers left where they are."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from orchestrator.core.cluster import make_team
from orchestrator.core.plan import Group, Plan, Stage
from orchestrator.core.slot import IDLE_ESTIMATE, Candidate, PlanningProblem
from orchestrator.errors import InfeasibleError
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime
from orchestrator.planning.grouping import DeviceSpace
from orchestrator.planning.roster import Roster
from orchestrator.planning.search import FEW_DEVICES, Search
from orchestrator.planning.space import Space, State, Trial
from orchestrator.planning.tables import LayerTables
from orchestrator.planning.templates import ClassSpace, binned
from orchestrator.planning.trials import Evaluator

NUM_RETIMED = 4
"""Finalists of the closed form that are timed exactly."""

NUM_DIVERSE = 6
"""Candidates on other sets of pools than the finalists'."""

MANY_OBJECTS = 100_000
"""Kept by a search, from which on the next walk over young ones takes more than some ms."""

OutOfTime = Callable[[], bool]


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection: a search makes no cycles, and a walk of all it keeps takes seconds."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Where somebody else put nothing aside; counting that takes some ms, too.
        if gc.get_count()[0] > MANY_OBJECTS and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, without a walk
        if was_enabled:
            gc.enable()


def device_space(problem: PlanningProblem) -> Space:
    """Device by device, with the teams that the profile and the problem allow."""
    return DeviceSpace(Roster(problem.cluster, team_sizes(problem)))


def team_sizes(problem: PlanningProblem) -> dict[str, tuple[int, ...]]:
    """Sizes of teams that may be formed, by kind."""
    tables = LayerTables(problem.model)
    return {
        kind: (1, *(q for q in tables.team_sizes(kind) if 1 < q <= problem.max_team))
        for kind in problem.model.kinds
    }


def class_space(problem: PlanningProblem) -> Space:
    """Class by class; the problem's slow-downs are in bins already."""
    return ClassSpace(problem.cluster, team_sizes(problem), problem.batch_samples)


@dataclass(frozen=True, slots=True)
class _Level:
    """How finely a search looks at the cluster, and for how many devices at most that pays."""

    most: float
    prepare: Callable[[PlanningProblem], PlanningProblem]
    make_space: Callable[[PlanningProblem], Space]


LEVELS = (
    _Level(inf, lambda problem: replace(problem, cluster=binned(problem.cluster)), class_space),
    _Level(FEW_DEVICES, lambda problem: problem, device_space),
)
"""Neither is safe alone in the middle: there both run (docs/model.md, section 5.4), the coarse one
first, as it comes to its end while the fine one takes all time there is."""


class Explorer:
    """Searches for plans, and remembers what does not depend on money between two slots."""

    def __init__(self) -> None:
        self._evaluators: dict[_Level, Evaluator] = {}
        self._outdated: list[Evaluator] = []
        """Kept until a plan is found: to free what a long search knew takes 0.1 s."""

    def _evaluator(self, level: _Level, problem: PlanningProblem) -> Evaluator:
        """The one of the last slot when the cluster is in the same state, else a new one.

        What is known of teams is kept, and shared between the levels.
        """
        known, problem = self._evaluators.get(level), level.prepare(problem)
        if known is None or not known.serves(problem):
            repriced = known.repriced(problem) if known else None
            before = known or next(iter(self._evaluators.values()), None)
            self._outdated += [known] if known else []
            self._evaluators[level] = repriced or Evaluator(problem, level.make_space, before)
        return self._evaluators[level]

    def seen(self, problem: PlanningProblem) -> list[Trial]:
        """Every trial so far in this state of the cluster."""
        levels = _levels(problem)
        return [trial for level in levels for trial in self._evaluator(level, problem).seen()]

    @uncollected()
    def search(
        self,
        problem: PlanningProblem,
        out_of_time: OutOfTime,
        *,
        price_of_money_samples_per_usd: float | None = None,
    ) -> list[Trial]:
        """Finalists in exact time, best first, then plans of other kinds in closed form.

        Args:
            problem: The slot.
            out_of_time: Says when to stop.
            price_of_money_samples_per_usd: Instead of the problem's own Q/V'.

        Raises:
            InfeasibleError: If the model fits on no combination of the devices.
        """
        weight, backlog_usd = problem.penalty_weight, problem.backlog_usd
        if price_of_money_samples_per_usd is not None:
            weight, backlog_usd = 1.0, price_of_money_samples_per_usd
        finalists: list[Trial] = []
        others: list[Trial] = []
        spread, lacking = _spread(problem)
        for start in (problem.incumbent, *([] if lacking else [spread])):
            plans, levels = [start], _levels(problem)
            for level in levels:
                evaluator = self._evaluator(level, problem)
                search = Search(evaluator, weight, backlog_usd, out_of_time)
                starts = _starts(evaluator.space, plans)
                coarse = level is not levels[-1]
                best = search.finalists(starts, problem.seed, NUM_RETIMED, coarse=coarse)
                reached = max(map(search.score, best), default=-inf)
                # A finer level leaves layers where they are; a coarser plan must be better.
                finalists = [*(t for t in finalists if search.score(t) > reached), *best]
                others = _others(evaluator, search, {trial.state for trial in best})
                plans += [_as_plan(trial) for trial in best[:1]]  # a finer level goes on from it
            if finalists:
                break
        self._outdated.clear()
        if not finalists:
            mend = "add devices or memory, or split the model into more layers"
            if problem.activation_checkpointing == "never":
                mend = f"write training.activation_checkpointing: auto, {mend}"
            raise InfeasibleError(
                f"no plan fits the devices' memory: {lacking or 'however they are grouped'}, even "
                f"with microbatches of one sample; {mend}"
            )
        return [*sorted(finalists, key=search.score, reverse=True), *others]


def _levels(problem: PlanningProblem) -> list[_Level]:
    return [level for level in LEVELS if len(problem.cluster.devices) <= level.most]


def _others(evaluator: Evaluator, search: Search, known: set[State]) -> list[Trial]:
    """The plan of most samples per dollar, and the best ones on other sets of pools.

    V needs the first; the user's limits may leave nothing but one of the second.
    """
    seen = [trial for trial in evaluator.seen() if trial.state not in known]
    cluster = evaluator.cost.problem.cluster
    best: dict[tuple[str, ...], Trial] = {}
    for trial in sorted(seen, key=search.score, reverse=True):
        devices = (cluster.device(d) for group in trial.groups for d in group.device_ids)
        best.setdefault(tuple(sorted(device.pool for device in devices)), trial)
    thrifty = max(seen, key=lambda t: t.estimate.samples_per_usd, default=None)
    chosen = [*([thrifty] if thrifty else []), *list(best.values())[:NUM_DIVERSE]]
    return list({trial.state: trial for trial in chosen}.values())


def candidates_of(problem: PlanningProblem, trials: Iterable[Trial]) -> tuple[Candidate, ...]:
    """Candidates of exact time, best score first, idle included.

    Alike devices are swapped so that layers stay where the incumbent has them.
    """
    cost = CostModel(problem)
    found = [
        candidate_of(cost, groups, trial.schedule)
        for trial in trials
        if (groups := trial.space.placed(trial, problem.incumbent))
    ]
    found.append(idle_candidate(cost))
    return tuple(sorted(found, key=lambda c: -c.score))


def candidate_of(cost: CostModel, groups: tuple[Group, ...], schedule: str) -> Candidate:
    """The candidate of these groups in exact time; the next generation, or that of equal work."""
    incumbent = cost.problem.incumbent
    plan = Plan(incumbent.generation + 1 if incumbent else 0, schedule, groups)
    if incumbent and plan.same_work(incumbent):
        plan = incumbent
    estimate = retime(cost, groups, schedule)
    return Candidate(plan, estimate, cost.score(estimate))


def idle_candidate(cost: CostModel) -> Candidate:
    """Doing nothing."""
    incumbent = cost.problem.incumbent
    plan = Plan(incumbent.generation + 1 if incumbent else 0, cost.problem.schedules[0])
    return Candidate(plan, IDLE_ESTIMATE, cost.score(IDLE_ESTIMATE))


def _starts(space: Space, plans: Iterable[Plan | None]) -> list[State]:
    return [state for plan in plans if plan and not plan.is_idle for state in space.of_plan(plan)]


def _as_plan(trial: Trial) -> Plan | None:
    groups = trial.space.placed(trial, None)
    return Plan(0, trial.schedule, groups) if groups else None


def _spread(problem: PlanningProblem) -> tuple[Plan, str | None]:
    """The model spread over the devices with most memory, and what this emptiest plan lacks."""
    devices = sorted(problem.cluster.devices, key=lambda d: (-d.memory_bytes, d.device_id))
    chain = devices[: problem.model.num_layers]
    cuts = [round(i * problem.model.num_layers / len(chain)) for i in range(len(chain) + 1)]
    stages = tuple(
        Stage(make_team([d]), first, end)
        for d, (first, end) in zip(chain, pairwise(cuts), strict=True)
    )
    chosen, cost = problem.activation_checkpointing, CostModel(problem)
    for recompute in (False, True):
        some = tuple(replace(stage, recompute=recompute) for stage in stages)
        plan = Plan(0, problem.schedules[0], (Group(some, (1,) * problem.batch_samples),))
        lacking = cost.memory_error(plan.groups, plan.schedule)
        if lacking is None or chosen == "never":
            break
    return plan, lacking
