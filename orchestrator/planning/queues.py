"""Virtual queues of the budget and the progress floor, the weight V, and what they guarantee."""

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

RATIO_HEADROOM = 1.2
"""rho_hat over the best samples per dollar seen so far (docs/model.md, section 4.4)."""

QUEUE_CAP_FACTOR = 1.5
"""``queue_cap: auto`` in units of V rho_hat; below 1 it would forgive what the budget forbids."""

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


@dataclass(frozen=True, slots=True)
class Queues:
    """Virtual queues at a slot's end; a bounded backlog means the constraint holds on average."""

    backlog_usd: float = 0.0  # Q
    forgiven_usd: float = 0.0  # cut off by a cap so far; never paid back
    progress_usd: float = 0.0  # Z: samples that the floor asks and that are missing, in dollars
    progress_max_usd: float = 0.0  # the most Z ever was

    def __post_init__(self) -> None:
        for name in ("backlog_usd", "progress_usd"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"{name} of the queues is {getattr(self, name)} $; it must not be negative"
                )

    def update(
        self,
        bill_usd: float,
        budget_usd_per_s: float,
        elapsed_s: float,
        *,
        cap_usd: float | None = None,
        shortfall_usd: float = 0.0,
    ) -> "Queues":
        """Advance by one slot: ``Q+ = max(Q + bill - b D, 0)`` and ``Z+ = max(Z + shortfall, 0)``.

        Args:
            bill_usd: What the slot was billed, never what the model predicted.
            budget_usd_per_s: b.
            elapsed_s: The slot's real length D, never the nominal one.
            cap_usd: Largest backlog; what lies above is added to ``forgiven_usd``.
            shortfall_usd: ``omega_z (r_min - r) D`` of the samples that were committed;
                negative where they were more than the floor asks.

        Source: docs/model.md, section 4.1.
        """
        backlog_usd = max(0.0, self.backlog_usd + bill_usd - budget_usd_per_s * elapsed_s)
        progress_usd = max(0.0, self.progress_usd + shortfall_usd)
        return Queues(
            backlog_usd,
            self.forgiven_usd,
            progress_usd,
            max(self.progress_max_usd, progress_usd),
        ).capped(cap_usd)

    def capped(self, cap_usd: float | None) -> "Queues":
        """The queues with what lies above a cap of Q forgiven."""
        if cap_usd is None or self.backlog_usd <= cap_usd:
            return self
        above_usd = self.backlog_usd - cap_usd
        return replace(self, backlog_usd=cap_usd, forgiven_usd=self.forgiven_usd + above_usd)

    def rescaled(self, old_weight: float, new_weight: float) -> "Queues":
        """The queues after V moved: the price of money Q/V' stays what it was.

        Source: docs/model.md, section 4.4.
        """
        factor = new_weight / old_weight
        return replace(
            self,
            backlog_usd=self.backlog_usd * factor,
            progress_usd=self.progress_usd * factor,
            progress_max_usd=self.progress_max_usd * factor,
        )


def penalty_weight(
    kappa: float,
    budget_usd_per_s: float,
    horizon_s: float,
    rho_samples_per_usd: float,
    opening_samples_per_usd: float = 0.0,
    largest: float = inf,
) -> float:
    """V in $^2/sample: ``b t`` is never overspent by more than ``kappa b H`` and one slot's bill.

    The backlog stays below ``V rho_hat`` (G1), and what is spent above ``b t`` below that less
    Q_0: ``V = kappa b H / (rho_hat - lambda_hat)``.

    Args:
        kappa: Share of the horizon's budget that may be overspent on the way.
        budget_usd_per_s: b.
        horizon_s: H, in the same seconds as b.
        rho_samples_per_usd: Most samples per dollar of any plan evaluated so far; the headroom
            ``RATIO_HEADROOM`` is added here.
        opening_samples_per_usd: lambda_hat, at most rho: the price of money at which the backlog
            opens, Q_0 = V lambda_hat; 0 where it opens empty.
        largest: Above all else, for instance since ``tau_V = V lambda_hat / b`` must stay short.

    Raises:
        ValueError: If one of the others is not positive.

    Source: docs/model.md, sections 4.2 (G1) and 4.4.
    """
    arguments = (kappa, budget_usd_per_s, horizon_s, rho_samples_per_usd)
    if not all(value > 0 for value in arguments):
        raise ValueError(
            f"V needs positive kappa, budget, horizon and samples per dollar, not {arguments}"
        )
    room_samples_per_usd = RATIO_HEADROOM * rho_samples_per_usd - opening_samples_per_usd
    return min(largest, kappa * budget_usd_per_s * horizon_s / room_samples_per_usd)


def queue_cap_usd(options: BudgetOptions, line_usd: float) -> float | None:
    """Largest backlog in dollars, None when nothing is forgiven.

    Args:
        options: Section ``budget``.
        line_usd: ``V rho_hat``. ``auto`` is 1.5 times this: above every price of money that the
            optimum can have.
    """
    if options.queue_cap == "off":
        return None
    if options.queue_cap == "auto":
        return QUEUE_CAP_FACTOR * line_usd
    return float(options.queue_cap)


def overspend_bound_usd(
    line_usd: float,
    budget_usd_per_s: float,
    *,
    slot_bill_max_usd: float,
    slot_s: float,
) -> float:
    """G1 slack: at every slot end ``spent <= b t + this``, whatever V, the search or the world did.

    A running slot starts at or below the line and adds its bill less ``b D``; an idle one adds
    nothing (standing costs stay below b).

    Args:
        line_usd: ``V rho_hat - Q_0``; ``V rho_hat`` is ``kappa b H`` where kappa sets V.
        budget_usd_per_s: b.
        slot_bill_max_usd: C_max, the largest bill of one slot, blocks paid ahead included.
        slot_s: D, the length of that slot.

    Source: docs/model.md, sections 4.2 (G1) and 4.5.
    """
    return line_usd + max(0.0, slot_bill_max_usd - budget_usd_per_s * slot_s)
