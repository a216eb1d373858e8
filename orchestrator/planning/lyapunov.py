"""The decision of a slot: drift plus penalty under guards that bind every strategy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from orchestrator.core.cluster import pool_of
from orchestrator.core.plan import Migration, Plan
from orchestrator.core.slot import (
    IDLE_ESTIMATE,
    Candidate,
    Decision,
    DecisionKind,
    PlanningProblem,
    StepEstimate,
)
from orchestrator.planning.drift import Drift, Lead
from orchestrator.planning.guards import LedgerView, affordable_s, move_usd
from orchestrator.planning.migration import plan_migration

if TYPE_CHECKING:
    from orchestrator.planning.cost import CostModel

DEFAULT_KAPPA = 0.05
"""Overspend share when the backlog starts at zero (docs/model.md, section 4.4)."""

KAPPA_WITH_ESTIMATE = 0.2
"""Overspend share when it starts at an estimated price of money: less of it is spent early."""

TIE_RATIO = 1e-9
"""Of a plan's worth: scores closer than this are equal; ``RATIO_HEADROOM`` covers it in G1."""

LEAST_PAUSE_SLOTS = 0.05
"""Slots that a change of places counts as at least: beside its pause a step ends at a boundary,
and devices of both plans are billed while they hand over. Between two plans that the optimum
mixes, rarer turns cost nothing but backlog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerOptions:
    """YAML section ``control.straggler``."""

    ratio: float = 1.2
    """Smallest slow-down acted on."""

    confirm_slots: int = 2
    """Slots above it until it is called lasting; a label, re-planning does not wait."""

    def __post_init__(self) -> None:
        if not self.ratio > 1:
            raise ValueError(f"ratio is {self.ratio}; a slow-down is larger than 1")
        if self.confirm_slots < 1:
            raise ValueError(f"confirm_slots is {self.confirm_slots}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """YAML section ``control``."""

    strategy: str = "joint"
    """Name of the strategy that proposes plans; CHANGELOG.md lists those of this version."""

    slot_s: float = 60.0
    """D, the planning epoch, in seconds of the run's clock."""

    kappa: Literal["auto"] | float = "auto"
    """Sets V = kappa b H / rho; auto: up to 0.2 with an estimated price of money, else 0.05."""

    penalty_weight: float | None = None
    """V itself, in $^2/sample; overrides kappa's."""

    hysteresis_slots: int = 10
    """H_e: a new plan must pay for its pause within this many slots."""

    plan_deadline_s: float = 2.0
    """Longest search of a slot. The first slot, which also looks for the price of money, may take
    about three times as long; so may one in which the hard cap forbids what was found."""

    max_team: int = 8
    """Largest team; never more than the backend can run."""

    straggler: StragglerOptions = StragglerOptions()
    """When a device is told of as slow."""

    def __post_init__(self) -> None:
        for name in ("slot_s", "penalty_weight", "plan_deadline_s", "hysteresis_slots"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        if not isinstance(self.kappa, str) and not self.kappa > 0:
            raise ValueError(f"kappa is {self.kappa}; write auto or a positive share such as 0.05")
        if not 1 <= self.max_team <= 8:
            raise ValueError(f"max_team is {self.max_team}; it lies between 1 and 8")

    def kappa_ratio(self, *, estimated: bool) -> float:
        """The overspend share as a number; ``estimated``: the backlog starts at V lambda_hat."""
        if not isinstance(self.kappa, str):
            return self.kappa
        return KAPPA_WITH_ESTIMATE if estimated else DEFAULT_KAPPA


@dataclass(frozen=True, slots=True)
class Incumbent:
    """What the running plan takes now, and what it was predicted to take until now."""

    now: StepEstimate | None = None  # None: it cannot be kept (lost a device, breaks a row)
    expected: StepEstimate | None = None


@dataclass(frozen=True, slots=True)
class _Option:
    """An admissible plan with its way in, and how long the cap lets it run."""

    candidate: Candidate
    migration: Migration
    run_until_s: float | None


@dataclass(frozen=True, slots=True)
class _Scene:
    """The inputs of one decision, gathered."""

    problem: PlanningProblem
    cost: "CostModel"
    ledger: LedgerView
    options: ControlOptions
    current: Candidate | None  # the incumbent, when it runs and may be kept
    expected: StepEstimate | None  # what the incumbent was predicted to take until now

    def beats_idle(self, estimate: StepEstimate) -> bool:
        """Whether J is at least that of idling: what G1 needs of every plan that runs.

        The plan that the price of money was taken from is level with idling, and runs.
        """
        rounding = TIE_RATIO * self.problem.penalty_weight * estimate.samples_per_s
        return self.cost.score(estimate) >= self.cost.score(IDLE_ESTIMATE) - rounding

    @property
    def drift(self) -> Drift:
        """How the backlog of this slot moves under a plan."""
        return Drift.of(self.problem, self.options.slot_s)


def decide(
    *,
    problem: PlanningProblem,
    candidates: Sequence[Candidate],
    cost: "CostModel",
    running: Incumbent,
    ledger: LedgerView,
    options: ControlOptions,
) -> Decision:
    """Choose between idle, keeping the incumbent, and the candidates.

    The best drift plus penalty of a slot wins (``Drift.slot_score``), subject to: no plan whose
    score J is worse than idle's (G1); nothing but idle above the ledger guard's line; what a
    plan may cost in a slot fits under the hard cap, or ``run_until_s`` closes the slot early; a
    new plan pays for its pause before its lead is gone, and within H_e slots.

    Args:
        problem: The slot; ``problem.incumbent`` is what ran until now.
        candidates: Plans that fit memory and the user's rows, in any order; idle is implied.
        cost: The model of ``problem``.
        running: The incumbent in the state of ``problem``, and before; a device that computes
            for longer than expected is named as the cause of a change.
        ledger: The money.
        options: Section ``control``.

    Returns:
        A Decision whose plan carries the incumbent's generation while the work stays the same,
        else the next one. Its reason starts with a stable word: keep, reassign, switch, and for
        idle budget_wait, budget_cap_reached or no_feasible_plan.

    Source: docs/model.md, sections 4.5, 4.7 and 4.8.
    """
    incumbent, current = problem.incumbent, None
    if incumbent and not incumbent.is_idle and running.now:
        current = Candidate(incumbent, running.now, cost.score(running.now))
    scene = _Scene(problem, cost, ledger, options, current, running.expected)
    ranked = _ranked(scene, candidates)
    if not ranked:
        return _idle(scene, "no_feasible_plan: no plan fits the devices' memory and the limits")
    over_usd = ledger.spent_usd - ledger.budget_usd
    if ledger.allow_idle and over_usd > ledger.line_usd:
        return _idle(
            scene,
            f"budget_wait: {over_usd:.4g} $ more than the average allows are spent; "
            f"work goes on once it is less than {ledger.line_usd:.4g} $",
        )
    worthwhile = [c for c in ranked if not ledger.allow_idle or scene.beats_idle(c.estimate)]
    if not worthwhile:
        best = max((c.estimate for c in ranked), key=cost.score)
        return _idle(
            scene,
            "budget_wait: no plan is worth its price; the best gives "
            f"{best.samples_per_usd:.4g} samples a dollar, and a dollar saved "
            f"is worth {problem.price_of_money_samples_per_usd:.4g}",
        )
    affordable = [option for c in worthwhile if (option := _under_cap(scene, c))]
    if not affordable:
        return _idle(
            scene,
            f"budget_cap_reached: {ledger.spent_usd:.6g} $ of {ledger.total_usd:.6g} $ are spent, "
            f"{ledger.reserve_usd:.4g} $ kept for the last checkpoint; no plan can run one step",
        )
    return _choose(scene, affordable, capped=affordable[0].candidate is not worthwhile[0])


def _ranked(scene: _Scene, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Running plans, best of a slot first; on a tie the incumbent, in its present state."""
    current = scene.current
    others = [
        c
        for c in candidates
        if not c.plan.is_idle and not (current and c.plan.same_work(current.plan))
    ]
    everyone = [current, *others] if current else others
    return sorted(everyone, key=lambda c: -scene.drift.slot_score(c.estimate))


def _under_cap(scene: _Scene, candidate: Candidate) -> _Option | None:
    """The option with its ``run_until_s``, None when not even its pause and one step fit."""
    problem, slot_s, migration = scene.problem, scene.options.slot_s, Migration()
    if candidate is not scene.current:
        migration = plan_migration(problem, problem.incumbent, candidate.plan)
    runs_s = affordable_s(problem, candidate, migration, ledger=scene.ledger, slot_s=slot_s)
    if not runs_s:
        return None
    whole = runs_s >= slot_s + migration.pause_s
    run_until_s = None if whole else problem.cluster.now_s + runs_s
    return _Option(candidate, migration, run_until_s)


def _choose(scene: _Scene, affordable: list[_Option], *, capped: bool) -> Decision:
    """The best option that pays for its pause; the incumbent needs not."""
    incumbent = scene.problem.incumbent
    stay = next((o for o in affordable if o.candidate is scene.current), None)
    lost = incumbent is not None and not incumbent.is_idle and scene.current is None
    must_run = not scene.ledger.allow_idle and stay is None
    for option in affordable:
        if option is stay:
            return _keep(option, best=affordable[0])
        if incumbent is None or lost or must_run or _pays(scene, option, stay):
            return _change(scene, option, capped=capped)
    return _idle(
        scene,
        f"budget_wait: the best plan would not earn its pause of "
        f"{affordable[0].migration.pause_s:.3g} s before its lead is gone",
    )


def earns_pause(
    lead: Lead,
    horizon_s: float,
    pause_s: float,
    worth_usd2_per_s: float,
    moved_usd2: float = 0.0,
) -> bool:
    """Whether a change of plan gains more within ``H_e D`` than its pause and its moves cost.

    Args:
        lead: J of the new plan above that of what runs.
        horizon_s: H_e D.
        pause_s: How long nothing runs.
        worth_usd2_per_s: V' times the larger of both rates.
        moved_usd2: Q times the dollars of the moves.

    Source: docs/model.md, section 4.8.
    """
    return lead.gain_usd2(horizon_s) > pause_s * worth_usd2_per_s + moved_usd2


def _pays(scene: _Scene, option: _Option, stay: _Option | None) -> bool:
    """Whether the plan's lead, while it lasts, is worth more than the change costs."""
    problem, new = scene.problem, option.candidate.estimate
    old = stay.candidate.estimate if stay else scene.cost.idle
    least_s = LEAST_PAUSE_SLOTS * scene.options.slot_s
    if stay and stay.candidate.plan.places == option.candidate.plan.places:
        least_s = 0.0  # shares follow the devices' speeds at once
    return earns_pause(
        scene.drift.lead(new, old),
        horizon_s=scene.options.hysteresis_slots * scene.options.slot_s,
        pause_s=max(option.migration.pause_s, least_s),
        worth_usd2_per_s=problem.penalty_weight * max(new.samples_per_s, old.samples_per_s),
        moved_usd2=problem.backlog_usd * move_usd(problem.cluster, option.migration),
    )


def idle_decision(incumbent: Plan | None, schedule: str, reason: str) -> Decision:
    """Nothing runs from now on, for this reason; ``schedule`` only where nothing ran before."""
    generation = 0
    if incumbent is not None:
        schedule = incumbent.schedule
        generation = incumbent.generation + (not incumbent.is_idle)
    return Decision("idle", Plan(generation, schedule), IDLE_ESTIMATE, reason)


def _idle(scene: _Scene, reason: str) -> Decision:
    if scene.ledger.budget_changed and scene.current:
        reason += "; the budget changed"
    return idle_decision(scene.problem.incumbent, scene.problem.schedules[0], reason)


def _keep(stay: _Option, *, best: _Option) -> Decision:
    reason = "keep: no other plan is better"
    if best is not stay:
        reason = (
            f"keep: a plan of {best.candidate.estimate.step_s:.4g} s a step would not earn its "
            f"pause of {best.migration.pause_s:.3g} s before its lead is gone"
        )
    plan, estimate = stay.candidate.plan, stay.candidate.estimate
    return Decision("keep", plan, estimate, reason, run_until_s=stay.run_until_s)


def _change(scene: _Scene, option: _Option, *, capped: bool) -> Decision:
    incumbent = scene.problem.incumbent
    plan = option.candidate.plan.with_generation(incumbent.generation + 1 if incumbent else 0)
    same_places = incumbent is not None and incumbent.places == plan.places
    kind: DecisionKind = "reassign" if same_places else "switch"
    causes = [*_causes(scene), *(["budget_cap_near"] if capped else [])]
    reason = f"{kind}: {'; '.join([*causes, _effect(scene, option)])}"
    return Decision(
        kind, plan, option.candidate.estimate, reason, option.migration, option.run_until_s
    )


def _causes(scene: _Scene) -> list[str]:
    """What in the incumbent is not as it was: devices that left or will, or that run slow."""
    problem, incumbent = scene.problem, scene.problem.incumbent
    if incumbent is None:
        return ["first plan"]
    if incumbent.is_idle:
        changed = ["the budget changed"] if scene.ledger.budget_changed else []
        return [*changed, "work is worth its price again"]
    changed = ["the budget changed"] if scene.ledger.budget_changed else []
    lost = [d for d in incumbent.device_ids if not problem.cluster.has(d)]
    before = dict(scene.expected.compute_s) if scene.expected else {}
    now = dict(scene.current.estimate.compute_s) if scene.current else {}
    slower = {d: now[d] / before[d] for d in incumbent.device_ids if before.get(d) and d in now}
    gone = [f"{d} {_why_lost(problem, d)}" for d in lost]
    return [*changed, *gone] + [
        f"{d} runs {ratio:.3g}x slower than predicted"
        for d, ratio in slower.items()
        if ratio >= scene.options.straggler.ratio
    ]


def _why_lost(problem: PlanningProblem, device_id: str) -> str:
    if device_id in problem.under_notice:
        return "is under notice"
    pool = pool_of(device_id)
    dear = any(offer.pool == pool and offer.is_too_dear for offer in problem.cluster.offers)
    return "costs more than its max_price_per_hour" if dear else "is gone"


def _effect(scene: _Scene, option: _Option) -> str:
    """What the new plan brings, beside the old one in the same state."""
    new, old = option.candidate.estimate, scene.current
    if old is None:
        return f"new plan takes {new.step_s:.4g} s a step"
    rate = new.samples_per_s / old.estimate.samples_per_s - 1
    money = new.cost_usd_per_s / old.estimate.cost_usd_per_s - 1
    each = (1 + money) / (1 + rate) - 1  # why a slower plan is taken
    return (
        f"new plan takes {new.step_s:.4g} s a step instead of {old.estimate.step_s:.4g} s "
        f"({100 * rate:+.1f} % samples/s, {100 * money:+.1f} % $/h"
        + (f", {100 * each:+.1f} % $/sample)" if rate < 0 else ")")
    )
