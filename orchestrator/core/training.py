"""What to train and how: the user's Task, and the section ``training`` of the file."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from orchestrator.core.evaluation import LOSS, Criterion, EarlyStop
from orchestrator.errors import ConfigError

TASK_IS_IMPORTED: ContextVar[bool] = ContextVar("TASK_IS_IMPORTED", default=False)
"""Whether the task's module is being imported: whoever trains then would do so in every worker."""

Precision = Literal["fp32", "bf16", "fp16"]

ActivationCheckpointing = Literal["auto", "never", "always"]

MAX_MICROBATCHES = 10_000
"""Of a step: a plan times every one of them."""

MOST_SAMPLES, MOST_AHEAD = 1_000_000_000, 1_000
"""Of a step, and microbatches that are loaded ahead: each of those takes memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How a model with like blocks in its middle runs in parts; all three close over the model.

    ``embed(value)`` takes what the model would and returns the state, ``block(i, state)`` runs
    block i and returns the next state, ``head(state)`` returns what the loss takes. A state is a
    tensor, or a dict (tuple, list) of tensors, numbers and None.
    """

    embed: Callable[[Any], Any]
    block: Callable[[int, Any], Any]
    head: Callable[[Any], Any]
    count: int | None = None  # of blocks; None: those of the longest ModuleList of one class


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the user's callable returns; ``training.task`` names the callable.

    ``layers`` is a list of ``nn.Module`` run one after another, or an ``nn.Module`` with
    ``blocks``. ``loss(output, batch)`` returns (sum over samples, sum of weights); the gradient
    of a step is that of (sum of sums) / (sum of weights) over the global batch. ``dataset``
    is a torch map-style dataset, or an iterable one; ``collate`` defaults to torch's
    ``default_collate``.
    """

    layers: Any
    loss: Callable[[Any, Any], tuple[Any, Any]]
    dataset: Any
    eval_dataset: Any = None
    """A map-style dataset that ``training.eval_every_steps`` evaluates, in its own order."""

    collate: Callable[[list[Any]], Any] | None = None
    blocks: Blocks | None = None
    inputs: Callable[[Any], Any] | None = None
    """What the first layer takes of a batch; None: ``batch[0]`` of a tuple or list, else all."""

    metrics: Callable[[Any, Any], Mapping[str, tuple[Any, Any]]] | None = None
    """``metrics(output, batch)`` of an evaluation: name to (sum over samples, weight). Reported is
    the sum of sums over the sum of weights of the whole ``eval_dataset``."""

    lr_factor: Callable[[int, int], float] | None = None
    """(step, steps of the run) to the multiplier of the learning rate, instead of
    ``training.lr_schedule``; a function of these alone, which every worker calls. From step 0 on.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """YAML ``training.optimizer.groups[]``: what holds for some of the model's parameters."""

    match: str | tuple[str, ...]
    """Their names in the model's ``state_dict``, or patterns of them (``*.bias``), or a list."""

    lr_ratio: float = 1.0
    """Their learning rate over that of the optimizer."""

    frozen: bool = False
    """They are not trained: no gradient, no update, no optimizer state."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's arguments that they have otherwise (``weight_decay``, ``betas``, ...)."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """What ``match`` lists."""
        return (self.match,) if isinstance(self.match, str) else self.match


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """YAML ``training.optimizer``: a class of ``torch.optim`` in lower case, its arguments."""

    name: str = "adamw"
    """Class of ``torch.optim`` in lower case; its own arguments stand beside it."""

    lr: float = 3e-4
    """Learning rate at its peak, of which ``lr_schedule`` makes that of a step."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments, as torch names them (``momentum``, ``weight_decay``, ``betas``, ...)."""

    groups: tuple[GroupOptions, ...] = ()
    """Parameters with settings of their own; the first entry that fits a parameter counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """YAML section ``training.lr_schedule``: the learning rate as a function of the step."""

    name: Literal["constant", "cosine", "linear", "inverse_sqrt", "wsd"] = "constant"
    """How it goes on after the warm-up. ``inverse_sqrt`` falls with the root of the step; ``wsd``
    (warm up, stay, decay) stays until the last ``decay_steps``, then falls linearly."""

    warmup_steps: int = 0
    """Steps over which the rate rises linearly from 0."""

    final_ratio: float = 0.0
    """Rate at the end over the peak rate (cosine, linear and wsd)."""

    decay_steps: int = 0
    """Steps at the end over which the rate falls (wsd)."""

    def factor(self, step: int, num_steps: int) -> float:
        """Multiplier of the peak rate at ``step`` (from 0) of ``num_steps``."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        if self.name == "inverse_sqrt":
            return math.sqrt(max(1, self.warmup_steps) / (step + 1))
        first = self.warmup_steps
        if self.name == "wsd":
            first = max(first, num_steps - self.decay_steps)
        done = min(1.0, max(0.0, (step - first) / max(1, num_steps - first)))
        shape = (1 + math.cos(math.pi * done)) / 2 if self.name == "cosine" else 1 - done
        return self.final_ratio + (1 - self.final_ratio) * shape


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """YAML section ``training``."""

    task: str
    """Import path ``package.module:callable`` of what returns the Task."""

    global_batch: int
    """Samples per optimizer step, whatever the plan."""

    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the task."""

    init_from: str | None = None
    """A safetensors file with weights to start from."""

    microbatch: int = 1
    """Largest number of samples in one microbatch; the planner may use less."""

    steps: int | None = None
    """Optimizer steps to run; this or ``epochs``."""

    epochs: int | None = None
    """Passes over the dataset to run; this or ``steps``."""

    optimizer: OptimizerOptions = OptimizerOptions()
    """What updates the parameters."""

    lr_schedule: ScheduleOptions = ScheduleOptions()
    """How the learning rate goes with the steps."""

    precision: Precision = "fp32"
    """``bf16`` and ``fp16`` mean autocast: weights, gradients and boundaries stay fp32."""

    activation_checkpointing: ActivationCheckpointing = "auto"
    """Whether stages keep nothing but the inputs of their layers and run them again before
    backward: ``auto`` where memory would not do without; no result changes."""

    clip_grad_norm: float | None = None
    """Largest norm of the whole gradient; null: no clipping."""

    schedule: str | tuple[str, ...] = "1f1b"
    """Pipeline schedule, or a list from which the planner chooses."""

    overlap: bool = False
    """Gradient sums overlap with backward."""

    prefetch_microbatches: int = 4
    """Batches that a worker loads before it needs them, up to 1,000; 0: none."""

    checkpoint_every_steps: int = 100
    """Steps after which a checkpoint is begun, while training goes on."""

    keep_checkpoints: int = 2
    """The newest so many stay; older ones go once a newer one is whole."""

    eval_every_steps: int | None = None
    """Steps after which ``Task.eval_dataset`` is evaluated, and once at the end; null: never."""

    keep_best: Criterion | None = None
    """Every evaluation has a checkpoint, and that of the best one is kept beside the newest."""

    early_stop: EarlyStop | None = None
    """The run ends where evaluations get no better; null: after its last step."""

    def __post_init__(self) -> None:
        positive = {
            "global_batch": self.global_batch, "microbatch": self.microbatch, "steps": self.steps,
            "epochs": self.epochs, "checkpoint_every_steps": self.checkpoint_every_steps,
            "keep_checkpoints": self.keep_checkpoints, "clip_grad_norm": self.clip_grad_norm,
            "eval_every_steps": self.eval_every_steps,
        }  # fmt: skip
        for name, value in positive.items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        for name, text in (("task", self.task), ("init_from", self.init_from)):
            if text is not None and not text.strip():
                mend = "module:callable" if name == "task" else "a file with weights, or null"
                raise ValueError(f"{name} is {text!r}; write {mend}")
        if not 0 <= self.prefetch_microbatches <= MOST_AHEAD:
            raise ValueError(
                f"prefetch_microbatches is {self.prefetch_microbatches}; write 0 (none) to "
                f"{MOST_AHEAD:,}"
            )
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        known = get_args(ActivationCheckpointing)
        if self.activation_checkpointing not in known:
            raise ValueError(
                f"activation_checkpointing is {self.activation_checkpointing!r}; write one of "
                f"{', '.join(known)}"
            )
        self._check_batch()

    def _check_batch(self) -> None:
        if self.global_batch > MOST_SAMPLES:
            raise ValueError(
                f"global_batch is {self.global_batch}; write {MOST_SAMPLES:,} samples or less"
            )
        if self.microbatch > self.global_batch:
            raise ValueError(
                f"microbatch is {self.microbatch}, but global_batch is only {self.global_batch}; "
                f"write microbatch: {self.global_batch} or less"
            )
        if self.global_batch > MAX_MICROBATCHES * self.microbatch:
            raise ValueError(
                f"microbatch is {self.microbatch}, so that a step has more than "
                f"{MAX_MICROBATCHES:,} microbatches; write microbatch: "
                f"{math.ceil(self.global_batch / MAX_MICROBATCHES)} or more"
            )

    def num_samples(self, dataset_samples: int | None) -> int:
        """Samples of the whole run; only ``epochs`` can leave a short last step.

        Args:
            dataset_samples: Those of one epoch; None: a stream that does not say.

        Raises:
            ConfigError: If they are needed and not known.
        """
        if self.steps is not None:
            return self.steps * self.global_batch
        assert self.epochs is not None, "one of steps and epochs is given"
        if dataset_samples is None:
            raise ConfigError(
                f"training.epochs is {self.epochs}, but Task.dataset has no __len__, so that "
                "nobody knows where an epoch ends; write training.steps, or give it a __len__"
            )
        return self.epochs * dataset_samples

    def evaluates_at(self, step: int, num_steps: int) -> bool:
        """Whether the model of ``step`` updates, of ``num_steps`` of the run, is evaluated."""
        every = self.eval_every_steps
        return every is not None and step > 0 and (step % every == 0 or step == num_steps)

    @property
    def criterion(self) -> Criterion:
        """Which evaluation is called the best."""
        return self.keep_best or self.early_stop or Criterion()

    def metric_error(self, returned: Iterable[str]) -> str | None:
        """What is wrong where ``Task.metrics`` returns these: one that is asked for is missing."""
        known = (LOSS, *returned)
        for key, asked in (("keep_best", self.keep_best), ("early_stop", self.early_stop)):
            if asked is not None and asked.metric not in known:
                return (
                    f"training.{key}.metric is {asked.metric!r}, which Task.metrics does not "
                    f"return; write one of {', '.join(known)}"
                )
        return None

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedules the planner may choose from."""
        return (self.schedule,) if isinstance(self.schedule, str) else self.schedule
