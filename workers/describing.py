"""What layers are, told by running each once, with values or without: bytes, FLOP, likeness."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from torch.utils.module_tracker import ModuleTracker

from orchestrator.core.model import LayerSizes, LayerTimes, ModelProfile
from orchestrator.core.training import OptimizerOptions, Task, TrainingOptions
from workers import border
from workers.data import SampleSource, to_device
from workers.device import PROCESSOR, lent
from workers.failures import user_code
from workers.randomness import sample_randomness
from workers.sizes import kept_sizes
from workers.splitting import SplitModel, Tie
from workers.stage import SavedBytes, autocast
from workers.two_sums import two_sums
from workers.update import make_optimizer
from workers.valueless import shapes_only, stand_ins

_aten = torch.ops.aten


def _attention_flop(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


_FLOP = {_aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop}
"""Of operations that torch does not count."""

_SAMPLE_SHAPE = 64, 64  # of the parameter whose optimizer state is looked at


class _OneWhole(ModuleTracker):
    """No tracker of modules.

    torch's has hooks on what they take, with which no layer may ask for gradients itself.
    """

    def __enter__(self) -> "_OneWhole":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer on one microbatch."""

    stash_bytes: int  # what autograd keeps for backward, the loss counted into the last layer
    boundary_bytes: int  # what it returns
    flop: int  # of its forward
    looks: Hashable
    """Equal for layers that take the same time."""

    inputs: tuple[tuple[bool, int], ...]  # of each tensor: whether autograd keeps it, its bytes
    keeps_outputs: tuple[bool, ...]  # of each tensor it returns


class Passage:
    """Runs the layers of a model one after another, each on new tensors, as stages do.

    Args:
        model: The layers.
        task: Whose samples and loss.
        options: Precision.
        without_values: Run on tensors that have shapes and no values: nothing is allocated or
            computed. Numbers that a layer or the loss reads from a tensor are then 1.
        device: Where they run, each lent to it; absent: where their parameters lie.
    """

    def __init__(
        self,
        model: SplitModel,
        task: Task,
        options: TrainingOptions,
        *,
        without_values: bool,
        device: torch.device | None = None,
    ) -> None:
        self.model, self._task, self._options = model, task, options
        self._source = SampleSource(task.dataset, task.collate, 0, task.inputs)
        self.device = device or next(
            (p.device for layer in model.layers for p in layer.parameters()), PROCESSOR
        )
        self._batches: dict[int, Any] = {}
        self._without_values = without_values
        has_values = self.device.type != "meta"
        self._fake = stand_ins() if without_values and has_values else None

    def first_input(self, size: int) -> Any:
        """What the first layer takes of a microbatch of ``size`` samples."""
        with user_code("the dataset, while profiling,"):
            batch = to_device(self._source.batch(range(size)), self.device)
            value = self._source.first_input(batch, range(size))
        self._batches[size] = border.mapped(batch, self._as_seen)
        return border.mapped(value, self._as_seen)

    def walk(self, size: int) -> Iterator[tuple[int, Any, LayerFacts]]:
        """Each layer's number, what it takes, and what it is."""
        value = self.first_input(size)
        for index in range(len(self.model.layers)):
            with lent(self.model.layers[index], self.device), self._computing():
                saved = SavedBytes(self.model.layers, self._as_seen)
                counter = FlopCounterMode(display=False, custom_mapping=_FLOP)
                counter.mod_tracker = _OneWhole()
                came = detached(value)
                with counter, saved.counting():
                    output, _ = self.forward(index, size, came)
                facts = LayerFacts(
                    stash_bytes=saved.total,
                    boundary_bytes=bytes_of(output),
                    flop=counter.get_total_flops(),
                    looks=self._looks(index, value, output),
                    inputs=tuple((saved.keeps(t), nbytes(t)) for t in border.tensors(came)),
                    keeps_outputs=tuple(map(saved.keeps, border.tensors(output))),
                )
            yield index, value, facts
            value = detached(output)

    def forward(self, index: int, size: int, value: Any) -> tuple[Any, list[Tensor]]:
        """Output of a layer, and what its backward starts from; the loss at the last one."""
        place = f"profiling: layer {index} ({self.model.names[index]})"
        layer = self.model.layers[index]
        randomness: AbstractContextManager[None] = (
            nullcontext()
            if self._without_values
            else sample_randomness(0, 0, range(size), index, layer)
        )
        with user_code(place), self._autocast(), randomness:
            value = layer(value)
            is_last = index == len(self.model.layers) - 1
            value = value if is_last else border.checked(value)
        roots = list(border.tensors(value))
        if is_last:
            with user_code("profiling: the loss"), self._autocast():
                loss_sum, _ = two_sums(self._task.loss(value, self._batches[size]))
            roots = [loss_sum] if torch.is_tensor(loss_sum) else []
        return value, [root for root in roots if root.requires_grad]

    def _autocast(self) -> AbstractContextManager[Any]:
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        return autocast(self._options.precision, device)

    def _as_seen(self, tensor: Tensor) -> Tensor:
        """The tensor that stands for a real one while layers run."""
        return tensor if self._fake is None else self._fake.from_tensor(tensor)

    def _computing(self) -> AbstractContextManager[None]:
        return shapes_only(self._fake) if self._without_values else nullcontext()

    def _looks(self, index: int, value: Any, output: Any) -> Hashable:
        layer, is_last = self.model.layers[index], index == len(self.model.layers) - 1
        shapes = [
            tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in border.tensors(value))
            for value in (value, output)
        ]
        parameters = tuple((tuple(p.shape), p.requires_grad) for p in layer.parameters())
        return type(layer), repr(layer), parameters, *shapes, is_last


def describe_model(model: SplitModel, task: Task, options: TrainingOptions) -> ModelProfile:
    """Return what planning needs to know of a model, except times, without running it.

    Nothing is computed and no activation allocated, so that a model larger than the memory, built
    on torch's meta device, is described too. Kinds are then priced from its FLOP. On the meta
    device nothing is cast: at half precision its stash is that of fp32, an upper bound.

    Raises:
        UserCodeError: If the dataset, a layer or the loss raises; also where one of them does
            what only values tell, for instance picks entries by a mask.
        ConfigError: If torch does not know the optimizer.
    """
    passage = Passage(model, task, options, without_values=True)
    facts = {
        size: [told for _, _, told in passage.walk(size)]
        for size in dict.fromkeys((options.microbatch, 1))
    }
    has_parameters = any(p.requires_grad for layer in model.layers for p in layer.parameters())
    ratio = _state_ratio(options.optimizer) if has_parameters else 1.0
    return assembled(model, options, facts, (), ratio)


def assembled(
    model: SplitModel,
    options: TrainingOptions,
    facts_at: Mapping[int, Sequence[LayerFacts]],
    times: Sequence[LayerTimes],
    optimizer_ratio: float,
) -> ModelProfile:
    """The profile of a model from what its layers told at the largest microbatch and at 1."""
    largest = options.microbatch
    facts = facts_at[largest]
    last = len(facts) - 1
    ties = [tie for tie in model.ties if _shared(model, tie).requires_grad]  # others have no sums
    return ModelProfile(
        model=options.task,
        dtype=options.precision,
        layers=model.names,
        sizes=(
            LayerSizes(
                team_size=1,
                param_bytes=tuple(
                    float(sum(nbytes(p) for p in layer.parameters())) for layer in model.layers
                ),
                boundary_bytes_per_sample=tuple(
                    told.boundary_bytes / largest if index != last else 0.0
                    for index, told in enumerate(facts)
                ),
                **kept_sizes(facts_at),
                input_bytes_per_sample=sum(size for _, size in facts[0].inputs) / largest,
                frozen_bytes=tuple(
                    float(sum(nbytes(p) for p in layer.parameters() if not p.requires_grad))
                    for layer in model.layers
                ),
            ),
        ),
        times=tuple(times),
        forward_flop_per_sample=tuple(told.flop / largest for told in facts),
        edges=tuple((i, i + 1) for i in range(last)),
        ties=tuple(tuple(layer for layer, _ in tie.keys) for tie in ties),
        tie_bytes=tuple(float(nbytes(_shared(model, tie))) for tie in ties),
        optimizer_bytes_per_param_byte=optimizer_ratio,
    )


def _shared(model: SplitModel, tie: Tie) -> nn.Parameter:
    """The parameter of a tie."""
    layer, name = tie.keys[0]
    return model.layers[layer].get_parameter(name)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what an optimizer keeps beside parameters and gradients."""
    kept = [t for state in optimizer.state.values() for t in state.values()]
    return sum(nbytes(t) for t in kept if torch.is_tensor(t))


def state_ratio(kept_bytes: int, param_bytes: int) -> float:
    """Gradient and optimizer state per byte of a parameter."""
    # Rounded: Adam also keeps a step count of 4 bytes a tensor.
    return round(1.0 + kept_bytes / param_bytes, 1) if param_bytes else 1.0


def _state_ratio(options: OptimizerOptions) -> float:
    parameter = nn.Parameter(torch.zeros(_SAMPLE_SHAPE))
    optimizer = make_optimizer(options, [parameter])
    assert optimizer is not None, "there is a parameter"
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return state_ratio(state_bytes(optimizer), nbytes(parameter))


def bytes_of(value: Any) -> int:
    """Bytes of the tensors in a nest of tuples, lists and dicts."""
    return sum(map(nbytes, border.tensors(value)))


def nbytes(tensor: Tensor) -> int:
    """Bytes of the entries of a tensor."""
    return tensor.numel() * tensor.element_size()


def detached(value: Any) -> Any:
    """The same border as a stage would receive it: new tensors, wanting gradients as before."""
    # Not leaves: layers may work in place.
    return border.mapped(value, lambda t: t.detach().requires_grad_(t.requires_grad).clone())
