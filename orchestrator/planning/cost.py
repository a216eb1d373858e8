"""The one model of step time, memory and money: search, decision and simulation all ask it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Self

from orchestrator.core.cluster import Team
from orchestrator.core.plan import Group, Stage
from orchestrator.core.slot import IDLE_ESTIMATE, PlanningProblem, StepEstimate
from orchestrator.planning.cutting import Cuts, CuttingTables
from orchestrator.planning.groups import GroupFigures, GroupModel
from orchestrator.planning.identity import ByIdentity
from orchestrator.planning.sums import Alike, GradientSums
from orchestrator.planning.traffic import Traffic, least_traffic

if TYPE_CHECKING:
    from orchestrator.planning.fading import Fading


class _Money(NamedTuple):
    """What a group costs whatever its time."""

    usd_per_s: float  # of its devices, beyond what is paid for their presence
    surcharge_usd_per_s: float
    entry_usd_per_sample: float


class CostModel(GroupModel):
    """Prices plans for one PlanningProblem. Everything is kept once computed.

    Source: docs/model.md, section 3.
    """

    def __init__(self, problem: PlanningProblem) -> None:
        super().__init__(problem)
        self.standing_usd_per_s = problem.cluster.standing_usd_per_s
        new = self.memories.new
        self.cuts: Fading[tuple[object, ...], tuple[Cuts, ...]] = new()  # of partition
        self.busiest: Fading[tuple[object, ...], tuple[float, bool]] = new()  # as well
        self.cutting = CuttingTables(self)
        self.exact_ends_s: Fading[tuple[object, ...], tuple[float, ...]] = new()  # of event
        self._sums = GradientSums(self.tables, problem.cluster)
        self._prices: dict[tuple[str, ...], float] = {}  # of teams
        self._money: ByIdentity[tuple[Stage, ...], _Money] = ByIdentity()  # of groups

    def following(self, problem: PlanningProblem) -> Self | None:
        """See ``GroupModel.following``; sums and prices are those of the new cluster."""
        other = super().following(problem)
        if other is None:
            return None
        other.standing_usd_per_s = problem.cluster.standing_usd_per_s
        other._prices, other._money = {}, ByIdentity()
        other.cutting = self.cutting.following(other)
        before, now = self.problem.cluster, problem.cluster
        if (now.devices, now.links) == (before.devices, before.links):
            other._sums = self._sums.following()
        else:
            other._sums = GradientSums(other.tables, now)
        return other

    @property
    def idle(self) -> StepEstimate:
        """Doing nothing: no samples, at the price of what is billed anyway."""
        return replace(IDLE_ESTIMATE, cost_usd_per_s=self.standing_usd_per_s)

    def memory_error(
        self, groups: Sequence[Group], schedule: str = "1f1b", *, replicated: bool | None = None
    ) -> str | None:
        """Which device lacks most memory, and how much; None when all fit.

        ``replicated``: whether gradients are summed over groups; None: when several are given.
        """
        replicated = len(groups) > 1 if replicated is None else replicated
        if all(self.figures(group, schedule).fits[replicated] for group in groups):
            return None
        return self.memory.error(groups, schedule, replicated=replicated)

    def fits(self, groups: Sequence[Group], schedule: str, *, replicated: bool) -> bool:
        """Whether every device holds its part."""
        return all(self.figures(group, schedule).fits[replicated] for group in groups)

    def least_step_s(self, groups: Sequence[Group], schedule: str, *, replicated: bool) -> float:
        """What a step lasts before gradients are summed; infinite where memory does not hold it."""
        figures = [self.figures(group, schedule) for group in groups]
        if not all(f.fits[replicated] for f in figures):
            return inf
        update_s = max([f.update_s for f in figures]) + self.problem.model.step_overhead_s
        return max([f.group_s for f in figures]) + update_s

    def evaluate(
        self,
        groups: Sequence[Group],
        schedule: str,
        *,
        alike: Sequence[Alike] | None = None,
        stage_ends_s: Sequence[Sequence[float]] | None = None,
    ) -> StepEstimate:
        """Time, rate, money and memory of a step; no groups: idle, which costs the standing rate.

        Args:
            groups: Need not fit memory; ``memory_error`` says so.
            schedule: Of every group's pipeline.
            alike: For how many groups each stands; None: for itself. Figures per device are
                then left out.
            stage_ends_s: Per group and stage, when its last backward ends, where known
                better than in closed form.
        """
        if not groups:
            return self.idle
        figures = [self.figures(group, schedule) for group in groups]
        ends_s = stage_ends_s or [f.stage_ends_s for f in figures]
        group_s = tuple(map(max, ends_s))
        slowest_s = max(group_s)
        sync_s, sums_usd = self._sync(groups, alike, ends_s, slowest_s)
        update_s = max([f.update_s for f in figures]) + self.problem.model.step_overhead_s
        step_s = slowest_s + sync_s + update_s
        count_G = [a.num_groups for a in alike] if alike else [1] * len(groups)
        egress_usd = sums_usd
        samples, devices, busy_s, price_usd_per_s = 0, 0, 0.0, self.standing_usd_per_s
        surcharge_usd_per_s = entry_usd = 0.0
        for group, figure, count in zip(groups, figures, count_G, strict=True):
            samples += count * group.num_samples
            devices += count * len(figure.compute_s)
            busy_s += count * figure.busy_s
            egress_usd += count * figure.egress_usd
            money = self._money.of(group.stages, self._money_of)
            price_usd_per_s += count * money.usd_per_s
            surcharge_usd_per_s += count * money.surcharge_usd_per_s
            entry_usd += count * group.num_samples * money.entry_usd_per_sample
        return StepEstimate(
            step_s=step_s,
            samples_per_s=samples / step_s,
            cost_usd_per_s=price_usd_per_s + egress_usd / step_s,
            exposed_comm_s=figures[group_s.index(slowest_s)].exposed_s + sync_s,
            bubble_ratio=1.0 - busy_s / (devices * step_s),
            group_s=group_s,
            sync_s=sync_s,
            update_s=update_s,
            egress_usd_per_s=egress_usd / step_s,
            peak_memory_bytes=() if alike else _peaks_bytes(groups, figures),
            compute_s=() if alike else _compute_s(groups, figures),
            interpolated=any(f.interpolated for f in figures),
            surcharge_usd_per_s=surcharge_usd_per_s + entry_usd / step_s,
        )

    def _money_of(self, stages: tuple[Stage, ...]) -> "_Money":
        devices = [d for stage in stages for d in stage.team.device_ids]
        return _Money(
            sum([self._team_usd_per_s(stage.team.device_ids) for stage in stages]),
            self.surcharge_usd_per_s(devices),
            self.entry_usd(stages[0].team),
        )

    def _team_usd_per_s(self, device_ids: tuple[str, ...]) -> float:
        """Price of its devices beyond what is paid for their presence."""
        found = self._prices.get(device_ids)
        if found is None:
            cluster = self.problem.cluster
            offers = [cluster.offer(cluster.device(d).pool) for d in device_ids]
            found = sum(o.price_usd_per_s for o in offers if o.billed == "while_used")
            self._prices[device_ids] = found
        return found

    def surcharge_usd_per_s(self, device_ids: Iterable[str]) -> float:
        """What J counts for devices beside their prices."""
        return sum(self.problem.cluster.device(d).surcharge_usd_per_s for d in device_ids)

    def entry_usd(self, team: Team) -> float:
        """What J counts for a sample that enters the model on a team, free on any member's pool."""
        cluster = self.problem.cluster
        return min(cluster.device(d).entry_usd_per_sample for d in team.device_ids)

    def devices_usd_per_s(self, device_ids: Sequence[str]) -> float:
        """What J counts for using these devices, beside what is billed while present."""
        return self._team_usd_per_s(tuple(device_ids)) + self.surcharge_usd_per_s(device_ids)

    def _sync(
        self,
        groups: Sequence[Group],
        alike: Sequence[Alike] | None,
        ends_s: Sequence[Sequence[float]],
        slowest_s: float,
    ) -> tuple[float, float]:
        """Seconds that gradient sums last beyond the slowest group, and their egress in dollars."""
        if not self.problem.overlap:
            return self._sums.together(groups, alike)
        finish_s, egress_usd = self._sums.finish(groups, alike, ends_s)
        return max(0.0, finish_s - slowest_s), egress_usd

    def balanced_sync_s(self, groups: Sequence[Group], alike: Sequence[Alike]) -> float:
        """About what gradient sums would take if cuts gave every stage as much of them."""
        return self._sums.balanced_s(groups, alike)

    def least_traffic(self, chains: Sequence[tuple[tuple[Team, ...], Alike]]) -> Traffic:
        """What traffic takes from chains of teams that have no cuts yet."""
        return least_traffic(self, self._sums, chains)

    def score(self, estimate: StepEstimate) -> float:
        """J = V' r - Q c in $^2/s; idle scores minus Q times the standing cost."""
        cost = estimate.counted_usd_per_s if estimate.step_s > 0 else self.standing_usd_per_s
        return (
            self.problem.penalty_weight * estimate.samples_per_s - self.problem.backlog_usd * cost
        )


def _peaks_bytes(
    groups: Sequence[Group], figures: Sequence[GroupFigures]
) -> tuple[tuple[str, int], ...]:
    """Peak of every device."""
    return tuple(
        (device, round(peak))
        for group, figure in zip(groups, figures, strict=True)
        for stage, peak in zip(group.stages, figure.peaks_bytes[len(groups) > 1], strict=True)
        for device in stage.team.device_ids
    )


def _compute_s(
    groups: Sequence[Group], figures: Sequence[GroupFigures]
) -> tuple[tuple[str, float], ...]:
    """What every device computes in a step."""
    return tuple(
        pair
        for group, figure in zip(groups, figures, strict=True)
        for pair in zip(group.device_ids, figure.compute_s, strict=True)
    )
