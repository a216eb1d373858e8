"""What an emulated cluster really does: true durations, slow-downs and prices, by step."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.control.backend import EmulatedEvent
from orchestrator.control.faults import Fault, Phase
from orchestrator.core.cluster import ClusterState, Device, Offer
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Group, Plan
from orchestrator.core.slot import first_problem
from orchestrator.core.training import TrainingOptions
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime

Narrowings = tuple[tuple[int, float, float], ...]
"""First step, end step, and how much of its bandwidth a link has from the one to the other."""


@dataclass(frozen=True, slots=True)
class StageTruth:
    """One device's stage at its normal speed; links as (latency in s, bandwidth in bytes/s)."""

    seconds: Mapping[int, tuple[float, float]]  # microbatch: forward_s, backward_s
    to_next: tuple[float, float] | None
    to_previous: tuple[float, float] | None
    step_end_s: float  # gradient sums and update after the last group
    slowdowns: tuple[tuple[int, float], ...]  # from which step, how much slower than normal
    delays: tuple[tuple[int, float, Phase, float], ...] = ()  # first step, end step, phase, s
    narrow_next: Narrowings = ()
    narrow_previous: Narrowings = ()


@dataclass(frozen=True, slots=True)
class EmulatedTruth:
    """The cluster as configured, the emulated times, and what happens to it at which step."""

    cluster: ClusterState
    """With every device that is ever there; ``present_at`` says which are."""

    model: ModelProfile
    training: TrainingOptions
    events: tuple[EmulatedEvent, ...] = ()
    faults: tuple[Fault, ...] = ()
    """Of which only delays and slow links count here."""

    billing_speedup: float = 1.0

    def slowdowns(self, device_id: str) -> tuple[tuple[int, float], ...]:
        """(step, slowdown) from which a device is that much slower than normal, by step."""
        device = self.cluster.device(device_id)
        found = [
            (event.at_step, 1.0 / event.speed_ratio)
            for event in self.events
            if event.speed_ratio is not None and _touches(event, device)
        ]
        return tuple(sorted(found, key=lambda step_slowdown: step_slowdown[0]))

    def slowdown_at(self, device_id: str, step: int) -> float:
        """How much slower than normal a device is in a step."""
        return next((s for at, s in reversed(self.slowdowns(device_id)) if at <= step), 1.0)

    def delays(self, device_id: str) -> tuple[tuple[int, float, Phase, float], ...]:
        """(first step, end step, phase, seconds) by which a device takes longer."""
        return tuple(
            (
                fault.at_step,
                fault.end_step,
                fault.where,
                fault.delay_s or 0.0,
            )
            for fault in self.faults
            if fault.kind == "slow" and fault.device == device_id
        )

    def present_at(self, step: int) -> tuple[str, ...]:
        """Devices that are there once ``step`` is the next one to run."""
        return present_by(self.events, self.cluster.devices, step)

    def leaving(self, reached_s: Mapping[int, float]) -> dict[str, float]:
        """Devices under notice, and when they are taken away, on the run's clock.

        ``reached_s``: event step to the time at which it came next.
        """
        return {
            device.device_id: reached_s[event.at_step] + event.notice_s
            for event in self.events
            if event.notice_s is not None and event.at_step in reached_s
            for device in self.cluster.devices
            if _touches(event, device)
        }

    def offers_at(self, step: int, reached_s: Mapping[int, float]) -> tuple[Offer, ...]:
        """Prices in force once ``step`` is the next one to run.

        Args:
            step: First step that has not been committed.
            reached_s: Event step to the time of the run's clock at which it came next.
        """
        offers = {offer.pool: offer for offer in self.cluster.offers}
        for event in sorted(self.events, key=lambda e: e.at_step):
            if event.price_per_hour is None or event.pool is None or event.at_step > step:
                continue
            offers[event.pool] = offers[event.pool].listed_at(
                event.price_per_hour / 3600 * self.billing_speedup,
                reached_s.get(event.at_step, 0.0),
            )
        return tuple(offers.values())

    def stages(self, plan: Plan, first_step: int) -> dict[str, StageTruth]:
        """True durations of every device that a plan uses, for work from ``first_step`` on.

        The end of a step is shared by all: it is timed at the speeds of ``first_step``.
        """
        normal = CostModel(first_problem(self.cluster, self.model, self.training))
        slowed = self._cluster_at(first_step)
        now = CostModel(first_problem(slowed, self.model, self.training))
        estimate = retime(now, plan.groups, plan.schedule)
        found: dict[str, StageTruth] = {}
        for group in plan.groups:
            for index, stage in enumerate(group.stages):
                truth = StageTruth(
                    seconds={size: normal.seconds_of(stage, size) for size in _sizes(group)},
                    to_next=self._link(group, index, index + 1),
                    to_previous=self._link(group, index, index - 1),
                    step_end_s=estimate.sync_s + estimate.update_s,
                    slowdowns=(),
                    narrow_next=self._narrowings(group, index, index + 1),
                    narrow_previous=self._narrowings(group, index, index - 1),
                )
                for device_id in stage.team.device_ids:
                    found[device_id] = replace(
                        truth,
                        slowdowns=self.slowdowns(device_id),
                        delays=self.delays(device_id),
                    )
        return found

    def _link(self, group: Group, index: int, other: int) -> tuple[float, float] | None:
        if not 0 <= other < len(group.stages):
            return None
        source, target = (
            self.cluster.device(group.stages[i].team.device_ids[0]) for i in (index, other)
        )
        link = self.cluster.link(source, target)
        border = max(group.stages[index].first_layer, group.stages[other].first_layer) - 1
        size_bytes = self.model.sizes[0].boundary_bytes_per_sample[border] * group.microbatches[0]
        return link.latency_s, link.rate_bytes_per_s(size_bytes)

    def _narrowings(self, group: Group, index: int, other: int) -> Narrowings:
        if not 0 <= other < len(group.stages):
            return ()
        ends = {group.stages[i].team.device_ids[0] for i in (index, other)}
        return tuple(
            (fault.at_step, fault.end_step, fault.bandwidth_ratio)
            for fault in self.faults
            if fault.bandwidth_ratio is not None and {fault.device, fault.peer} == ends
        )

    def _cluster_at(self, step: int) -> ClusterState:
        return replace(
            self.cluster,
            devices=tuple(
                replace(d, slowdown=self.slowdown_at(d.device_id, step))
                for d in self.cluster.devices
            ),
        )


def present_by(
    events: Sequence[EmulatedEvent], devices: Sequence[Device], step: int
) -> tuple[str, ...]:
    """Devices that are there once ``step`` is the next one to run.

    Args:
        events: In any order; what joins a pool are its last devices, in their order.
        devices: All that are ever there.
        step: How far the run has come.
    """
    joining = Counter[str]()
    for event in events:
        joining[event.pool or ""] += event.joined
    pools: dict[str, list[str]] = {}
    for device in devices:
        pools.setdefault(device.pool, []).append(device.device_id)
    there = {pool: ids[: len(ids) - joining[pool]] for pool, ids in pools.items()}
    waiting = {pool: ids[len(ids) - joining[pool] :] for pool, ids in pools.items()}
    for event in sorted(events, key=lambda e: e.at_step):
        if event.at_step > step:
            break
        if event.pool is not None and event.joined:
            there[event.pool] += waiting[event.pool][: event.joined]
            del waiting[event.pool][: event.joined]
        if event.lost:
            for pool, ids in there.items():
                there[pool] = [
                    d for d in ids if event.device != d and (event.device or event.pool != pool)
                ]
    present = {device_id for ids in there.values() for device_id in ids}
    return tuple(device.device_id for device in devices if device.device_id in present)


def _touches(event: EmulatedEvent, device: Device) -> bool:
    return event.device == device.device_id or (event.device is None and event.pool == device.pool)


def _sizes(group: Group) -> Iterable[int]:
    """Microbatch sizes a group may meet: its own, and any smaller one in a short last step."""
    return range(1, max(group.microbatches) + 1)
