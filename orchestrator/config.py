"""The run's YAML file as one frozen RunConfig; each section is its owner's options dataclass."""

import ast
import difflib
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from orchestrator import storage
from orchestrator.control.backend import ClusterOptions, EmulationOptions
from orchestrator.control.recovery import FailureOptions
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.training import GroupOptions, OptimizerOptions, TrainingOptions
from orchestrator.credentials import credential_problems
from orchestrator.errors import ConfigError
from orchestrator.familiar import FAMILIAR
from orchestrator.layers import INCLUDE, Layers, parse_layers, read_layers
from orchestrator.planning.lyapunov import ControlOptions
from orchestrator.ranges import range_problems
from orchestrator.run_options import RunOptions
from orchestrator.storage import Json
from orchestrator.support import LATER_SECTIONS, check_supported
from orchestrator.telemetry.metrics import MetricsOptions
from orchestrator.training_support import NOT_YET

_EXAMPLES = {
    "run": "run: {name: my-run}",
    "run.name": "name: my-run",
    "training": "training: {task: my_module:task, global_batch: 64, steps: 300}",
    "training.task": "task: my_module:task",
    "training.global_batch": "global_batch: 64",
    "cluster": "cluster: {source: emulated, offers: [...]}",
    "cluster.source": "source: emulated, ray or file",
    "budget": "budget: {average_per_hour_usd: 4.0}",
    "budget.average_per_hour_usd": "average_per_hour_usd: 4.0",
}
"""What to write where a required key is missing."""

_PART = (
    "  a price list or an overlay is no run by itself: give the run file that includes it, or lay "
    "it over one with --overlay"
)
"""Said of a file that has none of the sections every run has."""

_WANTED = {
    "float_type": "a number", "int_type": "a whole number", "int_from_float": "a whole number",
    "string_type": "text", "bool_type": "true or false", "finite_number": "a finite number",
    "tuple_type": "a list", "dict_type": "keys with values", "dataclass_type": "keys with values",
    "mapping_type": "keys with values", "model_type": "keys with values",
}  # fmt: skip
"""pydantic's error type to what should have been written."""

_SHOWN_ERRORS = 10

_INCLUDE_SCHEMA: Json = {
    "anyOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}],
    "description": "Files that lie below this one, which replaces what they say; paths begin in "
    "the folder of this file.",
    "title": "Include",
}

_WITH_ARGUMENTS = (OptimizerOptions, GroupOptions)
"""Options beside which arguments of torch's optimizer stand."""


class RunConfig(BaseModel):
    """The whole file. Sections are plain dataclasses; what is not given has their defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    run: RunOptions
    training: TrainingOptions
    cluster: ClusterOptions
    budget: BudgetOptions
    control: ControlOptions = ControlOptions()
    failure: FailureOptions = FailureOptions()
    metrics: MetricsOptions = MetricsOptions()
    emulation: EmulationOptions = EmulationOptions()

    @classmethod
    def load(
        cls, path: str | Path, overrides: Sequence[str] = (), overlays: Sequence[str | Path] = ()
    ) -> "RunConfig":
        """Read a file, what it includes, and what is laid over it.

        Args:
            path: A local path or an fsspec URL.
            overrides: ``dotted.key=value`` each, as after ``--set``; the value is YAML.
            overlays: Further files, as after ``--overlay``: what they say replaces what the file
                says, and ``overrides`` replace both.

        Raises:
            ConfigError: If a file is missing, is no YAML, or holds anything that is not
                understood or not supported; the message names file, key, value and mend.
        """
        return cls._resolve(read_layers(str(path), [str(url) for url in overlays]), overrides)

    @classmethod
    def parse(
        cls, text: str, overrides: Sequence[str] = (), *, source: str = "config"
    ) -> "RunConfig":
        """Read the text of a file; ``source`` names it in messages. Raises ConfigError."""
        return cls._resolve(parse_layers(text, source), overrides)

    @classmethod
    def _resolve(cls, layers: Layers, overrides: Sequence[str]) -> "RunConfig":
        data = layers.data
        for override in overrides:
            layers.set(override)
        if found := list(credential_problems(data)):  # first: other messages show values
            raise ConfigError(_listed(found, layers))
        _prepare(layers)
        try:
            config = cls.model_validate_json(json.dumps(data, default=str))
        except ValidationError as error:
            raise ConfigError(_listed(_problems(error), layers)) from None
        problems = check_supported(
            config.training, config.cluster, config.budget, config.control,
            config.emulation if "emulation" in data else None,
        )  # fmt: skip
        problems += range_problems(config.to_data())
        if problems:
            raise ConfigError(_listed(problems, layers))
        return config

    def with_budget(self, section: object, source: str) -> "RunConfig":
        """The configuration with another section ``budget``, checked as that of a file is.

        Args:
            section: As a file has it.
            source: Names its file in messages.

        Raises:
            ConfigError: As ``load``.
        """
        layers = parse_layers(self.to_yaml(), source)
        layers.data["budget"] = section
        return self._resolve(layers, ())

    def to_data(self) -> dict[str, Json]:
        """The resolved configuration as plain data, in the form of the file."""
        data = {name: storage.to_json(getattr(self, name)) for name in type(self).model_fields}
        optimizer = _child(_child(data, "training"), "optimizer")
        groups = optimizer["groups"]
        for part in (optimizer, *(groups if isinstance(groups, list) else ())):
            assert isinstance(part, dict)
            part.update(_child(part, "arguments"))
            del part["arguments"]
        if self.cluster.source != "emulated":
            del data["emulation"]
        return data

    def to_yaml(self) -> str:
        """The resolved configuration as the text of a file that loads to an equal one."""
        return str(yaml.safe_dump(self.to_data(), sort_keys=False, allow_unicode=True))


def config_schema(*, part: bool = False) -> dict[str, Json]:
    """JSON Schema of the file, with the docstring of every option as its description.

    ``part``: of a file that others complete, in which nothing is required.
    """
    schema: dict[str, Json] = RunConfig.model_json_schema()
    definitions = _child(schema, "$defs")
    for cls in _dataclasses_below(RunConfig):
        properties = _child(_child(definitions, cls.__name__), "properties")
        for name, text in _attribute_docs(cls).items():
            _child(properties, name)["description"] = text
    for cls in _WITH_ARGUMENTS:
        flat = _child(definitions, cls.__name__)
        del _child(flat, "properties")["arguments"]
        flat["additionalProperties"] = True  # torch's own arguments stand beside name and lr
    properties = {INCLUDE: _INCLUDE_SCHEMA, **_child(schema, "properties")}
    schema |= {"title": "lyray run", "properties": properties}
    if part:
        _drop_required(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _prepare(layers: Layers) -> None:
    """Bring the file's form to that of the dataclasses; what is wrong stays for the validation."""
    data = layers.data
    for name in [name for name in RunConfig.model_fields if data.get(name, name) is None]:
        del data[name]  # a section without keys is one with all its defaults
    training = data.get("training")
    if isinstance(training, dict) and isinstance(training.get("optimizer"), dict):
        optimizer = training["optimizer"] = _with_arguments(training["optimizer"], OptimizerOptions)
        groups = optimizer.get("groups")
        if isinstance(groups, list):
            optimizer["groups"] = [
                _with_arguments(group, GroupOptions) if isinstance(group, dict) else group
                for group in groups
            ]
    cluster = data.get("cluster")
    offers = cluster.get("offers") if isinstance(cluster, dict) else None
    if not isinstance(cluster, dict) or not isinstance(offers, list):
        return
    prices = [i for i, o in enumerate(offers) if isinstance(o, dict) and _is_price_only(o)]
    if cluster.get("source") == "ray":
        for offer in [offer for offer in offers if isinstance(offer, dict)]:
            offer.setdefault("billed", "while_present")  # Ray takes no node away at once
        for index in prices:
            del offers[index]["count"]  # it will be what is found
    elif prices:
        layers.drop_offers(prices)


def _is_price_only(offer: Mapping[str, object]) -> bool:
    """Whether an entry of ``cluster.offers`` prices devices that this run has none of."""
    return type(offer.get("count")) is int and offer["count"] == 0


def _with_arguments(given: dict[str, object], cls: type) -> dict[str, object]:
    """What stands beside an options class's own keys are arguments of torch's optimizer."""
    own = {key: value for key, value in given.items() if key in _keys(cls)}
    return {**own, "arguments": {key: value for key, value in given.items() if key not in own}}


def _problems(error: ValidationError) -> list[str]:
    """One line per wrong key: dotted path, value, what to write."""
    wanted: dict[str, list[str]] = {}  # path to the forms that its type allows
    values: dict[str, object] = {}
    problems: dict[str, str] = {}
    renamed: set[str] = set()
    missing: set[str] = set()
    for item in error.errors(include_url=False):
        path, siblings = _place(item["loc"])
        name = path.rpartition(".")[2]
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            problems[path], meant = _unknown_key(path, name, siblings)
            renamed.add(path.removesuffix(name) + meant)
        elif item["type"] in ("missing", "missing_keyword_only_argument", "missing_argument"):
            missing.add(path)
            problems[path] = f"{path} is missing; write {_EXAMPLES.get(path, f'{name}: ...')}"
        elif item["type"] == "value_error":
            text = str(item["ctx"]["error"])
            own = text.split(" ", 1)[0] in siblings
            problems[path] = f"{path}.{text}" if own else f"{path}: {text}"
        else:
            form = _WANTED.get(item["type"]) or str(
                item.get("ctx", {}).get("expected", item["msg"])
            )
            wanted.setdefault(path, []).append(_with_unit(form, name))
            values[path] = item["input"]
    for path, forms in wanted.items():
        if any(other.startswith(f"{path}[") for other in wanted):
            continue  # a list it may be; the wrong entry speaks for itself
        shown = json.dumps(values[path], default=str)
        problems[path] = f"{path} is {shown}; write {' or '.join(dict.fromkeys(forms))}"
    for path in renamed & missing:
        del problems[path]  # said already, under the name it was given
    return list(problems.values())


def _listed(problems: Sequence[str], layers: Layers) -> str:
    """The message on what is wrong, each with the file in which it stands."""
    told = [layers.told(problem) for problem in problems[:_SHOWN_ERRORS]]
    if len(problems) == 1:
        return ": ".join(told[0])
    shown = [
        f"  - {text if source == layers.source else f'{source}: {text}'}" for source, text in told
    ]
    rest = len(problems) - len(shown)
    more = [f"  - and {rest} more"] if rest else []
    told_missing = {p.partition(" is missing;")[0] for p in problems}
    part = [_PART] if told_missing.issuperset(("run", "training", "budget")) else []
    return "\n".join([f"{layers.source} has {len(problems)} errors:", *shown, *more, *part])


def _unknown_key(path: str, name: str, siblings: Sequence[str]) -> tuple[str, str]:
    """The message on an unknown key, and the key that was meant, if one can be told."""
    if path in LATER_SECTIONS:
        return f"{path}: {NOT_YET}; remove the section", ""
    section = path.rpartition(".")[0]
    if name in FAMILIAR and FAMILIAR[name] != path:
        place, _, meant = FAMILIAR[name].partition(":")[0].rpartition(".")
        mend = f"{path} is not a known key; write it as {FAMILIAR[name]}"
        return mend, meant if place == section else ""
    firsts = {key.partition("_")[0]: key for key in reversed(siblings)}
    close = difflib.get_close_matches(name, siblings, 1)
    close += [firsts[first] for first in difflib.get_close_matches(name, firsts, 1)]
    prefixed = [key for key in siblings if key.startswith(f"{name}_")]  # the unit was left out
    elsewhere = [
        f"{part}.{name}"
        for part, keys in _section_keys().items()
        if name in keys and part != section
    ]
    if prefixed or close:
        meant = (prefixed or close)[0]
        return f"{path} is not a known key; did you mean {meant}?", meant
    if elsewhere:
        return f"{path} is not a known key; write it as {elsewhere[0]}", ""
    return f"{path} is not a known key; known here: {', '.join(siblings)}", ""


def _with_unit(form: str, name: str) -> str:
    units = {
        "_gbytes_per_s": "GB/s", "_samples_per_s": "samples/s", "_s": "seconds", "_hours": "hours",
        "_usd": "dollars", "_hour": "dollars", "_gib": "GiB", "_steps": "steps",
    }  # fmt: skip
    unit = next((unit for suffix, unit in units.items() if name.endswith(suffix)), "")
    return f"{form} of {unit}" if unit and form.endswith("number") else form


def _place(loc: Sequence[int | str]) -> tuple[str, tuple[str, ...]]:
    """Dotted path of a pydantic location without its union tags, and the keys known there."""
    path = ""
    hint: object = RunConfig
    known: tuple[str, ...] = ()
    for item in loc:
        keys = _keys(hint)
        if isinstance(item, int):
            path += f"[{item}]"
            hint = next(iter(get_args(_concrete(hint))), None)
        elif keys or hint is None or get_origin(hint) not in (Union, UnionType):
            path += f".{item}" if path else str(item)
            hint, known = _hints(hint).get(item), keys
        known = _keys(hint) or known
    return path, known


def _concrete(hint: object) -> object:
    """The annotation without None, where only one is left."""
    parts = [p for p in get_args(hint) if p is not NoneType]
    union = get_origin(hint) in (Union, UnionType)
    return parts[0] if union and len(parts) == 1 else hint


def _hints(hint: object) -> Mapping[str, object]:
    concrete = _concrete(hint)
    if concrete is RunConfig:
        return {name: field.annotation for name, field in RunConfig.model_fields.items()}
    return get_type_hints(concrete) if is_dataclass(concrete) else {}


def _keys(hint: object) -> tuple[str, ...]:
    return tuple(
        key for key in _hints(hint) if _concrete(hint) not in _WITH_ARGUMENTS or key != "arguments"
    )


def _section_keys() -> Mapping[str, tuple[str, ...]]:
    return {name: _keys(hint) for name, hint in _hints(RunConfig).items()}


def _dataclasses_below(hint: object) -> Iterator[type]:
    for part in (*_hints(hint).values(), *get_args(hint)):
        if isinstance(part, type) and is_dataclass(part):
            yield part
        yield from _dataclasses_below(part)


def _attribute_docs(cls: type) -> Mapping[str, str]:
    """The docstrings that stand under the fields of a dataclass."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for base in filter(is_dataclass, cls.__bases__):
        found |= _attribute_docs(base)
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def _drop_required(schema: Json) -> None:
    """Let every key be left out, at any depth."""
    parts: Iterable[Json] = ()
    if isinstance(schema, dict):
        if isinstance(schema.get("required"), list):
            del schema["required"]
        parts = schema.values()
    for part in schema if isinstance(schema, list) else parts:
        _drop_required(part)


def _child(data: Mapping[str, Json], key: str) -> dict[str, Json]:
    child = data[key]
    assert isinstance(child, dict)
    return child
