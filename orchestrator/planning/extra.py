"""One more group beside a plan, made of one more device of a pool: what its worth is read from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from orchestrator.core.cluster import ClusterState, Device, Team, make_team
from orchestrator.core.plan import Group, Plan
from orchestrator.core.slot import PlanningProblem
from orchestrator.planning.alike import AlikeSet
from orchestrator.planning.constraints import Row, RowUse, row_use, sums_usd
from orchestrator.planning.cost import CostModel
from orchestrator.planning.curves import Curves, Option
from orchestrator.planning.slot_table import SlotTable
from orchestrator.planning.tables import LayerTables

MAX_CHAIN = 8
"""Most like devices that are tried together where one does not hold the model."""

MAX_LENGTHENED = 2
"""Sets of alike groups that are tried with one device more in a group of theirs."""


@dataclass(frozen=True, slots=True)
class ExtraGroup:
    """A plan's table with one more device of the pool at work in it.

    The device is a group of its own, or the first or last stage of a group of the plan, which
    is cut anew. Where it does not hold the model by itself, it is also part of a copy of the
    plan's best group that has such a device, or, where none has, of the shortest chain of like
    devices that holds the model. ``part`` is then its part of that group's price, and so much
    of what the group adds is its worth; 1 elsewhere.
    """

    pool: str
    table: SlotTable
    part: float


def extra_groups(
    problem: PlanningProblem, plan: Plan, table: SlotTable, rows: Sequence[Row]
) -> Iterator[ExtraGroup]:
    """The ways to use one more device of every pool, in order of their names.

    An idle device of the pool is the one more; else a healthy copy of one that is present, on
    a node of its own, or of the one that can be asked for.
    """
    cluster, stock = problem.cluster, _Stock(problem)
    pools = sorted(stock.like)
    tables = LayerTables(problem.model)
    sizes = {pool: tables.team_sizes(cluster.offer(pool).kind) for pool in pools}
    # The fewest devices that can run a stage; 0: no number was measured that workers can run.
    units = {p: next((q for q in sizes[p] if q <= max(1, problem.max_team)), 0) for p in pools}
    spare = {pool: stock.chain(pool) for pool in pools}
    alone = {
        pool: [stock.one_more(plan, pool)] if units[pool] == 1 else spare[pool][: units[pool]]
        for pool in pools
    }
    sets = {pool: _best_set(problem, table, pool) for pool in pools}
    copies = {a: stock.copied(table.sets[a].group) for a in sets.values() if a is not None}
    added = [d for devices in (*alone.values(), *spare.values()) for d in devices]
    added += [d for teams in copies.values() for devices in teams for d in devices]
    everyone = {device.device_id: device for device in (*cluster.devices, *added)}
    cost = CostModel(replace(problem, cluster=replace(cluster, devices=tuple(everyone.values()))))
    sums = _sums(cost, plan.schedule, table.sets)
    scene = _Scene(cluster, cost, plan.schedule, table, rows, sums)
    # Where one group fills its devices, its gradients cannot be packed for a sum.
    may_add = len(plan.groups) > 1 or not cost.memory_error(
        plan.groups, plan.schedule, replicated=True
    )
    for pool in pools:
        a, unit = sets[pool], units[pool]
        newcomers = [*alone[pool], *spare[pool][:2]]
        newcomers += [devices[0] for devices in copies[a]] if a is not None else []
        if not scene.reaches(newcomers):
            continue
        option = None
        if unit:
            team = make_team(alone[pool])
            for longer in scene.lengthened(team):
                yield ExtraGroup(pool, longer, 1.0 / unit)
            option = scene.option([team]) if may_add else None
        if not may_add:
            continue
        if option is not None:
            yield ExtraGroup(pool, scene.with_option(option), 1.0 / unit)
        elif a is not None:
            teams = [make_team(devices) for devices in copies[a]]
            part = _part(problem, table.sets[a].group, pool)
            yield ExtraGroup(pool, scene.with_copy(a, teams), part)
        elif unit and (option := scene.shortest(spare[pool], unit)) is not None:
            part = 1.0 / (unit * len(option.stages))
            yield ExtraGroup(pool, scene.with_option(option), part)


class _Stock:
    """Devices that could come: copies of those that are there, or of those that can be asked for.

    A copy is healthy: as fast as its profile says, or, where its times are estimated and not
    measured, as the fastest present device of its kind shows them to be.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        self._cluster = problem.cluster
        self.like: dict[str, Device] = {}
        """A device of each pool of which one more can be thought of."""
        for device in (*problem.cluster.devices, *problem.rentable):
            self.like.setdefault(device.pool, device)
        estimated = {times.kind for times in problem.model.times if times.estimated}
        self._slowdown: dict[str, float] = {}
        for device in problem.cluster.devices:
            if device.kind in estimated:
                best = self._slowdown.get(device.kind, device.slowdown)
                self._slowdown[device.kind] = min(best, device.slowdown)

    def one_more(self, plan: Plan, pool: str) -> Device:
        """An idle device of the pool, else a copy."""
        used = set(plan.device_ids)
        mine = (device for device in self._cluster.devices if device.pool == pool)
        idle = [device for device in mine if device.device_id not in used]
        if idle:
            return min(idle, key=lambda d: (d.slowdown, d.device_id))
        return self._twin(self.like[pool], "one more")

    def chain(self, pool: str) -> list[Device]:
        """Devices of one node, as a provider rents them."""
        model = self._healthy(self.like[pool])
        return [
            replace(model, device_id=f"{model.device_id} (one more, {i})") for i in range(MAX_CHAIN)
        ]

    def copied(self, group: Group) -> list[list[Device]]:
        """Copies of a group's devices, team by team."""
        return [
            [self._twin(self._cluster.device(d), "copy") for d in stage.team.device_ids]
            for stage in group.stages
        ]

    def _healthy(self, device: Device) -> Device:
        slowdown = self._slowdown.get(device.kind, 1.0)
        return replace(device, slowdown=slowdown, input_s_per_sample=0.0)

    def _twin(self, device: Device, word: str) -> Device:
        """A copy on a node of its own, where links inside a zone are known."""
        twin = replace(
            self._healthy(device),
            device_id=f"{device.device_id} ({word})",
            node_id=f"{device.node_id} ({word})",
        )
        try:
            self._cluster.link(device, twin)
        except ValueError:
            return replace(twin, node_id=device.node_id)
        return twin


def _best_set(problem: PlanningProblem, table: SlotTable, pool: str) -> int | None:
    """Of the sets that use the pool, the one with most samples per second and dollar."""
    cluster = problem.cluster
    ratios = []
    for a, each in enumerate(table.sets):
        devices = [cluster.device(d) for d in each.group.device_ids]
        if any(device.pool == pool for device in devices):
            price = sum(cluster.price_usd_per_s(device.device_id) for device in devices)
            ratios.append((table.size[a] / table.tau[a] / price, -a))
    return -max(ratios)[1] if ratios else None


def _part(problem: PlanningProblem, group: Group, pool: str) -> float:
    """One device's part of the price of a group."""
    prices = [problem.cluster.price_usd_per_s(d) for d in group.device_ids]
    return problem.cluster.offer(pool).price_usd_per_s / sum(prices)


class _Column(NamedTuple):
    """A group's figures as in a SlotTable, before its gradients are summed with others."""

    group: Group
    tau: float
    fixed: float
    cap: int
    usd: float


@dataclass(frozen=True, slots=True)
class _Scene:
    """The plan as the cluster with one more of everything sees it."""

    present: ClusterState
    cost: CostModel
    schedule: str
    table: SlotTable
    rows: Sequence[Row]
    sums: tuple[float, float]  # see ``_sums``, of the plan as it is

    @property
    def step_s(self) -> float:
        """Step time of the plan's own shares."""
        return self.table.step_s(
            [
                -(-each.num_samples // size)
                for each, size in zip(self.table.sets, self.table.size, strict=True)
            ]
        )

    def reaches(self, newcomers: Sequence[Device]) -> bool:
        """Whether links are known from these to the plan's devices and to each other."""
        cluster = self.cost.problem.cluster
        there = [
            cluster.device(stage.team.device_ids[0])
            for each in self.table.sets
            for stage in each.group.stages
        ]
        pairs = [(a, b) for a in newcomers for b in (*there, *newcomers)]
        try:
            for a, b in pairs:
                cluster.link(a, b), cluster.link(b, a)
        except ValueError:
            return False
        return True

    def option(self, teams: Sequence[Team], *, replicated: bool = True) -> Option | None:
        """What a chain of these teams does best beside the plan; None when it does not fit."""
        options = Curves(self.cost).of(
            tuple(teams), self.schedule, self.step_s, replicated=replicated
        )
        return max(options, key=lambda o: o.samples_by(self.step_s), default=None)

    def shortest(self, devices: Sequence[Device], unit: int) -> Option | None:
        """That of as few of these devices as hold the model, in teams of ``unit``."""
        most = min(len(devices) // unit, self.cost.problem.model.num_layers)
        teams = [make_team(devices[unit * i : unit * (i + 1)]) for i in range(most)]
        options = (self.option(teams[:count]) for count in range(2, most + 1))
        return next((option for option in options if option), None)

    def lengthened(self, team: Team) -> Iterator[SlotTable]:
        """The table with the team as first or last stage of a group, of the fastest sets."""
        table = self.table
        num_groups = sum(each.count for each in table.sets)
        fastest = sorted(
            range(len(table.sets)), key=lambda a: (-table.size[a] / table.tau[a], table.fixed[a])
        )
        for a in fastest[:MAX_LENGTHENED]:
            chain = [stage.team for stage in table.sets[a].group.stages]
            for teams in ((team, *chain), (*chain, team)):
                if len(teams) <= self.cost.problem.model.num_layers:
                    option = self.option(teams, replicated=num_groups > 1)
                    if option is not None:
                        yield self._with(self._column(option), team.device_ids, instead_of=a)

    def with_option(self, option: Option) -> SlotTable:
        """The table with a group of this option."""
        column = self._column(option)
        return self._with(column, column.group.device_ids)

    def with_copy(self, a: int, teams: Sequence[Team]) -> SlotTable:
        """The table with a copy of a group of its set ``a``: equal but for its devices' names."""
        group, table = self.table.sets[a].group, self.table
        stages = tuple(
            replace(stage, team=team) for stage, team in zip(group.stages, teams, strict=True)
        )
        copied = Group(stages, group.microbatches)
        column = _Column(copied, table.tau[a], table.fixed[a], table.cap[a], table.usd[a])
        return self._with(column, copied.device_ids)

    def _column(self, option: Option) -> _Column:
        size, period_s = option.microbatch, option.curve.period_s
        return _Column(
            group=Group(option.stages, (size,)),
            tau=period_s,
            fixed=self.sums[0] + option.fill_drain_s - period_s,
            cap=option.curve.max_microbatches,
            usd=self.cost.egress_usd(option.stages, size),
        )

    def _with(
        self, column: _Column, added: Sequence[str], *, instead_of: int | None = None
    ) -> SlotTable:
        """The table with one more column, for one group of a set or beside all of them.

        With one more member gradient sums may take longer, for everyone, and cost more.
        ``added``: the devices that were not at work before.
        """
        table = self.table
        kept, sets = [], []
        for a, each in enumerate(table.sets):
            left = each.members[1:] if a == instead_of else each.members
            if left:
                kept.append(a)
                sets.append(replace(each, members=left))
        sets.append(AlikeSet(column.group, (sum(each.count for each in table.sets),), 0))
        before_s, before_usd = self.sums
        after_s, after_usd = _sums(self.cost, self.schedule, sets)
        step_usd = max(0.0, table.step_usd + after_usd - before_usd)
        fixed = [*(table.fixed[a] for a in kept), column.fixed]
        return replace(
            table,
            sets=tuple(sets),
            tau=(*(table.tau[a] for a in kept), column.tau),
            fixed=tuple(seconds + after_s - before_s for seconds in fixed),
            size=(*(table.size[a] for a in kept), column.group.microbatches[0]),
            cap=(*(table.cap[a] for a in kept), column.cap),
            usd=(*(table.usd[a] for a in kept), column.usd),
            step_usd=step_usd,
            uses=tuple(self._use(r, sets, step_usd, added) for r in range(len(self.rows))),
        )

    def _use(
        self, r: int, sets: Sequence[AlikeSet], step_usd: float, added: Sequence[str]
    ) -> RowUse:
        """Use of a row; its price per second is the plan's and that of what is really added."""
        row, cluster = self.rows[r], self.cost.problem.cluster
        use = row_use(self.cost, row, sets, step_usd)
        added_usd_per_s = sum(
            cluster.price_usd_per_s(device_id)
            for device_id in added
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


def _sums(cost: CostModel, schedule: str, sets: Sequence[AlikeSet]) -> tuple[float, float]:
    """Seconds after the last group's pipeline, and dollars of gradient sums."""
    estimate = cost.evaluate(
        [each.group for each in sets], schedule, alike=[each.alike for each in sets]
    )
    shares = [replace(each, num_samples=each.count * each.group.num_samples) for each in sets]
    return estimate.sync_s + estimate.update_s, sums_usd(cost, shares, estimate)
