"""From the spec of a worker to the task it runs: model, samples, schedule, checked and split."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from orchestrator.core.training import ScheduleOptions, Task
from orchestrator.errors import ConfigError
from workers.data import SampleSource
from workers.device import PROCESSOR, device_memory_bytes
from workers.evaluation import EvaluationSet, evaluation_set, try_evaluation
from workers.grouping import freeze
from workers.orders import TaskInfo, WorkerSpec
from workers.rehearsal import rehearse
from workers.splitting import SplitModel, load_task, split
from workers.step import Samples
from workers.update import learning_rate
from workers.weights import load_weights


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The user's task in the hands of one worker."""

    task: Task
    model: SplitModel
    source: SampleSource
    samples: Samples
    lr: Callable[[int], float]  # of a step
    evaluation: EvaluationSet | None  # None: nothing is evaluated

    def info(self, device: torch.device) -> TaskInfo:
        """What the head wants to know of it, and of the device that it is to run on."""
        return TaskInfo(
            dataset_samples=self.source.num_samples,
            evaluation_samples=self.evaluation.num_samples if self.evaluation else 0,
            free_bytes=device_memory_bytes(device),
            shares_memory=device == PROCESSOR,
        )


def load(spec: WorkerSpec, device_id: str) -> Loaded:
    """Import the task, build the whole model from the run's seed, and split it.

    Raises:
        UserCodeError: If the user's code raises.
        ConfigError: If the model, its weights, its groups or the data will not do.
    """
    options = spec.options
    if spec.working_dir is not None:
        os.chdir(spec.working_dir)
    task = load_task(spec.task, spec.task_args, spec.seed)
    model = split(task, check=spec.check)
    if options.init_from is not None:
        load_weights(model, options.init_from)
    freeze(model, options.optimizer.groups)
    source = SampleSource(task.dataset, task.collate, spec.seed, task.inputs)
    evaluation = evaluation_set(task, options, spec.seed)
    if spec.check:
        rehearse(model, task, source, spec.seed)
        if evaluation is not None:
            try_evaluation(model, evaluation, options, spec.seed)
    dataset_samples = source.num_samples
    if spec.dataset_samples not in (None, dataset_samples):
        raise ConfigError(
            f"training.task: Task.dataset has {dataset_samples} samples on {device_id}, but "
            f"{spec.dataset_samples} on the others; every device must see the same data"
        )
    samples = Samples(options.global_batch, options.num_samples(dataset_samples))
    if task.lr_factor is not None and options.lr_schedule != ScheduleOptions():
        raise ConfigError(
            "training.lr_schedule is given, and so is Task.lr_factor; remove one of them"
        )
    lr = learning_rate(options, samples.num_steps, task.lr_factor)
    for step in (0, samples.num_steps - 1):
        lr(step)  # errors of the user's function are better told now than in the end
    return Loaded(task, model, source, samples, lr, evaluation)
