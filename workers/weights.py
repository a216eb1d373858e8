"""Weights to start from: safetensors files that hold the names of the user's own state_dict."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_safetensors
from torch import Tensor

from orchestrator import storage
from orchestrator.core.durable import stays_below
from orchestrator.errors import ConfigError
from workers.splitting import SplitModel

_SHOWN = 3  # names of a kind in a message
_ENDS = (".safetensors", ".safetensors.index.json")


def load_weights(model: SplitModel, url: str) -> None:
    """Fill the layers from a safetensors file, or from all files that an index of some names.

    A value takes the dtype that it has in the model. Of several names of one parameter, the file
    may hold any.

    Raises:
        ConfigError: If a file cannot be read, lacks or misshapes an entry, holds one that the
            model has not, or unlike ones of a parameter that the model has once.
    """
    targets: dict[str, Tensor] = {
        model.state_name(index, name): value
        for index, layer in enumerate(model.layers)
        for name, value in layer.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    filled: dict[int, str] = {}
    strange, problems = [], []
    for name, value in _read(url):
        if name not in targets:
            strange.append(name)
            continue
        target = targets[name].data
        key = id(targets[name])
        if value.shape != target.shape:
            problems.append(
                f"{name} has the shape {tuple(value.shape)}, and the model wants "
                f"{tuple(target.shape)}"
            )
        elif value.is_floating_point() != target.is_floating_point():
            kinds = (str(t.dtype).removeprefix("torch.") for t in (value, target))
            problems.append("{} holds {}, and the model wants {}".format(name, *kinds))
        elif key in filled and not torch.equal(target, value.to(target)):
            problems.append(
                f"{filled[key]} and {name} differ, though they are one parameter of the model"
            )
        else:
            target.copy_(value)
        filled.setdefault(key, name)
    missing = [name for name, target in targets.items() if id(target) not in filled]
    if missing:
        problems.insert(0, f"{_listed(missing)} missing")
    if strange:
        problems.insert(len(missing) > 0, f"{_listed(strange)} not in the model")
    if problems:
        more = len(problems) - 2 * _SHOWN
        told = [*problems[: 2 * _SHOWN], *([f"{more} more"] if more > 0 else [])]
        raise ConfigError(
            f"training.init_from: {url!r} does not fit the model: {'; '.join(told)}"
            f"{_prefix_words(missing, strange)}; give weights that were saved from the very class "
            "that training.task builds"
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    if len(names) == 1:
        return f"{shown} is"
    return f"{shown} are" if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more are"


def _prefix_words(missing: Sequence[str], strange: Sequence[str]) -> str:
    """What to say where the names are the same but for their beginning."""
    for longer, shorter, words in (
        (missing, strange, "the model's names begin with {!r}, and those of the file do not"),
        (strange, missing, "the file's names begin with {!r}, and those of the model do not"),
    ):
        ends = set(shorter)
        found = Counter(
            name[: at + 1]
            for name in longer
            for at, letter in enumerate(name)
            if letter == "." and name[at + 1 :] in ends
        )
        if found and (most := found.most_common(1)[0])[1] > len(longer) / 2:
            return f" ({words.format(most[0])})"
    return ""


def _read(url: str) -> Iterator[tuple[str, Tensor]]:
    """Names and values of a file, or of all files of an index, one after another."""
    if not url.endswith(".json"):
        yield from _read_file(url)
        return
    with _readable(url, "index of safetensors files", ""):
        files = dict.fromkeys(json.loads(storage.read_bytes(url))["weight_map"].values())
        for file in files:
            if not stays_below(file):
                raise ValueError(f"it names {file!r}, which does not lie beside it")
    folder = url.rpartition("/")[0]
    for file in files:
        yield from _read_file(storage.join(folder, file) if folder else file)


def _read_file(url: str) -> Iterator[tuple[str, Tensor]]:
    mend = "; write one with lyray export or safetensors.torch.save_file"
    with _readable(url, "safetensors file", mend):
        storage.size_bytes(url)  # of a folder every driver says what it is then
        path = storage.local_path(url)
        if path is None:
            yield from load_safetensors(storage.read_bytes(url)).items()
            return
        with safe_open(path, "pt") as file:  # no more of it in memory than one tensor
            for name in file.keys():  # noqa: SIM118 - no mapping
                yield name, file.get_tensor(name)


@contextmanager
def _readable(url: str, kind: str, mend: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"training.init_from: there is no file {url!r}") from None
    except IsADirectoryError:
        names = [n for n in storage.list_names(url) if n.endswith(_ENDS)]
        given = f"the file in it: {' or '.join(names[:_SHOWN])}" if names else "a file"
        raise ConfigError(f"training.init_from: {url!r} is a folder; give {given}") from None
    except (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"training.init_from: {url!r} is no {kind}: {error}{mend}") from None
