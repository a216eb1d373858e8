"""The layers of one stage: microbatches forward and backward, and what passes the borders."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from orchestrator.core.training import Precision
from orchestrator.errors import UserCodeError
from workers import border
from workers.device import at_hand, brought
from workers.failures import user_code
from workers.randomness import sample_randomness
from workers.scaling import LossScale
from workers.two_sums import two_sums

Loss = Callable[[Any, Any], tuple[Any, Any]]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """What a layer, or the loss, runs in at this precision."""
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


class SavedBytes:
    """Counts what autograd keeps for backward: each storage once, without the layers' own state.

    ``as_seen`` says which tensor stands for one of the layers' while they run.
    """

    def __init__(
        self, layers: Iterable[nn.Module], as_seen: Callable[[Tensor], Tensor] = lambda t: t
    ) -> None:
        own = [t for layer in layers for t in (*layer.parameters(), *layer.buffers())]
        own += [as_seen(tensor) for tensor in own]  # autograd keeps a view of those, or the layer's
        self._alive, self._own = own, set(map(_storage, own))  # no other takes their place
        self._kept: dict[int, int] = {}

    @property
    def total(self) -> int:
        """Bytes kept by what ran inside ``counting``."""
        return sum(self._kept.values())

    def keeps(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is among what is kept."""
        return _storage(tensor) in self._kept

    def counting(self) -> AbstractContextManager[Any]:
        """Looks at every saved tensor of what runs inside."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)

    def _pack(self, saved: Tensor) -> Tensor:
        if (storage := _storage(saved)) not in self._own:
            self._kept[storage] = saved.untyped_storage().nbytes()
        return saved.detach()


def _storage(tensor: Tensor) -> int:
    """Equal for tensors that share their memory; those without values have no address."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class StageWork:
    """What the layers of a stage have in common in one run."""

    first_layer: int
    layers: tuple[nn.Module, ...]
    names: tuple[str, ...]
    seed: int
    precision: Precision
    device: torch.device
    loss: Loss | None  # of the last stage
    loss_scale: LossScale
    recompute: bool = False  # keep the inputs of layers only, and run them again in backward


class _Inlet(torch.autograd.Function):
    """Where a received tensor enters the graph: the gradient ends in ``box[index]``.

    A leaf would do but for layers that work in place, which autograd forbids on a leaf.
    """

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, box: list[Tensor | None], index: int, value: Tensor
    ) -> Tensor:
        ctx.box, ctx.index = box, index
        # The same memory under a new tensor: autograd would refuse in-place work on a view.
        fresh = torch.empty(0, dtype=value.dtype, device=value.device)
        return fresh.set_(
            value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.box[ctx.index] = grads[0]
        return None, None, None, None


@dataclass(slots=True)
class _Kept:
    """What backward of one microbatch needs."""

    positions: Sequence[int] = ()  # of the samples in the run
    gradients: list[Tensor | None] = field(default_factory=list)  # of the inputs, once known
    outputs: tuple[GradientEdge, ...] | tuple[Tensor] = ()
    """Where backward begins: at the loss, or at what goes on, of which no tensor is kept."""

    stash_bytes: int = 0


class Stage:
    """Runs the layers of one stage, in one thread; keeps at most K_s microbatches, by number."""

    def __init__(self, work: StageWork) -> None:
        self.work = work
        self.peak_stash_bytes = 0
        self.loss_sum = 0.0
        self.weight_sum = 0.0
        self._told: list[tuple[Any, Any]] = []  # loss sum and weight of each microbatch
        self._kept: dict[int, _Kept] = {}
        self._stash_bytes: dict[tuple, int] = {}  # by the shapes that come in
        self._token = torch.zeros((), device=work.device, requires_grad=True)
        self._in_place: dict[int, bool] = {}  # layers that run again: whether they change inputs

    def start_step(self) -> None:
        """Forget the sums of the step before."""
        self.loss_sum, self.weight_sum, self.peak_stash_bytes = 0.0, 0.0, 0
        self._kept.clear()
        self._told.clear()

    def receive(self, microbatch: int, wire: Sequence[Tensor]) -> Any:
        """Rebuild the input from what the stage before sent."""
        kept = self._kept[microbatch] = _Kept()
        arrived = iter(wire[1:])

        def place(wants_gradient: bool) -> Tensor:
            value = brought(next(arrived), self.work.device)
            if not wants_gradient:
                return value
            kept.gradients.append(None)
            index = len(kept.gradients) - 1
            return cast("Tensor", _Inlet.apply(self._token, kept.gradients, index, value))

        return border.rebuild(wire[0], place)

    def forward(self, microbatch: int, step: int, positions: Sequence[int], value: Any) -> Any:
        """Run the layers on one microbatch; ``positions`` are its samples in the run.

        Raises:
            UserCodeError: If a layer raises, or returns what cannot cross a border.
        """
        kept = self._kept.setdefault(microbatch, _Kept())
        kept.positions = positions
        with self._measured(("layers", _shapes(value)), kept):
            for index in range(
                self.work.first_layer, self.work.first_layer + len(self.work.layers)
            ):
                run = partial(self._run, index, step, positions)
                if self.work.recompute and not self._is_last(index):
                    value = self._run_twice(index, run, value, kept)
                else:
                    value = run(value)
        return value

    def _is_last(self, index: int) -> bool:
        """Whether the loss comes next."""
        return (
            self.work.loss is not None
            and index == self.work.first_layer + len(self.work.layers) - 1
        )

    def _run(self, index: int, step: int, positions: Sequence[int], value: Any) -> Any:
        layer = self.work.layers[index - self.work.first_layer]
        place = f"step {step}: layer {index} ({self.work.names[index - self.work.first_layer]})"
        randomness = sample_randomness(self.work.seed, step, positions, index, layer)
        with user_code(place), self._autocast(), randomness:
            value = layer(value)
            if not self._is_last(index):
                # Not only at a border: whether a model runs must not depend on the plan.
                value = border.checked(value)
        return value

    def _run_twice(self, index: int, run: Callable[[Any], Any], value: Any, kept: _Kept) -> Any:
        """Run a layer, and have it run again in backward: nothing but its input is kept.

        It draws the same random numbers again, as they are a function of sample, step and layer.
        """
        if index not in self._in_place:
            self._in_place[index] = _works_in_place(run, value)
        changes = self._in_place[index]
        kept.stash_bytes += sum(t.numel() * t.element_size() for t in border.tensors(value))

        def apart(value: Any) -> Any:
            # What the layer changes in place must not be what it will start from again.
            return run(border.mapped(value, Tensor.clone) if changes else value)

        before = _versions(value)
        with set_checkpoint_early_stop(False):  # by an exception, which would be the user's
            output = checkpoint(apart, value, use_reentrant=False, preserve_rng_state=False)
        if _versions(value) != before:
            raise UserCodeError(
                f"layer {index} ({self.work.names[index - self.work.first_layer]}) changes its "
                "input in place, but not always, so that it cannot run again in backward; have it "
                "work on a copy, or write training.activation_checkpointing: never"
            )
        return output

    def send(self, microbatch: int, value: Any) -> tuple[Tensor, ...]:
        """Return what goes to the next stage: one tensor that describes the others, then those."""
        values = list(border.tensors(value))
        edges = [get_gradient_edge(value) for value in values if value.requires_grad]
        self._kept[microbatch].outputs = tuple(edges)
        return (border.describe(value), *(v.detach() for v in values))

    def finish(self, microbatch: int, step: int, output: Any, batch: Any, num_samples: int) -> None:
        """Last stage: take the loss of a microbatch, as its share of ``num_samples`` of the step.

        Raises:
            UserCodeError: If the loss raises or returns something else than two sums; ``tally``
                looks at their values.
        """
        assert self.work.loss is not None
        kept = self._kept[microbatch]
        measured = self._measured(("loss", _shapes(output)), kept)
        behind = self.work.first_layer + len(self.work.layers)
        randomness = sample_randomness(self.work.seed, step, kept.positions, behind, who="the loss")
        with user_code(f"step {step}: the loss"), self._autocast(), measured, randomness:
            returned = self.work.loss(output, batch)
            loss_sum, weight = two_sums(returned)
            loss_sum = torch.as_tensor(loss_sum)
            if loss_sum.numel() != 1:
                raise ValueError(
                    f"loss returned a tensor of shape {tuple(loss_sum.shape)}; return "
                    "(sum over samples, weight)"
                )
            self._told.append((at_hand(loss_sum), at_hand(weight)))
        if loss_sum.requires_grad:
            # A tensor of no dimension, as torch's scaler has it: a loss in fp16 becomes fp32.
            scale = torch.tensor(self.work.loss_scale.scale, dtype=torch.float32).to(
                loss_sum.device
            )
            kept.outputs = (loss_sum.reshape(()) * scale / num_samples,)

    def roots(self, microbatch: int) -> tuple[Any, ...]:
        """What backward of a microbatch will start from."""
        return self._kept[microbatch].outputs

    def tally(self, step: int) -> None:
        """Add up what the losses of the step told; on a GPU they are known only now.

        Raises:
            UserCodeError: If a weight is no number of samples.
        """
        with user_code(f"step {step}: the loss"):
            for loss_sum, told in self._told:
                weight = float(told)
                if not (weight >= 0 and math.isfinite(weight)):
                    raise ValueError(
                        f"loss returned the weight {weight}; return (sum over samples, weight) "
                        "with the number of samples, or of tokens, as the weight"
                    )
                self.loss_sum += float(loss_sum)
                self.weight_sum += weight
        self._told.clear()

    def backward(
        self, microbatch: int, step: int, wire: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Run one microbatch backward and return what goes to the stage before.

        Args:
            microbatch: Its number in the step.
            step: For the message of an error.
            wire: What the next stage sent; nothing at the last stage.

        Raises:
            UserCodeError: If a function of the user's own raises in backward.
        """
        kept = self._kept.pop(microbatch)
        outputs: tuple[Any, ...] = kept.outputs
        gradients: list[Tensor] | None = None
        if wire:
            arrived = iter(wire[1:])
            device = self.work.device
            present = [brought(next(arrived), device) if p else None for p in wire[0].tolist()]
            pairs = [(o, g) for o, g in zip(outputs, present, strict=True) if g is not None]
            outputs, gradients = tuple(o for o, _ in pairs), [g for _, g in pairs]
        if outputs:
            with user_code(f"step {step}: backward of layers {self._span()}"):
                torch.autograd.backward(outputs, gradients)
        description = torch.tensor([g is not None for g in kept.gradients], dtype=torch.uint8)
        return (description, *(g for g in kept.gradients if g is not None))

    def _span(self) -> str:
        return f"{self.work.first_layer} to {self.work.first_layer + len(self.work.layers) - 1}"

    def _autocast(self) -> AbstractContextManager[Any]:
        # One context a layer: the casts of a weight are then shared, or not, whatever the cuts.
        return autocast(self.work.precision, self.work.device)

    @contextmanager
    def _measured(self, key: tuple, kept: _Kept) -> Iterator[None]:
        # Looking at every saved tensor costs time: only the first microbatch of a shape is.
        if key not in self._stash_bytes:
            saved = SavedBytes(self.work.layers)
            with saved.counting():
                yield
            self._stash_bytes[key] = saved.total
        else:
            yield
        kept.stash_bytes += self._stash_bytes[key]
        held = sum(k.stash_bytes for k in self._kept.values())
        self.peak_stash_bytes = max(self.peak_stash_bytes, held)


def _works_in_place(run: Callable[[Any], Any], value: Any) -> bool:
    """Whether a layer changes what it is given; it is given a copy."""
    value = border.mapped(value, lambda tensor: tensor.detach().clone())
    before = _versions(value)
    with torch.no_grad():
        run(value)
    return _versions(value) != before


def _versions(value: Any) -> list[int]:
    """How often each tensor of a nest was changed in place."""
    return [tensor._version for tensor in border.tensors(value)]


def _shapes(value: Any) -> tuple:
    return tuple(tuple(tensor.shape) for tensor in border.tensors(value))
