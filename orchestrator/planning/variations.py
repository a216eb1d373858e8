"""Small changes of a trial: cuts, microbatch sizes and samples moved, for polish to try."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, product

from orchestrator.core.plan import Group, Stage
from orchestrator.planning.assembling import Assembled, Assembler, replicated
from orchestrator.planning.cost import CostModel
from orchestrator.planning.curves import Curves, Option
from orchestrator.planning.space import Trial
from orchestrator.planning.sums import Alike
from orchestrator.planning.waterfill import as_microbatches

Variation = Callable[[], Iterator[Assembled]]
"""A small change of a trial: what may come of it, worked out when asked."""

_Shift = tuple[int, int] | None
"""A stage, and where it ends instead."""


class Variations:
    """Lists changes of trials in one cluster.

    Source: docs/model.md, section 5.3.
    """

    def __init__(self, cost: CostModel, curves: Curves, assembler: Assembler) -> None:
        self._cost, self._curves, self._assembler = cost, curves, assembler

    def of_cuts(self, trial: Trial, end_s: float) -> list[Variation]:
        """One cut moved by one layer, in all groups that share it or in those cut alike.

        ``end_s``: variations in which pipelines last longer are left out.
        """
        groups = trial.groups
        cuts = sorted({stage.first_layer for group in groups for stage in group.stages[1:]})
        return [
            partial(self._recut, trial, end_s, cut, step) for cut, step in product(cuts, (-1, 1))
        ]

    def _recut(self, trial: Trial, end_s: float, cut: int, step: int) -> Iterator[Assembled]:
        groups, many = trial.groups, replicated(trial.alike)
        places = {
            g: place
            for g, group in enumerate(groups)
            if (place := _place(group.stages, cut, step)) is not None
        }
        slow = {
            g for g, s in places.items() if not self._ends_by(groups[g], end_s, (s, cut + step))
        }
        patterns: dict[tuple[int, ...], list[int]] = {}
        for g in places:
            patterns.setdefault(tuple([s.end_layer for s in groups[g].stages]), []).append(g)
        for chosen in [list(places), *(patterns.values() if len(patterns) > 1 else ())]:
            if not slow.isdisjoint(chosen):
                continue
            changed = list(groups)
            for g in chosen:
                share = groups[g].microbatches
                stages = self._cost.with_inflight(
                    self._cost.shifted(groups[g].stages, places[g], cut + step),
                    max(share),
                    len(share),
                    trial.schedule,
                    replicated=many,
                )
                changed[g] = Group(stages, share)
            if chosen:
                yield tuple(changed), trial.alike

    def _ends_by(self, group: Group, end_s: float, shift: tuple[int, int]) -> bool:
        """Whether a group with its share may, if a stage ends elsewhere."""
        *full, last = group.microbatches
        size = max(group.microbatches)
        count = len(full) + (last == size)
        return count <= self._cost.most_microbatches(group.stages, size, end_s, shift)

    def all(self, trial: Trial, end_s: float) -> list[Variation]:
        """A boundary or a microbatch size changed, or both, or a few samples moved.

        Of sets of groups that are alike one is changed, or all of them. ``end_s``: variations in
        which pipelines last longer are left out.
        """
        sets = _sets(trial)
        alike = [alike for _, _, alike in sets]
        many = replicated(alike)

        def sized(stages: tuple[Stage, ...], size: int) -> Option | None:
            return self._curves.sized(stages, size, trial.schedule, replicated=many)

        def changed(shift: _Shift, size: int, k: int) -> Option | None:
            stages = self._cost.shifted(sets[k][0], *shift) if shift else sets[k][0]
            return sized(stages, size)

        def most(shift: _Shift, size: int, k: int) -> float:
            stages, _, one = sets[k]
            count = self._cost.most_microbatches(stages, size, end_s, shift)
            return one.num_groups * size * count

        options = [sized(stages, size) for stages, size, _ in sets]
        most_K = [most(None, size, k) for k, (_, size, _) in enumerate(sets)]
        spare = sum(most_K) - self._cost.problem.batch_samples
        kin: dict[tuple[object, ...], list[int]] = {}
        for k, (stages, size, one) in enumerate(sets):
            kin.setdefault((self._cost.key(stages), size, one.num_groups), []).append(k)
        return [
            *(
                partial(self._resized, trial.schedule, alike, options, some, partial(changed, *how))
                for mates in kin.values()
                for how in self._changes(*sets[mates[0]][:2], alike)
                for some in ((mates[:1], mates) if len(mates) > 1 else (mates,))
                if len(some) * (most_K[some[0]] - most(*how, some[0])) <= spare
            ),
            *self._reshares(trial),
        ]

    def _changes(
        self, stages: tuple[Stage, ...], now: int, alike: Sequence[Alike]
    ) -> list[tuple[_Shift, int]]:
        """How a cut may move and which size microbatches may have instead."""
        shifts = [
            (s, upper.end_layer + step)
            for s, (upper, lower) in enumerate(pairwise(stages))
            for step in (-1, 1)
            if upper.first_layer < upper.end_layer + step < lower.end_layer
        ]
        sizes = [size for size in self._curves.sizes if size != now]
        # Few microbatches make both matter at once: a larger one wants other cuts.
        both = product(shifts, sizes) if self._assembler.is_coarse(now, alike) else ()
        return [*((shift, now) for shift in shifts), *((None, size) for size in sizes), *both]

    def _resized(
        self,
        schedule: str,
        alike: Sequence[Alike],
        options: Sequence[Option | None],
        some: Sequence[int],
        changed: Callable[[int], Option | None],
    ) -> Iterator[Assembled]:
        """Other options for some of the sets; shares are dealt anew."""
        chosen = list(options)
        for k in some:
            chosen[k] = changed(k)
        if all(chosen):
            yield from self._assembler.deals([o for o in chosen if o], alike, schedule)

    def _reshares(self, trial: Trial) -> list[Variation]:
        """Samples from the group that ends last to each unlike group of as many alike."""
        groups, ends_s = trial.groups, trial.estimate.group_s
        giver = ends_s.index(max(ends_s))
        size = groups[giver].microbatches[0]
        takers: dict[tuple[object, ...], int] = {}
        for g, (group, one) in enumerate(zip(groups, trial.alike, strict=True)):
            if g != giver and one.num_groups == trial.alike[giver].num_groups:
                takers.setdefault((self._cost.key(group.stages), group.microbatches), g)
        return [
            partial(self._reshared, trial, giver, taker, count)
            for taker in takers.values()
            for count in dict.fromkeys((1, size // 2, size))
            if 0 < count < groups[giver].num_samples
        ]

    def _reshared(self, trial: Trial, giver: int, taker: int, count: int) -> Iterator[Assembled]:
        changed = list(trial.groups)
        for g, more in ((giver, -count), (taker, count)):
            group = changed[g]
            share = as_microbatches(group.num_samples + more, max(group.microbatches))
            changed[g] = self._assembler.group(group.stages, share, trial.schedule)
        yield tuple(changed), trial.alike


def _sets(trial: Trial) -> list[tuple[tuple[Stage, ...], int, Alike]]:
    """Stages, microbatch and number of the trial's groups, whatever their shares."""
    found: dict[tuple[object, ...], tuple[tuple[Stage, ...], int, Alike]] = {}
    for group, one in zip(trial.groups, trial.alike, strict=True):
        laid = [team.device_ids for team in one.first]
        key = (*laid, *[(s.team.device_ids, s.first_layer) for s in group.stages])
        _, most, known = found.get(key, ((), 0, one._replace(num_groups=0)))
        size = max(most, *group.microbatches)
        found[key] = (
            group.stages,
            size,
            one._replace(num_groups=known.num_groups + one.num_groups),
        )
    return list(found.values())


def _place(stages: tuple[Stage, ...], cut: int, step: int) -> int | None:
    """The stage that ends at a cut; None when there is none, or one would be left empty."""
    for s, (upper, lower) in enumerate(pairwise(stages)):
        if upper.end_layer == cut and upper.first_layer < cut + step < lower.end_layer:
            return s
    return None
