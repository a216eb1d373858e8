"""The user's task: import it, build it, and cut its model into layers that any stage can run."""

import importlib
import logging
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from orchestrator.core.training import TASK_IS_IMPORTED, Task
from orchestrator.errors import ConfigError, UserCodeError
from workers.agreement import check_agreement
from workers.blocks import cut_blocks
from workers.border import mapped, tensors
from workers.cutter import MEND, call_model, cut_graph
from workers.data import SampleSource
from workers.failures import in_words, user_code, user_traceback
from workers.unchanged import unchanged
from workers.valueless import is_valueless, shapes_only

_OVER_BATCHES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OVER_SAMPLES = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

logger = logging.getLogger(__name__)

SAMPLES = (3, 5, 7, 11)
"""How many samples a model is looked at with that nobody named the parts of."""


@dataclass(frozen=True, slots=True)
class Tie:
    """One Parameter that several layers hold: (layer, name inside the layer) of each."""

    keys: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class SplitModel:
    """The layers, run one after another, each taking what the one before returned."""

    layers: tuple[nn.Module, ...]
    names: tuple[str, ...]
    prefixes: tuple[str, ...]  # of each layer's entries in the user's own state_dict
    ties: tuple[Tie, ...] = ()

    def state_name(self, layer: int, name: str) -> str:
        """The user's own state_dict name of a parameter or buffer of a layer."""
        return f"{self.prefixes[layer]}{name}"

    def state_keys(self, layer: int) -> dict[str, str]:
        """The user's own state_dict names of a layer, each with its key in the layer's state."""
        module = self.layers[layer]
        keys = {id(value): f"buffer/{name}" for name, value in module.named_buffers()}
        keys |= {id(value): f"param/{name}" for name, value in module.named_parameters()}
        return {
            self.state_name(layer, name): keys[id(value)]
            for name, value in module.state_dict(keep_vars=True).items()
            if id(value) in keys
        }


def build_task(factory: Callable[..., Task], args: Mapping[str, Any], seed: int) -> Task:
    """Call the user's factory with every global generator seeded, so that all workers agree.

    Raises:
        UserCodeError: If it raises, or returns something else than a Task.
    """
    name = getattr(factory, "__qualname__", repr(factory))
    torch.manual_seed(seed)
    random.seed(seed)  # the user's code may draw from it
    np.random.seed(seed % 2**32)  # noqa: NPY002 - as above
    with user_code(f"training.task {name}({_arguments(args)})"):
        task = factory(**args)
    if not isinstance(task, Task):
        raise UserCodeError(
            f"training.task {name} returned {type(task).__name__}; return an orchestrator.Task"
        )
    return task


def _arguments(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in args.items())


def load_task(path: str, args: Mapping[str, Any], seed: int) -> Task:
    """Import ``module:callable``, relative to the working directory, and build the task.

    Raises:
        ConfigError: If there is no such module or callable.
        UserCodeError: If the user's code raises while it is imported or called.
    """
    module_name, _, name = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    imported = TASK_IS_IMPORTED.set(True)
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and _is_parent(error.name, module_name):
            raise ConfigError(
                f"training.task: there is no module {error.name!r} (of {path!r}) in {here} "
                "or among the installed packages"
            ) from None
        shown = user_traceback(error.with_traceback(_after_import(error.__traceback__)))
        raise UserCodeError(
            f"importing {module_name} (training.task) raised {in_words(error)}", shown
        ) from error
    finally:
        TASK_IS_IMPORTED.reset(imported)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ConfigError(
            f"training.task: {path!r} names no callable; module {module_name!r} "
            f"({module.__file__}) has no function {name!r}"
        )
    return build_task(factory, args, seed)


def _is_parent(missing: str | None, module_name: str) -> bool:
    # What the user's module imports itself may be missing too; that is the user's error.
    return missing is not None and f"{module_name}.".startswith(f"{missing}.")


def _after_import(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in (__file__, importlib.__file__) and not file.startswith("<frozen importlib"):
            return trace
        trace = trace.tb_next
    return None


def split(task: Task, *, to_train: bool = True, check: bool = True) -> SplitModel:
    """Cut the task's model into layers.

    Accepts a list of modules, an ``nn.ModuleList`` or an ``nn.Sequential``, and any module with
    ``Task.blocks``. Parameters that layers share become ties.

    Args:
        task: Of the user.
        to_train: Refuse a model without values, on torch's meta device; such a one is cut
            without comparing what its parts compute.
        check: Compare a model in parts with the whole one.

    Raises:
        ConfigError: If the model is something else, or holds a module that cannot be trained
            exactly in microbatches; the message names the module and the alternatives.
        UserCodeError: If the user's code raises on its way to a model with blocks.
    """
    model = _split(task, check=check)
    if to_train and (name := _first_valueless(model)):
        raise ConfigError(
            f"training.task: parameter {name!r} is on the meta device and has no values to train; "
            "build the model outside torch.device('meta'), or only plan it, with cluster.source: "
            "file"
        )
    return model


def _split(task: Task, *, check: bool) -> SplitModel:
    if task.blocks is not None or (
        isinstance(task.layers, nn.Module)
        and not isinstance(task.layers, nn.Sequential | nn.ModuleList)
    ):
        return _split_module(task, check=check)
    layers, names = _layer_list(task.layers)
    for layer, name in zip(layers, names, strict=True):
        _check_modules(layer, f"{name}.")
    return SplitModel(layers, names, tuple(f"{name}." for name in names), _ties(layers))


def _split_module(task: Task, *, check: bool) -> SplitModel:
    """A whole model, in the parts that the user named, or where torch finds that least crosses."""
    model = task.layers
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"training.task: Task.layers is a {type(model).__name__}, but Task.blocks is of a "
            "model; pass the model as layers, or leave blocks out"
        )
    _check_modules(model, "")
    source = SampleSource(task.dataset, task.collate, 0, task.inputs)

    valueless = is_valueless(model)

    def inputs(num_samples: int) -> Any:
        with user_code("the dataset"):
            value = source.first_input(source.batch(range(num_samples)), range(num_samples))
        return mapped(value, lambda tensor: tensor.to("meta")) if valueless else value

    with shapes_only() if valueless else unchanged([model], f"a {type(model).__name__}"):
        if task.blocks:
            units = cut_blocks(model, task.blocks, inputs(1))
        else:
            units = cut_graph(model, _distinct(inputs))
    layers = tuple(units.values())
    whole = partial(call_model, model)
    compare = check and not valueless
    if compare and _runs(whole, inputs(1), parts_are_the_users=task.blocks is not None):
        # One sample: that several give what each gives by itself is what the rehearsal looks at.
        check_agreement(whole, layers, inputs(1), MEND)
    return SplitModel(layers, tuple(units), ("",) * len(layers), _ties(layers))


def _runs(whole: Callable[[Any], Any], value: Any, *, parts_are_the_users: bool) -> bool:
    """Whether the whole model takes what its first part does; else nothing is to be compared."""
    if not parts_are_the_users:
        return True
    try:
        with torch.random.fork_rng(), torch.no_grad():
            whole(value)
    except Exception as error:
        logger.warning(
            "Task.blocks was not compared with the whole model, which does not take the input of "
            "its first part: %s: %s", type(error).__name__, error,
        )  # fmt: skip
        return False
    return True


def _distinct(inputs: Callable[[int], Any]) -> Any:
    """Input of some samples, whose number is the length of nothing else in it."""
    for num_samples in SAMPLES:
        value = inputs(num_samples)
        others = {length for t in tensors(value) for length in t.shape[1:]}
        if num_samples not in others:
            break
    return value


def _check_modules(model: nn.Module, prefix: str) -> None:
    for name, module in model.named_modules():
        _check_module(module, f"{prefix}{name}".rstrip("."))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype == torch.complex128 or tensor.layout != torch.strided:
            raise ConfigError(
                f"training.task: {prefix}{name} is a tensor of {tensor.dtype} and {tensor.layout}, "
                "which no checkpoint can hold; use complex64 for complex128, and a dense tensor"
            )


def _layer_list(model: Any) -> tuple[tuple[nn.Module, ...], tuple[str, ...]]:
    if isinstance(model, nn.Sequential | nn.ModuleList):
        layers: Sequence[Any] = list(model)
        # remove_duplicate=False: a module that stands in two places runs twice.
        names = [n for n, _ in model.named_modules(remove_duplicate=False) if n and "." not in n]
    elif isinstance(model, list | tuple):
        layers, names = model, [str(index) for index in range(len(model))]
    else:
        raise ConfigError(
            f"training.task: Task.layers is a {type(model).__name__}, which cannot be cut into "
            "layers; pass a layer list: a list of nn.Module (or an nn.Sequential) that run one "
            "after another, each taking what the one before returned"
        )
    if not layers:
        raise ConfigError("training.task: Task.layers is empty; pass a layer list of nn.Module")
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise ConfigError(
                f"training.task: entry {index} of Task.layers is a {type(layer).__name__}; "
                "pass a layer list of nn.Module (wrap a function in a small module)"
            )
    return tuple(layers), tuple(names)


def _check_module(module: nn.Module, name: str) -> None:
    place = f"training.task: layer {name!r} is a {type(module).__name__}"
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ConfigError(
            f"{place} without shapes yet; give it its input size, or run one sample through first"
        )
    if _takes_statistics(module):
        kind, width = type(module).__name__, int(getattr(module, "num_features", 1))
        # Of one channel each, means over positions would be lost to what comes behind.
        num_groups = math.gcd(32, width, max(1, width // 8))
        raise ConfigError(
            f"{place}: its statistics would be those of a microbatch and differ from group to "
            "group, so the result would depend on the plan. Normalize every sample by itself: "
            f"nn.GroupNorm({num_groups}, {width}); or keep the statistics that it has: "
            f"[m.eval() for m in model.modules() if isinstance(m, nn.{kind})]"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise ConfigError(
            f"{place} with max_norm, which changes the weight of the samples that a device sees, "
            "and only there; leave max_norm out, or scale what it returns"
        )
    if isinstance(module, nn.DataParallel | DistributedDataParallel):
        raise ConfigError(f"{place}, but lyray deals out the samples itself; pass its .module")
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None):
        raise ConfigError(
            f"{place} made by torch.compile, which hides what it does; pass the module without it"
        )
    if isinstance(module, nn.RNNBase) and module.dropout > 0:
        raise ConfigError(
            f"{place} with dropout {module.dropout}, which cannot be drawn per sample; stack "
            f"{module.num_layers} of one layer each with nn.Dropout between them"
        )


def _first_valueless(model: SplitModel) -> str | None:
    """The user's own name of a parameter that has a shape only."""
    return next(
        (
            model.state_name(index, name)
            for index, layer in enumerate(model.layers)
            for name, parameter in layer.named_parameters()
            if parameter.is_meta
        ),
        None,
    )


def _takes_statistics(module: nn.Module) -> bool:
    """Whether a norm takes statistics of more than one sample, or keeps some of what it sees."""
    if isinstance(module, _OVER_SAMPLES):
        return module.training and module.track_running_stats
    if isinstance(module, _OVER_BATCHES):
        return module.training or module.running_mean is None
    return False


def _ties(layers: Sequence[nn.Module]) -> tuple[Tie, ...]:
    holders: dict[int, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():  # once a layer, whatever its names there
            holders.setdefault(id(parameter), []).append((index, name))
    return tuple(Tie(tuple(keys)) for keys in holders.values() if len(keys) > 1)
