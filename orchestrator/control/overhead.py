"""The part of the time in which a plan is held that makes no samples."""

from dataclasses import dataclass

HALF_LIFE_SLOTS = 100
"""Slots after which what was measured counts half."""

PRIOR_SLOTS = 10
"""Slots without overhead that the first measured one is weighed against: a start is no rule."""

MOST = 0.5
"""A larger share is a fault to be looked for, not a rate to plan with."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that plans were held and seconds that their steps took, older ones fading.

    The rest went to control, checkpoints, evaluation, pauses and steps that were lost: it cuts
    the rate of every plan alike, ``r = X/T (1 - ratio)``, and leaves its cost.

    Source: docs/model.md, section 3.7.
    """

    held_s: float
    working_s: float

    @classmethod
    def prior(cls, slot_s: float) -> "Overhead":
        """Before anything is measured."""
        return cls(PRIOR_SLOTS * slot_s, PRIOR_SLOTS * slot_s)

    def after(self, elapsed_s: float, working_s: float, *, runs: bool) -> "Overhead":
        """With one more slot.

        Args:
            elapsed_s: Its length.
            working_s: What the steps took that it committed.
            runs: Whether a plan was held; a step under way may end while none is any more.
        """
        held_s = elapsed_s if runs else min(elapsed_s, working_s)
        if not held_s:
            return self
        kept = 0.5 ** (1 / HALF_LIFE_SLOTS)
        return Overhead(kept * self.held_s + held_s, kept * self.working_s + working_s)

    @property
    def ratio(self) -> float:
        """The share, in whole percents: a finer change is no news."""
        return min(MOST, max(0.0, round(1.0 - self.working_s / self.held_s, 2)))
