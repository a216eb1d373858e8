"""What layers hand on: a nest of tuples, lists and dicts, as its tensors and where they stand."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from workers.messages import DTYPES

PLAIN_TYPES = (bool, int, float, str, type(None))
"""What may stand beside tensors."""

_TENSOR, _WITH_GRADIENT, _PLAIN, _TUPLE, _LIST, _DICT = "t", "g", "p", "u", "l", "d"


def checked(value: Any) -> Any:
    """The same nest of plain tuples, lists and dicts, which every stage can rebuild.

    A named tuple becomes a tuple: the next layer may be on another device, and whether a model
    runs must not depend on the plan.

    Raises:
        TypeError: If something else than tensors, numbers, text and None is in it, or no tensor.
    """
    made = _checked(value, "")
    if not any(True for _ in tensors(made)):
        raise TypeError(
            f"it returned {_named(value)} without a tensor in it; return what the next layer needs"
        )
    return made


def _checked(value: Any, place: str) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.dtype not in DTYPES:
            raise TypeError(
                f"it returned a tensor{place and f' at {place}'} of {value.layout} and "
                f"{value.dtype}, which cannot be sent; return a dense one (to_dense()) of a usual "
                "dtype"
            )
        return value
    if place and type(value) in PLAIN_TYPES:
        return value
    if type(value) is dict:
        for key in value:
            if not isinstance(key, str):
                raise TypeError(
                    f"it returned a dict with the key {key!r}; name what a layer returns by text"
                )
        return {key: _checked(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple([_checked(item, f"{place}[{i}]") for i, item in enumerate(value)])
    if type(value) is list:
        return [_checked(item, f"{place}[{i}]") for i, item in enumerate(value)]
    where = f" at {place}" if place else ""
    raise TypeError(
        f"it returned {_named(value)}{where}; a layer returns a tensor, or a tuple, list or dict "
        "of tensors, numbers and None"
    )


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def leaves(value: Any) -> Iterator[Any]:
    """What stands in a nest, tensors or not, in its order."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        yield value
        return
    for item in value:
        yield from leaves(item)


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors of a nest, in its order."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The nest with every tensor changed; what is no nest, nor a tensor, as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(mapped(item, change) for item in value)
    return value


def describe(value: Any) -> Tensor:
    """Where the tensors of a nest stand, which of them want a gradient, and the rest; as bytes."""
    return torch.frombuffer(bytearray(json.dumps(_described(value)).encode()), dtype=torch.uint8)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _WITH_GRADIENT if value.requires_grad else _TENSOR
    if isinstance(value, dict):
        return [_DICT, [[key, _described(item)] for key, item in value.items()]]
    if isinstance(value, tuple | list):
        kind = _TUPLE if isinstance(value, tuple) else _LIST
        return [kind, [_described(item) for item in value]]
    return [_PLAIN, value]


def rebuild(description: Tensor, place: Callable[[bool], Tensor]) -> Any:
    """The nest that ``describe`` told of; ``place`` says, tensor by tensor, what stands there.

    Args:
        description: From ``describe``.
        place: Given whether the tensor wants a gradient.
    """
    return _rebuilt(json.loads(bytes(description.tolist())), place)


def _rebuilt(told: Any, place: Callable[[bool], Tensor]) -> Any:
    if isinstance(told, str):
        return place(told == _WITH_GRADIENT)
    kind, items = told
    if kind == _PLAIN:
        return items
    if kind == _DICT:
        return {key: _rebuilt(item, place) for key, item in items}
    made = [_rebuilt(item, place) for item in items]
    return tuple(made) if kind == _TUPLE else made
