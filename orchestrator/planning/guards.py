"""The hard cap: the most a plan may be billed, and how long it may run before the money is gone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.core.cluster import ClusterState, Offer
from orchestrator.core.plan import Migration
from orchestrator.core.slot import NO_MIGRATION, Candidate, PlanningProblem
from orchestrator.planning.bisection import bracket

OVERRUN_STEPS = 2.0
"""Steps that devices may be held after the slot is closed: one under way, one voted on."""


RUN_TOLERANCE = 1e-3
"""Relative; how closely the longest run that is paid for is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """What the guards know of the money; seconds are those of the run's clock."""

    spent_usd: float
    """Billed so far."""

    budget_usd: float
    """What the average allows up to now: ``b t``, or the integral of b where it was changed."""

    line_usd: float
    """``V rho_hat - Q_0``: above ``b t`` by more than this, only idling is allowed."""

    total_usd: float | None = None
    """Hard cap on the whole run."""

    reserve_usd: float = 0.0
    """Kept back for the last checkpoint and the teardown."""

    allow_idle: bool = True
    """False: plans with J below idle run too; then only ``total_usd`` protects."""

    paid_until_s: Mapping[str, float] = field(default_factory=dict)
    """Devices whose billing goes on, and up to when they are paid ahead."""

    running_step_s: float = 0.0
    """Of the incumbent: devices that a new plan leaves are held until its last step ends."""

    budget_changed: bool = False
    """Whether it changed a few slots ago at most, and no plan has followed it yet."""

    @property
    def left_usd(self) -> float:
        """What work may still cost under the hard cap."""
        if self.total_usd is None:
            return math.inf
        return self.total_usd - self.spent_usd - self.reserve_usd


def slot_bill_usd(
    problem: PlanningProblem,
    candidate: Candidate,
    duration_s: float,
    migration: Migration = NO_MIGRATION,
    *,
    ledger: LedgerView,
) -> float:
    """Most that ``duration_s`` of a plan may be billed: C+ of the hard cap, C_max of G1.

    Devices count at the highest price they may have, with the blocks that are paid ahead: those
    held already begin another one only after they are paid for, and those that the plan leaves
    count until they have handed over. A change of price ends the slot, so an unforeseen
    one is met by the overrun only.

    Source: docs/model.md, sections 3.7 and 4.5.
    """
    cluster, estimate = problem.cluster, candidate.estimate
    used = set(candidate.plan.device_ids)
    overrun_s = OVERRUN_STEPS * estimate.step_s
    dollars = [
        estimate.egress_usd_per_s * (duration_s + overrun_s),
        move_usd(cluster, migration),
    ]
    for device in cluster.devices:
        offer, held_s, late_s = cluster.offer(device.pool), duration_s + overrun_s, overrun_s
        paid_until_s = ledger.paid_until_s.get(device.device_id)
        if device.device_id not in used and offer.billed == "while_used":
            if paid_until_s is None:
                continue
            late_s = OVERRUN_STEPS * ledger.running_step_s
            held_s = migration.pause_s + late_s
        if paid_until_s is None:
            billed_s = _fresh_s(offer, held_s)
        else:
            billed_s = _quanta_s(offer, max(0.0, cluster.now_s + held_s - paid_until_s))
        foreseen, worst = _upper_prices_usd_per_s(offer)
        dollars += [foreseen * billed_s, (worst - foreseen) * late_s]
    return math.fsum(dollars)


def move_usd(cluster: ClusterState, migration: Migration) -> float:
    """Egress dollars of the layers that a change of plan moves."""
    return math.fsum(
        move.size_bytes
        * cluster.link(cluster.device(move.source), cluster.device(move.target)).egress_usd_per_byte
        for move in migration.moves
        if cluster.has(move.source) and cluster.has(move.target)
    )


def affordable_s(
    problem: PlanningProblem,
    candidate: Candidate,
    migration: Migration = NO_MIGRATION,
    *,
    ledger: LedgerView,
    slot_s: float,
) -> float:
    """How long the plan may run from now on: ``slot_s`` and its pause when all of it fits.

    Returns 0 when the money does not even pay for the pause and one step.
    """

    def fits(duration_s: float) -> bool:
        bill_usd = slot_bill_usd(problem, candidate, duration_s, migration, ledger=ledger)
        return bill_usd <= ledger.left_usd

    longest_s = slot_s + migration.pause_s
    if math.isinf(ledger.left_usd) or fits(longest_s):
        return longest_s
    shortest_s = candidate.estimate.step_s + migration.pause_s
    if not fits(shortest_s):
        return 0.0
    return bracket(
        lambda duration_s: not fits(duration_s), shortest_s, longest_s, tolerance=RUN_TOLERANCE
    )[0]


def _fresh_s(offer: Offer, duration_s: float) -> float:
    """Billed seconds of a device held anew, in whole blocks; the first lasts its minimum."""
    first_s = offer.minimum_s if offer.minimum_s > offer.quantum_s else 0.0
    return first_s + _quanta_s(offer, max(0.0, duration_s - first_s))


def _quanta_s(offer: Offer, duration_s: float) -> float:
    if offer.quantum_s == 0:
        return duration_s
    return math.ceil(duration_s / offer.quantum_s) * offer.quantum_s


def _upper_prices_usd_per_s(offer: Offer) -> tuple[float, float]:
    """The price to count with in the slot, and the one after an unforeseen jump."""
    foreseen = offer.spot or offer.max_price_usd_per_s is not None
    return offer.upper_usd_per_s if foreseen else offer.price_usd_per_s, offer.upper_usd_per_s
