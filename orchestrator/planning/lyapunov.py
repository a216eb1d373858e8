"""The decision of a slot: drift plus penalty under guards that bind every strategy."""

from dataclasses import dataclass
from typing import Literal

DEFAULT_KAPPA = 0.05
"""Overspend share when the backlog starts at zero (docs/model.md, section 4.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerOptions:
    """YAML section ``control.straggler``."""

    ratio: float = 1.2
    """Smallest slow-down acted on."""

    confirm_slots: int = 2
    """Slots above it until it is called lasting; a label, re-planning does not wait."""

    def __post_init__(self) -> None:
        if not self.ratio > 1:
            raise ValueError(f"ratio is {self.ratio}; a slow-down is larger than 1")
        if self.confirm_slots < 1:
            raise ValueError(f"confirm_slots is {self.confirm_slots}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """YAML section ``control``."""

    strategy: str = "joint"
    """A name of interface.md section 6."""

    slot_s: float = 60.0
    """D, the planning epoch, in seconds of the run's clock."""

    kappa: Literal["auto"] | float = "auto"
    """Sets V = kappa b H / rho."""

    penalty_weight: float | None = None
    """V itself, in $^2/sample; overrides kappa's."""

    hysteresis_slots: int = 10
    """H_e: a new plan must pay for its pause within this many slots."""

    plan_deadline_s: float = 2.0
    max_team: int = 8
    """Largest team; never more than the backend can run."""

    straggler: StragglerOptions = StragglerOptions()

    def __post_init__(self) -> None:
        for name in ("slot_s", "penalty_weight", "plan_deadline_s", "hysteresis_slots"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        if not isinstance(self.kappa, str) and not self.kappa > 0:
            raise ValueError(f"kappa is {self.kappa}; write auto or a positive share such as 0.05")
        if not 1 <= self.max_team <= 8:
            raise ValueError(f"max_team is {self.max_team}; it lies between 1 and 8")

    @property
    def kappa_ratio(self) -> float:
        """The overspend share as a number."""
        return DEFAULT_KAPPA if isinstance(self.kappa, str) else self.kappa
