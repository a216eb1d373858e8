"""Sets of alike groups: what is true of one is true of all, so a plan is priced set by set.

Shape letters: A sets of alike groups.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.core.plan import Group, Stage
from orchestrator.planning.cost import CostModel
from orchestrator.planning.sums import Alike, alone


@dataclass(frozen=True, slots=True)
class AlikeSet:
    """Groups of a plan that differ in their devices' names and in their shares at most."""

    group: Group  # the first of them
    members: tuple[int, ...]  # positions in the plan
    num_samples: int  # of all of them
    second: Group | None = None  # the next one

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.members)

    @property
    def alike(self) -> Alike:
        """As the cost model takes it."""
        first, second = alone(self.group.stages), alone((self.second or self.group).stages)
        return Alike(self.count, first.first, second.first)


def alike_sets(cost: CostModel, groups: Sequence[Group]) -> tuple[AlikeSet, ...]:
    """Groups of equal times, links, pools, zones and microbatches, in order of their first."""
    found: dict[tuple[object, ...], list[int]] = {}
    for g, group in enumerate(groups):
        found.setdefault(_key(cost, group), []).append(g)
    return tuple(
        AlikeSet(
            group=groups[members[0]],
            members=tuple(members),
            num_samples=sum(groups[g].num_samples for g in members),
            second=groups[members[1]] if len(members) > 1 else None,
        )
        for members in found.values()
    )


def _key(cost: CostModel, group: Group) -> tuple[object, ...]:
    return (
        cost.key(group.stages),
        group.microbatches[0],
        tuple([stage.inflight for stage in group.stages]),
        _places(cost, group.stages),
    )


def _places(cost: CostModel, stages: Iterable[Stage]) -> tuple[tuple[str, str], ...]:
    devices = [cost.device(stage.team) for stage in stages]
    return tuple([(device.pool, device.zone) for device in devices])
