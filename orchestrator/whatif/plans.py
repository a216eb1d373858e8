"""What a file would lead to in its first slot: the chosen plan and the baselines beside it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from orchestrator.config import RunConfig
from orchestrator.control.pools import EFFICIENCY_RATIO, kind_name
from orchestrator.core.cluster import known_kinds
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Plan
from orchestrator.core.slot import IDLE_ESTIMATE, Candidate, PlanningProblem, SlotRecord
from orchestrator.errors import InfeasibleError
from orchestrator.planning.blocks import without_surcharges
from orchestrator.planning.constraints import Row, broken, make_rows
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime, timeline
from orchestrator.planning.frontier import COST_TOLERANCE, fastest_within
from orchestrator.planning.pricing import nearest_breach, refusal
from orchestrator.planning.tables import LayerTables
from orchestrator.reports import figures
from orchestrator.reports.plan_page import Timeline
from orchestrator.reports.tables import PlanRow, make_row, row_data
from orchestrator.reports.worth import Worth
from orchestrator.storage import Json
from orchestrator.strategies.registry import Strategy, make_strategy
from orchestrator.whatif.loops import simulated
from orchestrator.whatif.pace import conflict_notes, pace_notes
from orchestrator.whatif.summary import left_out
from orchestrator.whatif.traces import price_notes
from orchestrator.whatif.worth import worth_beside

PLAN_BASELINES = ("even-split", "proportional", "balanced-pipeline")
"""What ``lyray plan`` shows beside the chosen strategy."""

_SHOWN_GAPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Candidates for one file, in the order they are shown; the first is what would run."""

    problem: PlanningProblem
    rows: tuple[PlanRow, ...]
    timelines: tuple[Timeline, ...]  # of the first row's groups
    notes: tuple[str, ...]
    worth: Worth | None = None  # None: nothing runs

    @property
    def chosen(self) -> PlanRow:
        """The plan that would run first."""
        return self.rows[0]


def what_if(config: RunConfig, measured: ModelProfile, *, stopwatch: Callable[[], float]) -> WhatIf:
    """Decide the first slot as a run would, and put other plans beside what it decides.

    Args:
        config: The whole file.
        measured: As measured or read, unscaled.
        stopwatch: Seconds from any start, for ``control.plan_deadline_s``.

    Raises:
        InfeasibleError: If the file's own strategy finds no plan that fits and obeys the limits.
        ConfigError: If the profile does not serve the cluster.
    """
    name = config.control.strategy
    asked = _Asked(make_strategy(name))
    told = simulated(config, measured, asked, stopwatch=stopwatch)
    record = told.loop.tick()
    problem = told.loop.problem()
    problem = replace(
        problem,
        cluster=without_surcharges(problem.cluster),
        penalty_weight=1.0,
        backlog_usd=0.0,
        incumbent=None,
    )
    speedup = config.emulation.billing_speedup
    looked = _Look(CostModel(problem), make_rows(config.budget.limits, billing_speedup=speedup))
    chosen = looked.candidate(record.next_plan)
    seen = looked.obedient(asked.plans)
    rows = [
        _row(label, candidate, problem, speedup)
        for label, candidate in _own(name, chosen, seen, problem.budget_usd_per_s)
    ]
    rows[0] = replace(rows[0], chosen=True)
    rows += [looked.baseline(other, speedup) for other in PLAN_BASELINES if other != name]
    return WhatIf(
        problem=problem,
        rows=tuple(rows),
        timelines=tuple(timeline(looked.cost, g, chosen.plan.schedule) for g in chosen.plan.groups),
        notes=(
            *_notes(config, problem, rows),
            *price_notes(config, told.traces, problem.cluster),
            *pace_notes(config, told.loop.treasury, chosen.estimate),
            *conflict_notes(config, told.loop.treasury, seen),
            *_first_slot_notes(record),
            *left_out(config),
        ),
        worth=worth_beside(problem, [chosen, *seen], looked.limits, billing_speedup=speedup),
    )


def what_if_data(config: RunConfig, found: WhatIf) -> dict[str, Json]:
    """What ``lyray plan --json`` prints: seconds of the run's clock, dollars per billed hour."""
    cluster = found.problem.cluster
    return {
        "run": config.run.name,
        "global_batch": config.training.global_batch,
        "budget_per_hour_usd": config.budget.average_per_hour_usd,
        "billing_speedup": config.emulation.billing_speedup,
        "chosen": found.chosen.strategy,
        "candidates": [row_data(row, cluster) for row in found.rows],
        "marginal_values": dict(found.worth.values) if found.worth else {},
        "marginal_values_beside": found.worth.beside if found.worth else "",
        "notes": list(found.notes),
    }


class _Asked:
    """A strategy that remembers what it proposed."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.plans: dict[Plan, None] = {}  # in order

    @property
    def deals_shares(self) -> bool:
        """As the strategy's own."""
        return self._strategy.deals_shares

    def propose(
        self, problem: PlanningProblem, *, out_of_time: Callable[[], bool]
    ) -> tuple[Candidate, ...]:
        """The strategy's candidates; see ``Strategy``."""
        found = self._strategy.propose(problem, out_of_time=out_of_time)
        self.plans |= dict.fromkeys(candidate.plan for candidate in found)
        return found


@dataclass(frozen=True, slots=True)
class _Look:
    """Plans in the state of the first slot, at its own prices."""

    cost: CostModel
    limits: tuple[Row, ...]

    def candidate(self, plan: Plan) -> Candidate:
        """A plan with its estimate; idle at what is billed anyway."""
        if plan.is_idle:
            return Candidate(plan, self.cost.idle)
        estimate = retime(self.cost, plan.groups, plan.schedule)
        return Candidate(plan, estimate, self.cost.score(estimate))

    def obedient(self, plans: Iterable[Plan]) -> list[Candidate]:
        """Those that run and keep the user's limits."""
        running = (self.candidate(plan) for plan in plans if not plan.is_idle)
        return [c for c in running if broken(self.cost, self.limits, c) is None]

    def baseline(self, name: str, speedup: float) -> PlanRow:
        """The row of a strategy's best plan that keeps the limits, or why there is none."""
        problem = self.cost.problem
        try:
            found = make_strategy(name).propose(problem, out_of_time=lambda: False)
            running = [c for c in found if not c.plan.is_idle]
            if obedient := self.obedient(c.plan for c in running):
                return _row(name, obedient[0], problem, speedup)
            raise refusal(nearest_breach(self.cost, self.limits, running))
        except InfeasibleError as error:
            return _refused(name, str(error))


def _own(
    name: str, chosen: Candidate, seen: Sequence[Candidate], budget_usd_per_s: float
) -> list[tuple[str, Candidate]]:
    """What the strategy would run, and where they are others its fastest plans."""
    found = [(name, chosen)]
    others = {
        f"{name} fastest": fastest_within(seen, float("inf")),
        f"{name} in budget": fastest_within(seen, budget_usd_per_s),
    }
    for label, other in others.items():
        if other and not any(other.plan.same_work(known.plan) for _, known in found):
            found.append((label, other))
    return found


def _row(name: str, candidate: Candidate, problem: PlanningProblem, speedup: float) -> PlanRow:
    return make_row(name, candidate.plan, candidate.estimate, problem.cluster, speedup)


def _refused(name: str, problem: str) -> PlanRow:
    return PlanRow(name, Plan(0, ""), IDLE_ESTIMATE, 0.0, None, problem=problem)


def _gap_notes(problem: PlanningProblem, rows: Sequence[PlanRow]) -> list[str]:
    """Which times of the plans shown were not measured, and from what they come."""
    tables = LayerTables(problem.model)
    used = {
        (stage.team.kind, stage.team.size, samples)
        for row in rows
        for group in row.plan.groups
        for stage in group.stages
        for samples in set(group.microbatches)
    }
    times = [tables.times(*key) for key in sorted(used)]
    inside = [t.gap for t in times if t.gap and not t.beyond]
    beyond = [t.gap for t in times if t.gap and t.beyond]
    notes = []
    if inside:
        notes.append(f"Times interpolated between measured ones: {_some(inside)}.")
    if beyond:
        notes.append(f"Times beyond the measured ones, in proportion or dearer: {_some(beyond)}.")
    return notes


def _some(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(names))
    rest = len(shown) - _SHOWN_GAPS
    return ", ".join(shown[:_SHOWN_GAPS]) + (f" and {rest} more" if rest > 0 else "")


def _notes(config: RunConfig, problem: PlanningProblem, rows: Sequence[PlanRow]) -> list[str]:
    """What a reader must know about the figures."""
    notes = []
    priced = sorted({t.kind for t in problem.model.times if t.estimated})
    if priced:
        notes.append(
            f"Times of {', '.join(priced)} are priced, not measured: from FLOP at "
            f"{100 * EFFICIENCY_RATIO:g} % of the catalogue's peak or, where that takes longer, "
            "from the bytes that memory moves."
        )
    notes += _precision_notes(config, problem)
    notes += _gap_notes(problem, rows)
    budget = config.budget.average_per_hour_usd
    chosen = rows[0]
    if chosen.cost_per_hour_usd > budget * (1.0 + COST_TOLERANCE):
        share = budget / chosen.cost_per_hour_usd
        notes.append(
            f"The budget is ${budget:,.2f}/h on average: at ${chosen.cost_per_hour_usd:,.2f}/h the "
            f"chosen plan may run {100 * share:.3g} % of the time, or take turns with a cheaper "
            "one."
        )
    if at_once_usd := _blocks_usd(config, problem, chosen.plan):
        notes.append(
            f"Renting its devices is billed {figures.usd(at_once_usd)} at once: minimum_s "
            "and quantum_s are charged when they begin."
        )
    if unused := _unused_ratios(config, problem):
        notes.append(
            f"speed_ratio of {', '.join(unused)} is not used: the profile has times of that kind."
        )
    if config.cluster.source == "emulated":
        notes.append(
            "Devices are emulated: one second of the run is billed as "
            f"{config.emulation.billing_speedup:g} s; dollars per sample follow the bill."
        )
    return notes


def _precision_notes(config: RunConfig, problem: PlanningProblem) -> list[str]:
    """Kinds that compute bf16 no faster than fp32: a whole run has one precision."""
    if config.training.precision != "bf16":
        return []
    kinds, known = {device.kind for device in problem.cluster.devices}, known_kinds()
    slow = sorted(k for k in kinds if k in known and known[k].bf16_flop_per_s is None)
    if not slow:
        return []
    return [
        f"training.precision is bf16, which {', '.join(slow)} has no units for: planned at its "
        "speed in fp32; fp16 runs on all kinds."
    ]


def _blocks_usd(config: RunConfig, problem: PlanningProblem, plan: Plan) -> float:
    """What the first blocks of a plan's devices cost, where they outlast a slot."""
    offers = [problem.cluster.offer(problem.cluster.device(d).pool) for d in plan.device_ids]
    return sum(
        offer.price_usd_per_s * max(offer.minimum_s, offer.quantum_s)
        for offer in offers
        if max(offer.minimum_s, offer.quantum_s) > config.control.slot_s
        and offer.billed == "while_used"
    )


def _unused_ratios(config: RunConfig, problem: PlanningProblem) -> list[str]:
    """Pools whose speed the file states and the profile has measured."""
    cluster = config.cluster
    measured = {t.kind for t in problem.model.times if not t.estimated}
    return [
        offer.pool
        for offer in cluster.offers
        if cluster.source == "file" and offer.speed_ratio and kind_name(offer, cluster) in measured
    ]


def _first_slot_notes(record: SlotRecord) -> list[str]:
    """Why nothing would run at first, and what is not as the file has it."""
    notes = [f"Nothing would run at first: {record.reason}."] if record.next_plan.is_idle else []
    return [*notes, *(f"{text[:1].upper()}{text[1:]}." for text in record.fallbacks)]
