"""Whether a cut model still does what the whole one does: outputs and gradients of some samples."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError
from workers import border
from workers.failures import user_code

TOLERANCE = 1e-3
"""Largest difference, relative to the largest entry: sums may be in another order, no more."""

COARSE_TOLERANCE = 0.1
"""As above, of a model with parameters of two bytes."""

_WHOLE = "training.task: the whole model, on some samples"
_PARTS = "training.task: the model in parts, on some samples"

SEED = 0
"""Of what the model draws, which both draw alike."""


def check_agreement(
    whole: Callable[[Any], Any], layers: Sequence[nn.Module], value: Any, mend: str
) -> None:
    """Compare a model with its parts, which get new tensors at every border, as stages do.

    Of the outputs those are compared that both have: a head may return less than the model.

    Args:
        whole: Runs the model on an input.
        layers: Its parts.
        value: An input.
        mend: What the user is told to do where they differ.

    Raises:
        ConfigError: If an output or a gradient differs, or no output of the parts is the model's.
        UserCodeError: If the model raises.
    """
    parameters = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    tolerance = tolerance_of(parameters)
    parameters = [p for p in parameters if p.requires_grad]
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        with user_code(f"{_WHOLE},"):
            wanted = list(border.tensors(whole(value)))
        torch.manual_seed(SEED)
        with user_code(f"{_PARTS},"):
            found, crossed = _run(layers, value)
    pairs = [(w, f) for f in found if (w := _same_shape(wanted, f)) is not None]
    if not pairs:
        shapes = [tuple(t.shape) for t in wanted], [tuple(t.shape) for t in found]
        raise ConfigError(
            f"training.task: the model returns tensors of the shapes {shapes[0]}, but its parts "
            f"{shapes[1]}; {mend}"
        )
    for w, f in pairs:
        if (difference := _difference(w, f)) > tolerance:
            raise ConfigError(
                f"training.task: run in parts, the model returns something else: an output of "
                f"shape {tuple(w.shape)} differs by {difference:.2g} of its largest entry; {mend}"
            )
    _check_gradients(pairs, parameters, crossed, tolerance, mend)


def _run(layers: Sequence[nn.Module], value: Any) -> tuple[list[Tensor], list[tuple[Any, Any]]]:
    """Outputs of the last part, and what each border got on both of its sides."""
    crossed = []
    for layer in layers[:-1]:
        value = border.checked(layer(value))
        behind = border.mapped(value, lambda t: t.detach().clone().requires_grad_(t.requires_grad))
        crossed.append((value, behind))
        value = border.mapped(behind, lambda t: t.clone())  # layers may work in place
    return list(border.tensors(layers[-1](value))), crossed


def _same_shape(wanted: Sequence[Tensor], found: Tensor) -> Tensor | None:
    """The output of this shape that is nearest to the one found."""
    same = [w for w in wanted if w.shape == found.shape and w.dtype == found.dtype]
    return min(same, key=lambda w: _difference(w, found), default=None)


def _difference(wanted: Tensor, found: Tensor) -> float:
    if not wanted.numel():
        return 0.0
    largest = float(wanted.detach().abs().max())
    apart = float((wanted.detach() - found.detach()).abs().max())
    return apart / largest if largest else apart


def _check_gradients(
    pairs: Sequence[tuple[Tensor, Tensor]],
    parameters: Sequence[nn.Parameter],
    crossed: Sequence[tuple[Any, Any]],
    tolerance: float,
    mend: str,
) -> None:
    """Take off the whole model's gradients, part by part, what the parts give: nothing is left.

    So there is one set of gradients, and not two.
    """
    trained = [(w, f) for w, f in pairs if w.requires_grad and f.requires_grad]
    if not trained or not parameters:
        return
    generator = torch.Generator().manual_seed(SEED)
    seeds = [torch.randn(w.shape, generator=generator).to(w) for w, _ in trained]
    with user_code(f"{_WHOLE} and back,"):
        gradients = torch.autograd.grad(
            [w for w, _ in trained], parameters, seeds, allow_unused=True
        )
    left: dict[nn.Parameter, Tensor | None] = dict(zip(parameters, gradients, strict=True))
    largest = {p: largest_of(gradient) for p, gradient in left.items()}
    del gradients
    with user_code(f"{_PARTS} and back,"):
        torch.autograd.backward([f for _, f in trained], seeds)
        _take_off(left)
        for ahead, behind in reversed(crossed):
            ends = [
                (a, b.grad)
                for a, b in zip(border.tensors(ahead), border.tensors(behind), strict=True)
                if b.grad is not None
            ]
            if ends:
                torch.autograd.backward([a for a, _ in ends], [g for _, g in ends])
                _take_off(left)
    for p, rest in left.items():
        difference = largest_of(rest) / (largest[p] or 1.0)
        if difference > tolerance:
            raise ConfigError(
                "training.task: run in parts, the model learns something else: the gradient of a "
                f"parameter of shape {tuple(p.shape)} differs by {difference:.2g} of its largest "
                f"entry; {mend}"
            )


def _take_off(left: dict[nn.Parameter, Tensor | None]) -> None:
    for p, wanted in left.items():
        if p.grad is not None:
            # Not in place: a gradient may be a view of another one.
            left[p] = -p.grad if wanted is None else wanted - p.grad
            p.grad = None


def tolerance_of(parameters: Iterable[Tensor]) -> float:
    """How far apart, relative to the largest entry, what a model gives twice may be."""
    return COARSE_TOLERANCE if any(p.element_size() <= 2 for p in parameters) else TOLERANCE


def largest_of(tensor: Tensor | None) -> float:
    """Largest absolute value of an entry; 0 of nothing."""
    if tensor is None or not tensor.numel():
        return 0.0
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return float(torch.linalg.vector_norm(dense, math.inf))
