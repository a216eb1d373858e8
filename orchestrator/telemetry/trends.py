"""How far something is from its own prediction: followed slowly, by jumps, and given up with age.

A quantity is the logarithm of measured over predicted time. Nothing is ever compared with what
another device does.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from math import exp, log, nan
from typing import Any, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.durable import Trend
from orchestrator.telemetry.flapping import DIGITS, MIN_SLOTS, THRESHOLD_FLOOR, average

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

HALF_LIFE_SLOTS = 2.5
"""Slots after which an old level counts half, as long as nothing jumped."""

DRIFT_SIGMAS, DRIFT_FLOOR = 0.5, 0.025
THRESHOLD_SIGMAS = 8.0
"""Of the cumulative sums, in logarithms of a ratio, with ``THRESHOLD_FLOOR``: about one false alarm
in 19,000 steps."""

OUTLIER_SHARE = 0.8
"""Share of the threshold that one step may add: two in a row raise the alarm, never one."""

WINDOW_SLOTS = 24
WINDOW_STEPS = 32
"""What is kept of slots, and of the steps since a change may have begun."""

MIN_STEPS = 8
"""Before their spread is trusted; until then only the floors count."""

SIGMA_PER_MEDIAN_DEVIATION = 1.4826

RETRY_SLOTS, MOST_TRIALS = 20, 3
"""An estimate that nothing has confirmed for so many slots is given up, so that a device that
recovers while it is idle is used again; twice as many whenever it was still slow then, up to eight
times as many, and twice as many again of what is averaged."""


def _new(_: object) -> Trend:
    return Trend()


K = TypeVar("K", str, tuple[str, str])


class Trends(Sequence[tuple[K, Trend]]):
    """What is known of many quantities, in the order of their names.

    In columns: of a thousand devices each column of a slot is one operation. It never changes;
    what it says of one is a ``Trend``, made when it is asked for.
    """

    def __init__(self, known: Iterable[tuple[K, Trend]] = ()) -> None:
        found = sorted(known)
        self.names: tuple[K, ...] = tuple(name for name, _ in found)
        self._table = np.array([_row(trend) for _, trend in found], dtype=_ROW)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._with(self._table[index], self.names[index])
        (found,) = self._with(self._table[[index]], (self.names[index],))
        return found

    def __iter__(self) -> Iterator[tuple[K, Trend]]:
        rows = zip(*(self._table[name].tolist() for name in _ROW.names or ()), strict=True)
        return zip(self.names, map(_trend, rows), strict=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def column(self, name: str) -> Any:
        """A field of ``Trend``, of each quantity."""
        return self._table[name]

    def those(self, name: str) -> tuple[tuple[K, Trend], ...]:
        """Where a field is neither zero nor False."""
        rows = np.flatnonzero(self._table[name])
        return tuple(self._with(self._table[rows], tuple(self.names[row] for row in rows)))

    def keep(self, names: Iterable[K], first: Callable[[K], Trend] = _new) -> "Trends[K]":
        """Those of ``names`` and no others; of the new ones nothing is known but ``first``."""
        wanted = sorted(names)
        if tuple(wanted) == self.names:
            return self
        row_of = self._row_of
        new = Trends((name, first(name)) for name in wanted if name not in row_of)
        row_of = row_of | {name: len(self) + row for row, name in enumerate(new.names)}
        table = np.concatenate([self._table, new._table])
        return self._with(table[[row_of[name] for name in wanted]], tuple(wanted))

    @cached_property
    def _row_of(self) -> dict[K, int]:
        return {name: row for row, name in enumerate(self.names)}

    def rows(self, names: Iterable[K]) -> IntArray:
        """Where these are, in the order in which they are given."""
        return np.array([self._row_of[name] for name in names], dtype=np.int64)

    def others(self, rows: IntArray) -> IntArray:
        """All but these."""
        return np.setdiff1d(np.arange(len(self)), rows)

    def _with(self, table: Any, names: tuple[K, ...] | None = None) -> "Trends[K]":
        other = Trends[K]()
        other.names, other._table = self.names if names is None else names, table
        if names is None:
            other._row_of = self._row_of
        return other

    def measured(self, rows: IntArray, samples: Sequence[Sequence[float]]) -> "Trends[K]":
        """With one more slot's steps of some: follow slowly, or jump when the sums say so.

        Source: docs/model.md, section 6.
        """
        if not len(rows):
            return self
        table = self._table.copy()
        table[rows] = _measured(self._table[rows], samples)
        return self._with(table)

    def unseen(self, rows: IntArray, usual: FloatArray) -> "Trends[K]":
        """With one more slot in which some were not measured.

        What is given up takes its usual level.
        """
        was = self._table[rows]
        is_slow = was["slots_slow"] > 0
        # What flaps is worse to try.
        wait_slots = RETRY_SLOTS << (was["num_trials"] + was["averaged"])
        slots_unseen = was["slots_unseen"] + 1
        again = np.full(len(rows), np.array(_row(Trend()), dtype=_ROW))
        again["level"] = again["now"] = usual
        again["num_trials"] = was["num_trials"]
        again["on_trial"] = was["on_trial"] | is_slow
        again["given_up"] = np.where(is_slow, was["level"], was["given_up"])
        waits = (was["num_steps"] > 0) & (slots_unseen < wait_slots)
        found = np.where(waits, was, again)
        found["slots_unseen"] = slots_unseen
        table = self._table.copy()
        table[rows] = found
        return self._with(table)

    def judged(self, rows: IntArray, slow: BoolArray) -> "Trends[K]":
        """With the verdict on a slot in which some were measured.

        What is slow again when it is given another try is as slow as it was: one change of plan.
        """
        table = self._table.copy()
        found = table[rows]
        failed = slow & found["on_trial"]
        found["level"] = np.where(
            failed, np.maximum(found["level"], found["given_up"]), found["level"]
        )
        found["averaged"] &= ~failed
        found["slots_well"] = np.where(slow, 0, np.minimum(found["slots_well"] + 1, RETRY_SLOTS))
        proved = found["slots_well"] >= RETRY_SLOTS
        trials = np.minimum(found["num_trials"] + failed, MOST_TRIALS)
        found["num_trials"] = np.where(proved, 0, trials)
        found["on_trial"] &= ~(slow | proved)
        found["slots_slow"] = np.where(slow, found["slots_slow"] + 1, 0)
        table[rows] = found
        return self._with(table)


_WINDOW_OF = {
    "noise": WINDOW_SLOTS, "means": WINDOW_SLOTS, "nows": WINDOW_SLOTS,
    "since_up": WINDOW_STEPS, "since_down": WINDOW_STEPS,
}  # fmt: skip


def _column(name: str, kind: Any) -> tuple[Any, ...]:
    if name in _WINDOW_OF:
        return name, np.float64, (_WINDOW_OF[name],)  # the newest last, NaN before the oldest
    return name, kind


_ROW = np.dtype([_column(name, kind) for name, kind in get_type_hints(Trend).items()])


def _row(trend: Trend) -> tuple[Any, ...]:
    return tuple(
        (nan,) * (_WINDOW_OF[name] - len(value)) + value if name in _WINDOW_OF else value
        for name, value in ((name, getattr(trend, name)) for name in _ROW.names or ())
    )


def _trend(row: Sequence[Any]) -> Trend:
    values: list[Any] = [_window(v) if isinstance(v, list) else v for v in row]
    return Trend(*values)


def _window(values: list[float]) -> tuple[float, ...]:
    """Without the NaN before the oldest."""
    return tuple(values[next((i for i, v in enumerate(values) if v == v), len(values)) :])  # noqa: PLR0124


def _measured(was: Any, samples: Sequence[Sequence[float]]) -> Any:
    """Rows of a table, with a slot's steps of each."""
    num_steps = np.array([len(mine) for mine in samples])
    steps: FloatArray = np.full((len(samples), num_steps.max()), nan)
    steps[np.arange(steps.shape[1]) < num_steps[:, None]] = np.concatenate(samples)
    steps = steps.round(DIGITS)
    is_known = was["num_steps"] >= MIN_STEPS
    sigma = np.where(is_known, SIGMA_PER_MEDIAN_DEVIATION * _medians(was["noise"]), 0.0)
    sums = _Sums(
        np.maximum(DRIFT_SIGMAS * sigma, DRIFT_FLOOR),
        np.maximum(THRESHOLD_SIGMAS * sigma, THRESHOLD_FLOOR),
        was,
    )
    now, deviations = was["now"].copy(), np.empty_like(steps)
    changed: dict[int, list[float]] = {}  # the steps since the last jump
    for k, column in enumerate(steps.T):
        for row, since in changed.items():
            if k < num_steps[row]:
                since.append(float(column[row]))
        deviations[:, k] = np.abs(column - now)
        for row, jump in sums.add(column, now).items():
            changed[row] = list(jump)
            now[row] = _median(jump)
    apart = _medians(steps) - now
    # Else an odd slot.
    is_near = np.abs(apart) < OUTLIER_SHARE * sums.threshold
    now += np.where(is_near, _weights(was["means"]) * apart, 0.0)
    for row, since in changed.items():
        now[row] = _median(since)
    now = np.round(now, DIGITS)
    # Of one step the logarithm of its own exponential, which is itself once it is rounded.
    means = steps[:, 0] + 0.0  # 0, never -0
    several = num_steps > 1
    means[several] = np.log(np.nanmean(np.exp(steps[several]), axis=1))
    result = was.copy()
    _keep(result["noise"], np.round(_medians(deviations), DIGITS))
    _keep(result["means"], np.round(means, DIGITS))
    _keep(result["nows"], now)
    result["level"], result["now"], result["averaged"] = now, now, False
    for row in np.flatnonzero(_may_average(was, result)).tolist():
        found = average(
            was["averaged"][row],
            was["on_trial"][row],
            float(was["level"][row]),
            _window(result["means"][row].tolist()),
            _window(result["nows"][row].tolist()),
        )
        if found is not None:
            result["level"][row], result["averaged"][row] = found, True
    result["num_steps"] += num_steps
    result["up"], result["down"] = np.round(sums.up, DIGITS), np.round(sums.down, DIGITS)
    result["since_up"], result["since_down"] = sums.since_up, sums.since_down
    result["slots_unseen"] = 0
    return result


class _Sums:
    """Two-sided cumulative sums of each row, and the samples since each was last zero."""

    def __init__(self, drift: FloatArray, threshold: FloatArray, was: Any) -> None:
        self.threshold = threshold
        self._drift = drift
        self.up, self.down = was["up"].copy(), was["down"].copy()
        self.since_up, self.since_down = was["since_up"].copy(), was["since_down"].copy()

    def add(self, samples: FloatArray, level: FloatArray) -> dict[int, tuple[float, ...]]:
        """Advance by a sample each, NaN for none.

        Returns the samples since the change of each row one of whose sums passes the threshold.
        """
        most = OUTLIER_SHARE * self.threshold
        error = np.clip(samples - level, -most, most)
        there = ~np.isnan(samples)
        up = np.maximum(0.0, self.up + error - self._drift)
        down = np.maximum(0.0, self.down - error - self._drift)
        self.up, self.down = np.where(there, up, self.up), np.where(there, down, self.down)
        for total, since in (self.up, self.since_up), (self.down, self.since_down):
            goes_on = there & (total > 0)
            since[goes_on, :-1] = since[goes_on, 1:]
            since[goes_on, -1] = samples[goes_on]
            since[there & ~goes_on] = nan
        found = {}
        for row in np.flatnonzero(np.maximum(self.up, self.down) > self.threshold).tolist():
            is_up = self.up[row] > self.down[row]
            found[row] = _window((self.since_up if is_up else self.since_down)[row].tolist())
            self.up[row] = self.down[row] = 0.0
            self.since_up[row] = self.since_down[row] = nan
        return found


def _medians(values: FloatArray) -> FloatArray:
    """Of each row, NaN aside; NaN of a row that has nothing else."""
    counts = np.count_nonzero(~np.isnan(values), axis=1)
    ordered = np.sort(values, axis=1)  # NaN goes last
    rows = np.arange(len(values))
    lower, upper = np.maximum(counts - 1, 0) // 2, counts // 2
    middle: FloatArray = (ordered[rows, lower] + ordered[rows, upper]) / 2
    return middle


def _median(values: Sequence[float]) -> float:
    """As ``statistics.median``, without its checks."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _keep(windows: FloatArray, values: FloatArray) -> None:
    windows[:, :-1] = windows[:, 1:]
    windows[:, -1] = values


def _weights(means: FloatArray) -> FloatArray:
    """Of a new slot: the more slots differ, the less, so that noise does not move the level."""
    weight = 1 - exp(-log(2) / HALF_LIFE_SLOTS)
    spread = SIGMA_PER_MEDIAN_DEVIATION * _medians(np.abs(means - _medians(means)[:, None]))
    differ = (np.count_nonzero(~np.isnan(means), axis=1) >= MIN_SLOTS) & (spread > DRIFT_FLOOR)
    return np.where(differ, weight * DRIFT_FLOOR / np.where(differ, spread, 1.0), weight)


def _may_average(was: Any, now: Any) -> BoolArray:
    """Whether something flaps, or a slot is off; of the others ``average`` would be None."""
    nows, means = now["nows"], now["means"]
    flaps = np.fmax.reduce(nows, axis=1) - np.fmin.reduce(nows, axis=1) > THRESHOLD_FLOOR
    off = np.fmax.reduce(np.abs(means - now["now"][:, None]), axis=1) > THRESHOLD_FLOOR
    return np.asarray(was["averaged"] | flaps | off)
