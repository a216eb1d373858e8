"""The model as planning sees it: layers as measured, and the file that holds them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from orchestrator.core.profile_fields import (
    check_finite,
    check_keys,
    check_rows,
    column,
    layer_lists,
    list_of,
    number,
    rows,
    text,
    whole,
)

SIZE_COLUMNS = ("param_bytes", "boundary_bytes_per_sample", "stash_bytes_per_sample")
"""Of sizes, in every profile."""

MORE_SIZES = (
    "frozen_bytes", "stash_bytes_per_microbatch", "shared_bytes_per_sample",
    "work_bytes_per_sample", "work_bytes_per_microbatch", "update_bytes",
)  # fmt: skip
"""Of sizes, which a file may leave out: 0 then."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes of every layer on a team of ``team_size``, its fullest member; arrays over layers."""

    team_size: int
    param_bytes: tuple[float, ...]
    boundary_bytes_per_sample: tuple[float, ...]  # leaving the layer for the next one
    stash_bytes_per_sample: tuple[float, ...]  # what autograd keeps between forward and backward
    frozen_bytes: tuple[float, ...] = ()  # of the parameters: those not trained; absent: none
    stash_bytes_per_microbatch: tuple[float, ...] = ()
    """What autograd keeps however few samples there are: casts of weights."""

    shared_bytes_per_sample: tuple[float, ...] = ()
    """Of what leaves the layer: what both it and the next one keep; in the stash of either."""

    work_bytes_per_sample: tuple[float, ...] = ()
    """All that is made while the layer alone runs forward and backward, its stash included."""

    work_bytes_per_microbatch: tuple[float, ...] = ()  # likewise, however few samples
    update_bytes: tuple[float, ...] = ()  # what an update of the layer makes and frees again
    input_bytes_per_sample: float = field(default=0.0, kw_only=True)  # into the first layer

    def __post_init__(self) -> None:
        if self.team_size < 1:
            raise ValueError(f"sizes are of a team of {self.team_size}; it must be at least 1")
        for name in MORE_SIZES:
            if not getattr(self, name):  # not measured
                object.__setattr__(self, name, (0.0,) * len(self.param_bytes))
        for name in (*SIZE_COLUMNS, *MORE_SIZES):
            check_finite(f"{name} of teams of {self.team_size}", getattr(self, name))

    @property
    def has_work(self) -> bool:
        """Whether it was measured what layers need while they run."""
        return any(self.work_bytes_per_sample) or any(self.work_bytes_per_microbatch)


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of every layer for one microbatch on one kind and team size; arrays over layers."""

    kind: str
    team_size: int
    microbatch: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    estimated: bool = False  # True: priced from FLOP, not measured

    def __post_init__(self) -> None:
        if self.team_size < 1 or self.microbatch < 1:
            raise ValueError(
                f"times of kind {self.kind!r} are of a team of {self.team_size} and microbatches "
                f"of {self.microbatch}; both must be at least 1"
            )
        for name in ("forward_s", "backward_s", "update_s"):
            check_finite(
                f"{name} of kind {self.kind!r} (team {self.team_size}, microbatch "
                f"{self.microbatch})",
                getattr(self, name),
            )

    def scaled(self, factor: float, *, kind: str | None = None) -> "LayerTimes":
        """The same layers ``factor`` times slower, perhaps under another kind."""
        return replace(
            self,
            kind=kind or self.kind,
            forward_s=tuple(factor * t for t in self.forward_s),
            backward_s=tuple(factor * t for t in self.backward_s),
            update_s=tuple(factor * t for t in self.update_s),
        )


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A model's layers as measured, and as a profile file holds them: names, sizes, times, ties."""

    model: str
    dtype: str
    layers: tuple[str, ...]
    sizes: tuple[LayerSizes, ...]  # smallest team first
    times: tuple[LayerTimes, ...]
    forward_flop_per_sample: tuple[float, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    ties: tuple[tuple[int, ...], ...] = ()  # each: layers that hold one shared parameter
    tie_bytes: tuple[float, ...] = ()  # of each tie's parameter; in param_bytes of its layers too
    optimizer_bytes_per_param_byte: float = 3.0
    updates_together: bool = False
    """Whether the optimizer updates all parameters at once, as on a GPU, not one by one."""

    step_overhead_s: float = 0.0  # at the end of every step, beside sums and update: the vote

    def __post_init__(self) -> None:
        num_layers = len(self.layers)
        arrays = (
            [("forward_flop_per_sample", self.forward_flop_per_sample)]
            if self.forward_flop_per_sample
            else []
        )
        for size in self.sizes:
            names = (*SIZE_COLUMNS, *MORE_SIZES)
            arrays += [(f"{n} (team {size.team_size})", getattr(size, n)) for n in names]
        for time in self.times:
            arrays += [
                (f"{n} ({time.kind})", getattr(time, n))
                for n in ("forward_s", "backward_s", "update_s")
            ]
        for name, values in arrays:
            if len(values) != num_layers:
                raise ValueError(
                    f"{name} has {len(values)} entries for {num_layers} layers; give one a layer"
                )
        if not num_layers or not self.sizes:
            raise ValueError("a profile needs layers and their sizes")
        by_team = tuple(sorted(self.sizes, key=lambda size: size.team_size))
        object.__setattr__(self, "sizes", by_team)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def sizes_of(self, team_size: int) -> LayerSizes:
        """Sizes at a team size. Raises ValueError when there is no such profile."""
        for size in self.sizes:
            if size.team_size == team_size:
                return size
        raise ValueError(f"profile {self.model!r} has no sizes for teams of {team_size}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds with times."""
        return tuple(dict.fromkeys(t.kind for t in self.times))


def microbatch_sizes(largest: int) -> tuple[int, ...]:
    """Sizes that are worth measuring and trying: ``largest`` and its halves, down to 1."""
    sizes = [largest]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)


PROFILE_SCHEMA = "lyray.profile/1"
_TIME_COLUMNS = ("forward_s", "backward_s", "update_s")
_INPUT = "input_bytes_per_sample"
_REQUIRED_KEYS = ("schema", "model", "layers", "sizes", "times")
_OPTIONAL_KEYS = (
    "dtype", "forward_flop_per_sample", "edges", "ties", "tie_bytes",
    "optimizer_bytes_per_param_byte", "updates_together", "step_overhead_s",
)  # fmt: skip


def profile_to_json(profile: ModelProfile) -> dict[str, object]:
    """The profile as plain JSON values, in the form of a profile file."""
    return {
        "schema": PROFILE_SCHEMA,
        "model": profile.model,
        "dtype": profile.dtype,
        "layers": list(profile.layers),
        "sizes": [_sizes_json(s) for s in profile.sizes],
        "times": [
            {
                "kind": t.kind,
                "team": t.team_size,
                "microbatch": t.microbatch,
                **{name: list(getattr(t, name)) for name in _TIME_COLUMNS},
                **({"estimated": True} if t.estimated else {}),
            }
            for t in profile.times
        ],
        "forward_flop_per_sample": list(profile.forward_flop_per_sample),
        "edges": [list(edge) for edge in profile.edges],
        "ties": [list(tie) for tie in profile.ties],
        "tie_bytes": list(profile.tie_bytes),
        "optimizer_bytes_per_param_byte": profile.optimizer_bytes_per_param_byte,
        **({"updates_together": True} if profile.updates_together else {}),
        "step_overhead_s": profile.step_overhead_s,
    }


def _sizes_json(sizes: LayerSizes) -> dict[str, object]:
    measured = [name for name in MORE_SIZES if any(getattr(sizes, name))]
    return {
        "team": sizes.team_size,
        **{name: list(getattr(sizes, name)) for name in (*SIZE_COLUMNS, *measured)},
        **({_INPUT: sizes.input_bytes_per_sample} if sizes.input_bytes_per_sample else {}),
    }


def profile_from_json(data: object) -> ModelProfile:
    """Read a profile file that was parsed as JSON.

    Raises:
        ValueError: On a missing or unknown key, a hole, a negative number, a list of the
            wrong length, a row that stands twice, or times that are all 0; the message names
            the key, the layer and the mend.
    """
    if not isinstance(data, Mapping):
        raise ValueError("it holds no keys; write an object")  # noqa: TRY004 - of the file
    check_keys(data, "", _REQUIRED_KEYS, _OPTIONAL_KEYS)
    if data["schema"] != PROFILE_SCHEMA:
        raise ValueError(f"schema is {data['schema']!r}; write {PROFILE_SCHEMA!r}")
    layers = tuple(str(name) for name in list_of(data, "layers"))
    flop = "forward_flop_per_sample"
    profile = ModelProfile(
        model=text(data, "model"),
        dtype=str(data.get("dtype", "fp32")),
        layers=layers,
        sizes=tuple(
            LayerSizes(
                whole(row, "team", path, 1),
                *(column(row, name, path, layers) for name in SIZE_COLUMNS),
                input_bytes_per_sample=number(row.get(_INPUT, 0.0), _INPUT, f"{path}{_INPUT}"),
                **{name: column(row, name, path, layers) for name in MORE_SIZES if name in row},
            )
            for path, row in rows(data, "sizes", SIZE_COLUMNS, (*MORE_SIZES, _INPUT))
        ),
        times=tuple(
            LayerTimes(
                kind=text(row, "kind", path),
                team_size=whole(row, "team", path, 1),
                microbatch=whole(row, "microbatch", path, None),
                forward_s=column(row, "forward_s", path, layers),
                backward_s=column(row, "backward_s", path, layers),
                update_s=column(row, "update_s", path, layers),
                estimated=bool(row.get("estimated", False)),
            )
            for path, row in rows(data, "times", ("kind", "microbatch", *_TIME_COLUMNS))
        ),
        forward_flop_per_sample=column(data, flop, "", layers)
        if data.get(flop) not in (None, [], ())
        else (),
        edges=tuple((edge[0], edge[1]) for edge in layer_lists(data, "edges", layers, 2)),
        ties=layer_lists(data, "ties", layers, None),
        tie_bytes=tuple(
            number(value, "tie_bytes", f"tie_bytes[{i}]")
            for i, value in enumerate(list_of(data, "tie_bytes"))
        ),
        optimizer_bytes_per_param_byte=number(
            data.get("optimizer_bytes_per_param_byte", 3.0), "optimizer_bytes_per_param_byte"
        ),
        updates_together=bool(data.get("updates_together", False)),
        step_overhead_s=number(data.get("step_overhead_s", 0.0), "step_overhead_s"),
    )
    check_rows(profile)
    return profile
