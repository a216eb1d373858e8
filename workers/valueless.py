"""Models without values, on torch's meta device: their tensors have shapes and nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten


def is_valueless(model: nn.Module) -> bool:
    """Whether a module has parameters that are shapes only."""
    return any(parameter.is_meta for parameter in model.parameters())


def stand_ins() -> FakeTensorMode:
    """For a model that has values: makes tensors that stand for its own, for ``shapes_only``."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def shapes_only(fake: FakeTensorMode | None = None) -> Iterator[None]:
    """Compute nothing inside; what is read from a tensor (a count, a flag, a scale) is 1.

    Args:
        fake: From ``stand_ins``, for a model that has values.
    """
    with fake or torch.device("meta"), _Ones():
        yield


class _Ones(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))
