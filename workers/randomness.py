"""Random numbers drawn per sample, so that no plan, split or retry changes them.

For the layers, the loss behind them, and what makes the first one's input.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from workers.device import generator_states
from workers.seeding import seed_from

_aten = torch.ops.aten

_CHANGEABLE = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    nn.MultiheadAttention,
)  # fmt: skip
"""Layers with a rate that the user may change while training goes on."""

_FILLERS = frozenset({
    _aten.bernoulli_.float, _aten.uniform_.default, _aten.normal_.default,
    _aten.exponential_.default,
})  # fmt: skip
"""Operations that fill a tensor in place and take a generator."""

_MAKERS: dict[Any, Any] = {
    _aten.rand.default: _aten.uniform_.default,
    _aten.randn.default: _aten.normal_.default,
    _aten.rand_like.default: _aten.uniform_.default,
    _aten.randn_like.default: _aten.normal_.default,
}
"""Operations that make a random tensor, and what fills an empty one alike."""

_MAY_DRAW = frozenset({
    functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
    functional.alpha_dropout, functional.feature_alpha_dropout, functional.gumbel_softmax,
    functional.multi_head_attention_forward, functional.scaled_dot_product_attention,
    _aten.dropout.default, _aten.scaled_dot_product_attention.default, _aten.bernoulli.default,
    _aten.rand.default, _aten.randn.default, _aten.rand_like.default, _aten.randn_like.default,
    _aten.feature_dropout.default, _aten.alpha_dropout.default, _aten.native_dropout.default,
    _aten.feature_alpha_dropout.default, _aten.bernoulli_.float, _aten.uniform_.default,
    _aten.normal_.default, _aten.exponential_.default,
    _aten.dropout_.default, _aten.feature_dropout_.default, _aten.alpha_dropout_.default,
    _aten.feature_alpha_dropout_.default,
    torch.dropout, torch.dropout_, torch.feature_dropout_, torch.alpha_dropout_,
    torch.feature_alpha_dropout_,
    torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli,
    Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_,
})  # fmt: skip
"""What is looked into: watching every operation at the dispatcher costs 3.5 us each, not 1 us."""


_ATTENTION = (
    functional.scaled_dot_product_attention, _aten.scaled_dot_product_attention.default,
)  # fmt: skip


INPUTS = -1
"""In place of a layer's index: what makes the input of the first one."""


class _PerSample:
    """Generators of the samples of one microbatch in one layer of one step."""

    def __init__(
        self, seed: int, step: int, sample_indices: Sequence[int], layer: int, who: str
    ) -> None:
        self._keys = [struct.pack("<4q", seed, step, index, layer) for index in sample_indices]
        self._who = who
        self.num_draws = 0
        self._generator = torch.Generator()

    def fill(self, like: Tensor, operation: Callable[..., Any], *args: Any) -> Tensor:
        """A tensor like ``like`` in shape, dtype and device, filled by an in-place operation.

        Raises:
            ValueError: If its first dimension does not hold the samples.
        """
        num_samples = len(self._keys)
        if like.dim() == 0 or like.shape[0] % num_samples:
            raise ValueError(
                f"{self._who} draws random numbers of shape {tuple(like.shape)} for "
                f"{num_samples} samples; the first dimension must run over the samples, or what "
                "is drawn would depend on the plan: draw for each sample, put the samples first "
                "(batch_first=True), or leave it out (dropout=0)"
            )
        # Drawn on the CPU whatever the device: unlike devices must agree.
        drawn = torch.empty(like.shape, dtype=like.dtype)
        for key, part in zip(self._keys, drawn.chunk(num_samples), strict=True):
            self._generator.manual_seed(seed_from(key + struct.pack("<q", self.num_draws)))
            operation(part, *args, generator=self._generator)
        self.num_draws += 1
        return drawn.to(like.device)


class _Draws(TorchDispatchMode):
    """Replaces the random operations that the functions of ``_MAY_DRAW`` are made of."""

    def __init__(self, samples: _PerSample) -> None:
        super().__init__()
        self._samples = samples

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if options.pop("generator", None) is not None:
            return func(*args, **(kwargs or {}))  # the user's own generator, the user's own rule
        if func in _FILLERS:
            return args[0].copy_(self._samples.fill(args[0], func, *args[1:], **options))
        if func in _MAKERS:
            like = args[0] if isinstance(args[0], Tensor) else torch.empty(args[0], **options)
            return self._samples.fill(like, _MAKERS[func])
        if func is _aten.bernoulli.default:
            uniform = self._samples.fill(args[0], _aten.uniform_.default)
            return (uniform < args[0]).to(args[0].dtype)
        if func is _aten.native_dropout.default and args[2]:
            kept = self._samples.fill(args[0], _aten.bernoulli_.float, 1 - args[1])
            # Scaled as where it is not fused (on a processor), so that both round alike.
            return args[0] * (kept / (1 - args[1])), kept.bool()
        return func(*args, **options)


class _Watch(TorchFunctionMode):
    def __init__(self, samples: _PerSample) -> None:
        super().__init__()
        self._draws = _Draws(samples)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _MAY_DRAW or _draws_nothing(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        # The fused attention kernels draw inside, where nobody can look.
        with self._draws, sdpa_kernel(SDPBackend.MATH):
            return func(*args, **(kwargs or {}))


def _draws_nothing(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Attention without dropout, which most models have, keeps its fused kernel."""
    if func not in _ATTENTION:
        return False
    dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return not dropout


# Modules whose first run drew nothing: they are spared the watch, which costs 1 us an operation.
_quiet: dict[bool, WeakSet[nn.Module]] = {True: WeakSet(), False: WeakSet()}
"""By ``training``: what draws nothing while it is evaluated may draw in a step."""


def _may_change(module: nn.Module) -> bool:
    """Whether it holds parts that draw or not as the user pleases (a scheduled rate, say)."""
    return any(isinstance(m, _CHANGEABLE) for m in module.modules())


@contextmanager
def sample_randomness(
    seed: int,
    step: int,
    sample_indices: Sequence[int],
    layer: int,
    module: nn.Module | None = None,
    who: str = "",
) -> Iterator[None]:
    """Draw what ``layer`` draws at random (dropout, noise) per sample while inside.

    Each number is a function of (seed, step, position of the sample in the run, layer, draw):
    the same in every plan, microbatch and repetition. A generator that the user passes is left
    alone. Not covered: activation checkpointing inside a layer, whose second forward runs in
    backward, outside.

    Args:
        seed: Of the run.
        step: Of the run.
        sample_indices: Positions of the samples, in the order of the first dimension.
        layer: Its index in the model; behind the last one is the loss, before the first
            ``INPUTS``.
        module: The layer itself; given, one that draws nothing costs nothing from its second
            run on.
        who: What draws, for the message of an error; the layer by its index when empty.

    Raises:
        ValueError: If something was drawn that cannot be told apart by sample.

    Source: docs/model.md, section 8 (exact gradients).
    """
    before, who = generator_states(), who or f"layer {layer}"
    if module is not None and module in _quiet[module.training]:
        yield
    else:
        samples = _PerSample(seed, step, sample_indices, layer, who)
        with _Watch(samples):
            yield
        if module is not None and not samples.num_draws and not _may_change(module):
            _quiet[module.training].add(module)
    if not all(torch.equal(b, a) for b, a in zip(before, generator_states(), strict=False)):
        raise ValueError(
            f"{who} draws from torch's global generator in a way that depends on the plan; "
            "use nn.Dropout, or in every step torch.nn.functional.dropout, torch.rand_like, "
            "torch.randn_like or Tensor.uniform_; if it is the dataset that draws meanwhile, in "
            "threads of its own, give these a torch.Generator"
        )
