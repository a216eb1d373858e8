"""The user's limits as prices, for a search that knows nothing but money."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from orchestrator.core.cluster import ClusterState, Device, Link, Offer
from orchestrator.core.slot import IDLE_ESTIMATE, Candidate, PlanningProblem
from orchestrator.errors import InfeasibleError
from orchestrator.planning.constraints import Breach, Row, breaches, broken
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime

LEAST_PRICE_RATIO = 1e-9
"""Of an offer's price: what stands for nothing, as an offer must cost something."""

FREE_MONEY_SAMPLES_PER_USD = 1e-3
"""Stands for a price of money of 0."""

HELD_BACK_RATIO = 0.01
"""Of the best score: what limits may cost before the search is told of them."""

MAX_PRICE_ROUNDS = 4
"""Searches at prices of the rows; each halves the stretch in which the right one lies."""

LEAST_LIMIT_RATIO = 0.1
"""Of what a plan uses of a row: a limit below this is priced as if it were this."""


def search_within(
    propose: Callable[[PlanningProblem], Sequence[Candidate]],
    cost: CostModel,
    rows: Sequence[Row],
    found: Sequence[Candidate],
    out_of_time: Callable[[], bool],
) -> tuple[Candidate, ...]:
    """Candidates of further searches, in which the rows that the best of ``found`` break cost.

    The first price makes any breach worth less than idle; it is then halved towards the one
    at which the best plan just obeys. Candidates come back as what they are: in times and
    money of the problem itself.

    Args:
        propose: A strategy's search.
        cost: Of the slot.
        rows: The user's limits.
        found: Candidates of the search without prices.
        out_of_time: Says when to stop; the first search is always made.

    Source: docs/model.md, section 5.2.
    """
    running = [c for c in found if not c.plan.is_idle]
    worst: dict[str, Breach] = {}
    for candidate in running:
        for breach in breaches(cost, rows, candidate):
            known = worst.setdefault(breach.row.name, breach)
            if excess(breach) > excess(known):
                worst[breach.row.name] = breach
    rate = max((c.estimate.samples_per_s for c in running), default=0.0)
    more: dict[tuple[object, ...], Candidate] = {}
    low, high, factor = 0.0, 1.0, 1.0
    for _ in range(MAX_PRICE_ROUNDS if worst else 0):
        priced = price_rows(cost.problem, tuple(worst.values()), rate, factor=factor)
        proposed = [c for c in propose(priced) if not c.plan.is_idle]
        for c in proposed:
            estimate = retime(cost, c.plan.groups, c.plan.schedule)
            key = (c.plan.schedule, c.plan.groups)
            more.setdefault(key, Candidate(c.plan, estimate, cost.score(estimate)))
        if out_of_time():
            break
        best = proposed[0].plan if proposed else None
        obeys = best and broken(cost, rows, more[best.schedule, best.groups]) is None
        low, high = (low, factor) if obeys else (factor, high)
        if low >= high:
            break  # not even the highest price keeps the best plan within the limits
        factor = (low + high) / 2
    return tuple(more.values())


def is_held_back(
    cost: CostModel, found: Sequence[Candidate], obedient: Sequence[Candidate]
) -> bool:
    """Whether limits cost so much that a search that knows them may find something better.

    Not where even without them idling is better.
    """

    def best(candidates: Sequence[Candidate]) -> float:
        running = (c for c in candidates if not c.plan.is_idle)
        return max((cost.score(c.estimate) for c in running), default=-inf)

    free, bound = best(found), best(obedient)
    if bound == -inf:
        return free > -inf
    return free > cost.score(IDLE_ESTIMATE) and bound < free - HELD_BACK_RATIO * abs(free)


def price_rows(
    problem: PlanningProblem,
    broken: Sequence[Breach],
    samples_per_s: float,
    *,
    factor: float = 1.0,
) -> PlanningProblem:
    """The problem with prices under which breaking a row is not worth it.

    Offers and egress are scaled to ``J' = V' r - Q c - V' sum_j mu_j use_j``. A row of spending
    has ``mu = samples_per_s / limit``: whoever uses more than the limit is worth less than
    idle, however fast. A least share is one of samples that enter the model elsewhere, at most
    ``1 - limit`` of all: each of them costs ``mu = 1 / (1 - limit)``, on whatever devices it
    goes on.

    Args:
        problem: The slot.
        broken: The rows, and the most that a plan used of each.
        samples_per_s: Rate of the fastest plan.
        factor: By which the prices are less than that.

    Source: docs/model.md, section 5.2.
    """
    cluster = problem.cluster
    penalties: dict[str, float] = {}  # by pool, samples/s a device
    for breach in broken:
        for pool, penalty in _device_penalties(cluster, breach, samples_per_s).items():
            penalties[pool] = penalties.get(pool, 0.0) + factor * penalty
    # A backlog of nothing could not price anything; this is next to nothing.
    money = max(problem.backlog_usd, FREE_MONEY_SAMPLES_PER_USD * problem.penalty_weight)
    weight, backlog_usd = problem.penalty_weight, problem.backlog_usd

    def priced_offer(offer: Offer) -> Offer:
        penalty = penalties.get(offer.pool, 0.0)
        price = (backlog_usd * offer.price_usd_per_s + weight * penalty) / money
        least = LEAST_PRICE_RATIO * offer.price_usd_per_s
        billed = "while_used" if penalty else offer.billed
        return replace(offer, price_usd_per_s=max(price, least), billed=billed)

    def priced_link(link: Link) -> Link:
        if not link.egress_usd_per_byte or not any(b.row.kind == "egress" for b in broken):
            return link
        mu = factor * sum(_link_price(link, breach, samples_per_s) for breach in broken)
        return replace(
            link, egress_usd_per_byte=link.egress_usd_per_byte * (backlog_usd + weight * mu) / money
        )

    def priced_device(device: Device) -> Device:
        mu = factor * sum(_entry_price(device, breach.row) for breach in broken)
        return replace(device, entry_usd_per_sample=weight * mu / money) if mu else device

    return replace(
        problem,
        backlog_usd=money,
        cluster=replace(
            cluster,
            devices=tuple(map(priced_device, cluster.devices)),
            offers=tuple(map(priced_offer, cluster.offers)),
            links=tuple(map(priced_link, cluster.links)),
        ),
    )


def excess(breach: Breach) -> float:
    """By which factor a plan misses a limit, less one."""
    used, limit = breach.used, breach.row.limit
    high, low = (limit, used) if breach.row.kind == "share" else (used, limit)
    return high / low - 1.0 if low > 0 else inf


def nearest_breach(
    cost: CostModel, rows: Sequence[Row], candidates: Sequence[Candidate]
) -> str | None:
    """What the candidate that comes nearest to the limits still breaks, and by how much."""
    broken = [breaches(cost, rows, c) for c in candidates if not c.plan.is_idle]
    nearest = min((b for b in broken if b), key=lambda b: max(map(excess, b)), default=())
    return "; ".join(breach.text for breach in nearest) or None


def refusal(nearest: str | None) -> InfeasibleError:
    """The error that no plan keeps the limits; ``nearest`` as of ``nearest_breach``."""
    return InfeasibleError(
        "no plan found obeys every limit of budget.limits; the one that comes nearest breaks "
        f"{nearest}; raise it, or lower what min_share asks"
    )


def _device_penalties(
    cluster: ClusterState, breach: Breach, samples_per_s: float
) -> dict[str, float]:
    """Samples/s that a device of each pool is charged for its part in breaking a row."""
    row = breach.row
    if row.kind != "zone":
        return {}
    # What is billed anyway costs its zone no more when it is used.
    pools = {d.pool for d in cluster.devices if d.zone == row.where}
    offers = [o for o in map(cluster.offer, sorted(pools)) if o.billed == "while_used"]
    least = min((o.price_usd_per_s for o in offers), default=0.0)
    return {o.pool: samples_per_s * o.price_usd_per_s / max(row.limit, least) for o in offers}


def _entry_price(device: Device, row: Row) -> float:
    """What a sample that enters the model on a device is charged, in samples."""
    if row.kind != "share" or device.pool == row.where:
        return 0.0
    return 1.0 / max(1.0 - row.limit, LEAST_LIMIT_RATIO)


def _link_price(link: Link, breach: Breach, samples_per_s: float) -> float:
    """Samples per dollar of egress on a link that counts in a row.

    Egress that leaves a limited zone has none: the price of its devices is the larger part,
    and other links would mean other times to look up.
    """
    if breach.row.kind != "egress" or not link.egress_usd_per_byte:
        return 0.0
    return samples_per_s / max(breach.row.limit, LEAST_LIMIT_RATIO * breach.used)
