"""From what a slot measured to the state that planning sees: speeds, input, links, prices."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, log1p
from typing import Literal, NamedTuple

import numpy as np

from orchestrator.core.cluster import ClusterState, Device
from orchestrator.core.durable import Estimates, Trend
from orchestrator.core.plan import Plan
from orchestrator.core.slot import Observation, StepEstimate, StepReport
from orchestrator.telemetry.links import Links
from orchestrator.telemetry.prices import PriceDoubt, Prices
from orchestrator.telemetry.trends import FloatArray, Trends

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


class _Measured(NamedTuple):
    """One device's steps of a slot in one plan."""

    reports: list[StepReport]
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
        said = {d.device_id: _first(d) for d in cluster.devices}
        self._speeds = Trends((said | dict(known.speeds)).items())
        self._inputs = Trends(known.inputs)
        self._scale_s = dict(known.input_scales_s)
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
            speeds=self._speeds,
            inputs=self._inputs,
            input_scales_s=tuple(sorted(self._scale_s.items())),
            links=self._links.trends,
            prices=self._prices.memory,
        )

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Present devices that are slower than predicted by ``straggler_ratio``, by phase."""
        return self._phases("slots_slow")

    @property
    def tried_again(self) -> tuple[Straggler, ...]:
        """What was slow when it was last measured, long ago, and is counted as healthy since."""
        return self._phases("on_trial")

    def _phases(self, wanted: Literal["slots_slow", "on_trial"]) -> tuple[Straggler, ...]:
        """What is estimated of devices and is wanted, in order: of a thousand it is a few."""
        found = [self._straggler(d, "compute", trend) for d, trend in self._speeds.those(wanted)]
        found += [self._straggler(d, "input", trend) for d, trend in self._inputs.those(wanted)]
        if links := self._links.trends.those(wanted):
            devices = {d.node_id: d.device_id for d in reversed(self.cluster.devices)}
            found += [self._straggler(devices[a], "link", trend, b) for (a, b), trend in links]
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

    def _state(self, devices: Sequence[Device], now_s: float) -> ClusterState:
        slowdown = dict(
            zip(self._speeds.names, _slowdowns(self._speeds.column("level")), strict=True)
        )
        share = dict(zip(self._inputs.names, _shares(self._inputs.column("level")), strict=True))
        found = []
        for device in devices:
            d = device.device_id
            input_s = self._scale_s[d] * share[d] if d in share else 0.0
            found.append((device, self._estimated(device, slowdown[d], input_s)))
        self._made = {device.device_id: (device, made) for device, made in found}
        return ClusterState(
            now_s=now_s,
            devices=tuple(made for _, made in found),
            links=self._links.links,
            offers=self._prices.counted(now_s),
        )

    def _estimated(self, device: Device, slowdown: float, input_s: float) -> Device:
        """As it is planned with; the same object as before where nothing is news."""
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
        for group, num_samples in zip(groups, group_samples, strict=True):
            for stage in group.stages:
                team = [cluster.device(d) for d in stage.team.device_ids if cluster.has(d)]
                if not team:
                    continue
                draws = stage in (group.stages[0], group.stages[-1])
                input_s, slowdown = team[0].input_s_per_sample, team[0].slowdown
                for device in team[1:]:  # a team was predicted at its slowest member
                    input_s = max(input_s, device.input_s_per_sample)
                    slowdown = max(slowdown, device.slowdown)
                for device in team:
                    its_s = predicted_s.get(device.device_id, 0.0)
                    healthy_s = (its_s - draws * input_s * num_samples) / slowdown
                    steps = mine.get(device.device_id)
                    if steps and healthy_s > 0:
                        found[device.device_id] = _Measured(
                            sorted(steps, key=_step), healthy_s, num_samples, draws
                        )
        return found

    def _fold_speeds(self, devices: Iterable[Device], found: Mapping[str, _Measured]) -> None:
        present = {device.device_id: device for device in devices}
        speeds = self._speeds.keep(present, lambda device_id: _first(present[device_id]))
        rows = speeds.rows(d for d in found if d in present)
        unseen = speeds.others(rows)
        ratios = [
            [log(report.compute_s / its.healthy_s) for report in its.reports]
            for its in (found[speeds.names[row]] for row in rows)
        ]
        speeds = speeds.measured(rows, ratios)
        levels = np.where(speeds.column("num_steps") > 0, speeds.column("level"), 0.0)
        kinds = np.array([present[name].kind for name in speeds.names])
        usual = np.zeros(len(speeds))
        for kind in set(kinds):
            is_it = kinds == kind
            if np.count_nonzero(is_it) >= MIN_DEVICES_OF_KIND:
                usual[is_it] = np.median(levels[is_it])
        slow = speeds.column("level") - usual >= log(self._ratio)
        self._speeds = speeds.judged(rows, slow[rows]).unseen(unseen, usual[unseen])

    def _fold_inputs(self, devices: Iterable[Device], found: Mapping[str, _Measured]) -> None:
        """Slow is a device that would be slow if its input were computing."""
        present = {device.device_id for device in devices}
        drawn = {
            d: its
            for d, its in found.items()
            if d in present
            and its.draws
            and (d in self._scale_s or any(report.data_s > 0 for report in its.reports))
        }
        for d, its in drawn.items():
            self._scale_s.setdefault(d, its.healthy_s / its.num_samples)
        inputs = self._inputs.keep(drawn.keys() | (present & set(self._inputs.names)))
        rows = inputs.rows(drawn)
        unit_s = np.array([its.num_samples * self._scale_s[d] for d, its in drawn.items()])
        least_s = (self._ratio - 1) * np.array([its.healthy_s for its in drawn.values()])
        inputs = inputs.measured(
            rows,
            [
                [log1p(report.data_s / its_s) for report in its.reports]
                for its, its_s in zip(drawn.values(), unit_s.tolist(), strict=True)
            ],
        )
        slow = np.expm1(inputs.column("level")[rows]) * unit_s >= least_s
        unseen = inputs.others(rows)
        inputs = inputs.judged(rows, slow).unseen(unseen, np.zeros(len(unseen)))
        known = (inputs.column("num_steps") > 0) | (inputs.column("num_trials") > 0)
        known |= inputs.column("on_trial")
        self._inputs = inputs.keep(
            d for d, is_known in zip(inputs.names, known.tolist(), strict=True) if is_known
        )
        self._scale_s = {d: self._scale_s[d] for d in self._inputs.names}


def _first(device: Device) -> Trend:
    """Of a device that this run did not measure yet; a slow-down known from before may be true."""
    level = log(device.slowdown)
    return Trend(level=level, now=level, num_steps=int(level != 0.0))


def _slowdowns(levels: FloatArray) -> list[float]:
    """To whole percents: a finer change is no news, and would make planning start afresh."""
    found: list[float] = np.maximum(0.01, np.round(np.exp(levels), 2)).tolist()
    return found


def _shares(levels: FloatArray) -> list[float]:
    """Of what a device computed a sample in, how long it takes to draw one."""
    found: list[float] = np.expm1(np.round(levels / INPUT_BIN) * INPUT_BIN).tolist()
    return found


def _step(report: StepReport) -> int:
    return report.step
