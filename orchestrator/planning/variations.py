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


class Variations:
    """Lists changes of trials in one cluster.

    Source: docs/model.md, section 5.3.
    """

    def __init__(self, cost: CostModel, curves: Curves, assembler: Assembler) -> None:
        self._cost, self._curves, self._assembler = cost, curves, assembler

    def of_cuts(self, trial: Trial) -> list[Variation]:
        """One cut moved by one layer, in all groups that share it or in those cut alike."""
        groups = trial.groups
        cuts = sorted({stage.first_layer for group in groups for stage in group.stages[1:]})
        return [partial(self._recut, trial, cut, step) for cut, step in product(cuts, (-1, 1))]

    def _recut(self, trial: Trial, cut: int, step: int) -> Iterator[Assembled]:
        groups, many = trial.groups, replicated(trial.alike)
        moved = [_shifted(group.stages, cut, step) for group in groups]
        movable = [g for g, stages in enumerate(moved) if stages]
        patterns: dict[tuple[int, ...], list[int]] = {}
        for g in movable:
            patterns.setdefault(tuple([s.end_layer for s in groups[g].stages]), []).append(g)
        for chosen in [movable, *(patterns.values() if len(patterns) > 1 else ())]:
            changed = list(groups)
            for g in chosen:
                share = groups[g].microbatches
                stages = self._cost.with_inflight(
                    moved[g], max(share), len(share), trial.schedule, replicated=many
                )
                changed[g] = Group(stages, share)
            if chosen:
                yield tuple(changed), trial.alike

    def all(self, trial: Trial) -> list[Variation]:
        """A boundary or a microbatch size changed, or both, or a few samples moved."""
        sets = _sets(trial)
        alike = [alike for _, _, alike in sets]
        many = replicated(alike)

        def sized(stages: tuple[Stage, ...], size: int) -> Option | None:
            return self._curves.sized(stages, size, trial.schedule, replicated=many)

        options = [sized(stages, size) for stages, size, _ in sets]
        found: list[Variation] = []
        for k, (here, now, _) in enumerate(sets):
            cuts = [(stage.first_layer, step) for stage in here[1:] for step in (-1, 1)]
            shifted = [_shifted(here, *cut) for cut in cuts]
            changes = [(stages, now) for stages in shifted]
            # Few microbatches make both matter at once: a larger one wants other cuts.
            both = shifted if self._assembler.is_coarse(now, alike) else []
            others = [size for size in self._curves.sizes if size != now]
            changes += [(stages, size) for size in others for stages in (here, *both)]
            found += [
                partial(self._resized, trial.schedule, alike, options, k, partial(sized, *change))
                for change in changes
                if change[0]
            ]
        return [*found, *self._reshares(trial)]

    def _resized(
        self,
        schedule: str,
        alike: Sequence[Alike],
        options: Sequence[Option | None],
        k: int,
        change: Callable[[], Option | None],
    ) -> Iterator[Assembled]:
        """Another option for set k; shares are dealt anew."""
        chosen = [o for o in (*options[:k], change(), *options[k + 1 :]) if o]
        if len(chosen) == len(options):
            yield from self._assembler.deals(chosen, alike, schedule)

    def _reshares(self, trial: Trial) -> list[Variation]:
        """Samples from the group that ends last to each other group of as many alike."""
        groups, ends_s = trial.groups, trial.estimate.group_s
        giver = ends_s.index(max(ends_s))
        size = groups[giver].microbatches[0]
        return [
            partial(self._reshared, trial, giver, taker, count)
            for taker in range(len(groups))
            if taker != giver and trial.alike[giver].num_groups == trial.alike[taker].num_groups
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
        key = tuple([(s.team.device_ids, s.first_layer) for s in group.stages])
        _, most, known = found.get(key, ((), 0, one._replace(num_groups=0)))
        size = max(most, *group.microbatches)
        found[key] = (
            group.stages,
            size,
            one._replace(num_groups=known.num_groups + one.num_groups),
        )
    return list(found.values())


def _shifted(stages: tuple[Stage, ...], cut: int, step: int) -> tuple[Stage, ...]:
    """The stages with a cut moved; () when it is not theirs or a stage would be left empty."""
    for s, (upper, lower) in enumerate(pairwise(stages)):
        if upper.end_layer == cut and upper.first_layer < cut + step < lower.end_layer:
            return (
                *stages[:s],
                Stage(upper.team, upper.first_layer, cut + step),
                Stage(lower.team, cut + step, lower.end_layer),
                *stages[s + 2 :],
            )
    return ()
