"""Whether what a model computes with is its own: only parameters are trained, moved and saved."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from orchestrator.errors import ConfigError
from workers import border


def check_registered(
    outputs: Sequence[Tensor], parts: Mapping[str, nn.Module], given: Any = None
) -> None:
    """Refuse outputs that were computed from a tensor that wants a gradient and is no parameter.

    Args:
        outputs: Of the model, with what autograd knows of them.
        parts: Modules by name that have all parameters.
        given: What the model was called with: a model may ask for gradients of that itself.

    Raises:
        ConfigError: With the place of the tensor.
    """
    known = {id(p) for part in parts.values() for p in part.parameters()}
    samples = {_memory(tensor) for tensor in border.tensors(given)}
    for leaf in _leaves(outputs):
        if id(leaf) not in known and _memory(leaf) not in samples:
            raise ConfigError(
                f"training.task: the model computes with {_named(leaf, parts)}, a tensor of shape "
                f"{tuple(leaf.shape)} that requires a gradient but is none of its parameters: it "
                "would be neither trained nor saved. Make it one: self.name = nn.Parameter(...), "
                "and nn.ParameterList or nn.ModuleList instead of a list"
            )


def _memory(tensor: Tensor) -> int:
    """Equal for a tensor and its views."""
    return int(tensor.untyped_storage()._cdata)


def _leaves(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors that require a gradient and from which others were computed."""
    todo, seen = [output.grad_fn for output in outputs], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        todo += [before for before, _ in node.next_functions]


def _named(leaf: Tensor, parts: Mapping[str, nn.Module]) -> str:
    for name, part in parts.items():
        for path, module in part.named_modules():
            for key, value in vars(module).items():
                if any(item is leaf for item in _inside(value)):
                    return f"{key!r} of layer {'.'.join(filter(None, (name, path)))!r}"
    return "something outside of it"


def _inside(value: Any) -> Iterator[Any]:
    """What an attribute holds, modules in plain lists too."""
    for leaf in border.leaves(value):
        yield from leaf.parameters() if isinstance(leaf, nn.Module) else (leaf,)
