"""The closed loop on a virtual clock: what a file would do in days, told in seconds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import fsum

from orchestrator.config import RunConfig
from orchestrator.core.model import ModelProfile
from orchestrator.core.slot import SlotRecord
from orchestrator.errors import ConfigError, InfeasibleError
from orchestrator.strategies.registry import Strategy, make_strategy
from orchestrator.whatif.loops import simulated
from orchestrator.whatif.patience import Patient
from orchestrator.whatif.scenario import Scenario, load_scenario

DAY_S = 86400.0
MAX_DAYS = 3650
_POINTS = 300
"""Most points of a strategy's curves."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """How one strategy fared. Hours and dollars are billed ones; ``problem``: it could not run."""

    strategy: str
    hours: float = 0.0
    steps: int = 0
    samples: int = 0
    spent_usd: float = 0.0
    budget_usd: float = 0.0
    overspend_usd: float = 0.0  # the most that was ever spent above b t
    overspend_bound_usd: float = 0.0  # what was promised at that slot
    replans: int = 0
    lost: int = 0  # devices that left, in use or not
    redone: int = 0  # steps done twice because a loss took their only copy
    idle_ratio: float = 0.0  # of the time
    ended: str = ""  # how the run ended, empty when the days were over first
    problem: str = ""
    points: tuple[tuple[float, int, float], ...] = ()  # over time: hours, samples, dollars

    @property
    def duty_ratio(self) -> float:
        """b/c where more was spent than the budget, else 1: what equal cost leaves of the rate."""
        return min(1.0, self.budget_usd / self.spent_usd) if self.spent_usd else 1.0

    @property
    def samples_per_s_at_budget(self) -> float | None:
        """The rate at equal cost: what is spent above the budget is duty-cycled down to it."""
        rate = self.samples_per_s
        return None if rate is None else rate * self.duty_ratio

    @property
    def average_per_hour_usd(self) -> float | None:
        """What an hour cost."""
        return self.spent_usd / self.hours if self.hours else None

    @property
    def samples_per_s(self) -> float | None:
        """Committed samples per billed second, idle time included."""
        return self.samples / (3600 * self.hours) if self.hours else None

    @property
    def usd_per_million_samples(self) -> float | None:
        """What a million samples cost."""
        return 1e6 * self.spent_usd / self.samples if self.samples else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What ``lyray simulate`` runs: the file's own strategy, then the others, in one world.

    Raises:
        ConfigError: If the days or the scenario file make no sense.
    """

    config: RunConfig
    days: float
    others: tuple[str, ...] = ()
    scenario_path: str | None = None
    scenario: Scenario | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not 0 < self.days <= MAX_DAYS:
            raise ConfigError(f"--days is {self.days}; write a number of days up to {MAX_DAYS}")
        if self.scenario_path is not None:
            told = load_scenario(
                self.scenario_path,
                pools=[offer.pool for offer in self.config.cluster.offers],
                billing_speedup=self.config.emulation.billing_speedup,
            )
            object.__setattr__(self, "scenario", told)

    def run(
        self, measured: ModelProfile, begins: Callable[[str], None] = lambda words: None
    ) -> list[Rehearsal]:
        """Every strategy's rehearsal, the file's own first.

        Args:
            measured: The model's layers, unscaled.
            begins: Is told which strategy's turn it is; each may take minutes.

        Raises:
            InfeasibleError: If the file's own strategy finds no plan.
        """
        names = dict.fromkeys((self.config.control.strategy, *self.others))
        results = []
        for i, name in enumerate(names, start=1):
            begins(f"simulating {name} ({i} of {len(names)})")
            results.append(
                rehearse(
                    self.config, measured, days=self.days, strategy=name, scenario=self.scenario
                )
            )
        if results[0].problem:
            raise InfeasibleError(results[0].problem)
        return results


def rehearse(
    config: RunConfig,
    measured: ModelProfile,
    *,
    days: float,
    strategy: str | Strategy,
    scenario: Scenario | None = None,
    stopwatch: Callable[[], float] = lambda: 0.0,
) -> Rehearsal:
    """Run the control loop against the simulation until the run ends or the days are over.

    A device that is lost is planned without. With a scenario the run waits while nothing fits:
    devices may come.

    Args:
        config: The whole file, its traces included.
        measured: The model's layers, unscaled.
        days: Billed days.
        strategy: Instead of the file's own: a name, or one of the caller's making.
        scenario: What happens to the cluster beyond the file's own traces.
        stopwatch: Seconds that ``control.plan_deadline_s`` counts; by default none pass, and
            every search comes to its end.
    """
    name, strategy = (
        (strategy, make_strategy(strategy))
        if isinstance(strategy, str)
        else (type(strategy).__name__, strategy)
    )
    patient = Patient(strategy, waits_at_first=scenario is not None)
    told = simulated(config, measured, patient, scenario=scenario, stopwatch=stopwatch)
    loop, records = told.loop, told.records
    try:
        while loop.outcome is None and (not records or records[-1].time_s < days * DAY_S):
            loop.tick()
    except InfeasibleError as error:
        return Rehearsal(name, problem=str(error))
    finally:
        told.backend.close()
    ended = f"{loop.outcome.status}: {loop.outcome.reason}" if loop.outcome else ""
    found = _summary(name, records, ended)
    lost = sum(event.kind == "lost" for event in told.events)
    return replace(found, lost=lost, redone=told.backend.num_redone, points=_points(records))


def _points(records: Sequence[SlotRecord]) -> tuple[tuple[float, int, float], ...]:
    """Samples and dollars over the hours, thinned out to what a picture can show."""
    every = max(1, len(records) // _POINTS)
    kept = [*records[::every], *records[-1:]]
    return ((0.0, 0, 0.0), *((r.time_s / 3600, r.samples, r.spent_usd) for r in kept))


def _summary(strategy: str, records: Sequence[SlotRecord], ended: str) -> Rehearsal:
    if not records:
        return Rehearsal(strategy, ended=ended)
    last = records[-1]
    worst, worst_usd = last, 0.0  # where nothing was overspent, what is promised at the end
    for record in records:
        if record.spent_usd - record.budget_usd > worst_usd:
            worst, worst_usd = record, record.spent_usd - record.budget_usd
    return Rehearsal(
        strategy=strategy,
        hours=last.time_s / 3600,
        steps=last.step,
        samples=last.samples,
        spent_usd=last.spent_usd,
        budget_usd=last.budget_usd,
        overspend_usd=worst_usd,
        overspend_bound_usd=worst.overspend_bound_usd,
        replans=sum(record.decision in ("reassign", "switch") for record in records),
        idle_ratio=_idle_ratio(records),
        ended=ended,
    )


def _idle_ratio(records: Sequence[SlotRecord]) -> float:
    """Share of the time in which nothing ran."""
    starts_s = [0.0, *(record.time_s for record in records)]
    lengths_s = [end - start for start, end in pairwise(starts_s)]
    idle_s = fsum(s for s, r in zip(lengths_s, records, strict=True) if r.plan.is_idle)
    return idle_s / starts_s[-1] if starts_s[-1] else 0.0
