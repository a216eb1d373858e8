"""One more group beside a plan, made of one more device of a pool: what its worth is read from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from orchestrator.core.cluster import ClusterState, Device, Team, make_team
from orchestrator.core.plan import Group, Plan
from orchestrator.core.slot import PlanningProblem
from orchestrator.planning.alike import AlikeSet
from orchestrator.planning.constraints import Row, RowUse, row_use, sums_usd
from orchestrator.planning.cost import CostModel
from orchestrator.planning.curves import Curves, Option
from orchestrator.planning.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class ExtraGroup:
    """A plan's table with one more group in it that has a device of the pool.

    The device holds the whole model by itself where that fits; else it is part of a copy of
    the plan's best group that has such a device. ``part`` is then its part of the copy's
    price, and so much of what the copy adds is its worth; 1 where it is alone.
    """

    pool: str
    table: SlotTable
    part: float


def extra_groups(
    problem: PlanningProblem, plan: Plan, table: SlotTable, rows: Sequence[Row]
) -> Iterator[ExtraGroup]:
    """The one more group of every pool, in order of their names.

    An idle device of the pool is the one more; else a healthy copy of one that is present, on
    a node of its own.
    """
    pools = sorted({device.pool for device in problem.cluster.devices})
    lonely = {pool: _one_more(problem.cluster, plan, pool) for pool in pools}
    chains = {pool: each for pool in pools if (each := _best_set(problem, table, pool))}
    copies = {pool: _copied(problem.cluster, each.group) for pool, each in chains.items()}
    everyone = {device.device_id: device for device in problem.cluster.devices}
    everyone |= {device.device_id: device for device in lonely.values()}
    everyone |= {d.device_id: d for teams in copies.values() for team in teams for d in team}
    cluster = replace(problem.cluster, devices=tuple(everyone.values()))
    cost = CostModel(replace(problem, cluster=cluster))
    scene = _Scene(problem.cluster, cost, plan.schedule, table, rows)
    for pool in pools:
        team = make_team([lonely[pool]])
        options = Curves(cost).of((team,), plan.schedule, replicated=True)
        if options:
            option = max(options, key=lambda o: o.samples_by(scene.step_s))
            yield ExtraGroup(pool, scene.with_option(option), 1.0)
        elif pool in chains:
            group = chains[pool].group
            teams = [make_team(devices) for devices in copies[pool]]
            yield ExtraGroup(pool, scene.with_copy(group, teams), _part(problem, group, pool))


def _one_more(cluster: ClusterState, plan: Plan, pool: str) -> Device:
    mine = [device for device in cluster.devices if device.pool == pool]
    used = set(plan.device_ids)
    idle = [device for device in mine if device.device_id not in used]
    if idle:
        return min(idle, key=lambda d: (d.slowdown, d.device_id))
    return _twin(cluster, mine[0], "one more")


def _copied(cluster: ClusterState, group: Group) -> list[list[Device]]:
    """Healthy copies of a group's devices, team by team."""
    return [
        [_twin(cluster, cluster.device(d), "copy") for d in stage.team.device_ids]
        for stage in group.stages
    ]


def _twin(cluster: ClusterState, device: Device, word: str) -> Device:
    """A healthy device like this one on a node of its own, where links inside a zone are known."""
    twin = replace(
        device,
        device_id=f"{device.device_id} ({word})",
        node_id=f"{device.node_id} ({word})",
        slowdown=1.0,
    )
    try:
        cluster.link(device, twin)
    except ValueError:
        return replace(twin, node_id=device.node_id)
    return twin


def _best_set(problem: PlanningProblem, table: SlotTable, pool: str) -> AlikeSet | None:
    """Of the sets that use the pool, the one with most samples per second and dollar."""
    cluster = problem.cluster
    ratios = []
    for a, each in enumerate(table.sets):
        devices = [cluster.device(d) for d in each.group.device_ids]
        if any(device.pool == pool for device in devices):
            price = sum(cluster.price_usd_per_s(device.device_id) for device in devices)
            ratios.append((table.size[a] / table.tau[a] / price, -a))
    return table.sets[-max(ratios)[1]] if ratios else None


def _part(problem: PlanningProblem, group: Group, pool: str) -> float:
    """One device's part of the price of a group."""
    prices = [problem.cluster.price_usd_per_s(d) for d in group.device_ids]
    return problem.cluster.offer(pool).price_usd_per_s / sum(prices)


@dataclass(frozen=True, slots=True)
class _Scene:
    """The plan as the cluster with one more of everything sees it."""

    present: ClusterState
    cost: CostModel
    schedule: str
    table: SlotTable
    rows: Sequence[Row]

    @property
    def step_s(self) -> float:
        """Step time of the plan's own shares."""
        return self.table.step_s(
            [
                -(-each.num_samples // size)
                for each, size in zip(self.table.sets, self.table.size, strict=True)
            ]
        )

    def with_option(self, option: Option) -> SlotTable:
        """The table with a group of this option."""
        group = Group(option.stages, (option.microbatch,))
        usd = self.cost.egress_usd(option.stages, option.microbatch)
        ahead_s = option.fill_drain_s - option.curve.period_s
        return self._with(group, option.curve.period_s, ahead_s, option.curve.max_microbatches, usd)

    def with_copy(self, group: Group, teams: Sequence[Team]) -> SlotTable:
        """The table with a copy of one of its groups."""
        stages = tuple(
            replace(stage, team=team) for stage, team in zip(group.stages, teams, strict=True)
        )
        size = group.microbatches[0]
        curve = self.cost.curve(stages, size, self.schedule, replicated=True)
        return self._with(
            Group(stages, (size,)),
            curve.period_s,
            curve.fill_drain_s - curve.period_s,
            curve.max_microbatches,
            self.cost.egress_usd(stages, size),
        )

    def _with(
        self, group: Group, period_s: float, ahead_s: float, cap: int, usd: float
    ) -> SlotTable:
        """Gradient sums get one more member: they may take longer, for everyone, and cost more."""
        table = self.table
        place = sum(each.count for each in table.sets)
        sets = (*table.sets, AlikeSet(group, (place,), 0))
        before_s, before_usd = self._sums(table.sets)
        after_s, after_usd = self._sums(sets)
        longer_s = after_s - before_s
        step_usd = max(0.0, table.step_usd + after_usd - before_usd)
        return replace(
            table,
            sets=sets,
            tau=(*table.tau, period_s),
            fixed=(*(fixed + longer_s for fixed in table.fixed), ahead_s + after_s),
            size=(*table.size, group.microbatches[0]),
            cap=(*table.cap, max(1, cap)),
            usd=(*table.usd, usd),
            step_usd=step_usd,
            uses=tuple(self._use(r, sets, step_usd) for r in range(len(self.rows))),
        )

    def _use(self, r: int, sets: Sequence[AlikeSet], step_usd: float) -> RowUse:
        """Use of a row; its price per second is the plan's and that of what is really added."""
        row = self.rows[r]
        use = row_use(self.cost, row, sets, step_usd)
        cluster = self.cost.problem.cluster
        added_usd_per_s = sum(
            cluster.price_usd_per_s(device_id)
            for device_id in sets[-1].group.device_ids
            if row.kind == "zone" and cluster.device(device_id).zone == row.where
            if not self._is_paid(device_id)
        )
        return replace(use, usd_per_s=self.table.uses[r].usd_per_s + added_usd_per_s)

    def _is_paid(self, device_id: str) -> bool:
        """Whether the bill has the device already."""
        cluster = self.present
        return (
            cluster.has(device_id)
            and cluster.offer(cluster.device(device_id).pool).billed == "while_present"
        )

    def _sums(self, sets: Sequence[AlikeSet]) -> tuple[float, float]:
        """Seconds after the last group's pipeline, and dollars of gradient sums."""
        estimate = self.cost.evaluate(
            [each.group for each in sets], self.schedule, alike=[each.alike for each in sets]
        )
        shares = [replace(each, num_samples=each.count * each.group.num_samples) for each in sets]
        return estimate.sync_s + estimate.update_s, sums_usd(self.cost, shares, estimate)
