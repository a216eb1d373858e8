"""Measured layers kept on this machine: a model that was measured once here is known at once."""

import functools
import hashlib
import json
import logging
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator import storage
from orchestrator.core.model import ModelProfile, profile_from_json, profile_to_json
from orchestrator.core.training import Task, TrainingOptions
from workers import border
from workers.data import SampleSource
from workers.device import PROCESSOR, product_name
from workers.failures import user_code
from workers.profiler import profile_model
from workers.splitting import SplitModel

logger = logging.getLogger(__name__)

ENVIRONMENT = "LYRAY_PROFILE_CACHE"
"""Names the folder of the cache; ``off``: no cache."""

_VERSION = 1  # of how layers are measured: what an older one measured is not comparable
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def known_or_measured(
    model: SplitModel,
    task: Task,
    options: TrainingOptions,
    *,
    wall: bool = False,
    fresh: bool = False,
    device: torch.device = PROCESSOR,
) -> ModelProfile:
    """As ``profile_model``, unless the same model was measured on such a device of this machine.

    Wall times of a CPU are never kept: what a quota or a neighbour takes is another thing every
    time. An entry that cannot be read is measured anew; several processes may write the same one.

    Args:
        model: Cut.
        task: Whose samples and loss.
        options: Precision, microbatch and optimizer.
        wall: See ``profile_model``.
        fresh: Measure whatever is kept, and keep that.
        device: Where they are measured; its type is the kind in the profile.
    """
    folder = None if wall and device == PROCESSOR else cache_folder()
    path = None
    if folder is not None:
        path = str(folder / f"{fingerprint(model, task, options, device)}.json")
        if not fresh and (known := _read(path, model)) is not None:
            logger.info("the layers' figures are those of %s; %s=off measures", path, ENVIRONMENT)
            return known
    found = profile_model(model, task, options, kind=device.type, wall=wall, device=device)
    if path is not None:
        try:
            storage.write_json(path, profile_to_json(found))
        except OSError as error:
            logger.warning("the layers' figures are not kept: %s", error)
    return found


def cache_folder() -> Path | None:
    """Where measured layers are kept; None: nowhere."""
    told = os.environ.get(ENVIRONMENT, "")
    if told == "off":
        return None
    if told:
        return Path(told)
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = base if base.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # nobody's home
        return None
    return base / "lyray" / "profiles"


def fingerprint(
    model: SplitModel, task: Task, options: TrainingOptions, device: torch.device
) -> str:
    """Differs where layers, what they take, how they are trained, or the device differ.

    Of the user's code it sees the ``forward`` of every module and the loss, not what these call.
    """
    with user_code("the dataset, while profiling,"):
        source = SampleSource(task.dataset, task.collate, 0, task.inputs)
        batch = source.batch(range(options.microbatch))
    told = hashlib.sha256()
    for part in (
        _VERSION, torch.__version__, platform.python_version(), device.type, product_name(device),
        torch.get_num_threads(), options.task, options.precision, options.microbatch,
        replace(options.optimizer, lr=1.0), model.names, model.ties,
        [_shape(t) for t in border.tensors(batch)], *_code(task.loss),
        *(part for layer in model.layers for part in _structure(layer)),
    ):  # fmt: skip
        told.update(repr(part).encode())
        told.update(b"\0")
    return told.hexdigest()


def _read(path: str, model: SplitModel) -> ModelProfile | None:
    try:
        found = profile_from_json(json.loads(storage.read_bytes(path)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s cannot be used, the layers are measured anew: %s", path, error)
        return None
    return found if found.layers == model.names else None


def _shape(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad


def _structure(layer: nn.Module) -> Iterator[object]:
    yield repr(layer)
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        yield name, _shape(tensor)
    for module in layer.modules():
        yield type(module).__qualname__, module.training
        yield from _code(type(module).forward)
    yield from _code(getattr(layer, "_run", None))


def _code(function: Any) -> Iterator[object]:
    """What a function does, as far as its own code tells."""
    if isinstance(function, functools.partial):
        yield from _code(function.func)
        yield from filter(_is_plain, function.args)
    elif isinstance(function, MethodType):
        yield from _code(function.__func__)
    elif isinstance(function, FunctionType):
        yield from _instructions(function.__code__)
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        yield from filter(_is_plain, (*(function.__defaults__ or ()), *cells))


def _instructions(code: CodeType) -> Iterator[object]:
    yield code.co_code
    yield code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)
        else:
            yield constant if not isinstance(constant, frozenset) else sorted(map(repr, constant))


def _is_plain(value: object) -> bool:
    return isinstance(value, _PLAIN)


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - empty ones raise
    except ValueError:
        return False
    return True
