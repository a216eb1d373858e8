"""Which trouble ends a run, with which error, and the one time-out that all others follow."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The ladder derived from ``failure.timeout_s``: each wait outlasts the ones it contains."""

    receive_s: float
    """A receive or a collective inside a step."""

    hold_s: float
    """From asking for a step boundary to standing at it."""

    checkpoint_s: float
    """Writing every layer."""

    start_s: float
    """Processes, imports and the first process group."""

    def __post_init__(self) -> None:
        ladder = (self.receive_s, self.hold_s, self.checkpoint_s, self.start_s)
        assert ladder[0] > 0, "time-outs are positive"
        assert all(inner < outer for inner, outer in zip(ladder, ladder[1:], strict=False)), (
            f"time-outs must be strictly nested, not {ladder}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureOptions:
    """YAML section ``failure``."""

    max_failures: int = 3
    """Lost workers that the budget of failures may cover; -1: without end."""

    max_preemptions: int = -1
    """Preemptions that the run may go through; -1: without end."""

    timeout_s: float = 60.0
    """The one time-out; every other is derived from it and ordered."""

    def __post_init__(self) -> None:
        for name in ("max_failures", "max_preemptions"):
            if getattr(self, name) < -1:
                raise ValueError(f"{name} is {getattr(self, name)}; write -1 (no limit), 0 or more")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be positive")

    @property
    def timeouts(self) -> Timeouts:
        """The ladder of time-outs."""
        whole = self.timeout_s
        return Timeouts(
            receive_s=whole / 4, hold_s=whole / 2, checkpoint_s=whole, start_s=2 * whole
        )
