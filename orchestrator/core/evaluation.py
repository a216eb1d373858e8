"""Evaluations of a run: what is told of each, which is the best, and when a run ends early."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

LOSS = "loss"
"""The name of what every evaluation has, beside those that the user's metrics return."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """How far evaluations have come: so many rounds of the one at ``step`` are done."""

    step: int = 0
    rounds: int = 0

    def rounds_of(self, step: int) -> int:
        """Rounds that are done of the evaluation at ``step``, which is not an earlier one."""
        return self.rounds if self.step == step else 0


NOTHING_EVALUATED = Evaluated()


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One device's part of one round: the evaluation at a step is made in rounds of one batch.

    Only the device that takes the loss has sums; each is of its own group's samples.
    """

    generation: int
    step: int  # updates that the model had by then
    index: int  # of the round
    device_id: str
    round_s: float  # virtual on an emulated device
    loss_sum: float = 0.0
    weight_sum: float = 0.0
    metrics: tuple[tuple[str, float, float], ...] = ()  # name, sum, weight


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One line of ``evaluations.jsonl``: the whole evaluation dataset, seen once by one model."""

    step: int
    """Updates that the model had by then; its checkpoint, where one is kept, has this step."""

    generation: int
    """Of the plan of the last round."""

    samples: int
    loss: float | None
    """Sum of losses over sum of weights; None where no sample has any weight."""

    metrics: Mapping[str, float | None] = field(default_factory=dict)
    eval_s: float = 0.0
    """How long it took, on the run's clock."""

    best: bool = False
    """Whether none before it is better."""

    def value(self, metric: str) -> float | None:
        """The loss or a metric; None where it has none that is finite."""
        found = self.loss if metric == LOSS else self.metrics.get(metric)
        return found if found is not None and math.isfinite(found) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """YAML ``training.keep_best``: which evaluation is the best one."""

    metric: str = LOSS
    """``loss``, or a name that ``Task.metrics`` returns."""

    mode: Literal["min", "max"] | None = None
    """Whether less or more of it is better; ``min`` for the loss, to be said of a metric."""

    def __post_init__(self) -> None:
        if not self.metric.strip():
            raise ValueError(
                f"metric is {self.metric!r}; write {LOSS}, or a name that Task.metrics returns"
            )
        if self.metric != LOSS and self.mode is None:
            raise ValueError(
                f"mode is missing; write mode: max if more {self.metric} is better, or mode: min"
            )

    def improves(self, value: float, best: float | None, by: float = 0.0) -> bool:
        """Whether a value is better than the best one so far, by more than ``by``."""
        if best is None:
            return True
        return value > best + by if self.mode == "max" else value < best - by

    def best_of(self, evaluations: Iterable[Evaluation]) -> Evaluation | None:
        """The best one, the first of equal ones; None without any value."""
        found, best = None, None
        for evaluation in evaluations:
            value = evaluation.value(self.metric)
            if value is not None and self.improves(value, best):
                found, best = evaluation, value
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStop(Criterion):
    """YAML ``training.early_stop``: the run ends where evaluations get no better any more."""

    patience: int = 3
    """So many evaluations in a row that are no better than the best one before them end the run."""

    min_delta: float = 0.0
    """How much better one must be to count."""

    def __post_init__(self) -> None:
        Criterion.__post_init__(self)
        if self.patience < 1:
            raise ValueError(f"patience is {self.patience}; write 1 or more")
        if not (self.min_delta >= 0 and math.isfinite(self.min_delta)):
            raise ValueError(f"min_delta is {self.min_delta}; write 0 or more")

    def reason(self, evaluations: Sequence[Evaluation]) -> str | None:
        """Why a run with these evaluations ends; None while it goes on, or none had a value."""
        best, at_step, waited = None, 0, 0
        for evaluation in evaluations:
            value = evaluation.value(self.metric)
            if value is not None and self.improves(value, best, self.min_delta):
                best, at_step, waited = value, evaluation.step, 0
            else:
                waited += 1
        if waited < self.patience or best is None:
            return None
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"early stop: {self.metric} was no better{by} in {waited} evaluation"
            f"{'s' * (waited > 1)} in a row than {best:.6g} at step {at_step}"
        )

    def is_blind(self, evaluations: Sequence[Evaluation]) -> bool:
        """Whether so many evaluations had no value that waiting for one makes no sense."""
        seen = any(evaluation.value(self.metric) is not None for evaluation in evaluations)
        return len(evaluations) >= self.patience and not seen
