"""Plain JSON data from and to frozen dataclasses: every type checked, a message names the place."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Literal, Union, cast, get_args, get_origin, get_type_hints


@cache
def _hints(cls: type) -> dict[str, object]:
    """The types of a dataclass's fields that are given when it is made."""
    types = get_type_hints(cls)
    return {field.name: types[field.name] for field in fields(cls) if field.init}


@cache
def field_names(cls: type) -> tuple[str, ...]:
    """Of a dataclass, those that are given when one is made; none of any other class."""
    return tuple(f.name for f in fields(cls) if f.init) if is_dataclass(cls) else ()


def plain_members(value: object) -> dict[str, object] | Sequence[object]:
    """What a dataclass, or a mapping, holds, by name; a sequence's items in their order."""
    kind: type = type(value)
    if names := field_names(kind):
        return {name: getattr(value, name) for name in names}
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def _wrong(path: str, data: object, wanted: str) -> ValueError:
    return ValueError(f"{path} is {data!r}; it must be {wanted}")


def decode(hint: object, data: object, path: str) -> object:
    """Return what plain JSON data says, of the type that ``hint`` names.

    Args:
        hint: A type, as an annotation has it.
        data: What ``json.loads`` returned.
        path: Where it stands, for the message.

    Raises:
        ValueError: On a missing or unknown key or a value of the wrong type, with its path.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _decode_union(parts, data, path)
    if isinstance(hint, type) and is_dataclass(hint):
        return _decode_dataclass(hint, data, path)
    if origin is Literal:
        if data not in parts:
            raise _wrong(path, data, f"one of {', '.join(map(repr, parts))}")
        return data
    if origin in (tuple, Sequence):
        return _decode_tuple(parts if origin is tuple else (*parts, Ellipsis), data, path)
    if origin is not None and issubclass(cast("type", origin), Mapping):
        if not isinstance(data, Mapping):
            raise _wrong(path, data, "an object")
        return {str(k): decode(parts[1], item, f"{path}.{k}") for k, item in data.items()}
    return _decode_scalar(hint, data, path)


def _decode_scalar(hint: object, data: object, path: str) -> object:
    if hint is float and not isinstance(data, bool):
        if isinstance(data, int | float):
            return float(data)
        if data in ("inf", "-inf", "nan"):
            return float(str(data))
    elif hint is int and isinstance(data, bool):
        pass
    elif isinstance(hint, type):
        if isinstance(data, hint):
            return data
    else:
        return data  # Any: plain JSON data
    raise _wrong(path, data, f"of type {getattr(hint, '__name__', hint)}")


def _decode_union(parts: tuple[object, ...], data: object, path: str) -> object:
    if data is None and NoneType in parts:
        return None
    errors = []
    for part in parts:
        if part is NoneType:
            continue
        try:
            return decode(part, data, path)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError(errors[-1])


def _decode_tuple(parts: tuple[object, ...], data: object, path: str) -> object:
    if not isinstance(data, list | tuple):
        raise _wrong(path, data, "a list")
    if len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(decode(parts[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if len(parts) != len(data):
        raise ValueError(f"{path} has {len(data)} entries; it must have {len(parts)}")
    return tuple(
        decode(part, item, f"{path}[{i}]")
        for i, (part, item) in enumerate(zip(parts, data, strict=True))
    )


def _decode_dataclass(cls: type, data: object, path: str) -> object:
    if not isinstance(data, Mapping):
        raise _wrong(path, data, "an object")
    hints = _hints(cls)
    if unknown := sorted(data.keys() - hints.keys()):
        raise ValueError(f"{path} has the unknown key {unknown[0]!r}")
    decoded = {
        key: item if type(item) is hints[key] else decode(hints[key], item, f"{path}.{key}")
        for key, item in data.items()  # a ledger has a million scalars: most are as they must be
    }
    try:
        return cls(**decoded)
    except TypeError as error:  # a field without default is missing
        raise ValueError(f"{path}: {error}") from None
