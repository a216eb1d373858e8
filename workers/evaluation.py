"""Evaluation on the plan that trains: forwards only, round by round, and nothing changed by it."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from orchestrator.core.evaluation import LOSS, Evaluated, RoundReport
from orchestrator.core.plan import Plan
from orchestrator.core.schedule import EVALUATION
from orchestrator.core.training import Task, TrainingOptions
from orchestrator.errors import ConfigError, UserCodeError
from workers.data import SampleSource
from workers.device import PROCESSOR, generators_restored
from workers.executor import Executor, Patience, StepShare
from workers.failures import user_code
from workers.faults import NO_FAULTS
from workers.feed import Feed
from workers.scaling import LossScale
from workers.seeding import Draws
from workers.sequence import as_given
from workers.splitting import SplitModel
from workers.stage import Stage, StageWork
from workers.step import Samples, StepRunner, Window
from workers.transport import Transport
from workers.update import Ballot, Verdict

Metrics = Callable[[Any, Any], Mapping[str, tuple[Any, Any]]]


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationSet:
    """What is evaluated: the samples, each once and in their own order, and the task's metrics."""

    task: Task
    source: SampleSource
    num_samples: int


def evaluation_set(task: Task, options: TrainingOptions, seed: int) -> EvaluationSet | None:
    """What the options ask to evaluate; None: nothing.

    Raises:
        ConfigError: If the task lacks what is asked for, or has no sample to evaluate.
        UserCodeError: If its ``__len__`` raises.
    """
    if options.eval_every_steps is None:
        return None
    _check_metrics(task, options)
    if task.eval_dataset is None:
        raise ConfigError(
            "training.eval_every_steps is set, but the task has no eval_dataset; return "
            "Task(..., eval_dataset=...), or write eval_every_steps: null"
        )
    source = SampleSource(task.eval_dataset, task.collate, seed, task.inputs, as_given)
    assert source.num_samples is not None, "a map-style dataset has a length"
    return EvaluationSet(task, source, source.num_samples)


def _check_metrics(task: Task, options: TrainingOptions) -> None:
    """Refuse a metric that is asked for of a task that returns none."""
    for key, asked in (("keep_best", options.keep_best), ("early_stop", options.early_stop)):
        if asked is not None and asked.metric != LOSS and task.metrics is None:
            raise ConfigError(
                f"training.{key}.metric is {asked.metric!r}, but the task has no metrics; return "
                "Task(..., metrics=...), or write metric: loss"
            )


def try_evaluation(
    model: SplitModel, judged: EvaluationSet, options: TrainingOptions, seed: int
) -> None:
    """Evaluate the first sample, before anything trains: what fails is better told now than later.

    Raises:
        UserCodeError: If the user's code raises, or its metrics are no sums.
        ConfigError: If they lack one that is asked for.
    """
    work = StageWork(
        first_layer=0, layers=model.layers, names=model.names, seed=seed,
        precision="fp32", device=PROCESSOR, loss=judged.task.loss, loss_scale=LossScale("fp32"),
    )  # fmt: skip
    stage, first = EvaluationStage(work, judged.task.metrics), range(1)
    try:
        with at_rest(_modules(model.layers, judged.task), PROCESSOR):
            batch = judged.source.batch(first)
            with user_code("Task.inputs"):
                value = judged.source.first_input(batch, first)
            stage.finish(0, 0, stage.forward(0, 0, first, value), batch, 1)
    except UserCodeError as error:
        raise UserCodeError(
            f"{error} (tried on the first sample of Task.eval_dataset)", error.user_traceback
        ) from error
    if wrong := options.metric_error(stage.metrics):
        raise ConfigError(wrong)


class EvaluationStage(Stage):
    """A stage whose forwards keep nothing, and whose end takes the user's metrics, too."""

    def __init__(self, work: StageWork, metrics: Metrics | None) -> None:
        super().__init__(work)
        self.metrics: dict[str, tuple[float, float]] = {}  # sum and weight
        self._ask = metrics

    def start_step(self) -> None:
        """Forget the sums of the round before."""
        super().start_step()
        self.metrics = {}

    def finish(self, microbatch: int, step: int, output: Any, batch: Any, num_samples: int) -> None:
        """Last stage: add up the loss and the metrics of a microbatch.

        Raises:
            UserCodeError: If one of them raises, or returns something else than sums.
        """
        super().finish(microbatch, step, output, batch, num_samples)
        if self._ask is None:
            return
        with Draws() as draws, user_code(f"step {step}: Task.metrics"):
            draws.key(self.work.seed, step, microbatch)
            found = self._ask(output, batch)
            if not isinstance(found, Mapping):
                raise TypeError(
                    f"metrics returned {type(found).__name__}; return a dict of name to "
                    "(sum over samples, weight)"
                )
            for name, pair in found.items():
                total, weight = _pair(name, pair)
                known = self.metrics.get(name, (0.0, 0.0))
                self.metrics[name] = (known[0] + total, known[1] + weight)


def _pair(name: object, pair: Any) -> tuple[float, float]:
    if not isinstance(name, str) or not name or name == LOSS:
        raise ValueError(f"metrics returned the name {name!r}; use a text other than {LOSS!r}")
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"metrics returned {pair!r} for {name}; return (sum over samples, weight)")
    total, weight = float(pair[0]), float(pair[1])
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(
            f"metrics returned the weight {weight} for {name}; return (sum over samples, weight) "
            "with the number of samples, or of tokens, as the weight"
        )
    return total, weight


def _modules(layers: Sequence[nn.Module], task: Task) -> tuple[nn.Module, ...]:
    whole = (task.layers,) if isinstance(task.layers, nn.Module) else ()  # some look there
    return (*layers, *whole)


@contextmanager
def at_rest(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """No gradients and evaluation mode inside; modes and torch's generators as before afterwards.

    Python's and NumPy's are left alone: samples of training are drawn with them meanwhile.
    """
    modes = [(m, m.training) for module in modules for m in module.modules()]
    tops = [(module, module.training) for module in modules]
    try:
        for module, _ in tops:
            module.eval()
        with torch.no_grad(), generators_restored(device):
            yield
    finally:
        for module, was_training in tops:
            module.train(was_training)  # the user's own may do more than set a flag
        for module, was_training in modes:
            module.training = was_training


@dataclass(slots=True)
class _Rounds:
    """What one group takes of the next round.

    Apart from the Evaluator: a feed that held that one would be a circle of references, and
    process groups are only freed when the last reference to them is gone.
    """

    samples: Samples
    plan: Plan
    group_index: int
    done: Evaluated

    def are_done(self, step: int) -> bool:
        """Whether there is none left before ``step``."""
        return self.done.rounds_of(step) >= self.samples.num_steps

    def share(self, step: int) -> StepShare:
        """Of the next round before ``step``."""
        index = self.done.rounds_of(step)
        return replace(self.samples.share(self.plan, self.group_index, index), step=step)

    def positions(self, step: int) -> tuple[range, ...]:
        """Of each microbatch of that share."""
        return self.share(step).all_positions()


class Evaluator:
    """Evaluates the model at step boundaries: where, is a function of the step alone.

    The dataset is taken in rounds of one global batch, dealt to the groups as a step's samples
    are, so that no round takes longer than a step, by and large. At the end of each all vote: a
    stop, or another plan, need not wait for the rest, and whoever goes on begins with the first
    round that is not done.
    """

    def __init__(
        self,
        runner: StepRunner,
        judged: EvaluationSet,
        transport: Transport,
        *,
        is_due: Callable[[int], bool],
        longer_s: float,
        done: Evaluated,
    ) -> None:
        """Take the place of a runner.

        Args:
            runner: Of the steps of the plan; its layers are evaluated.
            judged: What is evaluated.
            transport: To the other stages.
            is_due: Whether there is an evaluation before a step.
            longer_s: By which a round may take longer than a step.
            done: What earlier plans have done.
        """
        self._runner, self._is_due, self._longer_s = runner, is_due, longer_s
        samples = Samples(runner.samples.batch, judged.num_samples)
        self._rounds = _Rounds(samples, runner.plan, runner.place.group_index, done)
        task, work, place = judged.task, runner.stage.work, runner.place
        self._stage = EvaluationStage(work, task.metrics if place.is_last else None)
        self._modules = _modules(work.layers, task)
        place = replace(place, schedule=EVALUATION)
        feed = None
        if place.is_first or place.is_last:
            feed = Feed(
                judged.source,
                self._rounds.positions,
                runner.samples.num_steps,
                work.device,
                ahead=0,
            )
        self._executor = Executor(place, self._stage, transport, feed, NO_FAULTS)

    @property
    def feed(self) -> Feed | None:
        """Where samples come from, at the first and the last stage of a group."""
        return self._executor.feed

    def owes(self, step: int) -> bool:
        """Whether rounds are left to be done before ``step``."""
        return self._is_due(step) and not self._rounds.are_done(step)

    def run(self, step: int, at_s: float, window: Window) -> tuple[Verdict, RoundReport, float]:
        """Run the next round before ``step``, which starts at ``at_s``.

        Returns:
            What the others wish, this device's part, and when the round ended.

        Raises:
            UserCodeError: If the user's code raises.
            PeerLostError, LostContactError: If a worker is gone.
        """
        runner, index = self._runner, self._rounds.done.rounds_of(step)
        clock, longest_s = runner.clock, window.patience_s + self._longer_s
        patience = Patience(time.monotonic() + longest_s, min(runner.receive_s, longest_s))
        runner.executor.faults.reach(step, "evaluate")
        clock.begin_step(step, at_s)
        with at_rest(self._modules, self._stage.work.device):
            self._executor.run(self._rounds.share(step), clock, patience)
        ballot = Ballot(
            squares=0.0,
            weight_sum=self._stage.weight_sum,
            loss_sum=self._stage.loss_sum,
            hold=window.hold,
            end_step=window.end_step,
            end_s=clock.times.end_s,
        )
        verdict = runner.vote.cast(ballot, patience.left_s(time.monotonic()))
        ended_s = verdict.end_s if runner.emulated else time.monotonic()
        self._rounds.done = Evaluated(step, index + 1)
        report = RoundReport(
            generation=runner.plan.generation,
            step=step,
            index=index,
            device_id=runner.device_id,
            round_s=ended_s - at_s,
            loss_sum=self._stage.loss_sum,
            weight_sum=self._stage.weight_sum,
            metrics=tuple((name, *pair) for name, pair in self._stage.metrics.items()),
        )
        return verdict, report, ended_s
