"""A plan: groups share the batch, a group is a chain of stages, a stage runs layers on a team."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from orchestrator.core.cluster import Team


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """How a team splits one layer: ``ways[i]`` parts along the axis named ``axes[i]``."""

    axes: tuple[str, ...]
    ways: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """Layers ``first_layer`` to ``end_layer`` (half-open) on one team.

    ``inflight`` is K_s, the most microbatches whose forward has run and whose backward has
    not. ``splits`` has one entry a layer, or is empty for a team of one. ``recompute``: of the
    layers nothing but their inputs is kept; each runs forward again right before its backward.
    """

    team: Team
    first_layer: int
    end_layer: int
    inflight: int = 1
    splits: tuple[LayerSplit, ...] = ()
    recompute: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.first_layer < self.end_layer:
            raise ValueError(
                f"stage on {self.team.team_id!r} has layers {self.first_layer} to "
                f"{self.end_layer}; "
                "a stage holds at least one layer"
            )
        if self.inflight < 1:
            raise ValueError(
                f"stage on {self.team.team_id!r} has inflight {self.inflight}; it must be at "
                "least 1"
            )

    @property
    def layers(self) -> range:
        """Indices of its layers."""
        return range(self.first_layer, self.end_layer)


@dataclass(frozen=True, slots=True)
class Group:
    """One model replica: stages in execution order and its share of the global batch."""

    stages: tuple[Stage, ...]
    microbatches: tuple[int, ...]  # samples of each, in order

    def __post_init__(self) -> None:
        if not self.stages or self.stages[0].first_layer != 0:
            raise ValueError("a group needs stages, the first of which starts at layer 0")
        for upstream, downstream in pairwise(self.stages):
            if upstream.end_layer != downstream.first_layer:
                raise ValueError(
                    f"stage on {downstream.team.team_id!r} starts at layer "
                    f"{downstream.first_layer}, but the "
                    f"stage before it ends at {upstream.end_layer}; the stages of a group must "
                    "tile the model"
                )
        if not self.microbatches or min(self.microbatches) < 1:
            raise ValueError(
                f"group has microbatches {self.microbatches}; each must hold at least one sample"
            )

    @property
    def num_samples(self) -> int:
        """Samples of one step."""
        return sum(self.microbatches)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.stages[-1].end_layer

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Its devices, in stage order."""
        return tuple(d for stage in self.stages for d in stage.team.device_ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """Who does what in one slot. No groups: idle. All groups together hold the global batch."""

    generation: int
    schedule: str
    groups: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        used = self.device_ids
        if len(set(used)) != len(used):
            doubled = sorted({d for d in used if used.count(d) > 1})
            raise ValueError(f"devices {doubled} appear twice; a device is in at most one team")
        if len({group.num_layers for group in self.groups}) > 1:
            raise ValueError("groups end at different layers; every group holds the whole model")

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Devices in use, group by group, stage by stage: the position is the worker's rank."""
        return tuple(d for group in self.groups for d in group.device_ids)

    @property
    def places(self) -> tuple[object, ...]:
        """Which devices hold which layers: what a mere change of shares leaves alone."""
        return tuple(
            tuple((s.team.device_ids, s.first_layer, s.end_layer) for s in group.stages)
            for group in self.groups
        )

    @property
    def num_samples(self) -> int:
        """The global batch."""
        return sum(group.num_samples for group in self.groups)

    @property
    def num_layers(self) -> int:
        """Layers of the model, 0 when idle."""
        return self.groups[0].num_layers if self.groups else 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs."""
        return not self.groups

    def with_generation(self, generation: int) -> "Plan":
        """The same work under another number."""
        return replace(self, generation=generation)

    def same_work(self, other: "Plan") -> bool:
        """Whether the other plan differs in its generation at most."""
        return self.schedule == other.schedule and self.groups == other.groups

    @property
    def holders(self) -> dict[int, tuple[str, ...]]:
        """Devices that hold each layer, one a group, by layer."""
        found: dict[int, tuple[str, ...]] = {}
        for stage in (stage for group in self.groups for stage in group.stages):
            for layer in stage.layers:
                found[layer] = (*found.get(layer, ()), stage.team.device_ids[0])
        return found

    def stage_of(self, device_id: str) -> tuple[int, int] | None:
        """(group index, stage index) of a device, None when it is idle."""
        for group_index, group in enumerate(self.groups):
            for stage_index, stage in enumerate(group.stages):
                if device_id in stage.team.device_ids:
                    return group_index, stage_index
        return None


def step_range(step: int, batch_samples: int, num_samples: int) -> tuple[int, int]:
    """Positions (half-open) that a step uses in the run's one sequence of samples.

    Step k owns ``[k B, (k + 1) B)`` whatever the plan, cut at the ``num_samples`` of the run.
    """
    first = min(step * batch_samples, num_samples)
    return first, min(first + batch_samples, num_samples)


def step_shares(groups: Iterable[Group], num_samples: int) -> tuple[tuple[int, ...], ...]:
    """Microbatches of each group in a step of ``num_samples``, at most the plan's own.

    Only the last step of a run over epochs is short: samples are dealt in order, so later
    groups may come out empty and then take part with weight zero.
    """
    left, shares = num_samples, []
    for group in groups:
        mine = []
        for size in group.microbatches:
            mine.append(min(size, left))
            left -= mine[-1]
        shares.append(tuple(size for size in mine if size))
    if left:
        raise ValueError(
            f"a step of {num_samples} samples does not fit the plan, "
            f"which holds {num_samples - left}"
        )
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive layers with one owner set: ``owners[g]`` is the stage index in group g."""

    first_layer: int
    end_layer: int
    owners: tuple[int, ...]


def segments(groups: Iterable[Group]) -> tuple[Segment, ...]:
    """Cut the model at every stage border of every group: one owner stage per group each."""
    chains = tuple(groups)
    if not chains:
        return ()
    end_layer, owners = 0, [-1] * len(chains)
    ends = [0] * len(chains)
    found = []
    while end_layer < chains[0].num_layers:
        for g, group in enumerate(chains):
            if ends[g] == end_layer:
                owners[g] += 1
                ends[g] = group.stages[owners[g]].end_layer
        first_layer, end_layer = end_layer, min(ends)
        found.append(Segment(first_layer, end_layer, tuple(owners)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Move:
    """One layer's state (parameters, buffers, optimizer) sent from one device to another."""

    layer: int
    source: str
    target: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Migration:
    """What a change of plan moves, and how long the step boundary lasts for it."""

    moves: tuple[Move, ...] = ()
    pause_s: float = 0.0
