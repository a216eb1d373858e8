"""From what a slot measured to the state that planning sees: speeds, prices, stragglers."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import exp, inf, log
from statistics import median
from typing import Literal

from orchestrator.core.cluster import PRICE_JUMP, ClusterState, Device, Offer
from orchestrator.core.plan import Plan
from orchestrator.core.slot import Observation, StepEstimate, StepReport

HALF_LIFE_SLOTS = 2.5
"""Slots after which an old speed counts half, as long as nothing jumped."""

DRIFT_SIGMAS, DRIFT_FLOOR = 0.5, 0.025
THRESHOLD_SIGMAS, THRESHOLD_FLOOR = 8.0, 0.10
"""Of the cumulative sums, in logarithms of a ratio: about one false alarm in 19,000 steps."""

OUTLIER_SHARE = 0.8
"""Share of the threshold that one step may add: two in a row raise the alarm, never one."""

WINDOW_STEPS = 200
"""Deviations kept per device."""

MIN_DEVIATIONS = 8
"""Steps before their spread is trusted; until then only the floors count."""

SIGMA_PER_MEDIAN_DEVIATION = 1.4826

MIN_DEVICES_OF_KIND = 3
"""From here on the median of a kind says how far its profile is off, whoever straggles."""

CONFIRMING_READINGS = 3
"""A price that moves by more than ``PRICE_JUMP`` is believed at its third reading in a row."""

SAME_PRICE_RATIO = 1.05


@dataclass(slots=True)
class _Speed:
    """What is known of one device: the logarithm of measured over predicted time, and its noise."""

    level: float = 0.0
    deviations: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    up: float = 0.0
    down: float = 0.0
    since_up: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    since_down: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    slots_slow: int = 0

    def fold(self, samples: list[float]) -> None:
        """Take in a slot's steps: follow slowly, or jump when the cumulative sums say so."""
        sigma = 0.0
        if len(self.deviations) >= MIN_DEVIATIONS:
            sigma = SIGMA_PER_MEDIAN_DEVIATION * median(self.deviations)
        drift = max(DRIFT_SIGMAS * sigma, DRIFT_FLOOR)
        threshold = max(THRESHOLD_SIGMAS * sigma, THRESHOLD_FLOOR)
        after_change: list[float] = []
        for sample in samples:
            if after_change:
                after_change.append(sample)
            self.deviations.append(abs(sample - self.level))
            since = self._alarm(sample, drift, threshold)
            if since:
                after_change = since
                self.level = median(since)
        if after_change:
            self.level = median(after_change)
        else:
            weight = 1 - 0.5 ** (1 / HALF_LIFE_SLOTS)
            self.level += weight * (median(samples) - self.level)

    def _alarm(self, sample: float, drift: float, threshold: float) -> list[float]:
        """Advance both sums; the samples since the change when one of them passes the threshold."""
        most = OUTLIER_SHARE * threshold
        error = max(-most, min(most, sample - self.level))
        self.up = max(0.0, self.up + error - drift)
        self.down = max(0.0, self.down - error - drift)
        for total, since in ((self.up, self.since_up), (self.down, self.since_down)):
            if total:
                since.append(sample)
            else:
                since.clear()
        if max(self.up, self.down) <= threshold:
            return []
        found = list(self.since_up if self.up > self.down else self.since_down)
        self.up = self.down = 0.0
        self.since_up.clear()
        self.since_down.clear()
        return found


@dataclass(frozen=True, slots=True)
class PriceDoubt:
    """Why the price of a pool is not the one that was read last; dollars per second of the run."""

    pool: str
    cause: Literal["jump", "missing", "stale"]
    counted_usd_per_s: float  # what it is billed and planned at
    read_usd_per_s: float | None = None  # not believed
    age_s: float = 0.0  # since the newest price that was believed


@dataclass(slots=True)
class _Price:
    """The offer of a pool that is believed, when it was read, and readings not believed yet."""

    offer: Offer
    read_s: float
    seen_s: float = -inf  # newest reading, believed or not
    doubted: list[float] = field(default_factory=list)
    missing: bool = False

    def read(self, offer: Offer, now_s: float) -> None:
        """Take a reading in: a feed's row counts once, any other price once a slot."""
        self.missing = False
        at_s = now_s if offer.read_s is None else offer.read_s
        if offer.read_s is not None and at_s <= self.seen_s:
            return
        self.seen_s = at_s
        factor = offer.price_usd_per_s / self.offer.price_usd_per_s
        if not 1 / PRICE_JUMP <= factor <= PRICE_JUMP:
            first = self.doubted[0] if self.doubted else offer.price_usd_per_s
            ratio = offer.price_usd_per_s / first
            agrees = 1 / SAME_PRICE_RATIO <= ratio <= SAME_PRICE_RATIO
            self.doubted = [*self.doubted, first] if agrees else [offer.price_usd_per_s]
            if len(self.doubted) < CONFIRMING_READINGS:
                return
        self.offer, self.read_s, self.doubted = offer, at_s, []

    def counted(self, now_s: float, max_age_s: float) -> Offer:
        """The offer to plan and bill with: at its upper price once nobody knows the true one."""
        if not self.is_stale(now_s, max_age_s):
            return self.offer
        upper = self.offer.upper_usd_per_s
        return replace(
            self.offer,
            price_usd_per_s=upper,
            max_price_usd_per_s=upper,
            valid_from_s=self.read_s + max_age_s,
        )

    def is_stale(self, now_s: float, max_age_s: float) -> bool:
        """Whether the newest believed reading is too old."""
        return now_s - self.read_s > max_age_s


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
    ) -> None:
        """Start from the cluster as first seen; slow-downs known from before are in its devices.

        A price last read longer than ``price_max_age_s`` ago is not trusted: the pool counts at
        its upper price. None: a price holds until the next one.
        """
        self.cluster = cluster
        self._ratio = straggler_ratio
        self._confirm_slots = confirm_slots
        self._max_age_s = inf if price_max_age_s is None else price_max_age_s
        self._speeds = {d.device_id: _Speed(level=log(d.slowdown)) for d in cluster.devices}
        self._prices = {offer.pool: _Price(offer, cluster.now_s) for offer in cluster.offers}

    @property
    def stragglers(self) -> tuple[str, ...]:
        """Present devices that run slower than predicted by ``straggler_ratio`` or more."""
        return tuple(d for d in sorted(self._speeds) if self._speeds[d].slots_slow)

    @property
    def lasting_stragglers(self) -> tuple[str, ...]:
        """Those that have been so for ``confirm_slots`` slots in a row."""
        return tuple(
            d for d in self.stragglers if self._speeds[d].slots_slow >= self._confirm_slots
        )

    @property
    def doubts(self) -> tuple[PriceDoubt, ...]:
        """Pools whose newest price was not believed, was missing from the last slot, or is old."""
        now_s, found = self.cluster.now_s, []
        for pool, price in sorted(self._prices.items()):
            stale = price.is_stale(now_s, self._max_age_s)
            if not (stale or price.doubted or price.missing):
                continue
            found.append(
                PriceDoubt(
                    pool,
                    "stale" if stale else "jump" if price.doubted else "missing",
                    price.counted(now_s, self._max_age_s).price_usd_per_s,
                    price.doubted[0] if price.doubted else None,
                    now_s - price.read_s,
                )
            )
        return tuple(found)

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
        return tuple(
            (pool, self.cluster.now_s - price.read_s)
            for pool, price in sorted(self._prices.items())
        )

    def update(self, observation: Observation, predicted: StepEstimate, plan: Plan) -> ClusterState:
        """Fold one slot in and return the state at its end, also kept as ``cluster``.

        Args:
            observation: The slot; reports of other generations than the plan's are passed over.
            predicted: The cost model's view of ``plan`` in the state before this slot.
            plan: What ran.
        """
        present = {device.device_id: device for device in observation.devices}
        self._speeds = {
            device_id: self._speeds.get(device_id) or _Speed(level=log(device.slowdown))
            for device_id, device in present.items()
        }
        for device_id, samples in self._samples(observation.reports, predicted, plan).items():
            self._speeds[device_id].fold(samples)
        self._count_slow_slots(present)
        for price in self._prices.values():
            price.missing = True
        for offer in observation.offers:
            known = self._prices.setdefault(offer.pool, _Price(offer, observation.now_s))
            known.read(offer, observation.now_s)
        self.cluster = ClusterState(
            now_s=observation.now_s,
            devices=tuple(
                replace(present[d], slowdown=_slowdown(self._speeds[d].level)) for d in present
            ),
            links=self.cluster.links,
            offers=tuple(
                price.counted(observation.now_s, self._max_age_s) for price in self._prices.values()
            ),
        )
        return self.cluster

    def _samples(
        self, reports: Iterable[StepReport], predicted: StepEstimate, plan: Plan
    ) -> dict[str, list[float]]:
        """Logarithm of measured over healthy predicted compute time, per device, step by step."""
        healthy_s = self._healthy_s(predicted, plan)
        ordered = sorted(
            (
                report
                for report in reports
                if report.generation == plan.generation
                and report.compute_s > 0
                and healthy_s.get(report.device_id, 0.0) > 0
                and report.device_id in self._speeds
                and report.num_samples == plan.groups[report.group_index].num_samples
            ),
            key=_device_and_step,
        )
        return {
            device_id: [log(report.compute_s / healthy_s[device_id]) for report in mine]
            for device_id, mine in groupby(ordered, key=lambda report: report.device_id)
        }

    def _healthy_s(self, predicted: StepEstimate, plan: Plan) -> Mapping[str, float]:
        """Predicted compute time without slow-downs; a team was predicted at its slowest member."""
        team_slowdown = {
            device_id: max(
                self.cluster.device(member).slowdown
                for member in stage.team.device_ids
                if self.cluster.has(member)
            )
            for group in plan.groups
            for stage in group.stages
            for device_id in stage.team.device_ids
            if self.cluster.has(device_id)
        }
        return {
            device_id: seconds / team_slowdown[device_id]
            for device_id, seconds in predicted.compute_s
            if device_id in team_slowdown
        }

    def _count_slow_slots(self, present: Mapping[str, Device]) -> None:
        levels: dict[str, list[float]] = {}
        for device_id, device in present.items():
            levels.setdefault(device.kind, []).append(self._speeds[device_id].level)
        for device_id, device in present.items():
            of_kind = levels[device.kind]
            usual = median(of_kind) if len(of_kind) >= MIN_DEVICES_OF_KIND else 0.0
            speed = self._speeds[device_id]
            slow = speed.level - usual >= log(self._ratio)
            speed.slots_slow = speed.slots_slow + 1 if slow else 0


def _slowdown(level: float) -> float:
    """To whole percents: a finer change is no news, and would make planning start afresh."""
    return max(0.01, round(exp(level), 2))


def _device_and_step(report: StepReport) -> tuple[str, int]:
    return report.device_id, report.step
