"""Whether a loss is a sum over samples to the last digits, which rounding in a model would hide."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers import border
from workers.randomness import sample_randomness
from workers.two_sums import two_sums

FINE_TOLERANCE, TOLERANCE = 1e-5, 1e-4
"""Largest difference, relative to what the samples give, of a loss in fp64, and of what is of 32
bits: a loss that casts by itself, and numbers of the batch as the model returned them."""

NOISE = 1e-12
"""Of the loss: what a difference of two such losses in fp64 does not tell."""

ROUNDINGS = 16
"""So many of the last digit, of whatever type a loss or a number is, are no difference."""

MOST_NUMBERS = 2**25
"""Of the outputs, of which copies in fp64 are made: 256 MiB each. Larger ones are not looked at."""


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss and what it took of some samples, at once and each alone."""

    loss: Callable[[Any, Any], tuple[Any, Any]]
    seed: int
    layer: int
    """The number by which the loss draws random numbers, with ``seed``."""

    def couples(
        self, alone: Sequence[tuple[Any, Any]], batch: Any, whole: Sequence[Tensor]
    ) -> bool:
        """Whether the loss of all samples is another one than the sum of each one's.

        Both are taken of the same outputs, in fp64: however small a term is that couples samples,
        it shows. Numbers without a dimension (a penalty that the model returns) are those of the
        model; what they add is looked at by itself.

        Args:
            alone: Output and batch of each sample of the run, from the first one on.
            batch: Of all of them.
            whole: The tensors that the model returns for all of them; shapes are enough of those
                with a dimension.

        Returns:
            False, too, where nothing can be said: the outputs do not fit together, they are very
            large, or the loss takes no fp64 or is not finite.
        """
        joined = _joined([output for output, _ in alone], whole)
        if joined is None:
            return False
        cases = [(range(len(alone)), joined, batch)]
        cases += [(range(k, k + 1), output, one) for k, (output, one) in enumerate(alone)]
        try:
            with torch.no_grad():
                plain = torch.stack([self._of(*case, _without_numbers) for case in cases])
                added = torch.stack([self._of(*case, _wide) for case in cases]) - plain
        except Exception:  # the user's code may want one precision only; in that it ran already
            return False
        tolerance = FINE_TOLERANCE if plain.dtype == torch.float64 else TOLERANCE
        noise = max(NOISE, _rounding(plain)) * float(plain.abs().sum())
        of_numbers = max([TOLERANCE, *(_rounding(t) for t in whole if not t.dim())])
        return _differs(plain, max(tolerance, _rounding(plain)), 1e-9) or _differs(
            added, of_numbers, noise
        )

    def _of(
        self, positions: Sequence[int], output: Any, batch: Any, made: Callable[[Tensor], Tensor]
    ) -> Tensor:
        with sample_randomness(self.seed, 0, positions, self.layer):
            total, _ = two_sums(self.loss(border.mapped(output, made), border.mapped(batch, _wide)))
        return torch.as_tensor(total).reshape(())


def _rounding(tensor: Tensor) -> float:
    """Largest difference, relative to a number of this type, that may come of rounding alone."""
    return ROUNDINGS * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0


def _differs(found: Tensor, tolerance: float, noise: float) -> bool:
    """Whether the first is not the sum of the others; no is said of what is not finite."""
    together, apart = found[0].double(), found[1:].double()
    return float((apart.sum() - together).abs()) > tolerance * float(apart.abs().sum()) + noise


def _joined(outputs: Sequence[Any], whole: Sequence[Tensor]) -> Any:
    """What the model returns for all samples, made of what it returns for each; None: no such."""
    columns = list(zip(*(border.tensors(output) for output in outputs), strict=False))
    if sum(t.numel() for t in whole) > MOST_NUMBERS or len(columns) != len(whole):
        return None
    made = []
    for column, wanted in zip(columns, whole, strict=True):
        if any(t.dim() != wanted.dim() or t.shape[1:] != wanted.shape[1:] for t in column):
            return None
        made.append(torch.cat(column) if wanted.dim() else wanted)
        if made[-1].shape != wanted.shape:
            return None
    rest = iter(made)
    return border.mapped(outputs[0], lambda _: next(rest))


def _wide(tensor: Tensor) -> Tensor:
    """A copy, which the loss may work on in place, of as many digits as there are."""
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        dtype = torch.complex128 if dtype.is_complex else torch.float64
    return tensor.detach().to(dtype, copy=True)


def _without_numbers(tensor: Tensor) -> Tensor:
    made = _wide(tensor)
    return made if made.dim() or not made.is_floating_point() else made.zero_()
