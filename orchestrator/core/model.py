"""The model as planning sees it (measured layers) and as workers see it (the user's Task)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the user's callable returns; ``training.task`` names the callable.

    ``layers`` is a list of ``nn.Module`` run one after another, or an ``nn.Module`` that can
    be split. ``loss(output, batch)`` returns (sum over samples, sum of weights); the gradient
    of a step is that of (sum of sums) / (sum of weights) over the global batch. ``dataset``
    is a torch map-style dataset; ``collate`` defaults to torch's ``default_collate``.
    """

    layers: Any
    loss: Callable[[Any, Any], tuple[Any, Any]]
    dataset: Any
    eval_dataset: Any = None
    collate: Callable[[list[Any]], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """YAML ``training.optimizer``: a class of ``torch.optim`` in lower case, its arguments."""

    name: str = "adamw"
    lr: float = 3e-4
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments, as torch names them (``momentum``, ``weight_decay``, ``betas``, ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions:
    """YAML section ``training.lr_schedule``: the learning rate as a function of the step."""

    name: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    """Steps over which the rate rises linearly from 0."""

    final_ratio: float = 0.0
    """Rate at the last step over the peak rate (cosine and linear)."""

    def factor(self, step: int, num_steps: int) -> float:
        """Multiplier of the peak rate at ``step`` (from 0) of ``num_steps``."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps))
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
    lr_schedule: ScheduleOptions = ScheduleOptions()
    precision: Precision = "fp32"
    """``bf16`` and ``fp16`` mean autocast: weights, gradients and boundaries stay fp32."""

    clip_grad_norm: float | None = None
    """Largest norm of the whole gradient; null: no clipping."""

    schedule: str | tuple[str, ...] = "1f1b"
    """Pipeline schedule, or a list from which the planner chooses."""

    overlap: bool = False
    """Gradient sums overlap with backward."""

    checkpoint_every_steps: int = 100
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        positive = {
            "global_batch": self.global_batch, "microbatch": self.microbatch, "steps": self.steps,
            "epochs": self.epochs, "checkpoint_every_steps": self.checkpoint_every_steps,
            "keep_checkpoints": self.keep_checkpoints, "clip_grad_norm": self.clip_grad_norm,
        }  # fmt: skip
        for name, value in positive.items():
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be positive")
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        if self.microbatch > self.global_batch:
            raise ValueError(
                f"microbatch is {self.microbatch}, but global_batch is only {self.global_batch}; "
                f"write microbatch: {self.global_batch} or less"
            )

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedules the planner may choose from."""
        return (self.schedule,) if isinstance(self.schedule, str) else self.schedule


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes of every layer on a team of ``team_size``, its fullest member; arrays over layers."""

    team_size: int
    param_bytes: tuple[float, ...]
    boundary_bytes_per_sample: tuple[float, ...]  # leaving the layer for the next one
    stash_bytes_per_sample: tuple[float, ...]  # what autograd keeps between forward and backward


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of every layer for one microbatch on one kind and team size; arrays over layers."""

    kind: str
    team_size: int
    microbatch: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    estimated: bool = False  # True: priced from FLOP, not measured

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "update_s"):
            values = getattr(self, name)
            if any(not (v >= 0 and math.isfinite(v)) for v in values):
                raise ValueError(
                    f"{name} of kind {self.kind!r} holds {min(values)}; times must be finite "
                    "and >= 0"
                )

    def scaled(self, factor: float, *, kind: str | None = None) -> "LayerTimes":
        """The same layers ``factor`` times slower, perhaps under another kind."""
        return replace(
            self,
            kind=kind or self.kind,
            forward_s=tuple(factor * t for t in self.forward_s),
            backward_s=tuple(factor * t for t in self.backward_s),
            update_s=tuple(factor * t for t in self.update_s),
        )


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model's layers as measured (interface.md section 5): names, sizes, times, ties."""

    model: str
    dtype: str
    layers: tuple[str, ...]
    sizes: tuple[LayerSizes, ...]
    times: tuple[LayerTimes, ...]
    forward_flop_per_sample: tuple[float, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()  # each: layers that hold one shared parameter
    tie_bytes: tuple[float, ...] = ()  # of each tie's parameter; in param_bytes of its layers too
    optimizer_bytes_per_param_byte: float = 3.0
    step_overhead_s: float = 0.0  # at the end of every step, beside sums and update: the vote

    def __post_init__(self) -> None:
        num_layers = len(self.layers)
        arrays = (
            [("forward_flop_per_sample", self.forward_flop_per_sample)]
            if self.forward_flop_per_sample
            else []
        )
        for size in self.sizes:
            names = ("param_bytes", "boundary_bytes_per_sample", "stash_bytes_per_sample")
            arrays += [(f"{n} (team {size.team_size})", getattr(size, n)) for n in names]
        for time in self.times:
            arrays += [
                (f"{n} ({time.kind})", getattr(time, n))
                for n in ("forward_s", "backward_s", "update_s")
            ]
        for name, values in arrays:
            if len(values) != num_layers:
                raise ValueError(
                    f"{name} has {len(values)} entries for {num_layers} layers; give one a layer"
                )
        if not num_layers or not self.sizes:
            raise ValueError("a profile needs layers and their sizes")

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def sizes_of(self, team_size: int) -> LayerSizes:
        """Sizes at a team size. Raises ValueError when there is no such profile."""
        for size in self.sizes:
            if size.team_size == team_size:
                return size
        raise ValueError(f"profile {self.model!r} has no sizes for teams of {team_size}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds with times."""
        return tuple(dict.fromkeys(t.kind for t in self.times))

    def microbatches_of(self, kind: str, team_size: int) -> tuple[int, ...]:
        """Microbatch sizes with times, ascending."""
        return tuple(
            sorted(t.microbatch for t in self.times if t.kind == kind and t.team_size == team_size)
        )
