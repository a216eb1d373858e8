"""What an emulated cluster really does: true durations, slow-downs and prices, by step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from orchestrator.control.backend import EmulatedEvent
from orchestrator.core.cluster import ClusterState, Device, Offer
from orchestrator.core.model import ModelProfile, TrainingOptions
from orchestrator.core.plan import Group, Plan
from orchestrator.core.slot import first_problem
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime


@dataclass(frozen=True, slots=True)
class StageTruth:
    """One device's stage at its normal speed; links as (latency in s, bandwidth in bytes/s)."""

    seconds: Mapping[int, tuple[float, float]]  # microbatch: forward_s, backward_s
    to_next: tuple[float, float] | None
    to_previous: tuple[float, float] | None
    step_end_s: float  # gradient sums and update after the last group
    slowdowns: tuple[tuple[int, float], ...]  # from which step, how much slower than normal


@dataclass(frozen=True, slots=True)
class EmulatedTruth:
    """The cluster as configured, the emulated times, and what happens to it at which step."""

    cluster: ClusterState
    model: ModelProfile
    training: TrainingOptions
    events: tuple[EmulatedEvent, ...] = ()
    billing_speedup: float = 1.0

    def slowdowns(self, device_id: str) -> tuple[tuple[int, float], ...]:
        """(step, slowdown) from which a device is that much slower than normal, by step."""
        device = self.cluster.device(device_id)
        found = [
            (event.at_step, 1.0 / event.speed_ratio)
            for event in self.events
            if event.speed_ratio is not None
            and (event.device == device_id or (event.device is None and event.pool == device.pool))
        ]
        return tuple(sorted(found, key=lambda step_slowdown: step_slowdown[0]))

    def slowdown_at(self, device_id: str, step: int) -> float:
        """How much slower than normal a device is in a step."""
        return next((s for at, s in reversed(self.slowdowns(device_id)) if at <= step), 1.0)

    def lost_at(self, step: int) -> tuple[str, ...]:
        """Devices that are gone once ``step`` is the next one to run."""
        return lost_by(self.events, self.cluster.devices, step)

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
            offers[event.pool] = replace(
                offers[event.pool],
                price_usd_per_s=event.price_per_hour / 3600 * self.billing_speedup,
                valid_from_s=reached_s.get(event.at_step, 0.0),
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
                    seconds={
                        size: normal.stage_seconds(
                            stage.team, stage.first_layer, stage.end_layer, size
                        )
                        for size in _sizes(group)
                    },
                    to_next=self._link(group, index, index + 1),
                    to_previous=self._link(group, index, index - 1),
                    step_end_s=estimate.sync_s + estimate.update_s,
                    slowdowns=(),
                )
                for device_id in stage.team.device_ids:
                    found[device_id] = replace(truth, slowdowns=self.slowdowns(device_id))
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

    def _cluster_at(self, step: int) -> ClusterState:
        return replace(
            self.cluster,
            devices=tuple(
                replace(d, slowdown=self.slowdown_at(d.device_id, step))
                for d in self.cluster.devices
            ),
        )


def lost_by(
    events: Sequence[EmulatedEvent], devices: Sequence[Device], step: int
) -> tuple[str, ...]:
    """Devices that events have taken once ``step`` is the next one to run."""
    return tuple(
        device.device_id
        for event in events
        if event.lost and event.at_step <= step
        for device in devices
        if event.device == device.device_id or (event.device is None and event.pool == device.pool)
    )


def _sizes(group: Group) -> Iterable[int]:
    """Microbatch sizes a group may meet: its own, and any smaller one in a short last step."""
    return range(1, max(group.microbatches) + 1)
