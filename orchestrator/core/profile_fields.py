"""Reads the fields of a parsed profile file; a message names the place, the value and the mend.

All raise ValueError. ``path`` is what stands before the key in messages, its dot included.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

MAX_NUMBER = 1e18
"""Bytes, seconds or FLOP beyond this are a slip, and sums of them overflow."""

MAX_WHOLE = 10**9
"""Samples or devices beyond this are a slip."""


def check_keys(
    data: Mapping[str, object], path: str, required: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    """Refuse a missing or an unknown key."""
    for key in required:
        if key not in data:
            raise ValueError(f"{path}{key} is missing from the profile; add it")
    for key in data:
        if key not in (*required, *optional):
            known = ", ".join((*required, *optional))
            raise ValueError(f"{path}{key} is not a key of a profile; known: {known}")


def list_of(data: Mapping[str, object], key: str, path: str = "") -> list[object]:
    """The list under a key, empty where the key is absent."""
    value = data.get(key, [])
    if not isinstance(value, list | tuple):
        raise ValueError(f"{path}{key} is {value!r}; write a list")  # noqa: TRY004 - of the file
    return list(value)


def rows(
    data: Mapping[str, object], key: str, columns: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The mappings of a list, each with the path of its fields."""
    for index, row in enumerate(list_of(data, key)):
        path = f"{key}[{index}]"
        if not isinstance(row, Mapping):
            raise ValueError(f"{path} is {row!r}; write a mapping")  # noqa: TRY004 - of the file
        check_keys(row, f"{path}.", columns, ("team", "estimated"))
        yield f"{path}.", row


def column(
    data: Mapping[str, object], key: str, path: str, layers: tuple[str, ...]
) -> tuple[float, ...]:
    """Numbers of all layers."""
    values = list_of(data, key, path)
    if len(values) != len(layers):
        raise ValueError(
            f"{path}{key} has {len(values)} entries for {len(layers)} layers; give one a layer"
        )
    return tuple(
        number(value, f"{path}{key}[{i}] (layer {layers[i]!r})") for i, value in enumerate(values)
    )


def number(value: object, path: str) -> float:
    """A finite number that is not negative."""
    if value is None:
        raise ValueError(f"{path} is a hole; measure it or leave out the whole row")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path} is {value!r}; write a number")  # noqa: TRY004 - of the file
    if not 0 <= value <= MAX_NUMBER:
        shown = value if isinstance(value, float) else f"a number of {len(str(value))} digits"
        shown = value if -MAX_NUMBER <= value < 0 else shown
        raise ValueError(f"{path} is {shown}; write a number from 0 to {MAX_NUMBER:g}")
    return float(value)


def check_finite(name: str, values: Sequence[float]) -> None:
    """Refuse a figure of a layer that is negative, infinite or not a number."""
    for index, value in enumerate(values):
        if not (value >= 0 and isfinite(value)):
            raise ValueError(
                f"{name} is {value} in layer {index}; it must be finite and >= 0: measure it again "
                "or leave out the whole row"
            )


def whole(data: Mapping[str, object], key: str, path: str, default: int | None) -> int:
    """A whole number of at least 1; ``default`` where the key is absent."""
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_WHOLE:
        raise ValueError(f"{path}{key} is {value!r}; write a whole number from 1 to {MAX_WHOLE}")
    return value


def layer_lists(
    data: Mapping[str, object], key: str, layers: tuple[str, ...], length: int | None
) -> tuple[tuple[int, ...], ...]:
    """Lists of unlike layers by their indices, each of ``length`` or of two and more."""
    found = []
    for index, value in enumerate(list_of(data, key)):
        members = value if isinstance(value, list | tuple) else (value,)
        good = tuple(m for m in members if _is_index(m, len(layers)))
        if len(set(good)) != len(members) or len(good) < 2 or length not in (None, len(good)):
            raise ValueError(
                f"{key}[{index}] is {value!r}; write {length or 'two or more'} unlike layer "
                f"indices from 0 to {len(layers) - 1}"
            )
        found.append(good)
    return tuple(found)


def text(data: Mapping[str, object], key: str, path: str = "") -> str:
    """A text that is not empty."""
    value = data[key]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{path}{key} is {value!r}; write text")
    return value


def _is_index(value: object, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end
