"""Parts of a user's module that stages can run: each holds what it uses of the module."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Unit(nn.Module):
    """One function of the user's model as a layer, with the modules and tensors it uses.

    Those keep their names in the whole model, and are the very same objects.

    Args:
        run: Maps what the unit before returned to what the next one takes.
        looks: Equal for units that take the same time.
    """

    def __init__(self, run: Callable[[Any], Any], looks: str) -> None:
        super().__init__()
        self._run, self._looks = run, looks

    def forward(self, value: Any) -> Any:
        """Run the function."""
        return self._run(value)

    def hold_module(self, name: str, module: nn.Module) -> None:
        """Hold a module that the model has under this name."""
        path, _, leaf = name.rpartition(".")
        self._holder(path).add_module(leaf, module)

    def hold_tensor(self, name: str, tensor: Tensor, *, persistent: bool) -> None:
        """Hold a parameter or buffer by itself; one that is in no state_dict: not persistent."""
        path, _, leaf = name.rpartition(".")
        holder = self._holder(path)
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(leaf, tensor)
        else:
            holder.register_buffer(leaf, tensor, persistent=persistent)

    def _holder(self, path: str) -> nn.Module:
        found: nn.Module = self
        for part in filter(None, path.split(".")):
            if not hasattr(found, part):
                found.add_module(part, nn.Module())
            found = found.get_submodule(part)
        return found

    def __repr__(self) -> str:
        """What it looks like, without its place in the model."""
        return self._looks


@dataclass(slots=True)
class Uses:
    """Modules that ran and tensors that took part while a function ran."""

    modules: list[nn.Module] = field(default_factory=list)
    tensors: set[int] = field(default_factory=set)  # ids


class _Tensors(TorchDispatchMode):
    def __init__(self, seen: set[int]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Below autograd and autocast: only what is computed with, not whose dtype is asked for.
        self._seen.update(id(leaf) for leaf in tree_leaves((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


@contextmanager
def watched() -> Iterator[Uses]:
    """Note what runs inside uses."""
    uses = Uses()
    handle = register_module_forward_pre_hook(lambda module, _: uses.modules.append(module))
    try:
        with _Tensors(uses.tensors):
            yield uses
    finally:
        handle.remove()


class Belongings:
    """Hands the modules and tensors of a model to the units that use them.

    Args:
        model: The user's module.
        apart: Modules that no unit holds as a part of a larger one: the blocks.
    """

    def __init__(self, model: nn.Module, apart: Sequence[nn.Module]) -> None:
        self._model = model
        self._names = {id(module): name for name, module in model.named_modules()}
        whole = {id(module) for module in apart}
        self._mixed = {
            id(module)
            for module in model.modules()
            if id(module) not in whole and any(id(inner) in whole for inner in module.modules())
        }
        self._held: set[int] = set()  # tensors, by id

    def hand(self, unit: Unit, uses: Uses) -> None:
        """Let the unit hold what it used: whole modules, and tensors that are in none of them."""
        chosen: list[nn.Module] = []
        for module in uses.modules:
            inside = any(module is inner for whole in chosen for inner in whole.modules())
            if not inside and id(module) in self._names and id(module) not in self._mixed:
                chosen.append(module)
                unit.hold_module(self._names[id(module)], module)
        mine = {id(t) for module in chosen for t in (*module.parameters(), *module.buffers())}
        self._held |= mine
        self._hold(unit, uses.tensors - mine)

    def hand_rest(self, unit: Unit) -> None:
        """Let the unit hold what nobody used: it is part of the model's state all the same."""
        everything = {id(t) for t in (*self._model.parameters(), *self._model.buffers())}
        self._hold(unit, everything - self._held)

    def _hold(self, unit: Unit, ids: set[int]) -> None:
        # Under each of its names: all of them are in the model's state_dict.
        for name, tensor in (
            *self._model.named_parameters(remove_duplicate=False),
            *self._model.named_buffers(remove_duplicate=False),
        ):
            if id(tensor) in ids:
                self._held.add(id(tensor))
                owner = self._model.get_submodule(name.rpartition(".")[0])
                is_kept = name.rpartition(".")[2] not in owner._non_persistent_buffers_set
                unit.hold_tensor(name, tensor, persistent=is_kept)
