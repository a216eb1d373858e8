"""The long-term budget: what a run may cost, and what that comes to by now."""

from dataclasses import dataclass
from math import inf
from typing import Literal

MAX_HORIZON_HOURS = 7 * 24.0
"""Longest H that sets V: a longer one lets one bad week overspend by too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """One entry of YAML ``budget.limits``: a linear limit, obeyed in every slot."""

    zone: str | None = None
    """Limits the spending in this zone; with ``max_per_hour_usd``."""

    egress: bool = False
    """Limits what all traffic between zones costs; with ``max_per_hour_usd``."""

    pool: str | None = None
    """Gives the groups that read their samples on this pool a least share; with ``min_share``."""

    max_per_hour_usd: float | None = None
    """With ``zone`` or ``egress``: the most that it may cost per hour."""

    min_share: float | None = None
    """Share of the global batch, 0 to 1."""

    def __post_init__(self) -> None:
        named = [
            name
            for name, given in (("zone", self.zone), ("egress", self.egress), ("pool", self.pool))
            if given
        ]
        if len(named) != 1:
            raise ValueError(
                f"a limit names exactly one of zone, egress and pool, not {named or 'none'}"
            )
        if self.pool is not None:
            if self.min_share is None or self.max_per_hour_usd is not None:
                raise ValueError(
                    f"the limit of pool {self.pool!r} takes min_share and nothing else; "
                    "write min_share: 0.25"
                )
            if not 0 <= self.min_share <= 1:
                raise ValueError(f"min_share is {self.min_share}; it lies between 0 and 1")
        elif self.max_per_hour_usd is None or self.min_share is not None:
            raise ValueError(
                f"a limit of {named[0]} takes max_per_hour_usd and nothing else; "
                "write max_per_hour_usd: 1.0"
            )
        elif self.max_per_hour_usd < 0:
            raise ValueError(
                f"max_per_hour_usd is {self.max_per_hour_usd}; it must not be negative"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOptions:
    """YAML section ``budget``: what the run may cost, in real hours and dollars."""

    average_per_hour_usd: float
    """b: what the run may cost per hour, averaged over the horizon."""

    total_usd: float | None = None
    """Hard cap on the whole run; never exceeded."""

    horizon_hours: float = 48.0
    """H: over how long the average is meant; sets V."""

    on_exhausted: Literal["pause", "stop"] = "pause"
    """When ``total_usd`` is used up; ``pause`` can be resumed once it is raised."""

    allow_idle: bool = True
    """False: never wait for the average to recover; then only ``total_usd`` protects."""

    queue_cap: Literal["off", "auto"] | float = "off"
    """Largest backlog in dollars; what lies above is forgiven and reported."""

    min_samples_per_s: float = 0.0
    """Progress floor: samples a second of the run's clock, on average; 0: none."""

    limits: tuple[LimitOptions, ...] = ()
    """Linear limits, obeyed in every slot."""

    def __post_init__(self) -> None:
        for name in ("average_per_hour_usd", "total_usd", "horizon_hours"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        if not isinstance(self.queue_cap, str) and self.queue_cap == 0:
            # YAML 1.1 reads a bare `off` as false.
            object.__setattr__(self, "queue_cap", "off")
        if not isinstance(self.queue_cap, str) and self.queue_cap < 0:
            raise ValueError(
                f"queue_cap is {self.queue_cap}; write off, auto or a number of dollars"
            )
        if not 0 <= self.min_samples_per_s < inf:
            raise ValueError(
                f"min_samples_per_s is {self.min_samples_per_s}; write the samples a second that "
                "the run must make on average, or 0 for no floor"
            )

    @property
    def weight_horizon_hours(self) -> float:
        """H as far as V and the slack go: ``horizon_hours``, at most a week."""
        return min(self.horizon_hours, MAX_HORIZON_HOURS)

    @property
    def whole_usd(self) -> float:
        """What the whole run may cost: the hard cap, else the average over the horizon."""
        if self.total_usd is not None:
            return self.total_usd
        return self.average_per_hour_usd * self.horizon_hours


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the average allows up to a time: the integral of b, whatever b was before.

    In seconds of the run's clock.
    """

    usd_per_s: float  # b in force
    since_s: float = 0.0
    before_usd: float = 0.0  # allowed up to then

    def at(self, now_s: float) -> float:
        """Dollars allowed from the start up to ``now_s``, which is not before ``since_s``."""
        return self.before_usd + self.usd_per_s * (now_s - self.since_s)

    def changed(self, now_s: float, usd_per_s: float) -> "Allowance":
        """The allowance with another b from ``now_s`` on; what was allowed before stays so."""
        if usd_per_s == self.usd_per_s:
            return self
        return Allowance(usd_per_s, now_s, self.at(now_s))
