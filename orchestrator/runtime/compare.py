"""Strategies side by side: each one's plan, what it promises, and what a short run of it gives."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.core.plan import Plan
from orchestrator.core.slot import Candidate, PlanningProblem, StepReport, first_problem
from orchestrator.planning.frontier import fastest_within
from orchestrator.runtime.news import Comparing
from orchestrator.runtime.rig import Rig
from orchestrator.strategies.registry import make_strategy

WARM_UP_STEPS = 2
"""First steps of a short run that are not counted: allocators and connections warm up."""

MONEY_PRICES = 12
"""Prices of money, from nothing up, at which the planner is asked for cheaper plans."""

EQUAL_COST_RATIO = 0.001
"""Costs per hour closer than this are equal: egress makes the last digits differ."""

JOINT = "joint"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One plan, predicted and measured. Money in dollars per true hour."""

    strategy: str
    plan: Plan
    predicted_step_s: float
    measured_step_s: float
    samples_per_s: float
    cost_per_hour_usd: float
    at_cost_of: str = ""
    """The strategy whose cost per hour this plan was not allowed to exceed; empty: no limit."""

    num_late: int = 0
    num_operations: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A plan to be measured."""

    strategy: str
    candidate: Candidate
    at_cost_of: str = ""


COMPARE_FILE = "compare.json"
"""What strategies promised and gave in short runs before the first step."""

Propose = Callable[[str, PlanningProblem], tuple[Candidate, ...]]


def entries(problem: PlanningProblem, others: Sequence[str], propose: Propose) -> tuple[Entry, ...]:
    """The plans worth measuring.

    First joint's and the others' with money no object; then, for each of the others, the
    fastest plan of joint's that costs no more per hour.

    Args:
        problem: With the budget not binding (no backlog).
        others: Names of the strategies to compare with.
        propose: Candidates of a strategy for a problem, best first.
    """
    free = replace(problem, backlog_usd=0.0)
    joint = _best(propose(JOINT, free))
    if joint is None:
        return ()
    found = [Entry(JOINT, joint)]
    for name in others:
        candidate = _best(propose(name, free))
        if candidate is not None:
            found.append(Entry(name, candidate))
    frontier = [joint, *_cheaper(problem, joint, propose)]
    for entry in tuple(found[1:]):
        limit = entry.candidate.estimate.cost_usd_per_s * (1.0 + EQUAL_COST_RATIO)
        if best := fastest_within(frontier, limit):
            found.append(Entry(JOINT, best, at_cost_of=entry.strategy))
    return tuple(found)


def measure(
    found: Iterable[Entry],
    run: Callable[[Plan, int], Sequence[StepReport]],
    *,
    num_steps: int,
    per_hour: float,
) -> tuple[Comparison, ...]:
    """Run every plan once for ``num_steps`` steps and put what they took beside the promise.

    Args:
        found: The plans.
        run: Runs a plan for some steps and returns all devices' reports; none: it cannot run.
        num_steps: Steps of each plan.
        per_hour: True dollars per hour of one dollar per second of the run.
    """
    measured: dict[Plan, tuple[StepReport, ...]] = {}
    rows = []
    for number, entry in enumerate(found):
        plan, estimate = entry.candidate.plan, entry.candidate.estimate
        work = plan.with_generation(0)
        if work not in measured:
            measured[work] = tuple(run(plan.with_generation(number), num_steps))
        reports = measured[work]
        if not reports:
            continue  # it wants a device that was lost: there is nothing to compare
        step_s = _median_step_s(reports)
        rows.append(
            Comparison(
                strategy=entry.strategy,
                plan=plan,
                predicted_step_s=estimate.step_s,
                measured_step_s=step_s,
                samples_per_s=plan.num_samples / step_s,
                cost_per_hour_usd=estimate.cost_usd_per_s * per_hour,
                at_cost_of=entry.at_cost_of,
                num_late=sum(r.num_late for r in reports),
                num_operations=sum(r.num_operations for r in reports),
            )
        )
    return tuple(rows)


def _cheaper(problem: PlanningProblem, joint: Candidate, propose: Propose) -> tuple[Candidate, ...]:
    """Joint's plans as money gets dearer: the backlog rises until idling would win."""
    worth = problem.penalty_weight * joint.estimate.samples_per_s / joint.estimate.cost_usd_per_s
    found: list[Candidate] = []
    for share in range(1, MONEY_PRICES + 1):
        dear = replace(problem, backlog_usd=worth * share / MONEY_PRICES)
        found += [c for c in propose(JOINT, dear) if not c.plan.is_idle]
    return tuple(found)


def _best(candidates: Iterable[Candidate]) -> Candidate | None:
    return next((c for c in candidates if not c.plan.is_idle), None)


def _median_step_s(reports: Sequence[StepReport]) -> float:
    by_step: dict[int, float] = {}
    for report in reports:
        by_step[report.step] = max(by_step.get(report.step, 0.0), report.step_s)
    counted = [step_s for step, step_s in by_step.items() if step >= WARM_UP_STEPS]
    return median(counted or by_step.values())


def compare_once(
    config: RunConfig,
    comparing: Comparing,
    rig: Rig,
    run: Callable[[Plan, int], tuple[StepReport, ...]],
    say: Callable[[str], None],
) -> None:
    """Measure plans of several strategies on the started workers; once in a run.

    Args:
        config: The whole file.
        comparing: Which strategies, and how long.
        rig: The workers and what they are.
        run: Runs a plan for so many steps that count for nothing.
        say: Takes one line on what is being done.
    """
    url = storage.join(config.run.run_url, COMPARE_FILE)
    if storage.exists(url):
        return
    speedup = config.emulation.billing_speedup
    problem = first_problem(
        rig.cluster,
        rig.model,
        config.training,
        budget_usd_per_s=config.budget.average_per_hour_usd / 3600.0 * speedup,
        seed=config.run.seed,
    )
    say(f"comparing {len(comparing.strategies)} strategies with joint")
    rows: tuple[Comparison, ...] = measure(
        entries(problem, comparing.strategies, _propose),
        run,
        num_steps=comparing.num_steps,
        per_hour=3600.0 / speedup,
    )
    storage.write_json(url, rows)


def _propose(name: str, problem: PlanningProblem) -> tuple[Candidate, ...]:
    return make_strategy(name).propose(problem, out_of_time=lambda: False)
