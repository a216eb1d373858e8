"""What must not change by running a model: its state, and generators that no plan can share."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from orchestrator.errors import ConfigError
from workers.seeding import generators_state


@contextmanager
def unchanged(layers: Iterable[nn.Module], what: str) -> Iterator[None]:
    """Refuse what changes by running inside: it would differ from device to device.

    Args:
        layers: Whose parameters and buffers are looked at.
        what: For the message.

    Raises:
        ConfigError: If a buffer or parameter is another one than before, or something was drawn
            from the generator of Python or NumPy.
    """
    modules = list(layers)
    before = {key: _copy(tensor) for key, tensor in _state(modules)}
    drawn = generators_state()
    yield
    for key, tensor in _state(modules):
        kind, _, name = key
        if not torch.equal(before.get(key, _copy(tensor)), _copy(tensor)):
            raise ConfigError(
                f"training.task: {what} changes its {kind} {name!r} while it runs, so that the "
                "result would depend on the plan; keep it as it is (.eval() does in many modules), "
                "or compute what it holds from the input"
            )
    if generators_state() != drawn:
        raise ConfigError(
            f"training.task: {what} draws from the generator of Python or NumPy while it runs, so "
            "that the result would depend on the plan; draw by sample with torch.rand_like or "
            "nn.Dropout"
        )


def _state(modules: list[nn.Module]) -> Iterator[tuple[tuple[str, int, str], Tensor]]:
    for index, module in enumerate(modules):
        yield from ((("buffer", index, name), t) for name, t in module.named_buffers())
        yield from ((("parameter", index, name), t) for name, t in module.named_parameters())


def _copy(tensor: Tensor) -> Tensor:
    """A buffer's bits, as NaN is unlike itself; of a parameter, which may be large, their sum."""
    value = tensor.detach()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(value.element_size(), torch.int64)
    if value.is_complex():
        value = torch.view_as_real(value)
    bits = value.contiguous().view(words)
    is_parameter = isinstance(tensor, nn.Parameter)
    return bits.sum(dtype=torch.int64) if is_parameter else bits.clone()
