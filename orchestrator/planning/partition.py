"""Where to cut the layers of a group into stages: dynamic programming.

Shape letters: S and U stages, B their borders, I and J layer borders (0 to L), T limits on the
longest stage, C cuts, F figures.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from orchestrator.core.cluster import Team
from orchestrator.core.plan import Stage
from orchestrator.planning.cost import CostModel
from orchestrator.planning.cutting import Border, Cuts, FloatArray, Prefix

IntArray = NDArray[np.int64]

THETAS = (1.0, 1.03, 1.08, 1.15, 1.3, 1.6, inf)
"""Limits on the longest stage, in units of the least possible one."""

SHORTER_RATIO = 0.01
"""By so much the longest stage must be shorter for cuts that let fewer microbatches be in flight
than plain 1F1B has."""


def partition(
    cost: CostModel, teams: tuple[Team, ...], microbatch: int, schedule: str
) -> tuple[tuple[Stage, ...], ...]:
    """Ways to cut the layers over these teams in this order, busiest stage shortest first.

    At most seven, none worse than another in fill and drain, period and egress together;
    every stage has a layer and fits its memory. Where fewer microbatches in flight than plain
    1F1B has let the busiest stage be shorter, such cuts are among them. When the buckets of
    gradient sums fit nowhere, cuts that fit without them are returned: such a group must be the
    only one. Empty when nothing fits.

    Source: docs/model.md, section 5.3.
    """
    count = len(teams)
    most = max(1, cost.problem.batch_samples // microbatch)
    return tuple(
        cost.with_inflight(
            tuple(
                Stage(team, first, end, inflight=count - s)
                for s, (team, (first, end)) in enumerate(zip(teams, pairwise(cuts), strict=True))
            ),
            microbatch,
            most,
            schedule,
        )
        for cuts, _, _ in cut_options(cost, teams, microbatch, schedule)
    )


def cut_options(
    cost: CostModel, teams: tuple[Team, ...], microbatch: int, schedule: str
) -> tuple[Cuts, ...]:
    """The cuts of ``partition``'s options; alike chains share them."""
    if len(teams) > cost.problem.model.num_layers:
        return ()
    key = (cost.chain_key(teams), microbatch, schedule)
    found = cost.cuts[key]
    if found is None:
        found = cost.cuts[key] = _cuts(cost, teams, microbatch, schedule)
    return found


def busiest_s(cost: CostModel, teams: tuple[Team, ...], microbatch: int) -> float:
    """Of the longest stage or message, cut so that it lasts least; infinite when nothing fits."""
    return _busiest(cost, teams, microbatch)[0]


def _busiest(cost: CostModel, teams: tuple[Team, ...], microbatch: int) -> tuple[float, bool]:
    """``busiest_s``, one microbatch in flight at a time, and whether gradient buckets fit, too."""
    if len(teams) > cost.problem.model.num_layers:
        return inf, False
    key = (cost.chain_key(teams), microbatch)
    found = cost.busiest[key]
    if found is None:
        borders, one_S = _borders(cost, teams, microbatch), [1] * len(teams)
        every = (
            (_longest_s(_work(cost, teams, microbatch, one_S, replicated=many), borders), many)
            for many in (True, False)
        )
        found = next((one for one in every if one[0] < inf), (inf, False))
        cost.busiest[key] = found
    return found


def _cuts(
    cost: CostModel, teams: tuple[Team, ...], microbatch: int, schedule: str
) -> tuple[Cuts, ...]:
    least_s, replicated = _busiest(cost, teams, microbatch)
    if least_s == inf:
        return ()
    prefixes = [cost.cutting.prefix(team, microbatch) for team in teams]
    borders = _borders(cost, teams, microbatch)
    found: set[tuple[int, ...]] = set()
    one_S, plain_S = [1] * len(teams), range(len(teams), 0, -1)
    work_SJI = _work(cost, teams, microbatch, one_S, replicated=replicated)
    tables = [work_SJI]
    if schedule != "gpipe":
        plain_SJI = _work(cost, teams, microbatch, plain_S, replicated=replicated)
        longest_s = _longest_s(plain_SJI, borders)
        tables.insert(0, plain_SJI)
        if longest_s < inf:
            found |= _search(plain_SJI, prefixes, borders, longest_s)
    if not found or least_s < longest_s * (1 - SHORTER_RATIO):
        found |= _search(work_SJI, prefixes, borders, least_s)
    cuts_CB = np.array(sorted(found))
    again_CS = _again(cuts_CB, tables, prefixes)
    return _pareto(cuts_CB, _rated(cuts_CB, prefixes, borders, schedule, again_CS))


def _again(
    cuts_CB: IntArray, tables: Sequence[Sequence[FloatArray]], prefixes: Sequence[Prefix]
) -> FloatArray:
    """What stages of cuts recompute, by the first of tables in which they fit."""
    again_CS = np.zeros((len(cuts_CB), len(prefixes)))
    for s, prefix in enumerate(prefixes):
        first_C, end_C = cuts_CB[:, s], cuts_CB[:, s + 1]
        work_C = np.full(len(cuts_CB), inf)
        for work_SJI in tables:
            work_C = np.where(work_C < inf, work_C, work_SJI[s][end_C, first_C])
        again_CS[:, s] = work_C - (prefix.both_s[end_C] - prefix.both_s[first_C])
    return again_CS


def _borders(cost: CostModel, teams: Sequence[Team], microbatch: int) -> list[Border]:
    return [cost.cutting.border(a, b, microbatch) for a, b in pairwise(teams)]


def _work(
    cost: CostModel,
    teams: Sequence[Team],
    microbatch: int,
    held_S: Sequence[int],
    *,
    replicated: bool,
) -> list[FloatArray]:
    """What each stage's layers take where so many microbatches in flight fit."""
    return [
        cost.cutting.work(team, microbatch, held, replicated=replicated)
        for team, held in zip(teams, held_S, strict=True)
    ]


def _longest_s(work_SJI: Sequence[FloatArray], borders: Sequence[Border]) -> float:
    """The least that the longest stage or message can last; stages have a layer at least."""
    num_more = len(borders)  # stages still to come
    here = slice(1, len(work_SJI[0]) - num_more)
    longest_J = work_SJI[0][here, 0]
    for work_JI, border in zip(work_SJI[1:], borders, strict=True):
        end = slice(here.start + 1, here.stop + 1)
        longest_J = np.maximum(longest_J, border.busy_s[here])
        longest_J, _ = _least(np.maximum(longest_J, work_JI[end, here]))
        here = end
    return float(longest_J[-1])


def _search(
    work_SJI: Sequence[FloatArray],
    prefixes: Sequence[Prefix],
    borders: Sequence[Border],
    longest_s: float,
) -> set[tuple[int, ...]]:
    """Cuts of least total time under every limit on the longest stage or message.

    ``longest_s``: the least that such a limit can be.
    """
    # A hair above: the limit itself must pass whatever order its sums were taken in.
    limit_T = longest_s * (1 + 1e-9) * np.array(THETAS)
    found: set[tuple[int, ...]] = set()
    for some_T in (limit_T[:-1], limit_T[-1:]):  # a table is as wide as its last limit reaches
        reach_S = _reach(prefixes, float(some_T[-1]))
        found |= _least_total(work_SJI, borders, some_T, reach_S)
    return found


def _reach(prefixes: Sequence[Prefix], limit_s: float) -> list[slice]:
    """Where each stage may end, so that no stage before or after it must exceed the limit."""
    num_layers, last = len(prefixes[0].both_s) - 1, len(prefixes) - 1
    least, most = list(range(1, last + 2)), [num_layers - last + s for s in range(last + 1)]
    if limit_s < inf:
        roomy_s = limit_s * (1 + 1e-9)  # the tables decide what is on the limit
        border = 0
        for s, prefix in enumerate(prefixes):
            both_I = prefix.both_s
            border = int(both_I.searchsorted(both_I[border] + roomy_s, side="right")) - 1
            most[s] = min(most[s], border)
        border = num_layers
        for s in range(last, 0, -1):
            both_I = prefixes[s].both_s
            border = int(both_I.searchsorted(both_I[border] - roomy_s))
            least[s - 1] = max(least[s - 1], border)
        least[last] = num_layers
    return [slice(first, end + 1) for first, end in zip(least, most, strict=True)]


def _least_total(
    work_SJI: Sequence[FloatArray],
    borders: Sequence[Border],
    limit_T: FloatArray,
    reach_S: Sequence[slice],
) -> set[tuple[int, ...]]:
    """Cuts of least total time under each limit, within reach."""
    first_J = work_SJI[0][reach_S[0], 0]
    total_TJ = np.where(first_J <= limit_T[:, None], first_J, inf)
    origins = []
    for work_JI, border, here, end in zip(
        work_SJI[1:], borders, reach_S[:-1], reach_S[1:], strict=True
    ):
        total_TI = total_TJ + border.both_ways_s[here]
        block_JI = work_JI[end, here]
        if limit_T[0] < inf:
            total_TI = np.where(border.busy_s[here] <= limit_T[:, None], total_TI, inf)
            block_TJI = np.where(block_JI <= limit_T[:, None, None], block_JI, inf)
            block_TJI += total_TI[:, None, :]
        else:
            block_TJI = total_TI[:, None, :] + block_JI
        total_TJ, origin_TJ = _least(block_TJI)
        origins.append((here.start, end.start, origin_TJ))
    found = set()
    for t, total_s in enumerate(total_TJ[:, -1].tolist()):
        if total_s < inf:
            cuts = [len(work_SJI[0]) - 1]
            for first, first_end, origin_TJ in reversed(origins):
                cuts.append(first + int(origin_TJ[t, cuts[-1] - first_end]))
            found.add((0, *reversed(cuts)))
    return found


def _least(block: FloatArray) -> tuple[FloatArray, IntArray]:
    """Least entries along the last axis, and where: argmin is several times as fast as min."""
    origin = block.argmin(axis=-1)
    rows = block.reshape(-1, block.shape[-1])
    return rows[np.arange(len(rows)), origin.ravel()].reshape(origin.shape), origin


def _rated(
    cuts_CB: IntArray,
    prefixes: Sequence[Prefix],
    borders: Sequence[Border],
    schedule: str,
    again_CS: FloatArray,
) -> list[tuple[float, ...]]:
    """Period, fill and drain, egress, and the least period of all cuts at once.

    The first one with plain 1F1B's microbatches in flight, or GPipe's.
    """
    shape = len(cuts_CB), len(prefixes)
    forward_CS, backward_CS = np.empty(shape), np.empty(shape)
    down_CS, up_CS, both_ways_CS, egress_CS = (np.zeros(shape) for _ in range(4))
    for s, prefix in enumerate(prefixes):
        first_C, end_C = cuts_CB[:, s], cuts_CB[:, s + 1]
        forward_CS[:, s] = prefix.forward_s[end_C] - prefix.forward_s[first_C]
        backward_CS[:, s] = prefix.backward_s[end_C] - prefix.backward_s[first_C]
        if s < len(borders):
            down_CS[:, s] = borders[s].down_busy_s[end_C]
            up_CS[:, s] = borders[s].up_busy_s[end_C]
            both_ways_CS[:, s] = borders[s].both_ways_s[end_C]
            egress_CS[:, s] = borders[s].egress_usd[end_C]
    if again_CS.any():
        backward_CS += again_CS
    work_CS = forward_CS + backward_CS
    trip_CS = (work_CS + both_ways_CS)[:, ::-1].cumsum(axis=1)[:, ::-1]
    if schedule == "gpipe":
        period_C = np.maximum(forward_CS, down_CS).max(axis=1)
        period_C += np.maximum(backward_CS, up_CS).max(axis=1)
        busiest_C = period_C
    else:
        # Circuits from stage s to u and back move u - s + 1 microbatches on (period_s).
        order = np.arange(shape[1])
        moved_SU = np.where(order[:, None] < order, order - order[:, None] + 1.0, inf)
        round_CSU = trip_CS[:, :, None] - (trip_CS - work_CS)[:, None, :]
        period_C = (round_CSU / moved_SU).max(axis=(1, 2))
        busiest_C = np.max([work_CS, down_CS, up_CS], axis=(0, 2))
        period_C = np.maximum(period_C, busiest_C)
    figures_CF = np.stack([period_C, trip_CS[:, 0], egress_CS.sum(axis=1), busiest_C], axis=1)
    return [tuple(row) for row in figures_CF.tolist()]


def _pareto(cuts_CB: IntArray, rated: Sequence[tuple[float, ...]]) -> tuple[Cuts, ...]:
    """The cuts none of which is worse than another in every figure, shortest period first."""
    figures = [one[:3] for one in rated]
    return tuple(
        Cuts(tuple(cuts), busiest_s, fill_drain_s)
        for (period_s, fill_drain_s, usd, busiest_s), cuts in sorted(
            zip(rated, cuts_CB.tolist(), strict=True)
        )
        if not any(
            other != (period_s, fill_drain_s, usd)
            and other[0] <= period_s
            and other[1] <= fill_drain_s
            and other[2] <= usd
            for other in figures
        )
    )
