"""The first look at what is on offer: most samples per dollar, and what the budget buys at best."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.control.treasury import Treasury
from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.errors import InfeasibleError
from orchestrator.planning.blocks import without_surcharges
from orchestrator.planning.constraints import Row, broken
from orchestrator.planning.cost import CostModel
from orchestrator.planning.frontier import BudgetValue, budget_value

if TYPE_CHECKING:
    from orchestrator.core.plan import Plan

MAX_RATIO_ROUNDS = 4
"""Searches for the most samples per dollar, after that for the fastest plan."""

MAX_PRICE_ROUNDS = 4
"""Searches that look for the price of money at the budget."""

LATER_PART = 0.5
"""Of ``control.plan_deadline_s``: what the later searches for either share."""

OutOfTime = Callable[[], bool]
Propose = Callable[[PlanningProblem, OutOfTime], tuple[Candidate, ...]]


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found, at prices as they are in the long run, and the price last asked at."""

    found: tuple[Candidate, ...] = ()
    asked_samples_per_usd: float = 0.0
    is_cut_off: bool = False  # the search for the fastest plan, by its deadline


def survey(
    problem: PlanningProblem,
    treasury: Treasury,
    propose: Propose,
    rows: Sequence[Row],
    deadline: Callable[[float], OutOfTime],
) -> Survey:
    """Teach the treasury rho, the price of money and the rate at b.

    Before anything is spent, and again where the budget changes.

    The price of money is first raised to the best ratio found until no plan is worth more
    (Dinkelbach): a first V from the fastest plan alone would be too large. Then the linear
    program over the plans found names a price at which the search looks for plans that are
    still missing, until the price stays (column generation). In the long run blocks of billing
    are used to their end; at first none is held, and the backlog opens at the price at which
    beginning them is worth it.

    Args:
        problem: The first slot, or the first one of a changed budget.
        treasury: Learns, and opens the backlog.
        propose: Candidates of the strategy at the price of money of a problem.
        rows: The user's limits; what breaks them counts for rho only.
        deadline: Starts a part of ``control.plan_deadline_s``: the search for the fastest plan
            has all of it.

    Raises:
        InfeasibleError: At the first look, if not even idling would keep the average.

    Source: docs/model.md, section 4.4.
    """
    first, problem = problem, replace(problem, cluster=without_surcharges(problem.cluster))
    cost = CostModel(problem)
    first_look = not treasury.best_ratio_samples_per_usd
    if first_look and treasury.may_idle and cost.standing_usd_per_s > problem.budget_usd_per_s:
        raise InfeasibleError(standing_text(cost.standing_usd_per_s, problem.budget_usd_per_s))
    found: dict[Plan, Candidate] = {}

    def ask(price_samples_per_usd: float, out_of_time: OutOfTime) -> None:
        priced = replace(problem, penalty_weight=1.0, backlog_usd=price_samples_per_usd)
        for candidate in propose(priced, out_of_time):
            found.setdefault(candidate.plan, candidate)

    asked, out_of_time = 0.0, deadline(1.0)
    ask(asked, out_of_time)
    is_cut_off, out_of_time = out_of_time(), deadline(LATER_PART)
    for _ in range(MAX_RATIO_ROUNDS):
        if not treasury.learn(c.estimate for c in found.values()) or out_of_time():
            break
        asked = treasury.best_ratio_samples_per_usd
        ask(asked, out_of_time)
    runs = any(not candidate.plan.is_idle for candidate in found.values())
    if not runs or not treasury.best_ratio_samples_per_usd:
        return Survey(tuple(found.values()))  # nothing that runs: there is nothing to price
    value = _value(cost, found.values(), rows, may_idle=treasury.may_idle)
    out_of_time = deadline(LATER_PART)
    for _ in range(MAX_PRICE_ROUNDS):
        if not value.price_of_money_samples_per_usd or out_of_time():
            break  # the fastest plan is within the budget
        asked = value.price_of_money_samples_per_usd
        ask(asked, out_of_time)
        before, value = value, _value(cost, found.values(), rows, may_idle=treasury.may_idle)
        if value == before:
            break
    treasury.learn(c.estimate for c in found.values())
    anew = _value(CostModel(first), found.values(), rows, may_idle=treasury.may_idle)
    treasury.open(value, anew.price_of_money_samples_per_usd)
    asked = asked if value.price_of_money_samples_per_usd else 0.0
    return Survey(tuple(found.values()), asked, is_cut_off)


def standing_text(standing_usd_per_s: float, budget_usd_per_s: float) -> str:
    """Why an average cannot be kept that is less than what devices cost that do nothing."""
    return (
        "the devices that are billed while present cost "
        f"{standing_usd_per_s / budget_usd_per_s:.3g} times "
        "budget.average_per_hour_usd even when nothing runs; raise it, offer fewer "
        "devices, or write billed: while_used if unused ones are given back"
    )


def _value(
    cost: CostModel, found: Iterable[Candidate], rows: Sequence[Row], *, may_idle: bool
) -> BudgetValue:
    """The optimum at what J counts in the model's problem: blocks begun, where it has them."""
    estimates = [
        replace(
            c.estimate,
            cost_usd_per_s=c.estimate.cost_usd_per_s + cost.surcharge_usd_per_s(c.plan.device_ids),
        )
        for c in found
        if not c.plan.is_idle and broken(cost, rows, c) is None
    ]
    state = [*estimates, cost.idle] if may_idle or not estimates else estimates
    return budget_value([state], cost.problem.budget_usd_per_s)
