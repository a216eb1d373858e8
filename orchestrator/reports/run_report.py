"""A run's files read back, and the figures a person asks of them; also while it goes on."""

import gc
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import fmean, median

from orchestrator import storage
from orchestrator.control.persistence import RunStore, evaluation_json
from orchestrator.core.evaluation import Evaluation
from orchestrator.errors import ConfigError
from orchestrator.reports.accounts import Accounts, PoolBill, add_up
from orchestrator.reports.bill import BillLine
from orchestrator.reports.budget_table import change_data
from orchestrator.reports.device_times import DeviceTimes
from orchestrator.reports.event_counts import event_counts
from orchestrator.reports.lives import Life, Lives
from orchestrator.reports.rows import Row, SlotRow, int_of, number_of, slot_row
from orchestrator.reports.worth import Worth, typical
from orchestrator.storage import Json

LOSS_WINDOW = 10  # steps whose mean stands for the loss at the start and at the end
_CENT = 0.01
_NO_TIME_S = 1.0  # billed; the first slot ends as soon as there is a plan


@dataclass(frozen=True, slots=True)
class PlanSpan:
    """A stretch of slots in which one plan ran."""

    first_slot: int
    last_slot: int
    from_s: float  # billed, as is the next
    to_s: float
    end_step: int
    plan: Row
    predicted_step_s: float | None
    measured_step_s: float | None  # median over its slots
    cost_per_hour_usd: float | None
    reason: str  # why it was taken


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFound:
    """A run as its files tell it. Times of money are billed ones."""

    run_url: str
    name: str
    status: str
    reason: str
    slots: tuple[SlotRow, ...]
    lives: tuple[Life, ...]
    devices: tuple[DeviceTimes, ...]
    steps: tuple[Row, ...]
    evaluations: tuple[Evaluation, ...] = ()
    accounts: Accounts
    events: tuple[Row, ...]
    comparisons: tuple[Row, ...]

    @property
    def losses(self) -> tuple[tuple[int, float], ...]:
        """(step, loss) of every committed step that has one."""
        return tuple(_losses(self.steps))

    @property
    def best_evaluation(self) -> Evaluation | None:
        """The best one so far."""
        return next((e for e in reversed(self.evaluations) if e.best), None)

    @property
    def first_loss(self) -> float | None:
        """Mean of the first ten."""
        return _mean_loss(self.steps)

    @property
    def last_loss(self) -> float | None:
        """Mean of the last ten."""
        return _mean_loss(reversed(self.steps))

    @property
    def num_steps(self) -> int:
        """Committed steps."""
        return len(self.steps)

    @property
    def num_samples(self) -> int:
        """Committed samples."""
        return sum(int_of(step, "samples") for step in self.steps)

    @property
    def billed_hours(self) -> float:
        """How long the run was, on the bill's clock."""
        return self.slots[-1].time_s / 3600 if self.slots else 0.0

    @property
    def spent_usd(self) -> float:
        """Sum of the ledger."""
        return math.fsum(p.usd + p.egress_usd for p in self.pools)

    @property
    def average_per_hour_usd(self) -> float | None:
        """What an hour cost up to the last slot; while a run goes on the ledger is ahead of it."""
        return self.slots[-1].spent_usd / self.billed_hours if self.billed_hours else None

    @property
    def usd_per_million_samples(self) -> float | None:
        """What a million samples cost."""
        return 1e6 * self.spent_usd / self.num_samples if self.num_samples else None

    @property
    def step_s(self) -> float | None:
        """Median time of a step, on the run's clock."""
        found = [v for s in self.steps if (v := number_of(s, "step_s")) is not None]
        return median(found) if found else None

    @property
    def error_ratio(self) -> float | None:
        """Median over slots of how far the step time lay from its prediction, either way."""
        found = [abs(e) for s in self.slots if (e := s.error_ratio) is not None]
        return median(found) if found else None

    @property
    def late_ratio(self) -> float | None:
        """Share of emulated operations whose real work outlasted their virtual time."""
        operations = sum(s.num_operations for s in self.slots)
        return sum(s.num_late for s in self.slots) / operations if operations else None

    @property
    def budget_changes(self) -> tuple[Row, ...]:
        """Events on keys of the budget that were edited while the run went on."""
        return tuple(event for event in self.events if event.get("kind") == "budget_changed")

    @property
    def worst_slot(self) -> SlotRow | None:
        """The slot at whose end most was spent above the average budget."""
        return max(self.slots, key=lambda s: s.spent_usd - s.budget_usd, default=None)

    @property
    def has_started(self) -> bool:
        """Whether it has done or paid anything yet."""
        return bool(self.slots or self.steps or self.pools)

    @property
    def bound_held(self) -> bool | None:
        """Whether spending stayed within budget and slack at every slot, to the cent.

        None before the first one.
        """
        if not self.slots:
            return None
        return all(s.spent_usd <= s.budget_usd + s.overspend_bound_usd + _CENT for s in self.slots)

    @property
    def forgiven_usd(self) -> float:
        """What ``budget.queue_cap`` cut off the backlog: spent above the average for good."""
        return self.slots[-1].forgiven_usd if self.slots else 0.0

    @property
    def time_constant_s(self) -> float | None:
        """How fast the price of money follows: median over slots, in billed seconds."""
        found = [s.time_constant_s for s in self.slots if s.time_constant_s]
        return median(found) if found else None

    @property
    def coherence_s(self) -> float | None:
        """For how long prices and speeds lasted, in billed seconds; None: not known."""
        return self.slots[-1].coherence_s if self.slots else None

    @property
    def standing_usd(self) -> float:
        """What devices cost that were present and not used."""
        return math.fsum(p.standing_usd for p in self.pools)

    @property
    def worth(self) -> Worth | None:
        """What one more of each thing was worth, as medians over slots; None: never known."""
        told = [slot for slot in self.slots if slot.marginal_values]
        values = typical([slot.marginal_values for slot in told])
        if not values:
            return None
        # as the values are medians, so a device is idle that was in most slots: at the end all are
        idle = Counter(pool for slot in told for pool in slot.idle_pools)
        prices: dict[str, float] = {}
        for slot in self.slots:
            prices |= slot.price_per_hour_usd  # the newest of each pool
        return Worth(
            beside="the plan that is best in each slot, median over slots",
            values=tuple(values.items()),
            prices=tuple(prices.items()),
            idle=tuple(pool for pool, count in idle.items() if 2 * count > len(told)),
        )

    @property
    def pool_of(self) -> dict[str, str]:
        """The pool of every device that was ever present."""
        return {life.device: life.pool for life in self.lives}

    @property
    def plans(self) -> tuple[PlanSpan, ...]:
        """The plans that ran, in order; a slot in which next to no time passed ran none."""
        spans: list[list[SlotRow]] = []
        starts_s: list[float] = []
        before_s = 0.0
        for slot in self.slots:
            if slot.time_s > before_s + _NO_TIME_S:
                if spans and spans[-1][-1].plan == slot.plan:
                    spans[-1].append(slot)
                else:
                    spans.append([slot])
                    starts_s.append(before_s)
            before_s = slot.time_s
        reasons = {s.slot + 1: s.reason for s in self.slots if s.decision != "keep"}
        return tuple(
            _span(slots, from_s, reasons.get(slots[0].slot, ""))
            for slots, from_s in zip(spans, starts_s, strict=True)
        )

    @property
    def pools(self) -> tuple[PoolBill, ...]:
        """The bill by pool."""
        return self.accounts.pools

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the files, each with its place."""
        gap = self.accounts.gap
        return (f"{storage.join(self.run_url, 'ledger.jsonl')}: {gap}",) if gap else ()


def read_run(run_dir: str) -> RunFound:
    """Read what a run has written so far.

    Raises:
        ConfigError: If there is no run in the folder.
    """
    store = RunStore(storage.absolute(run_dir))
    if not any(storage.is_file(store.url(name)) for name in ("config.yaml", "slots.jsonl")):
        raise ConfigError(f"{run_dir} holds no run; give the folder that has its config.yaml")
    result = store.read_result()
    with _without_collector():
        return _read(store, result)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Data without cycles is read inside: to look for some took a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _read(store: RunStore, result: Row | None) -> RunFound:
    slots: list[SlotRow] = []
    lives = Lives()
    for row in store.rows("slots"):  # one by one: a line of many devices is long
        slots.append(slot_row(row, slots[-1].plan if slots else {}))
        lives.add(row, slots[-1].slot)
    return RunFound(
        run_url=store.run_url,
        name=store.run_url.rstrip("/").rsplit("/", 1)[-1],
        status=str(result["status"]) if result else "running, or ended without a result",
        reason=str(result.get("reason", "")) if result else "there is no result.json yet",
        slots=tuple(slots),
        lives=lives.lives(),
        devices=lives.times(),
        steps=store.read("steps"),
        evaluations=store.read_evaluations(),
        accounts=add_up(store.charges(), slots),
        events=store.read("events"),
        comparisons=_comparisons(store),
    )


def report_data(found: RunFound, reconciled: Sequence[BillLine] = ()) -> dict[str, Json]:
    """What ``lyray report --json`` prints."""
    worst = found.worst_slot
    data: dict[str, Json] = {
        "run_dir": found.run_url,
        "status": found.status,
        "reason": found.reason,
        "warnings": list(found.warnings),
        "steps": found.num_steps,
        "samples": found.num_samples,
        "first_loss": found.first_loss,
        "last_loss": found.last_loss,
        "evaluations": [evaluation_json(e) for e in found.evaluations],
        "step_s": found.step_s,
        "prediction_error_ratio": found.error_ratio,
        "late_ratio": found.late_ratio,
        "billed_hours": found.billed_hours,
        "spent_usd": found.spent_usd,
        "average_per_hour_usd": found.average_per_hour_usd,
        "usd_per_million_samples": found.usd_per_million_samples,
        "standing_usd": found.standing_usd,
        "forgiven_usd": found.forgiven_usd,
        "time_constant_s": found.time_constant_s,
        "coherence_s": found.coherence_s,
        "bound_held": found.bound_held,
        "budget_changes": [change_data(event) for event in found.budget_changes],
        "pools": [storage.to_json(pool) for pool in found.pools],
        "devices": [storage.to_json(device) for device in found.devices],
        "plans": [storage.to_json(span) for span in found.plans],
        "marginal_values": dict(found.worth.values) if found.worth else {},
        "events": [storage.to_json(event) for event in found.events],
        "event_counts": [storage.to_json(count) for count in event_counts(found.events)],
        "comparisons": [storage.to_json(row) for row in found.comparisons],
        "curves": _curves(found),
        "timeline": [storage.to_json(life) for life in found.lives],
        "control_cpu_s_per_slot": (
            fmean(s.control_cpu_s for s in found.slots) if found.slots else None
        ),
    }
    if worst is not None:
        data["most_over_budget"] = {
            "slot": worst.slot,
            "spent_usd": worst.spent_usd,
            "budget_usd": worst.budget_usd,
            "overspend_bound_usd": worst.overspend_bound_usd,
        }
    if reconciled:
        data["bill"] = [
            {**asdict(line), "difference_usd": line.difference_usd} for line in reconciled
        ]
    return data


def _losses(steps: Iterable[Row]) -> Iterator[tuple[int, float]]:
    return ((int_of(s, "step"), v) for s in steps if (v := number_of(s, "loss")) is not None)


def _mean_loss(steps: Iterable[Row]) -> float | None:
    """Of the first few that have one."""
    few = [loss for _, loss in islice(_losses(steps), LOSS_WINDOW)]
    return fmean(few) if few else None


def _curves(found: RunFound) -> Json:
    """What the charts draw, slot by slot and step by step, as columns."""
    slots, losses = found.slots, found.losses
    return {
        "slot": [s.slot for s in slots],
        "billed_s": [s.time_s for s in slots],
        "samples": [s.samples for s in slots],
        "measured_samples_per_s": [s.measured_samples_per_s for s in slots],
        "predicted_samples_per_s": [s.predicted_samples_per_s for s in slots],
        "measured_step_s": [s.measured_step_s for s in slots],
        "predicted_step_s": [s.predicted_step_s for s in slots],
        "cost_per_hour_usd": [s.cost_per_hour_usd for s in slots],
        "spent_usd": [s.spent_usd for s in slots],
        "budget_usd": [s.budget_usd for s in slots],
        "overspend_bound_usd": [s.overspend_bound_usd for s in slots],
        "step": [step for step, _ in losses],
        "loss": [loss for _, loss in losses],
    }


def _span(slots: Sequence[SlotRow], from_s: float, reason: str) -> PlanSpan:
    measured = [s.measured_step_s for s in slots if s.measured_step_s is not None]
    costs = [s.cost_per_hour_usd for s in slots if s.cost_per_hour_usd is not None]
    return PlanSpan(
        first_slot=slots[0].slot,
        last_slot=slots[-1].slot,
        from_s=from_s,
        to_s=slots[-1].time_s,
        end_step=slots[-1].step,
        plan=slots[0].plan,
        predicted_step_s=slots[-1].predicted_step_s,
        measured_step_s=median(measured) if measured else None,
        cost_per_hour_usd=median(costs) if costs else None,
        reason=reason,
    )


def _comparisons(store: RunStore) -> tuple[Row, ...]:
    url = store.url("compare.json")
    if not storage.exists(url):
        return ()
    rows = json.loads(storage.read_bytes(url))
    return tuple(row for row in rows if isinstance(row, dict))
