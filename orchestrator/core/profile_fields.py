"""Reads the fields of a parsed profile file; a message names the place, the value and the mend.

All raise ValueError. ``path`` is what stands before the key in messages, its dot included.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.core.model import ModelProfile

MAX_NUMBER = 1e18
"""Bytes or FLOP beyond this are a slip, and sums of them overflow."""

SIZES: Mapping[str, tuple[float, float, str]] = {
    "_s": (1e-12, 1e6, "seconds"),
    "bytes": (1e-3, MAX_NUMBER, "bytes"),
    "bytes_per_sample": (1e-3, MAX_NUMBER, "bytes"),
    "bytes_per_microbatch": (1e-3, MAX_NUMBER, "bytes"),
    "flop_per_sample": (1.0, MAX_NUMBER, "FLOP"),
    "per_param_byte": (1e-6, 1e6, "bytes"),
}
"""End of a key to the least and largest size other than 0, and its unit: slips of a unit, and
figures whose inverse is none."""

SHRINK_RATIO = 0.5
"""Of the time of a smaller microbatch: a larger one that takes less was measured otherwise."""

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
    data: Mapping[str, object],
    key: str,
    columns: tuple[str, ...],
    optional: tuple[str, ...] = ("estimated",),
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The mappings of a list, each with the path of its fields."""
    for index, row in enumerate(list_of(data, key)):
        path = f"{key}[{index}]"
        if not isinstance(row, Mapping):
            raise ValueError(f"{path} is {row!r}; write a mapping")  # noqa: TRY004 - of the file
        check_keys(row, f"{path}.", columns, ("team", *optional))
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
        number(value, key, f"{path}{key}[{i}] (layer {layers[i]!r})")
        for i, value in enumerate(values)
    )


def number(value: object, key: str, path: str = "") -> float:
    """0, or a number of the size that ``key`` may have; ``path``: its place, where it is longer."""
    path = path or key
    if value is None:
        raise ValueError(f"{path} is a hole; measure it or leave out the whole row")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{path} is {value!r}; write a number")  # noqa: TRY004 - of the file
    least, most, unit = next(size for end, size in SIZES.items() if key.endswith(end))
    if value != 0 and not least <= value <= most:
        shown = value if isinstance(value, float) else f"a number of {len(str(value))} digits"
        shown = value if abs(value) <= MAX_NUMBER else shown
        raise ValueError(f"{path} is {shown}; write a number of {unit}, 0 or {least:g} to {most:g}")
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


def check_rows(profile: "ModelProfile") -> None:
    """Refuse what a file may get wrong and a measured profile cannot."""
    teams = Counter(f"sizes of team {size.team_size}" for size in profile.sizes)
    tables = Counter(
        f"times of {time.kind!r}, team {time.team_size}, microbatch {time.microbatch}"
        for time in profile.times
    )
    for name, count in (*teams.items(), *tables.items()):
        if count > 1:
            raise ValueError(f"the {name} stand {count} times; keep one row")
    if not any(size.team_size == 1 for size in profile.sizes):
        raise ValueError("sizes has no row of team 1; add it")
    for index, time in enumerate(profile.times):
        for name in ("forward_s", "backward_s"):
            if not sum(getattr(time, name)) > 0:
                raise ValueError(f"times[{index}].{name} is 0 in every layer; measure the kind")
    _check_frozen(profile)
    _check_growth(profile)
    if profile.tie_bytes and len(profile.tie_bytes) != len(profile.ties):
        raise ValueError(
            f"tie_bytes has {len(profile.tie_bytes)} entries for {len(profile.ties)} ties; "
            "give one a tie"
        )


def _check_frozen(profile: "ModelProfile") -> None:
    """No more of a layer is frozen than it has."""
    for index, size in enumerate(profile.sizes):
        pairs = zip(size.frozen_bytes, size.param_bytes, strict=True)
        for layer, (frozen, whole_bytes) in enumerate(pairs):
            if frozen > whole_bytes:
                raise ValueError(
                    f"sizes[{index}].frozen_bytes[{layer}] is {frozen:g}, more than the "
                    f"{whole_bytes:g} of its param_bytes; write that or less"
                )


def _check_growth(profile: "ModelProfile") -> None:
    """Larger microbatches on the same devices are not much faster: a slip of a unit otherwise."""
    whole_s = {
        (t.kind, t.team_size, t.microbatch): (sum(t.forward_s) + sum(t.backward_s), index)
        for index, t in enumerate(profile.times)
    }
    for (*place, size), (smaller_s, index) in sorted(whole_s.items()):
        larger = [key for key in whole_s if list(key[:2]) == place and key[2] > size]
        for key in larger:
            larger_s, other = whole_s[key]
            if larger_s < SHRINK_RATIO * smaller_s:
                raise ValueError(
                    f"times[{other}] takes {larger_s:.4g} s for microbatches of {key[2]} on "
                    f"{place[0]!r}, times[{index}] {smaller_s:.4g} s for {size}; both are in "
                    "seconds: measure again, or leave out the wrong row"
                )


def _is_index(value: object, end: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < end
