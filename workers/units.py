"""Parts of a user's module that stages can run: each holds what it uses of the module."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from workers import border


class Unit(nn.Module):
    """One function of the user's model as a layer, with the modules and tensors it uses.

    Those keep their names in the whole model, and are the very same objects.

    Args:
        run: Maps what the unit before returned to what the next one takes.
        looks: Equal for units that take the same time.
        at_rest: Makes what runs in evaluation mode; absent: ``run`` looks at modes itself.
    """

    def __init__(
        self,
        run: Callable[[Any], Any],
        looks: str,
        at_rest: Callable[[], Callable[[Any], Any]] | None = None,
    ) -> None:
        super().__init__()
        # A module would become a part of this one, under a name that is not the model's.
        self._run = run.__call__ if isinstance(run, nn.Module) else run
        self._looks, self._make_rest = looks, at_rest
        self._rest: Callable[[Any], Any] | None = None

    def forward(self, value: Any) -> Any:
        """Run the function."""
        if self.training or self._make_rest is None:
            return self._run(value)
        self._rest = self._rest or self._make_rest()
        return self._rest(value)

    def hold(self, name: str, part: nn.Module | Tensor, *, persistent: bool = True) -> None:
        """Hold what the model has under this name; ``persistent``: a buffer's."""
        path, _, leaf = name.rpartition(".")
        holder: nn.Module = self
        for step in filter(None, path.split(".")):
            if not hasattr(holder, step):
                holder.add_module(step, nn.Module())
            holder = holder.get_submodule(step)
        if isinstance(part, nn.Module):
            holder.add_module(leaf, part)
        elif isinstance(part, nn.Parameter):
            holder.register_parameter(leaf, part)
        else:
            holder.register_buffer(leaf, part, persistent=persistent)

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
        self._seen.update(id(leaf) for leaf in border.leaves((args, kwargs or {})))
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
        blocks: Modules that no unit holds as a part of a larger one.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module] = ()) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        whole = {id(module) for module in blocks}
        self._mixed = {
            id(module)
            for module in model.modules()
            if id(module) not in whole and any(id(inner) in whole for inner in module.modules())
        }
        kept = set(model.state_dict(keep_vars=True))
        self._tensors = [  # under each of its names: all of them are in the state_dict
            (name, tensor, name in kept) for name, tensor in _named(model)
        ]
        self._held: set[int] = set()
        self._units: list[Unit] = []

    def hand(self, unit: Unit, uses: Uses) -> None:
        """Let the unit hold what it used: whole modules, and tensors that are in none of them."""
        self._units.append(unit)
        chosen: list[nn.Module] = []
        for module in uses.modules:
            inside = any(module is inner for whole in chosen for inner in whole.modules())
            if not inside and id(module) in self._names and id(module) not in self._mixed:
                chosen.append(module)
                unit.hold(self._names[id(module)], module)
        mine = {id(t) for module in chosen for t in (*module.parameters(), *module.buffers())}
        self._held |= mine
        self._hold(unit, uses.tensors - mine)

    def hand_rest(self, unit: Unit) -> None:
        """Let the unit hold what nobody used: it is part of the model's state all the same."""
        self._hold(unit, {id(tensor) for _, tensor, _ in self._tensors} - self._held)
        units = dict.fromkeys((*self._units, unit))
        known = {name for each in units for name, _ in _named(each)}
        for name, tensor, is_kept in self._tensors:
            if name not in known:  # another name of what a unit holds, in a module that none ran
                holder = next(u for u in units if any(own is tensor for _, own in _named(u)))
                holder.hold(name, tensor, persistent=is_kept)

    def _hold(self, unit: Unit, ids: set[int]) -> None:
        for name, tensor, is_kept in self._tensors:
            if id(tensor) in ids:
                self._held.add(id(tensor))
                unit.hold(name, tensor, persistent=is_kept)


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
