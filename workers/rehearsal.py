"""A few samples there and back before anything trains: does the result depend on the plan?"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.core.training import Task
from orchestrator.errors import ConfigError, UserCodeError
from workers import border
from workers.agreement import largest_of, tolerance_of
from workers.data import SampleSource
from workers.failures import user_code
from workers.loss_sum import LossSum
from workers.registered import check_registered
from workers.scaling import LossScale
from workers.splitting import SplitModel
from workers.stage import Stage, StageWork
from workers.unchanged import unchanged

NUM_SAMPLES = 2

FLOOR = 1e-5
"""Of the largest gradient: gradients that are zero but for rounding cannot be compared."""

_BACKWARD = (
    "look for hooks on gradients, a backward of its own that mixes samples, and "
    "torch.utils.checkpoint around dropout (leave it out)"
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Heard:
    """What some samples gave."""

    losses: list[float] = field(default_factory=list)  # by microbatch
    weight: float = 0.0
    crossed: list[list[Any]] = field(default_factory=list)
    """By microbatch, what each layer returned."""

    whole: list[Tensor] = field(default_factory=list)
    """What the last layer returned for all samples at once; shapes, but for single numbers."""

    @property
    def loss(self) -> float:
        """Of all."""
        return sum(self.losses)


def rehearse(model: SplitModel, task: Task, source: SampleSource, seed: int) -> None:
    """Train on two samples without an update: on the coarsest plan and on the finest one.

    The coarsest: one device has all layers and takes both samples at once. The finest: every layer
    has a device of its own and takes one sample after the other. Loss, weight and gradients must be
    the same, or the result would depend on the plan; so must be what each sample gives before all
    else, the smaller one first. No parameter, buffer or gradient stays changed.

    Raises:
        ConfigError: If they are not, there is nothing to train, or running changes the model;
            the message names the layer and the mend.
        UserCodeError: If the user's code raises.
    """
    layers = dict.fromkeys(model.layers)
    parameters = {id(p): p for layer in layers for p in layer.parameters() if p.requires_grad}
    if not parameters:
        raise ConfigError(
            "training.task: no parameter of the model requires a gradient, so there is nothing to "
            "train; leave requires_grad on where it is to learn"
        )
    hall = _Hall(model, task, source, seed)
    try:
        with unchanged(layers, "the model"):
            first = hall.first()
            together = hall.coarsest()
            for p in parameters.values():
                # What the finest plan adds takes it off.
                p.grad = None if p.grad is None else -p.grad
            largest = {key: largest_of(p.grad) for key, p in parameters.items()}
            apart = hall.finest([range(1), range(1, NUM_SAMPLES)])
        if not math.isfinite(together.loss):
            logger.warning("the loss of the first %d samples is %s", NUM_SAMPLES, together.loss)
            return
        hall.compare(together, apart, largest, parameters)
        hall.compare_first(first, apart)
    except ConfigError:
        hall.check_samples()  # where they are others each time, that is why
        raise
    except UserCodeError as error:
        raise UserCodeError(
            f"{error} (tried on {NUM_SAMPLES} samples and on one: any number must do)",
            error.user_traceback,
        ) from error
    finally:
        for p in parameters.values():
            p.grad = None


class _Hall:
    """Runs a task without a worker."""

    def __init__(self, model: SplitModel, task: Task, source: SampleSource, seed: int) -> None:
        self._model, self._task, self._source = model, task, source
        self._work = StageWork(
            first_layer=0, layers=model.layers, names=model.names, seed=seed, precision="fp32",
            device=torch.device("cpu"), loss=task.loss, loss_scale=LossScale("fp32"),
        )  # fmt: skip
        self._given: dict[tuple[int, ...], list[Tensor]] = {}  # by positions, when first asked for
        self._changed: Sequence[int] = ()  # positions whose samples were others later

    def _batch(self, positions: Sequence[int]) -> Any:
        batch = self._source.batch(positions)
        given = [t.clone() for t in border.tensors(batch)]
        if not all(map(_same, self._given.setdefault(tuple(positions), given), given)):
            self._changed = positions
        return batch

    def check_samples(self) -> None:
        """Raise a ConfigError where the dataset gave something else when asked again."""
        if self._changed:
            raise ConfigError(
                f"training.task: Task.dataset (or Task.collate) gave another sample at position "
                f"{self._changed[0]} when asked again, so the result would depend on the plan. "
                "Draw with torch, numpy or random, which are seeded by position; seed generators "
                "of your own by the index, or, in a stream, anew in each __iter__"
            )

    def _inputs(self, batch: Any, positions: Sequence[int]) -> Any:
        with user_code("Task.inputs"):
            return self._source.first_input(batch, positions)

    def first(self) -> dict[int, float]:
        """The loss of each sample before anything larger was run."""
        sizes = {
            k: sum(t.numel() for t in border.tensors(self._inputs(self._batch([k]), [k])))
            for k in range(NUM_SAMPLES)
        }
        order = sorted(sizes, key=lambda k: sizes[k])
        _, heard = self._ahead([range(k, k + 1) for k in order])
        return dict(zip(order, heard.losses, strict=True))

    def coarsest(self) -> _Heard:
        stage, positions = Stage(self._work), range(NUM_SAMPLES)
        batch = self._batch(positions)
        value = self._inputs(batch, positions)
        output = stage.forward(0, 0, positions, value)
        whole = [t.detach().to("meta") if t.dim() else t.detach() for t in border.tensors(output)]
        stage.finish(0, 0, output, batch, 1)
        stage.tally(0)
        self._check_roots(stage.roots(0), value)
        stage.backward(0, 0)
        return _Heard([stage.loss_sum], stage.weight_sum, whole=whole)

    def finest(self, microbatches: Sequence[Sequence[int]]) -> _Heard:
        """Layer by layer, all microbatches in each: what one leaves behind meets the others."""
        stages, heard = self._ahead(microbatches)
        wires: list[tuple[Tensor, ...]] = [()] * len(microbatches)
        for stage in reversed(stages):
            for k in range(len(microbatches)):
                wires[k] = tuple(t.clone() for t in stage.backward(k, 0, wires[k]))
        return heard

    def _ahead(self, microbatches: Sequence[Sequence[int]]) -> tuple[list[Stage], _Heard]:
        """The way there; with gradients, as layers may ask for some themselves."""
        count = len(self._model.layers)
        stages = [
            Stage(
                replace(
                    self._work, first_layer=i, layers=(layer,), names=(self._model.names[i],),
                    loss=self._task.loss if i == count - 1 else None,
                )
            )
            for i, layer in enumerate(self._model.layers)
        ]  # fmt: skip
        values: list[Any] = [
            self._inputs(self._batch(positions), positions) for positions in microbatches
        ]
        heard = _Heard(crossed=[[] for _ in microbatches])
        for i, stage in enumerate(stages):
            for k, positions in enumerate(microbatches):
                if i:
                    values[k] = stage.receive(k, values[k])
                output = stage.forward(k, 0, positions, values[k])
                heard.crossed[k].append(border.mapped(output, lambda t: t.detach().clone()))
                if i == count - 1:
                    stage.finish(k, 0, output, self._batch(positions), 1)
                    stage.tally(0)
                    heard.losses.append(stage.loss_sum - heard.loss)
                else:
                    values[k] = tuple(t.clone() for t in stage.send(k, output))
        heard.weight = stages[-1].weight_sum
        return stages, heard

    def _check_roots(self, roots: Sequence[Tensor], given: Any) -> None:
        """The loss must have come from the model's parameters, and from no others."""
        if not roots:
            raise ConfigError(
                "training.task: the loss does not depend on any parameter, so nothing would be "
                "trained; look for .item(), .detach(), torch.no_grad() or argmax on its way"
            )
        parts = dict(zip(self._model.names, self._model.layers, strict=True))
        check_registered(roots, parts, given)

    def compare(
        self,
        together: _Heard,
        apart: _Heard,
        largest: dict[int, float],
        parameters: dict[int, nn.Parameter],
    ) -> None:
        """Raise a ConfigError where two samples at once gave something else than one by one."""
        tolerance = tolerance_of(parameters.values())
        if not math.isclose(together.weight, apart.weight, rel_tol=tolerance):
            raise ConfigError(
                f"training.task: the loss gives {NUM_SAMPLES} samples at once the weight "
                f"{together.weight:.6g}, one by one {apart.weight:.6g}; return (sum over samples, "
                "number of samples, or of tokens)"
            )
        if not math.isclose(together.loss, apart.loss, rel_tol=tolerance, abs_tol=1e-9):
            raise ConfigError(
                f"training.task: the loss of {NUM_SAMPLES} samples is {together.loss:.6g} at once, "
                f"but {apart.loss:.6g} layer by layer and one by one, so the result would depend "
                f"on the plan: {self._why(together, apart, tolerance)}"
            )
        if self._couples(together, apart):
            raise ConfigError(
                f"training.task: the loss of {NUM_SAMPLES} samples at once is not the sum of what "
                "each gives, if only by a little, so the result would depend on the plan: the loss "
                "must be a sum of what each sample gives by itself"
            )
        floor = FLOOR * max(largest.values())
        layers = list(zip(self._model.layers, self._model.names, strict=True))
        for layer, name in reversed(layers):  # what is wrong in one goes on to those before
            for inner, p in layer.named_parameters():
                if p.requires_grad and largest_of(p.grad) > tolerance * largest[id(p)] + floor:
                    raise ConfigError(
                        f"training.task: the gradient of {inner!r} of layer {name!r} is another "
                        f"one for {NUM_SAMPLES} samples at once than for one by one, so the result "
                        "would depend on the plan: "
                        f"{self._beside(self._again(), apart, tolerance) or _BACKWARD}"
                    )

    def compare_first(self, first: dict[int, float], apart: _Heard) -> None:
        """Raise a ConfigError where a sample gave something else before others than after them."""
        parameters = (p for layer in self._model.layers for p in layer.parameters())
        tolerance = tolerance_of(parameters) / 10  # of the same operations, only later
        for k, later in enumerate(apart.losses):
            if not math.isclose(first[k], later, rel_tol=tolerance, abs_tol=1e-9):
                raise ConfigError(
                    f"training.task: the loss of a sample was {first[k]:.6g} at first, and "
                    f"{later:.6g} after others had been run, so the result would depend on the "
                    "plan. Layers must not keep anything from one run to the next that changes "
                    "what they return, such as a scale of the longest input so far"
                )

    def _couples(self, together: _Heard, apart: _Heard) -> bool:
        loss = LossSum(self._task.loss, self._work.seed, len(self._model.layers))
        alone = [(crossed[-1], self._batch([k])) for k, crossed in enumerate(apart.crossed)]
        return loss.couples(alone, self._batch(range(NUM_SAMPLES)), together.whole)

    def _why(self, together: _Heard, apart: _Heard, tolerance: float) -> str:
        again = self._again()
        if not math.isclose(again.losses[0], together.loss, rel_tol=tolerance):
            return (
                "a layer got something else than what the one before returned. Layers must not "
                "keep anything from one run to the next, hand something on other than by "
                "returning it, or work in place on their input (x = x.clone() first)"
            )
        if (beside := self._beside(again, apart, tolerance)) is not None:
            return beside
        if math.isclose(NUM_SAMPLES * together.loss, apart.loss, rel_tol=tolerance):
            return "it looks like a mean over samples; return their sum (reduction='sum')"
        return "the loss must be a sum of what each sample gives by itself"

    def _again(self) -> _Heard:
        """Both samples at once, with others in between, which are to leave nothing behind."""
        _, heard = self._ahead([range(NUM_SAMPLES), range(NUM_SAMPLES, 2 * NUM_SAMPLES)])
        return heard

    def _beside(self, again: _Heard, apart: _Heard, tolerance: float) -> str | None:
        """Which layer returns something else for a sample with another beside it, if one does."""
        layers = zip(self._model.names, again.crossed[0], *apart.crossed, strict=True)
        for index, (name, whole, *parts) in enumerate(layers):
            if _padded(whole, parts):
                return (
                    f"what layer {index} ({name}) returns has another shape beside other samples. "
                    "What is padded must be masked, and dropout draws by position: pad all "
                    "samples to one length in Task.collate, whatever is beside them"
                )
            if _mixes(whole, parts, tolerance):
                return (
                    f"what layer {index} ({name}) returns for a sample depends on the samples "
                    "beside it. Use no statistics over the batch (nn.GroupNorm does not), mask "
                    "what is padded, and let the first dimension of all tensors be the samples"
                )
        return None


def _same(one: Tensor, other: Tensor) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and bool(((one == other) | one.isnan()).all())


def _padded(whole: Any, parts: Sequence[Any]) -> bool:
    """Whether a tensor over samples has another shape, apart from their number, than for one."""
    return any(
        one.dim() and one.dim() == other.dim() and one.shape[1:] != other.shape[1:]
        for part in parts
        for one, other in zip(border.tensors(whole), border.tensors(part), strict=False)
    )


def _mixes(whole: Any, parts: Sequence[Any], tolerance: float) -> bool:
    """Whether a tensor over samples is another one than those of the single samples."""
    for one, *others in zip(
        border.tensors(whole), *(border.tensors(part) for part in parts), strict=False
    ):
        same = one.dim() and all(
            t.dim() == one.dim() and t.shape[1:] == one.shape[1:] for t in others
        )
        if not same or sum(len(t) for t in others) != len(one):
            continue
        apart, at_once = _wide(torch.cat(others)), _wide(one)
        if largest_of(apart - at_once) > tolerance * largest_of(at_once):
            return True
    return False


def _wide(tensor: Tensor) -> Tensor:
    """As numbers whose differences mean something: masks are not, small integers wrap around."""
    return tensor if tensor.is_complex() else tensor.to(torch.float64)
