"""Where to cut the layers of a group into stages: dynamic programming.

Shape letters: S stages, I and J layer borders (0 to L), T limits on the longest stage.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.cluster import Team
from orchestrator.core.plan import Stage
from orchestrator.planning.cost import CostModel

FloatArray = NDArray[np.float64]

THETAS = (1.0, 1.03, 1.08, 1.15, 1.3, 1.6, inf)
"""Limits on the longest stage, in units of the least possible one."""


def partition(
    cost: CostModel, teams: tuple[Team, ...], microbatch: int, schedule: str
) -> tuple[tuple[Stage, ...], ...]:
    """Ways to cut the layers over these teams in this order, busiest stage shortest first.

    At most seven, none worse than another in fill and drain, period and egress together;
    every stage has a layer and fits its memory. When plain 1F1B's microbatches in flight or
    the buckets of gradient sums fit nowhere, cuts that fit without them are returned: such a
    group takes few microbatches, or must be the only one. Empty when nothing fits.

    Source: docs/model.md, section 5.3.
    """
    if len(teams) > cost.problem.model.num_layers:
        return ()
    key = _class_key(cost, teams, microbatch, schedule)
    if key not in cost.cuts:
        cost.cuts[key] = _cuts(cost, teams, microbatch, schedule)
    most = max(1, cost.problem.batch_samples // microbatch)
    return tuple(
        cost.with_inflight(_stages(teams, cuts), microbatch, most, schedule)
        for cuts in cost.cuts[key]
    )


def _class_key(
    cost: CostModel, teams: tuple[Team, ...], microbatch: int, schedule: str
) -> tuple[object, ...]:
    """All that cuts depend on: two chains of like teams and links share them."""
    links = [
        (k.latency_s, k.bandwidth_bytes_per_s, k.egress_usd_per_byte, k.points)
        for a, b in pairwise(teams)
        for k in (cost.link(a, b), cost.link(b, a))
    ]
    classes = [(t.kind, t.size, cost.slowdown(t), cost.memory.usable_bytes(t)) for t in teams]
    return (tuple(classes), tuple(links), microbatch, schedule)


def _stages(teams: Sequence[Team], cuts: Sequence[int]) -> tuple[Stage, ...]:
    count = len(teams)
    return tuple(
        Stage(team, first, end, inflight=count - s)
        for s, (team, (first, end)) in enumerate(zip(teams, pairwise(cuts), strict=True))
    )


def _cuts(
    cost: CostModel, teams: tuple[Team, ...], microbatch: int, schedule: str
) -> tuple[tuple[int, ...], ...]:
    work_SIJ = [_work(cost, team, microbatch) for team in teams]
    for replicated in (True, False):
        for plain in (True, False):
            held_S = [
                len(teams) - s if plain and schedule != "gpipe" else 1 for s in range(len(teams))
            ]
            fitting = [
                np.where(_fits(cost, team, microbatch, held, replicated=replicated), work, inf)
                for team, work, held in zip(teams, work_SIJ, held_S, strict=True)
            ]
            if found := _search(cost, teams, microbatch, fitting):
                return _pareto(cost, teams, microbatch, schedule, found)
    return ()


def _work(cost: CostModel, team: Team, microbatch: int) -> FloatArray:
    """Forward plus backward of layers i to j; infinite where j <= i, a stage is never empty."""
    times = cost.tables.times(team.kind, team.size, microbatch)
    prefix = cost.slowdown(team) * (np.asarray(times.forward_s) + np.asarray(times.backward_s))
    borders = np.arange(len(prefix))
    return np.where(borders[:, None] < borders, prefix - prefix[:, None], inf)


def _fits(
    cost: CostModel, team: Team, microbatch: int, held: int, *, replicated: bool
) -> NDArray[np.bool_]:
    fixed_IJ, per_microbatch_IJ, bucket_IJ = cost.memory.matrices(team.size, microbatch)
    peak_IJ = fixed_IJ + held * per_microbatch_IJ + (bucket_IJ if replicated else 0.0)
    fits: NDArray[np.bool_] = peak_IJ <= cost.memory.usable_bytes(team)
    return fits


def _borders(
    cost: CostModel, teams: tuple[Team, ...], microbatch: int
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Per pair of neighbours: how long a boundary at each border occupies, and takes both ways."""
    num_layers = cost.problem.model.num_layers
    sizes = [0, *(cost.tables.boundary_bytes(i, microbatch) for i in range(num_layers - 1)), 0]
    for a, b in pairwise(teams):
        down, up = cost.link(a, b), cost.link(b, a)
        yield (
            np.array([max(down.occupied_s(size), up.occupied_s(size)) for size in sizes]),
            np.array([down.transfer_s(size) + up.transfer_s(size) for size in sizes]),
        )


def _search(
    cost: CostModel, teams: tuple[Team, ...], microbatch: int, work_SIJ: list[FloatArray]
) -> set[tuple[int, ...]]:
    """Cuts of least total time under every limit on the longest stage or message."""
    borders = list(_borders(cost, teams, microbatch))
    longest_J = work_SIJ[0][0]
    for work_IJ, (occupied_I, _) in zip(work_SIJ[1:], borders, strict=True):
        longest_J = np.maximum(np.maximum(longest_J, occupied_I)[:, None], work_IJ).min(axis=0)
    if longest_J[-1] == inf:
        return set()
    # A hair above: the limit itself must pass whatever order its sums were taken in.
    limit_T = longest_J[-1] * (1 + 1e-9) * np.array(THETAS)
    total_TJ = np.where(work_SIJ[0][0] <= limit_T[:, None], work_SIJ[0][0], inf)
    origins = []
    for work_IJ, (occupied_I, both_ways_I) in zip(work_SIJ[1:], borders, strict=True):
        total_TJ = np.where(occupied_I <= limit_T[:, None], total_TJ + both_ways_I, inf)
        allowed_TIJ = np.where(work_IJ <= limit_T[:, None, None], work_IJ, inf)
        candidate_TIJ = total_TJ[:, :, None] + allowed_TIJ
        origins.append(candidate_TIJ.argmin(axis=1))
        total_TJ = candidate_TIJ.min(axis=1)
    found = set()
    for t in range(len(THETAS)):
        if total_TJ[t, -1] < inf:
            cuts = [len(longest_J) - 1]
            for origin_TJ in reversed(origins):
                cuts.append(int(origin_TJ[t, cuts[-1]]))
            found.add((0, *reversed(cuts)))
    return found


def _pareto(
    cost: CostModel,
    teams: tuple[Team, ...],
    microbatch: int,
    schedule: str,
    cuts: set[tuple[int, ...]],
) -> tuple[tuple[int, ...], ...]:
    rated = []
    for one in cuts:
        stages = _stages(teams, one)
        curve = cost.curve(stages, microbatch, schedule)
        egress_usd = cost.egress_usd(stages, microbatch)
        rated.append(((curve.period_s, curve.fill_drain_s, egress_usd), one))
    return tuple(
        one
        for figures, one in sorted(rated)
        if not any(
            other != figures and all(o <= f for o, f in zip(other, figures, strict=True))
            for other, _ in rated
        )
    )
