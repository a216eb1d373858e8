"""What this version can do of the section ``training``: schedules, precisions, optimizers."""

import difflib
import json
from collections.abc import Iterator, Mapping
from math import inf
from typing import TypeGuard

from orchestrator.control.backend import ClusterOptions
from orchestrator.core.schedule import SCHEDULES
from orchestrator.core.training import GroupOptions, OptimizerOptions, TrainingOptions
from orchestrator.familiar import FAMILIAR

NOT_YET = "not supported in this version"

LATER_SCHEDULES = ("2bw",)

_COMMON = ("weight_decay", "maximize", "foreach")
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "sgd": ("momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "fused"),
    "adam": ("betas", "eps", "amsgrad", "fused", "decoupled_weight_decay", *_COMMON),
    "adamw": ("betas", "eps", "amsgrad", "fused", *_COMMON),
    "adamax": ("betas", "eps", *_COMMON),
    "nadam": ("betas", "eps", "momentum_decay", "decoupled_weight_decay", *_COMMON),
    "radam": ("betas", "eps", "decoupled_weight_decay", *_COMMON),
    "rmsprop": ("alpha", "eps", "momentum", "centered", *_COMMON),
    "adagrad": ("lr_decay", "initial_accumulator_value", "eps", "weight_decay", "maximize",
                "foreach", "fused"),
    "adadelta": ("rho", "eps", *_COMMON),
}  # fmt: skip
"""torch.optim classes that work parameter by parameter, and their arguments besides lr."""

LATER_ARGUMENTS = ("capturable", "differentiable")
"""Arguments of torch's that a step in a plan cannot honour."""

_SWITCHES = ("amsgrad", "centered", "decoupled_weight_decay", "fused", "maximize", "nesterov")
_SHARES = ("alpha", "dampening", "momentum", "rho")  # 0 to 1; every other argument is 0 or more

MOST_OF_AN_ARGUMENT = 1e6
"""Learning rates and other numbers that are larger are slips: they make infinities of weights."""

LATER_OPTIMIZERS = ("adafactor", "asgd", "lbfgs", "muon", "rprop", "sparseadam")


def training_problems(training: TrainingOptions, cluster: ClusterOptions) -> Iterator[str]:
    """What of the section cannot be done as asked, one message each."""
    for schedule in training.schedules:
        if schedule in LATER_SCHEDULES:
            yield f"training.schedule is {schedule}: {NOT_YET}; write {' or '.join(SCHEDULES)}"
        elif schedule not in SCHEDULES:
            yield f"training.schedule is {schedule!r}; write {' or '.join(SCHEDULES)}"
    if not training.schedules:
        yield f"training.schedule is an empty list; write {' or '.join(SCHEDULES)}"
    if training.overlap and cluster.source != "file":
        yield (
            f"training.overlap is true with cluster.source: {cluster.source}: {NOT_YET}; write "
            "overlap: false"
        )
    rate = training.lr_schedule
    for name in ("warmup_steps", "final_ratio", "decay_steps"):
        if (value := getattr(rate, name)) < 0:
            yield f"training.lr_schedule.{name} is {value}; it must not be negative"
    if rate.final_ratio > 1:
        yield (
            f"training.lr_schedule.final_ratio is {rate.final_ratio}: the rate would end above its "
            "peak; write 0 to 1, the rate at the end over that of training.optimizer.lr"
        )
    if (rate.name == "wsd") != (rate.decay_steps > 0):
        yield (
            f"training.lr_schedule.decay_steps is {rate.decay_steps} with name: "
            f"{rate.name}; wsd needs steps to decay, and nothing else takes them"
        )
    yield from _evaluation_problems(training)
    yield from _optimizer_problems(training.optimizer)


def _evaluation_problems(training: TrainingOptions) -> Iterator[str]:
    for name in ("keep_best", "early_stop"):
        if getattr(training, name) is not None and training.eval_every_steps is None:
            yield f"training.{name}: nothing is evaluated; write eval_every_steps: 100 beside it"


def _optimizer_problems(optimizer: OptimizerOptions) -> Iterator[str]:
    if optimizer.name in LATER_OPTIMIZERS:
        yield f"training.optimizer.name is {optimizer.name}: {NOT_YET}; write {choice(OPTIMIZERS)}"
        return
    if optimizer.name not in OPTIMIZERS:
        yield f"training.optimizer.name is {optimizer.name!r}; write {choice(OPTIMIZERS)}"
        return
    if not optimizer.lr > 0:
        yield f"training.optimizer.lr is {optimizer.lr}; it must be positive"
    elif optimizer.lr > MOST_OF_AN_ARGUMENT:
        yield f"training.optimizer.lr is {optimizer.lr:g}; write {MOST_OF_AN_ARGUMENT:g} or less"
    known = OPTIMIZERS[optimizer.name]
    yield from _argument_problems(
        "training.optimizer", optimizer.arguments, ("lr", *known), optimizer.name
    )
    for index, group in enumerate(optimizer.groups):
        path = f"training.optimizer.groups[{index}]"
        yield from _group_problems(path, group)
        # What decides the tensors of a state is one for all: checkpoints outlive groups.
        own = tuple(key for key in known if key not in (*_SWITCHES, "foreach"))
        known_here = ("lr_ratio", "frozen", *own)
        yield from _argument_problems(path, group.arguments, known_here, "a group")


def _group_problems(path: str, group: GroupOptions) -> Iterator[str]:
    if not group.patterns or not all(group.patterns):
        yield f"{path}.match is {json.dumps(group.match)}; write names of parameters, or patterns"
    if not (_is_number(group.lr_ratio) and 0 < group.lr_ratio <= MOST_OF_AN_ARGUMENT):
        yield (
            f"{path}.lr_ratio is {group.lr_ratio}; write a positive number up to "
            f"{MOST_OF_AN_ARGUMENT:g}, or frozen: true for "
            "parameters that are not trained"
        )
    if group.frozen and (group.arguments or group.lr_ratio != 1.0):
        given = [*(["lr_ratio"] if group.lr_ratio != 1.0 else []), *group.arguments]
        told = " and ".join(given)
        yield f"{path} is frozen, so that {told} has no effect; remove one or the other"


def _argument_problems(
    path: str, arguments: Mapping[str, object], known: tuple[str, ...], owner: str
) -> Iterator[str]:
    for key, value in arguments.items():
        if key in LATER_ARGUMENTS:
            yield f"{path}.{key}: {NOT_YET}; remove it"
        elif key in known:
            if wanted := _wanted(key, value):
                yield f"{path}.{key} is {json.dumps(value)}; write {wanted}"
        else:
            close = difflib.get_close_matches(key, known, 1)
            if FAMILIAR.get(key) == FAMILIAR["lr"]:
                close = ["lr_ratio" if "lr_ratio" in known else "lr"]
            mend = f"did you mean {close[0]}?" if close else f"it takes {', '.join(known)}"
            yield f"{path}.{key} is not an argument of {owner}; {mend}"


def _wanted(key: str, value: object) -> str:
    """What to write for an argument of an optimizer; empty where the value will do."""
    if key in _SWITCHES or key == "foreach":
        fits = isinstance(value, bool) or (value is None and key in ("foreach", "fused"))
        return "" if fits else "true or false"
    if key == "betas":
        pair = value if isinstance(value, list) and len(value) == 2 else [None]
        fits = all(_is_share(beta) and beta < 1 for beta in pair)
        return "" if fits else "two numbers from 0 to below 1"
    if key in _SHARES:
        return "" if _is_share(value) else "a number from 0 to 1"
    if _is_number(value) and 0 <= value <= MOST_OF_AN_ARGUMENT:
        return ""
    return f"a number that is not negative, up to {MOST_OF_AN_ARGUMENT:g}"


def _is_share(value: object) -> TypeGuard[float]:
    return _is_number(value) and 0 <= value <= 1


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < inf


def choice(names: Mapping[str, object] | tuple[str, ...]) -> str:
    """The names as an error offers them: a, b or c."""
    *most, last = names
    return f"{', '.join(most)} or {last}"
