"""The evaluations of one life: each is whole once every device has told of every round of it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from orchestrator.core.evaluation import LOSS, Criterion, Evaluated, Evaluation, RoundReport
from orchestrator.core.training import TrainingOptions
from orchestrator.errors import ConfigError, UserCodeError

Sums = dict[str, tuple[float, float]]
"""Sum and weight by name."""


class Evaluations:
    """Adds up what the devices of a plan report, round by round.

    A round counts once every device of the plan has reported it; whoever goes on after a fault
    or a change of plan begins with the first one that does not.
    """

    def __init__(
        self,
        training: TrainingOptions | None = None,
        *,
        num_steps: int = 0,
        num_samples: int = 0,
        recorded: Iterable[Evaluation] = (),
        tell: Callable[[Evaluation], None] = lambda _: None,
    ) -> None:
        """Go on where the record ends.

        Args:
            training: When there are any, and which one is the best; None: there are none.
            num_steps: Of the run.
            num_samples: Of the evaluation dataset.
            recorded: Those that are on record.
            tell: Called by ``follow`` with every one that is whole, once.
        """
        self._training, self._num_steps, self._num_samples = training, num_steps, num_samples
        self._num_rounds = -(-num_samples // training.global_batch) if training else 0
        self._tell, self.whole = tell, list(recorded)
        """Every one that is whole, by step."""

        self._devices: frozenset[str] = frozenset()
        self._generation = -1
        self._heard: dict[tuple[int, int], dict[str, RoundReport]] = {}  # by step and round
        self._sums: Sums = {}
        self._eval_s = 0.0
        self._fresh: list[Evaluation] = []
        self._done = self._recorded()

    @property
    def done(self) -> Evaluated:
        """What whoever goes on need not do again."""
        return self._done

    @property
    def best(self) -> Evaluation | None:
        """The best one so far."""
        return next((e for e in reversed(self.whole) if e.best), None)

    @property
    def kept_steps(self) -> tuple[int, ...]:
        """Steps whose checkpoints are kept because no evaluation was better."""
        keeps = self._training is not None and self._training.keep_best is not None
        return (self.best.step,) if keeps and self.best else ()

    @property
    def end_reason(self) -> str | None:
        """Why the run ends before its last step, None while it goes on."""
        stop = self._training.early_stop if self._training else None
        return stop.reason(self.whole) if stop else None

    def owes(self, next_step: int) -> bool:
        """Whether something of an evaluation is left to be done before ``next_step``."""
        training = self._training
        is_due = training is not None and training.evaluates_at(next_step, self._num_steps)
        return is_due and self._done.rounds_of(next_step) < self._num_rounds

    def owes_checkpoint(self, next_step: int) -> bool:
        """Whether what is evaluated next may turn out to be the best."""
        keeps = self._training is not None and self._training.keep_best is not None
        return keeps and self.owes(next_step)

    def expect(self, device_ids: Iterable[str], generation: int) -> None:
        """From now on the rounds of these devices, under this generation, count."""
        self._devices, self._generation = frozenset(device_ids), generation
        self._heard.clear()

    def take(self, report: RoundReport) -> None:
        """Take in one device's part of a round; one of another generation is dropped."""
        key = report.step, report.index
        if report.generation == self._generation and key >= (self._done.step, self._done.rounds):
            self._heard.setdefault(key, {})[report.device_id] = report
        while (found := self._heard.get(self._next, {})).keys() == self._devices and found:
            del self._heard[self._next]
            self._add([found[device_id] for device_id in sorted(found)])

    @property
    def _next(self) -> tuple[int, int]:
        """Step and index of the round that comes next; one of a later step needs no others."""
        done = self._done
        if done.step and done.rounds < self._num_rounds:
            return done.step, done.rounds
        return min((step for step, _ in self._heard if step > done.step), default=0), 0

    def _add(self, reports: Sequence[RoundReport]) -> None:
        """Add a whole round up, in an order that is always the same: a sum depends on it."""
        step, index = reports[0].step, reports[0].index
        if index == 0:
            self._sums, self._eval_s = {}, 0.0
        self._eval_s += max(r.round_s for r in reports)
        for name, total, weight in chain.from_iterable(map(_sums, reports)):
            known = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (known[0] + total, known[1] + weight)
        self._done = Evaluated(step, index + 1)
        if self._done.rounds == self._num_rounds:
            self._finish(step)

    def follow(self) -> None:
        """Tell of those that have become whole; the steps before them have been told of.

        Raises:
            ConfigError: If they lack a metric that ``keep_best`` or ``early_stop`` names.
            UserCodeError: If ``early_stop`` waits for a number that never comes.
        """
        fresh, self._fresh = tuple(self._fresh), []
        for evaluation in fresh:
            self._check(evaluation)
            self._tell(evaluation)
        stop = self._training.early_stop if self._training else None
        if fresh and stop is not None and stop.is_blind(self.whole):
            raise UserCodeError(
                f"training.early_stop: {stop.metric} was no finite number in any evaluation so far "
                f"({len(self.whole)} by step {self.whole[-1].step}), so that none is better than "
                f"another; look at what {'Task.loss' if stop.metric == LOSS else 'Task.metrics'} "
                "returns for Task.eval_dataset (NaN, infinity, or no weight), or remove early_stop"
            )

    def rewind(self, next_step: int) -> None:
        """Forget those of later steps, which will be run again."""
        self.whole = [e for e in self.whole if e.step <= next_step]
        self._heard.clear()
        self._generation = -1  # a late part of what is undone must not count
        self._done = self._recorded()

    def _recorded(self) -> Evaluated:
        return Evaluated(self.whole[-1].step, self._num_rounds) if self.whole else Evaluated()

    def _finish(self, step: int) -> None:
        metrics = {name: _mean(pair) for name, pair in self._sums.items() if name != LOSS}
        found = Evaluation(
            step=step,
            generation=self._generation,
            samples=self._num_samples,
            loss=_mean(self._sums[LOSS]),
            metrics=metrics,
            eval_s=self._eval_s,
        )
        if self._criterion.best_of([*self.whole, found]) is found:
            found = replace(found, best=True)
        self.whole.append(found)
        self._fresh.append(found)

    @property
    def _criterion(self) -> Criterion:
        return self._training.criterion if self._training else Criterion()

    def _check(self, evaluation: Evaluation) -> None:
        if self._training and (error := self._training.metric_error(evaluation.metrics)):
            raise ConfigError(error)


def _sums(report: RoundReport) -> Iterable[tuple[str, float, float]]:
    return ((LOSS, report.loss_sum, report.weight_sum), *report.metrics)


def _mean(pair: tuple[float, float]) -> float | None:
    return pair[0] / pair[1] if pair[1] else None
