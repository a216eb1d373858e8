"""Reference strategies: what people do without a joint planner, on the same model and ledger."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from orchestrator.core.cluster import ClusterState, Device, make_team
from orchestrator.core.plan import Group, Plan, Stage
from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.errors import InfeasibleError
from orchestrator.planning.cost import CostModel
from orchestrator.planning.partition import partition
from orchestrator.planning.roster import Roster
from orchestrator.planning.shares import dealt_by_speed, with_share
from orchestrator.planning.waterfill import as_microbatches
from orchestrator.strategies.explorer import (
    Explorer,
    OutOfTime,
    candidate_of,
    candidates_of,
    idle_candidate,
)

Groups = tuple[Group, ...]


def even_split(cost: CostModel) -> Groups:
    """Data parallel with ceil or floor of batch/devices samples, as torch's DDP splits them."""
    devices = Roster(cost.problem.cluster).devices[: cost.problem.batch_samples]
    share, more = divmod(cost.problem.batch_samples, len(devices))
    return _replicas(cost, devices, [share + (d < more) for d in range(len(devices))])


def proportional(cost: CostModel) -> Groups:
    """Data parallel with samples in proportion to speed; a device too slow for one stays idle."""
    problem = cost.problem
    devices = Roster(problem.cluster).devices
    speeds = [1.0 / _model_seconds(cost, device) for device in devices]
    exact = [problem.batch_samples * speed / sum(speeds) for speed in speeds]
    shares = [int(samples) for samples in exact]
    by_rest = sorted(range(len(exact)), key=lambda d: (shares[d] - exact[d], d))
    for d in by_rest[: problem.batch_samples - sum(shares)]:
        shares[d] += 1
    return _replicas(cost, devices, shares)


def even_pipeline(cost: CostModel) -> Groups:
    """One chain of all devices, fastest first, with as many layers each as can be."""
    problem = cost.problem
    devices = _fastest_first(cost)[: problem.model.num_layers]
    layers, more = divmod(problem.model.num_layers, len(devices))
    cuts = [d * layers + min(d, more) for d in range(len(devices) + 1)]
    stages = tuple(
        Stage(make_team([device]), first, end)
        for device, (first, end) in zip(devices, pairwise(cuts), strict=True)
    )
    return (_chain(cost, stages),)


def balanced_pipeline(cost: CostModel) -> Groups:
    """One chain of all devices, fastest first, cut by dynamic programming."""
    problem = cost.problem
    devices = _fastest_first(cost)[: problem.model.num_layers]
    teams = tuple(make_team([device]) for device in devices)
    every = partition(cost, teams, problem.microbatch_samples, problem.schedules[0])
    if not every:
        return even_pipeline(cost)  # says itself which device lacks memory
    chains = [(_chain(cost, stages),) for stages in every]
    return min(chains, key=lambda groups: cost.evaluate(groups, problem.schedules[0]).step_s)


def _model_seconds(cost: CostModel, device: Device) -> float:
    """One microbatch through the whole model on a device."""
    problem = cost.problem
    return sum(
        cost.stage_seconds(
            make_team([device]), 0, problem.model.num_layers, problem.microbatch_samples
        )
    )


def _fastest_first(cost: CostModel) -> list[Device]:
    devices = Roster(cost.problem.cluster).devices
    return sorted(devices, key=lambda device: _model_seconds(cost, device))


def _replicas(cost: CostModel, devices: Sequence[Device], shares: Sequence[int]) -> Groups:
    """The whole model on every device that has a share."""
    problem = cost.problem
    return tuple(
        _group(cost, (Stage(make_team([device]), 0, problem.model.num_layers),), samples)
        for device, samples in zip(devices, shares, strict=True)
        if samples
    )


def _chain(cost: CostModel, stages: tuple[Stage, ...]) -> Group:
    return _group(cost, stages, cost.problem.batch_samples)


def _group(cost: CostModel, stages: tuple[Stage, ...], samples: int) -> Group:
    problem = cost.problem
    share = as_microbatches(samples, problem.microbatch_samples)
    return with_share(cost, stages, share, problem.schedules[0])


class Fixed:
    """Always the plan of one recipe, or idle when the guards say so.

    Source: docs/model.md, section 7.
    """

    deals_shares = False

    def __init__(self, recipe: Callable[[CostModel], Groups]) -> None:
        self._recipe = recipe

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """The recipe's plan and idle; see ``Strategy``."""
        cost, schedule = CostModel(problem), problem.schedules[0]
        groups = self._recipe(cost)
        message = cost.memory_error(groups, schedule)
        if message is not None:
            raise InfeasibleError(f"the plan of this strategy does not fit: {message}")
        return _with_idle(cost, groups, schedule)


class DoNothing:
    """Idles."""

    deals_shares = False

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """Idle alone; see ``Strategy``."""
        return (idle_candidate(CostModel(problem)),)


class Greedy:
    """The fastest plan, whatever it costs; only the guards hold it back."""

    deals_shares = True

    def __init__(self) -> None:
        self._explorer = Explorer()

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """The fastest plan and idle; see ``Strategy``."""
        trials = self._explorer.search(problem, out_of_time, price_of_money_samples_per_usd=0.0)
        return candidates_of(problem, [max(trials, key=lambda t: t.estimate.samples_per_s)])


class Cheapest:
    """The plan with most samples per dollar, at any speed."""

    deals_shares = True

    def __init__(self) -> None:
        self._explorer = Explorer()

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """The plan of best ratio and idle; see ``Strategy``."""
        ratio, best = 0.0, None
        # Dinkelbach: at the price of money of the best ratio, nothing scores above zero.
        while best is None or best.estimate.samples_per_usd > ratio * (1 + 1e-9):
            ratio = best.estimate.samples_per_usd if best else 0.0
            trials = self._explorer.search(
                problem, out_of_time, price_of_money_samples_per_usd=ratio
            )
            found = (*trials, *([best] if best else []))
            best = max(found, key=lambda t: t.estimate.samples_per_usd)
        return candidates_of(problem, [best])


class Static:
    """The joint planner's first plan, for ever; another one only when it lost a device.

    Args:
        rebalance: Whether its shares follow the speed of the devices.
    """

    deals_shares = False

    def __init__(self, *, rebalance: bool) -> None:
        self._rebalance, self._explorer = rebalance, Explorer()
        self._plan: Plan | None = None

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """The first plan's stages and idle; see ``Strategy``."""
        incumbent, cost = problem.incumbent, CostModel(problem)
        if incumbent and not incumbent.is_idle:
            self._plan = incumbent
        if self._plan is None or not _present(problem.cluster, self._plan.groups):
            found = candidates_of(problem, self._explorer.search(problem, out_of_time)[:1])
            self._plan = next(c.plan for c in found if not c.plan.is_idle)
            return found
        groups, schedule = self._plan.groups, self._plan.schedule
        if self._rebalance and len(groups) > 1:
            groups = _redealt(cost, groups, schedule)
        return _with_idle(cost, groups, schedule)


class OnDemand:
    """The joint planner without spot devices."""

    deals_shares = True

    def __init__(self) -> None:
        self._explorer = Explorer()

    def propose(self, problem: PlanningProblem, *, out_of_time: OutOfTime) -> tuple[Candidate, ...]:
        """Plans of the firm pools and idle; see ``Strategy``."""
        cluster = problem.cluster
        firm = tuple(d for d in cluster.devices if not cluster.offer(d.pool).spot)
        if not firm:
            raise InfeasibleError("every pool is spot; on-demand needs one that is not")
        part = replace(problem, cluster=replace(cluster, devices=firm))
        return candidates_of(problem, self._explorer.search(part, out_of_time))


def _with_idle(cost: CostModel, groups: Groups, schedule: str) -> tuple[Candidate, ...]:
    both = (candidate_of(cost, groups, schedule), idle_candidate(cost))
    return tuple(sorted(both, key=lambda c: -c.score))


def _present(cluster: ClusterState, groups: Groups) -> bool:
    return all(cluster.has(device_id) for group in groups for device_id in group.device_ids)


def _redealt(cost: CostModel, groups: Groups, schedule: str) -> Groups:
    """The same stages with shares by the present speeds."""
    sizes = [group.microbatches[0] for group in groups]
    curves = [
        cost.curve(group.stages, size, schedule) for group, size in zip(groups, sizes, strict=True)
    ]
    return dealt_by_speed(cost, [g.stages for g in groups], sizes, curves, schedule)
