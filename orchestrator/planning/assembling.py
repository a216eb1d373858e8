"""From options of chains to groups: cuts where others are cut too, and shares dealt."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from orchestrator.core.plan import Group, Stage
from orchestrator.planning.cost import CostModel
from orchestrator.planning.curves import Curves, Option
from orchestrator.planning.dealing import deal
from orchestrator.planning.identity import MAX_KEPT
from orchestrator.planning.sums import Alike

FINE_MICROBATCHES = 16
"""Microbatches a group, on average, below which shares are also dealt sample by sample."""

Assembled = tuple[tuple[Group, ...], tuple[Alike, ...]]
"""Groups, and for how many each stands."""


class Assembler:
    """Makes groups of options in one cluster.

    Source: docs/model.md, sections 5.1 and 5.3.
    """

    def __init__(self, cost: CostModel, curves: Curves) -> None:
        self._cost, self._curves = cost, curves
        self._batch = cost.problem.batch_samples
        # By the id of stages, kept alive here: the same groups come again and again.
        self._groups: dict[tuple[object, ...], tuple[Group, tuple[Stage, ...]]] = {}

    def deals(
        self, chosen: Sequence[Option], alike: Sequence[Alike], schedule: str
    ) -> Iterator[Assembled]:
        """Whole microbatches, and single samples where few microbatches make whole ones coarse."""
        if not chosen:
            return
        counts = [a.num_groups for a in alike]
        largest = max(option.microbatch for option in chosen)
        coarse = sum(counts) > 1 and self.is_coarse(largest, alike)
        for fine in (False, True) if coarse else (False,):
            dealt = deal(chosen, counts, self._batch, fine=fine)
            if dealt is not None:
                yield (
                    tuple(
                        self.group(chosen[d.set_index].stages, d.microbatches, schedule)
                        for d in dealt
                    ),
                    tuple(alike[d.set_index]._replace(num_groups=d.num_groups) for d in dealt),
                )

    def is_coarse(self, microbatch: int, alike: Sequence[Alike]) -> bool:
        """Whether groups have few microbatches of a size, so that each of them matters."""
        return self._batch < FINE_MICROBATCHES * microbatch * sum(a.num_groups for a in alike)

    def group(self, stages: tuple[Stage, ...], share: tuple[int, ...], schedule: str) -> Group:
        """A group of these stages and microbatches, K_s as its schedule wants them."""
        key = (id(stages), share, schedule)
        known = self._groups.get(key)
        if known is None:
            if len(self._groups) >= MAX_KEPT:
                self._groups.clear()
            held = stages
            if schedule == "gpipe":
                held = self._cost.with_inflight(stages, share[0], len(share), schedule)
            known = self._groups[key] = Group(held, share), stages
        return known[0]

    def aligned(
        self, chosen: Sequence[Option], alike: Sequence[Alike], schedule: str
    ) -> list[Option]:
        """Chains cut where the leading one is, as far as memory allows: fewer, larger sums.

        The leading cuts are those of the chains that do most samples; [] when all are theirs.
        """
        weight: dict[tuple[int, ...], float] = {}
        for option, one in zip(chosen, alike, strict=True):
            cuts = _cuts(option)
            weight[cuts] = weight.get(cuts, 0.0) + option.samples_per_s * one.num_groups
        if len(weight) < 2:
            return []
        lead = max(weight, key=lambda cuts: (weight[cuts], cuts))
        return [self._recut(option, snapped(_cuts(option), lead), schedule) for option in chosen]

    def _recut(self, option: Option, cuts: Sequence[int], schedule: str) -> Option:
        """The option with other cuts; as it is where they leave a stage empty, or do not fit."""
        borders = [0, *cuts, option.stages[-1].end_layer]
        if cuts == _cuts(option) or any(first >= end for first, end in pairwise(borders)):
            return option
        stages = tuple(
            Stage(stage.team, first, end)
            for stage, (first, end) in zip(option.stages, pairwise(borders), strict=True)
        )
        return self._curves.sized(stages, option.microbatch, schedule, replicated=True) or option


def _cuts(option: Option) -> tuple[int, ...]:
    return tuple([stage.end_layer for stage in option.stages[:-1]])


def snapped(own: Sequence[int], lead: Sequence[int]) -> tuple[int, ...]:
    """Cuts moved onto the leading ones, in order, so that they move least in all.

    Where there are more of them than leading ones, some stay; the result may then be out of
    order.
    """
    few, many = (own, lead) if len(own) <= len(lead) else (lead, own)
    spare = len(many) - len(few)
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())] * (spare + 1)  # by how many are skipped
    for i, cut in enumerate(few):
        row, least = [], best[0]
        for skipped in range(spare + 1):
            least = min(least, best[skipped])
            place = i + skipped
            row.append((least[0] + abs(many[place] - cut), (*least[1], place)))
        best = row
    _, places = min(best)
    if many is lead:
        return tuple([lead[place] for place in places])
    found = list(own)
    for place, cut in zip(places, lead, strict=True):
        found[place] = cut
    return tuple(found)


def replicated(alike: Sequence[Alike]) -> bool:
    """Whether layers have several owners."""
    return sum(a.num_groups for a in alike) > 1
