"""A model with blocks in its middle, cut into its embedding, every block and its head."""

from functools import partial
from typing import Any

import torch
from torch import nn

from orchestrator.core.training import Blocks
from orchestrator.errors import ConfigError
from workers import border
from workers.failures import user_code
from workers.units import Belongings, Unit, watched


def cut_blocks(model: nn.Module, blocks: Blocks, value: Any) -> dict[str, Unit]:
    """Units by name, in the order in which they run; the sample is run through all of them.

    Args:
        model: Whose parts the functions of ``blocks`` call.
        blocks: How to run the model in parts.
        value: What the first unit takes, of a sample or more.

    Raises:
        ConfigError: If there are no blocks, or what a part returns cannot cross a border.
        UserCodeError: If one of the functions raises.
    """
    found = _longest(model)
    count = blocks.count if blocks.count is not None else len(found[1]) if found else 0
    if count < 1:
        raise ConfigError(
            f"training.task: Task.layers is a {type(model).__name__} without a ModuleList of "
            "blocks of one class; say in Task.blocks how many there are: count=..."
        )
    path, modules = found or ("block", [])
    runs: dict[str, tuple[Any, str]] = {"embed": (blocks.embed, "embed")}
    for i in range(count):
        looks = repr(modules[i]) if i < len(modules) else f"block {i}"
        runs[f"{path}.{i}"] = partial(blocks.block, i), looks
    runs["head"] = blocks.head, "head"
    belongings = Belongings(model, modules)
    units: dict[str, Unit] = {}
    with torch.random.fork_rng(), torch.no_grad():
        for name, (run, looks) in runs.items():
            unit = units[name] = Unit(run, looks)
            with user_code(f"training.task: Task.blocks, {name}"), watched() as uses:
                value = run(value)
                if name != "head":
                    value = border.checked(value)
            belongings.hand(unit, uses)
    belongings.hand_rest(units["head"])
    return units


def _longest(model: nn.Module) -> tuple[str, list[nn.Module]] | None:
    """The longest ModuleList whose modules are of one class, the first of several; its path."""
    lists = [
        (name, list(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(inner) for inner in module}) == 1
    ]
    return max(lists, key=lambda one: len(one[1]), default=None)
