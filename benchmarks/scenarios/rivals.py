"""Strong rivals of the changing scenarios, as strategies: same problem, same loop, same ledger."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import exp

import numpy as np
import simpy

from benchmarks.scenarios.grids import even_chain
from orchestrator.core.cluster import ClusterState, Device, Team, make_team
from orchestrator.core.model import microbatch_sizes
from orchestrator.core.plan import Group
from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.errors import InfeasibleError
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime
from orchestrator.planning.shares import with_share
from orchestrator.planning.waterfill import as_microbatches
from orchestrator.simulation.streams import Process
from orchestrator.simulation.world import World
from orchestrator.strategies.explorer import OutOfTime, candidate_of, idle_candidate
from orchestrator.strategies.registry import Strategy, make_strategy

HOUR_S = 3600.0


@dataclass
class Restart:
    """Checkpoint and restart: after every loss nothing runs until the whole job is up again.

    What is done twice since the last checkpoint is counted as waiting, too. Waiting is not
    billed here, though a real restart would be: this favours the rival.

    Args:
        down_s: Start of all workers, load of the checkpoint, half a checkpoint interval again.
        strategy: Plans whenever the job is up.
    """

    down_s: float
    strategy: Strategy = field(default_factory=lambda: make_strategy("joint"))
    _until_s: float = 0.0

    @property
    def deals_shares(self) -> bool:
        """As the strategy's own."""
        return self.strategy.deals_shares

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """The strategy's candidates, or idle after a loss; see ``Strategy``."""
        incumbent, cluster = problem.incumbent, problem.cluster
        if incumbent and not all(map(cluster.has, incumbent.device_ids)):
            self._until_s = cluster.now_s + self.down_s
        if cluster.now_s < self._until_s:
            return (idle_candidate(CostModel(problem)),)
        return self.strategy.propose(problem, out_of_time=out_of_time)


@dataclass
class LookAhead:
    """Liveput-like: the pipeline depth whose expected rate under losses is the highest.

    All devices alike, D chains of P equal stages. Within the look-ahead k devices are lost,
    Poisson with the published rate; of n devices floor((n - k)/P) chains are then left, as
    whole chains are rebuilt from what remains. The plan in place is kept until it breaks or
    another depth is better by more than ``margin``.

    Args:
        losses_per_hour: Of one device.
        ahead_s: How far it looks.
    """

    losses_per_hour: float
    ahead_s: float = 600.0
    margin: float = 0.03
    _rates: dict[tuple[int, int, int], float] = field(default_factory=dict)

    deals_shares = False

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """One plan and idle; see ``Strategy``."""
        cluster, cost = problem.cluster, CostModel(problem)
        spot = [d for d in cluster.devices if cluster.offer(d.pool).spot]
        depths = range(1, min(len(spot), problem.model.num_layers) + 1)
        scored = [
            (self.expected_samples_per_s(cost, spot, depth, size), depth, size)
            for depth in depths
            for size in microbatch_sizes(problem.microbatch_samples)
        ]
        best, depth, size = max(scored, default=(0.0, 0, 0))
        if best <= 0:
            raise InfeasibleError("no depth of equal stages fits the spot devices' memory")
        kept = self._kept(problem, scored, best)
        depth, size = kept or (depth, size)
        held = problem.incumbent.device_ids if kept and problem.incumbent else ()
        ordered = sorted(spot, key=lambda d: (d.device_id not in held, d.device_id))
        if kept and problem.incumbent:
            groups = problem.incumbent.groups
        else:
            groups = _chains(cost, ordered, depth, size)
        schedule = problem.schedules[0]
        return (candidate_of(cost, groups, schedule), idle_candidate(cost))

    def _kept(
        self, problem: PlanningProblem, scored: Iterable[tuple[float, int, int]], best: float
    ) -> tuple[int, int] | None:
        """Depth and size of the plan in place where it is whole and nearly as good."""
        plan = problem.incumbent
        if not plan or plan.is_idle or not all(map(problem.cluster.has, plan.device_ids)):
            return None
        depth, size = len(plan.groups[0].stages), plan.groups[0].microbatches[0]
        spot = sum(problem.cluster.offer(d.pool).spot for d in problem.cluster.devices)
        if len(plan.groups) < spot // depth:  # another whole chain could run
            return None
        now = max((s for s, p, m in scored if (p, m) == (depth, size)), default=0.0)
        return (depth, size) if now * (1 + self.margin) >= best else None

    def expected_samples_per_s(
        self, cost: CostModel, spot: list[Device], depth: int, size: int
    ) -> float:
        """Rate of chains of this depth and microbatch size, over the losses to come."""
        mean = self.losses_per_hour / HOUR_S * self.ahead_s * len(spot)
        chance, expected = exp(-mean), 0.0
        for lost in range(len(spot) + 1):
            expected += chance * self._rate(cost, spot, (len(spot) - lost) // depth, (depth, size))
            chance *= mean / (lost + 1)
        return expected

    def _rate(
        self, cost: CostModel, spot: list[Device], chains: int, form: tuple[int, int]
    ) -> float:
        if chains < 1 or chains > cost.problem.batch_samples:
            return 0.0
        key = (chains, *form)
        if key not in self._rates:
            groups = _chains(cost, spot[: chains * form[0]], *form)
            schedule = cost.problem.schedules[0]
            fits = cost.memory_error(groups, schedule) is None
            rate = cost.evaluate(groups, schedule).samples_per_s if fits else 0.0
            self._rates[key] = rate
        return self._rates[key]


def _chains(cost: CostModel, devices: list[Device], depth: int, size: int) -> tuple[Group, ...]:
    """As many chains of equal stages as there are devices for, with equal shares."""
    problem, schedule = cost.problem, cost.problem.schedules[0]
    width = min(len(devices) // depth, problem.batch_samples)
    share, more = divmod(problem.batch_samples, width)
    groups = []
    for w in range(width):
        teams = [make_team([d]) for d in devices[w * depth : (w + 1) * depth]]
        microbatches = as_microbatches(share + (w < more), size)
        stages = even_chain(cost, teams)
        groups.append(with_share(cost, stages, microbatches, schedule))
    return tuple(groups)


@dataclass
class Fallback:
    """The joint strategy on one pool while anything fits there, else on another one.

    Args:
        first: The pool of choice, such as the spot devices of one zone.
        second: Taken when nothing fits the first.
    """

    first: str
    second: str
    strategy: Strategy = field(default_factory=lambda: make_strategy("joint"))

    deals_shares = True

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """Plans of one pool and idle; see ``Strategy``."""
        for pool in (self.first, self.second):
            part = tuple(d for d in problem.cluster.devices if d.pool == pool)
            if not part:
                continue
            cluster = replace(problem.cluster, devices=part)
            try:
                return self.strategy.propose(
                    replace(problem, cluster=cluster), out_of_time=out_of_time
                )
            except InfeasibleError:
                continue
        raise InfeasibleError(f"the model fits neither {self.first} nor {self.second}")


@dataclass
class KeepFirst:
    """The first plan of a strategy as long as its devices are there; then its next one.

    Args:
        strategy: Such as ``slot-cap``: the fastest plan within the budget at the first prices.
    """

    strategy: Strategy

    deals_shares = False

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """The plan in place and idle; see ``Strategy``."""
        plan, cost = problem.incumbent, CostModel(problem)
        if plan is None or plan.is_idle or not all(map(problem.cluster.has, plan.device_ids)):
            return self.strategy.propose(problem, out_of_time=out_of_time)
        return (candidate_of(cost, plan.groups, plan.schedule), idle_candidate(cost))


@dataclass
class Spy:
    """A stream that does nothing but know the true cluster."""

    world: World | None = None

    def run(self, env: simpy.Environment, rng: np.random.Generator, world: World) -> Process:
        """See ``Stream``."""
        self.world = world
        yield env.timeout(0.0)

    @property
    def truth(self) -> ClusterState:
        """The cluster as it is, slow links and devices included."""
        assert self.world is not None, "the simulated world has begun"
        return self.world.cluster


@dataclass
class Told:
    """A strategy that is told the true speed of every link and device: what seeing all is worth.

    Args:
        spy: Runs in the world of the rehearsal.
        strategy: Plans on what it is told.
    """

    spy: Spy
    strategy: Strategy = field(default_factory=lambda: make_strategy("joint"))

    @property
    def deals_shares(self) -> bool:
        """As the strategy's own."""
        return self.strategy.deals_shares

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """The strategy's candidates on the true cluster; see ``Strategy``."""
        truth = self.spy.truth
        slowdown = {d.device_id: d.slowdown for d in truth.devices}
        devices = tuple(
            replace(d, slowdown=slowdown.get(d.device_id, d.slowdown))
            for d in problem.cluster.devices
        )
        known = replace(problem.cluster, devices=devices, links=truth.links)
        return self.strategy.propose(replace(problem, cluster=known), out_of_time=out_of_time)


@dataclass
class Reorder:
    """Keeps the first plan, and puts its like nodes in the order that is best on the true links.

    What a fault manager does that measures links: the ring or chain is led around the slow one.

    Args:
        spy: Runs in the world of the rehearsal.
    """

    spy: Spy
    strategy: Strategy = field(default_factory=lambda: make_strategy("joint"))

    deals_shares = False

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """The plan in its best order and idle; see ``Strategy``."""
        plan, cluster = problem.incumbent, problem.cluster
        if plan is None or plan.is_idle or not all(map(cluster.has, plan.device_ids)):
            return self.strategy.propose(problem, out_of_time=out_of_time)
        links = self.spy.truth.links
        cost = CostModel(replace(problem, cluster=replace(cluster, links=links)))
        orders = [
            _renamed(cluster, plan.groups, names) for names in _orders(cluster, plan.device_ids)
        ]
        best = max(orders, key=lambda groups: retime(cost, groups, plan.schedule).samples_per_s)
        # No nearer than this to the present order: it stays.
        now = retime(cost, plan.groups, plan.schedule).samples_per_s
        if retime(cost, best, plan.schedule).samples_per_s <= now * 1.001:
            best = plan.groups
        return (candidate_of(cost, best, plan.schedule), idle_candidate(cost))


def _orders(cluster: ClusterState, device_ids: Iterable[str]) -> list[dict[str, str]]:
    """Every renaming of devices that swaps whole nodes of one kind and size."""
    nodes: dict[str, list[str]] = {}
    for device_id in device_ids:
        nodes.setdefault(cluster.device(device_id).node_id, []).append(device_id)
    members = [sorted(ids) for ids in nodes.values()]
    pairs = [list(zip(members, order, strict=True)) for order in permutations(members)]
    alike = [p for p in pairs if all(_alike(cluster, a, b) for a, b in p)]
    return [{x: y for a, b in p for x, y in zip(a, b, strict=True)} for p in alike]


def _alike(cluster: ClusterState, one: list[str], other: list[str]) -> bool:
    kinds = [cluster.device(ids[0]).kind for ids in (one, other)]
    return len(one) == len(other) and kinds[0] == kinds[1]


def _renamed(
    cluster: ClusterState, groups: tuple[Group, ...], names: dict[str, str]
) -> tuple[Group, ...]:
    """The same work on other devices."""

    def moved(team: Team) -> Team:
        return make_team(cluster.device(names[d]) for d in team.device_ids)

    return tuple(
        replace(g, stages=tuple(replace(s, team=moved(s.team)) for s in g.stages)) for g in groups
    )


@dataclass
class SingleKind:
    """The joint strategy on one kind alone: that of most samples per dollar at the first prices."""

    strategy: Strategy = field(default_factory=lambda: make_strategy("cheapest"))
    kind: str = ""

    deals_shares = True

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """Plans of one kind and idle; see ``Strategy``."""
        kinds = sorted({d.kind for d in problem.cluster.devices})
        if not self.kind:
            ratios = {kind: self._ratio(problem, kind) for kind in kinds}
            self.kind = max(ratios, key=lambda kind: ratios[kind])
            self.strategy = make_strategy("joint")
        return self.strategy.propose(_only(problem, self.kind), out_of_time=out_of_time)

    def _ratio(self, problem: PlanningProblem, kind: str) -> float:
        """Once, so in full: else the kinds that are tried last would have no time."""
        try:
            found = make_strategy("cheapest").propose(
                _only(problem, kind), out_of_time=lambda: False
            )
        except InfeasibleError:
            return 0.0
        running = [c.estimate.samples_per_usd for c in found if not c.plan.is_idle]
        return max(running, default=0.0)


def _only(problem: PlanningProblem, kind: str) -> PlanningProblem:
    part = tuple(d for d in problem.cluster.devices if d.kind == kind)
    if not part:
        raise InfeasibleError(f"no {kind} is there")
    return replace(problem, cluster=replace(problem.cluster, devices=part))
