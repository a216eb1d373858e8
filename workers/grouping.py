"""Which parameters a group of ``training.optimizer.groups`` names, by the user's own names."""

import difflib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from orchestrator.core.training import GroupOptions
from orchestrator.errors import ConfigError
from workers.splitting import SplitModel

_SHOWN = 3  # names in a message


def freeze(model: SplitModel, groups: Sequence[GroupOptions]) -> None:
    """Let the parameters of frozen groups want no gradient any more.

    Raises:
        ConfigError: If a pattern fits no parameter, a group is left none, groups disagree on one,
            or nothing is left to train.
    """
    _check_patterns(groups, [name for _, _, name in _names(model)])
    found = find_groups(model, groups, model.layers)
    for number in set(range(len(groups))).difference(found.values()):
        raise ConfigError(
            f"training.optimizer.groups[{number}] has no parameter: all that its match fits belong "
            "to entries before it, and the first counts; put it before them, or leave it out"
        )
    for parameter, number in found.items():
        if groups[number].frozen:
            parameter.requires_grad_(False)
    if found and not any(p.requires_grad for layer in model.layers for p in layer.parameters()):
        raise ConfigError(
            "training.optimizer.groups freeze every parameter that the model trains; leave some"
        )


def find_groups(
    model: SplitModel, groups: Sequence[GroupOptions], layers: Sequence[nn.Module]
) -> dict[nn.Parameter, int]:
    """The number of the group of each parameter that has one.

    A parameter of several names belongs to the group of the names that have one.

    Args:
        model: The whole model, which knows the names.
        groups: Of the file.
        layers: The model's, or copies of them.

    Raises:
        ConfigError: If names of one parameter belong to unlike groups.
    """
    found: dict[nn.Parameter, dict[int, str]] = defaultdict(dict)
    for layer, own_name, name in _names(model):
        number = next((n for n, group in enumerate(groups) if _fits(group, name)), None)
        if number is not None:
            found[layers[layer].get_parameter(own_name)].setdefault(number, name)
    for numbers in found.values():
        if len(numbers) > 1:
            each = ", but ".join(f"{name!r} to groups[{n}]" for n, name in sorted(numbers.items()))
            raise ConfigError(
                f"training.optimizer.groups: one parameter has several names, and they belong to "
                f"unlike groups: {each}; let one group match both"
            )
    return {parameter: next(iter(numbers)) for parameter, numbers in found.items()}


def _names(model: SplitModel) -> Iterator[tuple[int, str, str]]:
    """Each parameter under each of its names: layer, name in the layer, name in the model."""
    for index, layer in enumerate(model.layers):
        for name, _ in layer.named_parameters(remove_duplicate=False):
            yield index, name, model.state_name(index, name)


def _fits(group: GroupOptions, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in group.patterns)


def _check_patterns(groups: Sequence[GroupOptions], names: Sequence[str]) -> None:
    for number, group in enumerate(groups):
        for pattern in group.patterns:
            if any(fnmatchcase(name, pattern) for name in names):
                continue
            close = [name for name in names if fnmatchcase(name, f"*{pattern}*")]
            close = close or difflib.get_close_matches(pattern, names, _SHOWN, 0.5)
            shown = ", ".join([*dict.fromkeys(close or names)][:_SHOWN])
            raise ConfigError(
                f"training.optimizer.groups[{number}].match: {pattern!r} fits no parameter of the "
                f"model; {'names that are close' if close else 'its first parameters'}: {shown}; "
                "correct it, or leave it out"
            )
