"""Virtual queues of the budget and the progress floor, the weight V, and what they guarantee."""

from dataclasses import dataclass, replace
from math import inf

from orchestrator.core.budget import BudgetOptions

RATIO_HEADROOM = 1.2
"""rho_hat over the best samples per dollar seen so far (docs/model.md, section 4.4)."""

QUEUE_CAP_FACTOR = 1.5
"""``queue_cap: auto`` in units of V rho_hat; below 1 it would forgive what the budget forbids."""


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

    def progress_times(self, factor: float) -> "Queues":
        """The queues with Z in another unit; 0 forgets it."""
        return replace(
            self,
            progress_usd=self.progress_usd * factor,
            progress_max_usd=self.progress_max_usd * factor,
        )

    def rescaled(self, old_weight: float, new_weight: float) -> "Queues":
        """The queues after V moved: the price of money Q/V' stays what it was.

        Source: docs/model.md, section 4.4.
        """
        factor = new_weight / old_weight
        return replace(self.progress_times(factor), backlog_usd=self.backlog_usd * factor)


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
