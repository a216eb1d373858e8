"""What passes between the job process and the head; light, so that the job process stays light."""

from dataclasses import dataclass

from orchestrator.core.slot import CommittedStep, RunEvent, SlotRecord

Cursor = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class HeadNews:
    """What happened since the last question; ``cursor`` goes into the next one."""

    phase: str
    steps: tuple[CommittedStep, ...]
    slots: tuple[SlotRecord, ...]
    events: tuple[RunEvent, ...]
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Comparing:
    """Strategies to run for a few discarded steps before the first one that counts."""

    strategies: tuple[str, ...]
    num_steps: int = 8
