"""From what a slot measured to the state that planning sees: speeds, input, links, prices."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import exp, expm1, inf, log, log1p
from statistics import median
from typing import Literal

from orchestrator.core.cluster import ClusterState, Device
from orchestrator.core.durable import Estimates, InputMemory, Trend
from orchestrator.core.plan import Plan
from orchestrator.core.slot import Observation, StepEstimate, StepReport
from orchestrator.telemetry.links import Links
from orchestrator.telemetry.prices import PriceDoubt, Prices
from orchestrator.telemetry.trends import judged, measured, unseen

MIN_DEVICES_OF_KIND = 3
"""From here on the median of a kind says how far its profile is off, whoever straggles."""

INPUT_BIN = 0.05
"""Of log(1 + input / computing): less input is not counted, and a finer change is no news."""

Phase = Literal["compute", "input", "link"]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A device that is slower than predicted for it, in one phase of its step.

    ``ratio``: of what it takes to what it should take; input counts beside the computing.
    ``towards``: the node to which its messages are slow.
    """

    device_id: str
    phase: Phase
    ratio: float
    lasting: bool = False
    towards: str = ""

    @property
    def key(self) -> tuple[str, Phase, str]:
        """What it is the same straggler by, slot after slot."""
        return self.device_id, self.phase, self.towards


@dataclass(frozen=True, slots=True)
class _Measured:
    """One device's steps of a slot in one plan."""

    reports: tuple[StepReport, ...]
    healthy_s: float  # predicted for its computing, slow-downs aside
    num_samples: int
    draws: bool  # whether its stage draws samples


class Estimator:
    """Folds observations into one ClusterState. Each device is held against its own prediction.

    Source: docs/model.md, section 6.
    """

    def __init__(
        self,
        cluster: ClusterState,
        *,
        straggler_ratio: float = 1.2,
        confirm_slots: int = 2,
        price_max_age_s: float | None = None,
        estimates: Estimates | None = None,
    ) -> None:
        """Start from the cluster as described, and from what an earlier life learned of it.

        Slow-downs that are in the cluster's devices count where ``estimates`` knows nothing. A
        price last read longer than ``price_max_age_s`` ago is not trusted: the pool counts at its
        upper price. None: a price holds until the next one.
        """
        known = estimates or Estimates()
        self._ratio = straggler_ratio
        self._confirm_slots = confirm_slots
        self._speeds = {d.device_id: _first(d) for d in cluster.devices} | dict(known.speeds)
        self._inputs = dict(known.inputs)
        self._links = Links(cluster, known.links, straggler_ratio)
        self._prices = Prices(
            cluster.offers,
            cluster.now_s,
            known.prices,
            inf if price_max_age_s is None else price_max_age_s,
        )
        self._made: dict[str, tuple[Device, Device]] = {}  # as discovered, and as estimated
        self.cluster = self._state(cluster.devices, cluster.now_s)

    @property
    def estimates(self) -> Estimates:
        """What was learned, to be kept over a restart; bounded, however long the run."""
        return Estimates(
            speeds=tuple(sorted(self._speeds.items())),
            inputs=tuple(sorted(self._inputs.items())),
            links=self._links.memory,
            prices=self._prices.memory,
        )

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Present devices that are slower than predicted by ``straggler_ratio``, by phase."""
        return self._phases(lambda trend: trend.slots_slow > 0)

    @property
    def tried_again(self) -> tuple[Straggler, ...]:
        """What was slow when it was last measured, long ago, and is counted as healthy since."""
        return self._phases(lambda trend: trend.on_trial)

    def _phases(self, wanted: Callable[[Trend], bool]) -> tuple[Straggler, ...]:
        """What is estimated of devices and is wanted, in order: of a thousand it is a few."""
        found = [
            self._straggler(d, "compute", trend)
            for d, trend in self._speeds.items()
            if wanted(trend)
        ]
        found += [
            self._straggler(d, "input", memory.trend)
            for d, memory in self._inputs.items()
            if wanted(memory.trend)
        ]
        links = [link for link in self._links.memory if wanted(link[-1])]
        if links:
            devices = {d.node_id: d.device_id for d in reversed(self.cluster.devices)}
            found += [self._straggler(devices[a], "link", trend, b) for a, b, trend in links]
        return tuple(sorted(found, key=lambda straggler: straggler.key))

    def _straggler(
        self, device_id: str, phase: Phase, trend: Trend, towards: str = ""
    ) -> Straggler:
        return Straggler(device_id, phase, exp(trend.level), self._is_lasting(trend), towards)

    def _is_lasting(self, trend: Trend) -> bool:
        return trend.slots_slow >= self._confirm_slots or trend.num_trials > 0

    @property
    def doubts(self) -> tuple[PriceDoubt, ...]:
        """Pools whose newest price was not believed, was missing from the last slot, or is old."""
        return self._prices.doubts(self.cluster.now_s)

    @property
    def doubtful_pools(self) -> frozenset[str]:
        """Pools whose price is a guess."""
        return frozenset(doubt.pool for doubt in self.doubts)

    @property
    def stale_pools(self) -> frozenset[str]:
        """Pools whose price nobody knows any more: no further device of them is taken."""
        return frozenset(doubt.pool for doubt in self.doubts if doubt.cause == "stale")

    @property
    def price_age_s(self) -> tuple[tuple[str, float], ...]:
        """Seconds since the price of each pool was last read and believed."""
        return self._prices.age_s(self.cluster.now_s)

    def update(self, observation: Observation, predicted: StepEstimate, plan: Plan) -> ClusterState:
        """Fold one slot in and return the state at its end, also kept as ``cluster``.

        Args:
            observation: The slot; reports of other generations than the plan's are passed over.
            predicted: The cost model's view of ``plan`` in the state before this slot.
            plan: What ran.
        """
        found = self._measured(observation.reports, predicted, plan)
        self._fold_speeds(observation.devices, found)
        self._fold_inputs(observation.devices, found)
        self._prices.update(observation.offers, observation.now_s)
        self._links.update(observation.reports, observation.devices)
        self.cluster = self._state(observation.devices, observation.now_s)
        return self.cluster

    def _state(self, devices: Iterable[Device], now_s: float) -> ClusterState:
        found = [(device, self._estimated(device)) for device in devices]
        self._made = {device.device_id: (device, made) for device, made in found}
        return ClusterState(
            now_s=now_s,
            devices=tuple(made for _, made in found),
            links=self._links.links,
            offers=self._prices.counted(now_s),
        )

    def _estimated(self, device: Device) -> Device:
        """As it is planned with; the same object as before where nothing is news."""
        slowdown = _slowdown(self._speeds[device.device_id].level)
        input_s = _input_s(self._inputs.get(device.device_id))
        known, made = self._made.get(device.device_id, (None, device))
        if known is device and (made.slowdown, made.input_s_per_sample) == (slowdown, input_s):
            return made
        return replace(device, slowdown=slowdown, input_s_per_sample=input_s)

    # Speeds and input ----------------------------------------------------------------

    def _measured(
        self, reports: Iterable[StepReport], predicted: StepEstimate, plan: Plan
    ) -> dict[str, _Measured]:
        """Whole steps of the plan, by device, with what each device was predicted to compute."""
        groups, cluster = plan.groups, self.cluster
        group_samples = [group.num_samples for group in groups]
        mine: dict[str, list[StepReport]] = {}
        for report in reports:
            if (
                report.generation == plan.generation
                and report.compute_s > 0
                and report.num_samples == group_samples[report.group_index]
            ):
                mine.setdefault(report.device_id, []).append(report)
        predicted_s = dict(predicted.compute_s)
        found = {}
        for group in groups:
            for stage in group.stages:
                # A team was predicted at its slowest member.
                team = [cluster.device(d) for d in stage.team.device_ids if cluster.has(d)]
                if not team:
                    continue
                draws = stage in (group.stages[0], group.stages[-1])
                input_s = max(device.input_s_per_sample for device in team)
                slowdown = max(device.slowdown for device in team)
                for device in team:
                    its_s = predicted_s.get(device.device_id, 0.0)
                    healthy_s = (its_s - draws * input_s * group.num_samples) / slowdown
                    steps = mine.get(device.device_id, ())
                    if steps and healthy_s > 0:
                        found[device.device_id] = _Measured(
                            tuple(sorted(steps, key=_step)), healthy_s, group.num_samples, draws
                        )
        return found

    def _fold_speeds(self, devices: Iterable[Device], found: Mapping[str, _Measured]) -> None:
        speeds, kinds = {}, dict[str, list[float]]()
        for device in devices:
            trend = self._speeds.get(device.device_id) or _first(device)
            if its := found.get(device.device_id):
                ratios = [log(report.compute_s / its.healthy_s) for report in its.reports]
                trend = measured(trend, ratios)
            speeds[device.device_id] = trend
            level = trend.level if trend.num_steps else 0.0
            kinds.setdefault(device.kind, []).append(level)
        usuals = {
            kind: median(levels) if len(levels) >= MIN_DEVICES_OF_KIND else 0.0
            for kind, levels in kinds.items()
        }
        least = log(self._ratio)
        for device in devices:
            device_id, usual = device.device_id, usuals[device.kind]
            trend = speeds[device_id]
            if device_id in found:
                slow = trend.level - usual >= least
                speeds[device_id] = judged(trend, slow=slow)
            else:
                speeds[device_id] = unseen(trend, usual)
        self._speeds = speeds

    def _fold_inputs(self, devices: Iterable[Device], found: Mapping[str, _Measured]) -> None:
        inputs = {}
        for device_id in sorted(device.device_id for device in devices):
            memory, its = self._inputs.get(device_id), found.get(device_id)
            if its and its.draws:
                if memory is None and any(report.data_s > 0 for report in its.reports):
                    memory = InputMemory(Trend(), its.healthy_s / its.num_samples)
                if memory:
                    inputs[device_id] = self._drawn(memory, its)
            elif memory and (trend := unseen(memory.trend, 0.0)) != Trend(
                slots_unseen=trend.slots_unseen
            ):
                inputs[device_id] = replace(memory, trend=trend)
        self._inputs = inputs

    def _drawn(self, memory: InputMemory, its: _Measured) -> InputMemory:
        """With a slot's input; slow when the device would be slow if that were computing."""
        unit_s = its.num_samples * memory.scale_s
        trend = measured(memory.trend, [log1p(r.data_s / unit_s) for r in its.reports])
        slow = expm1(trend.level) * unit_s >= (self._ratio - 1) * its.healthy_s
        return replace(memory, trend=judged(trend, slow=slow))


def _first(device: Device) -> Trend:
    """Of a device that this run did not measure yet; a slow-down known from before may be true."""
    level = log(device.slowdown)
    return Trend(level=level, now=level, num_steps=int(level != 0.0))


def _slowdown(level: float) -> float:
    """To whole percents: a finer change is no news, and would make planning start afresh."""
    return max(0.01, round(exp(level), 2))


def _input_s(memory: InputMemory | None) -> float:
    if memory is None:
        return 0.0
    return memory.scale_s * expm1(round(memory.trend.level / INPUT_BIN) * INPUT_BIN)


def _step(report: StepReport) -> int:
    return report.step
