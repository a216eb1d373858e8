"""What a budget buys at best: rate and price of money of a small linear program over plans."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

from orchestrator.core.slot import StepEstimate

COST_TOLERANCE = 1e-9
"""Relative: costs and limits are sums of many prices."""


@dataclass(frozen=True, slots=True)
class BudgetValue:
    """Optimum of the linear program at one budget."""

    price_of_money_samples_per_usd: float
    """lambda: what one more dollar would bring; 0 where the budget does not bind."""

    samples_per_s: float
    """r*: the best average rate within the budget."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A piece of a state's frontier: so much more money brings so many more samples."""

    cost_usd_per_s: float
    samples_per_s: float

    @property
    def slope(self) -> float:
        return self.samples_per_s / self.cost_usd_per_s


class Estimated(Protocol):
    """What has an estimate: candidates of a slot, trials of a search."""

    @property
    def estimate(self) -> StepEstimate:
        """What the cost model says of it."""


PlanT = TypeVar("PlanT", bound=Estimated)


def fastest_within(plans: Iterable[PlanT], cost_usd_per_s: float) -> PlanT | None:
    """The fastest plan that runs and costs no more; None when there is none."""
    most = cost_usd_per_s * (1.0 + COST_TOLERANCE)
    within = [p for p in plans if p.estimate.step_s > 0 and p.estimate.cost_usd_per_s <= most]
    return max(within, key=lambda p: p.estimate.samples_per_s, default=None)


def budget_value(
    states: Sequence[Iterable[StepEstimate]],
    budget_usd_per_s: float,
    *,
    shares: Sequence[float] | None = None,
) -> BudgetValue:
    """Best average rate of plans that are mixed over time, at an average cost of the budget.

    max sum pi_s r_sa y_sa  subject to  sum pi_s c_sa y_sa <= b, sum_a y_sa = 1, y >= 0. With one
    budget row the optimum walks the concave frontiers of all states, steepest piece first, so no
    solver is needed; the price is the slope of the piece on which the money ends.

    Args:
        states: Per state the plans that may run; idling is one of them (rate 0 at what is billed
            anyway).
        budget_usd_per_s: b.
        shares: pi_s, how much of the time each state takes; all alike when absent.

    Returns:
        The optimum. A budget below the least cost has the price of the first piece.

    Raises:
        ValueError: If a state has no plan.

    Source: docs/model.md, section 4.4.
    """
    weights = shares or [1.0 / len(states)] * len(states)
    left_usd_per_s, rate = budget_usd_per_s, 0.0
    pieces: list[_Segment] = []
    for share, estimates in zip(weights, states, strict=True):
        start, segments = _frontier(estimates)
        left_usd_per_s -= share * start.cost_usd_per_s
        rate += share * start.samples_per_s
        pieces += [
            _Segment(share * s.cost_usd_per_s, share * s.samples_per_s) for s in segments if share
        ]
    price = 0.0
    for piece in sorted(pieces, key=lambda p: -p.slope):
        part = min(1.0, max(0.0, left_usd_per_s / piece.cost_usd_per_s))
        rate += part * piece.samples_per_s
        left_usd_per_s -= piece.cost_usd_per_s
        if left_usd_per_s < -COST_TOLERANCE * budget_usd_per_s:
            price = piece.slope
            break
    return BudgetValue(price, rate)


def _frontier(estimates: Iterable[StepEstimate]) -> tuple[_Segment, list[_Segment]]:
    """The cheapest plan, and the pieces of the concave frontier from it upwards."""
    points = sorted(
        {(e.cost_usd_per_s, e.samples_per_s) for e in estimates}, key=lambda p: (p[0], -p[1])
    )
    if not points:
        raise ValueError("a state without any plan has no frontier; idling is a plan, too")
    hull = [points[0]]
    for point in points[1:]:
        if point[1] <= hull[-1][1] * (1.0 + COST_TOLERANCE):
            continue
        while len(hull) > 1 and _slope(hull[-1], point) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    steps = [_Segment(later[0] - first[0], later[1] - first[1]) for first, later in pairwise(hull)]
    return _Segment(*points[0]), steps


def _slope(first: tuple[float, float], later: tuple[float, float]) -> float:
    return (later[1] - first[1]) / (later[0] - first[0])
