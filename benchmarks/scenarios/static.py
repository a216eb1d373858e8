"""Scenarios where nothing changes: every strategy and the strong rivals on one problem.

Rates are at equal cost: a plan that costs more than the budget runs b/c of the time. Ours may
mix plans over time, as its control law does; its rate is the best mix of what it proposed, asked
again and again at the price of money that its plans so far make, which its queue comes to.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from benchmarks.exhaustive import Exhaustive, TooLargeError
from benchmarks.plan_time import within
from benchmarks.scenarios.files import HOUR_S, Case, ScenarioFile
from benchmarks.scenarios.grids import Groups, two_bw, uniform_grid
from benchmarks.scenarios.rows import OURS, SEVERAL_SEARCHES, Role, Row
from orchestrator.core.model import microbatch_sizes
from orchestrator.core.slot import IDLE_ESTIMATE, Candidate, PlanningProblem, first_problem
from orchestrator.errors import InfeasibleError
from orchestrator.planning.cost import CostModel
from orchestrator.planning.frontier import BudgetValue, budget_value
from orchestrator.strategies.explorer import candidate_of
from orchestrator.strategies.registry import STRATEGIES, make_strategy
from orchestrator.whatif.loops import figures_of

DEADLINE_S, QUICK_DEADLINE_S = 1.0, 0.2
"""CPU seconds that a strategy may search, unless the file says otherwise."""

NUM_PRICES = 4
"""So often ours is asked at the price of money that its plans so far make, where budgets bind. Who
searches at several prices then gets as much time, and so do always the grids that try all."""

RECIPE_NAMES = ("even-split", "proportional", "even-pipeline", "balanced-pipeline", "do-nothing")
"""Strategies that do not search; the others ask the joint search, at their own price of money."""


@dataclass(frozen=True, slots=True)
class Contest:
    """One case's problem and how long each may search."""

    case: Case
    problem: PlanningProblem
    deadline_s: float

    @property
    def budget_usd_per_s(self) -> float:
        """What may be spent."""
        return self.problem.budget_usd_per_s

    def row(self, strategy: str, role: Role, found: Candidate | None, note: str = "") -> Row:
        """A plan at equal cost; None: it has none that fits."""
        if found is None or found.plan.is_idle:
            return Row(self.case.file.name, self.case.name, strategy, role, 0.0, note=note)
        cost = found.estimate.cost_usd_per_s
        duty = min(1.0, self.budget_usd_per_s / cost * (1 + 1e-9))
        rate = found.estimate.samples_per_s * duty
        return Row(
            self.case.file.name, self.case.name, strategy, role, rate, rate, rate,
            cost * HOUR_S, duty, "; ".join(filter(None, (note, shape(found)))),
        )  # fmt: skip

    def propose(self, name: str, problem: PlanningProblem, *, searches: int = 1) -> list[Candidate]:
        """What a strategy offers that runs; a recipe gets the largest microbatch that fits it.

        ``searches``: for how many it has time.
        """
        limit_s = searches * self.deadline_s
        for size in microbatch_sizes(problem.microbatch_samples):
            sized = replace(problem, microbatch_samples=size)
            try:
                found = make_strategy(name).propose(sized, out_of_time=within(limit_s))
            except InfeasibleError:
                continue
            return [c for c in found if not c.plan.is_idle]
        return []


def problem_of(case: Case) -> PlanningProblem:
    """The first slot of a case."""
    config = case.config
    cluster, model = figures_of(config, case.profile)
    return first_problem(
        cluster,
        model,
        config.training,
        max_team=config.control.max_team,
        budget_usd_per_s=config.budget.average_per_hour_usd / HOUR_S,
    )


def shape(found: Candidate) -> str:
    """A plan in few words."""
    groups = found.plan.groups
    stages = sorted({len(g.stages) for g in groups})
    teams = sorted({s.team.size for g in groups for s in g.stages})
    devices = len(found.plan.device_ids)
    return (
        f"{devices} devices, {len(groups)} groups of {_range(stages)} stages, teams {_range(teams)}"
    )


def _range(values: list[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}"


def run(file: ScenarioFile, options: argparse.Namespace) -> list[Row]:
    """All cases."""
    return [row for case in file.cases(quick=options.quick) for row in run_case(case, options)]


def contest_of(case: Case, options: argparse.Namespace) -> Contest:
    """A case with the deadline of the long or the short form."""
    default_s = QUICK_DEADLINE_S if options.quick else DEADLINE_S
    deadline_s = float(case.get("quick_deadline_s" if options.quick else "deadline_s", default_s))
    return Contest(case, problem_of(case), deadline_s)


def run_case(case: Case, options: argparse.Namespace) -> list[Row]:
    """Ours, every strategy of the registry, the strong rivals, the optimum where feasible."""
    contest = contest_of(case, options)
    ours, money_binds = _ours(contest)
    # Where money does not bind most of the registry is the joint search once more: once will do.
    every = case.get("quick", False) and not options.quick
    names = tuple(STRATEGIES) if every else (*RECIPE_NAMES, "cheapest", "greedy")
    rows = [ours, *_registry(contest, names, ours if not money_binds else None), *_strong(contest)]
    if case.get("exhaustive", False):
        rows.append(_optimum(contest, ours))
    return rows


def _ours(contest: Contest) -> tuple[Row, bool]:
    """Our row, and whether money binds."""
    found = contest.propose(OURS, contest.problem)
    best = max(found, key=lambda c: c.estimate.samples_per_s)
    row = contest.row(OURS, "ours", best, f"{contest.case.source} times")
    if best.estimate.cost_usd_per_s <= contest.budget_usd_per_s * (1 + 1e-9):
        return row, False
    value = _best_mix(contest, found)
    for _ in range(NUM_PRICES):
        backlog_usd = contest.problem.penalty_weight * value.price_of_money_samples_per_usd
        found += contest.propose(OURS, replace(contest.problem, backlog_usd=backlog_usd))
        value = _best_mix(contest, found)
    mixed = replace(
        row, samples_per_s=value.samples_per_s, low=value.samples_per_s, high=value.samples_per_s,
        usd_per_hour=contest.budget_usd_per_s * HOUR_S, duty=1.0,
        note=f"{contest.case.source} times; the best mix over time",
    )  # fmt: skip
    return mixed, True


def _best_mix(contest: Contest, found: Iterable[Candidate]) -> BudgetValue:
    """What plans bring that are mixed over time within the budget, and the price of money then."""
    plans = [IDLE_ESTIMATE, *(c.estimate for c in found)]
    return budget_value([plans], contest.budget_usd_per_s)


def _registry(contest: Contest, names: Iterable[str], same: Row | None) -> Iterator[Row]:
    """The other strategies.

    ``same``: our row where money binds nothing; whoever asks the same search then has it. Where
    money binds, who searches at several prices may search as often as ours.
    """
    spot = any(offer.spot for offer in contest.problem.cluster.offers)
    for name in names:
        if name == OURS:
            continue
        searches_alike = name not in (*RECIPE_NAMES, "cheapest") and not (
            spot and name == "on-demand"
        )
        if same and searches_alike:
            yield replace(same, strategy=name, role="same", note="the joint search")
            continue
        searches = 1 + NUM_PRICES if not same and name in SEVERAL_SEARCHES else 1
        found = contest.propose(name, contest.problem, searches=searches)
        best = max(found, key=lambda c: c.estimate.samples_per_s, default=None)
        note = "" if best or name == "do-nothing" else "no plan fits"
        if best and best.estimate.cost_usd_per_s > contest.budget_usd_per_s * (1 + 1e-6):
            note = "over budget, duty-cycled"
        yield contest.row(name, "baseline", best, note)


def _strong(contest: Contest) -> Iterator[Row]:
    for rival in contest.case.get("strong", ()):
        name = str(rival["name"])
        if "joint_on" in rival:
            yield contest.row(name, "strong", joint_on(contest, rival["joint_on"]))
            continue
        recipe = RECIPES[rival["recipe"]]
        problem = replace(contest.problem, max_team=int(rival.get("max_team", 8)))
        groups = recipe(problem, within((1 + NUM_PRICES) * contest.deadline_s))
        found = None
        if groups:
            found = candidate_of(CostModel(problem), groups, problem.schedules[0])
        yield contest.row(name, "strong", found, "" if groups else "no plan fits")


def joint_on(contest: Contest, pools: list[str]) -> Candidate | None:
    """The joint strategy on some pools alone."""
    cluster = contest.problem.cluster
    part = replace(cluster, devices=tuple(d for d in cluster.devices if d.pool in pools))
    if not part.devices:
        return None
    found = contest.propose(OURS, replace(contest.problem, cluster=part))
    return max(found, key=lambda c: c.estimate.samples_per_s, default=None)


def _optimum(contest: Contest, ours: Row) -> Row:
    """The best plan of all; cost does not count in these cases."""
    reference = Exhaustive(contest.problem)
    row = replace(ours, strategy="optimum", role="reference", note="exhaustive")
    try:
        best = reference.best(ours.samples_per_s)
    except TooLargeError:
        return replace(row, samples_per_s=0.0, low=0.0, high=0.0, note="too large to try all")
    regret = 100.0 * (best / ours.samples_per_s - 1.0)
    note = f"exhaustive, {reference.num_groupings} groupings; regret of ours {regret:.3g} %"
    return replace(row, samples_per_s=best, low=best, high=best, note=note)


Recipe = Callable[[PlanningProblem, Callable[[], bool]], Groups | None]

RECIPES: dict[str, Recipe] = {"uniform-grid": uniform_grid, "2bw": two_bw}
