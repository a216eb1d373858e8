"""Class by class: which mixes of templates the search starts from, and moves to."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, product

import numpy as np

from orchestrator.planning.roster import dealt_out
from orchestrator.planning.stock import Mix, Stock, Template, make_mix

SHARES = ((1.0, 80), (0.25, 40), (0.0, 30))
"""Parts of the groups of a template that a move changes, and how many such moves are tried."""

DEPTHS = (1, 2, 4, 8, 16, 3, 6, 12)
"""Stages of the first guesses that have one team size throughout."""


FEW_CLASSES = 5
"""So many are chained two by two, and left out of the first guesses, in every way."""


def seeds(stock: Stock, seconds_per_sample: Sequence[float]) -> list[Mix]:
    """All devices in one shape each, then chains over several classes; all that fit.

    Args:
        stock: The classes.
        seconds_per_sample: Of the whole model on each of the stock's pieces.
    """
    speed = [
        min(seconds_per_sample[stock.index_of[c, size]] * size for size in one.sizes)
        for c, one in enumerate(stock.classes)
    ]
    fastest = sorted(range(len(stock.classes)), key=lambda c: (speed[c], c))
    found: list[Mix] = []
    sizes = sorted({size for _, size in stock.pieces})
    for size, depth in product(sizes, DEPTHS):
        chosen = [
            (template, count)
            for c in fastest
            for template in [((c, size),) * depth]
            if (c, size) in stock.index_of and (count := stock.most(template))
        ]
        found += [make_mix(dict(some)) for some in _some_of(chosen, every=depth == 1)]
    for template in _across(stock, fastest):
        found += [_filled(stock, template, fastest), make_mix({template: stock.most(template)})]
    devices = [c for c in fastest for _ in range(stock.classes[c].num_devices)]
    for depth in DEPTHS[1:]:
        if num_groups := len(devices) // depth:
            chains = (tuple((c, 1) for c in hand) for hand in dealt_out(devices, num_groups))
            found.append(make_mix(Counter(chains)))
    return [mix for mix in dict.fromkeys(found) if mix and stock.fits(mix)]


def _some_of(
    chosen: Sequence[tuple[Template, int]], *, every: bool
) -> Iterator[Sequence[tuple[Template, int]]]:
    """All but the slowest classes, all but the fastest, one alone; few classes in every way.

    Whatever comes first may have too little memory, or sum its gradients over slow links. Of
    many classes a half, one or none are left out.
    """
    most = len(chosen)
    few = most <= FEW_CLASSES
    for k in range(most) if few else dict.fromkeys((0, 1, most // 2, most - 1)):
        yield from (chosen[: most - k], chosen[k:])
    yield from ([one] for one in chosen)
    if every and few:
        yield from (some for k in range(2, most) for some in combinations(chosen, k))


def _across(stock: Stock, fastest: Sequence[int]) -> Iterator[Template]:
    """Chains over one node of each of two, three or all classes, fastest first or last.

    Nodes are split into teams alike; of few classes two neighbours in every way, and one device
    of each of any.
    """
    for first, end in combinations(range(len(fastest) + 1), 2):
        span = fastest[first:end]
        if len(span) not in (2, 3, len(fastest)) or len(span) < 2:
            continue
        sizes = [stock.classes[c].sizes for c in span]
        mixed = len(span) == 2 and len(fastest) <= FEW_CLASSES
        for chosen in product(*sizes) if mixed else _side_by_side(sizes):
            parts = [
                ((c, size),) * (stock.classes[c].node_size // size)
                for c, size in zip(span, chosen, strict=True)
            ]
            for ordered in (parts, parts[::-1]):
                yield tuple(piece for part in ordered for piece in part)
    yield tuple((c, 1) for c in fastest)
    if len(fastest) <= FEW_CLASSES:
        for count in range(2, len(fastest)):
            for some in combinations(fastest, count):
                yield tuple((c, 1) for c in some)


def _side_by_side(sizes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The smallest of each, the second smallest of each, and so on; the largest where it ends."""
    most = max(map(len, sizes))
    return [tuple(one[min(i, len(one) - 1)] for one in sizes) for i in range(most)]


def _filled(stock: Stock, template: Template, fastest: Sequence[int]) -> Mix:
    """As many groups of a template as fit, and chains over the nodes that are left untouched."""
    if not stock.most(template):
        return ()
    found = {template: stock.most(template)}
    needed = stock.num_nodes(make_mix(found))
    for c in fastest:
        alone = ((c, 1),) * stock.classes[c].node_size
        if left := len(stock.classes[c].nodes) - needed.get(c, 0):
            found[alone] = found.get(alone, 0) + left
    return make_mix(found)


def near(stock: Stock, state: Mix, longest: int, rng: np.random.Generator) -> Iterator[Mix]:
    """Mixes one move away, those that change most groups first; no doubles.

    Moves change the pieces of all groups of a template, of a quarter of them, or of one: add,
    drop, replace, swap, reverse, join and part teams; whole groups come, go, merge and split.

    Args:
        stock: The classes.
        state: Where to start.
        longest: Most stages of a chain: the number of layers.
        rng: Decides the order.
    """
    seen = {state}
    for share, most in SHARES:
        moves = [
            *_changed(stock, state, share),
            *_fewer(state, share),
            *_more(stock, state, share),
            *_merged(state, share),
        ]
        for index in rng.permutation(len(moves))[:most]:
            mix = make_mix(moves[index])
            if mix in seen or any(len(template) > longest for template, _ in mix):
                continue
            seen.add(mix)
            if stock.fits(mix):
                yield mix


def _changed(stock: Stock, state: Mix, share: float) -> Iterator[dict[Template, int]]:
    """Some groups of a template follow another one, or two."""
    for template, count in state:
        others: list[tuple[Template, ...]] = [
            (other,)
            for other in (
                *_with_other_pieces(stock, template),
                *_with_other_teams(stock, template),
                *_reordered(template),
            )
        ]
        others += [(template[:p], template[p:]) for p in range(1, len(template))]
        moved = _part(count, share)
        for instead in others:
            changed = {**dict(state), template: count - moved}
            for other in instead:
                changed[other] = changed.get(other, 0) + moved
            yield changed


def _with_other_pieces(stock: Stock, template: Template) -> Iterator[Template]:
    """One piece more, less or another one."""
    for p in range(len(template)):
        if len(template) > 1:
            yield (*template[:p], *template[p + 1 :])
        for piece in stock.pieces:
            yield (*template[:p], piece, *template[p:])
            if piece != template[p]:
                yield (*template[:p], piece, *template[p + 1 :])
    for piece in stock.pieces:
        yield (*template, piece)


def _with_other_teams(stock: Stock, template: Template) -> Iterator[Template]:
    """Two neighbours joined to one team, or a team parted into two neighbours."""
    for p, (c, size) in enumerate(template):
        if (c, 2 * size) in stock.index_of and template[p + 1 : p + 2] == ((c, size),):
            yield (*template[:p], (c, 2 * size), *template[p + 2 :])
        if size > 1 and (c, size // 2) in stock.index_of:
            yield (*template[:p], (c, size // 2), (c, size // 2), *template[p + 1 :])


def _reordered(template: Template) -> Iterator[Template]:
    """Two pieces swapped, or all of them reversed."""
    for p, q in combinations(range(len(template)), 2):
        if template[q] != template[p]:
            pieces = list(template)
            pieces[p], pieces[q] = pieces[q], pieces[p]
            yield tuple(pieces)
    if len(template) > 1:
        yield template[::-1]


def _fewer(state: Mix, share: float) -> Iterator[dict[Template, int]]:
    for template, count in state:
        left = {**dict(state), template: count - _part(count, share)}
        if any(left.values()):
            yield left


def _more(stock: Stock, state: Mix, share: float) -> Iterator[dict[Template, int]]:
    """More groups of a template, or of one device or team alone."""
    base = dict(state)
    singles = [(piece,) for piece in stock.pieces if (piece,) not in base]
    for template in [*base, *singles]:
        if most := stock.room(state, template):
            yield {**base, template: base.get(template, 0) + _part(most, share)}


def _merged(state: Mix, share: float) -> Iterator[dict[Template, int]]:
    """Groups of two templates, or pairs of one, become chains of both."""
    for (one, n), (two, m) in product(state, repeat=2):
        pairs = n // 2 if one == two else min(n, m)
        if not pairs:
            continue
        changed, moved = dict(state), _part(pairs, share)
        changed[one] -= moved
        changed[two] -= moved
        changed[one + two] = changed.get(one + two, 0) + moved
        yield changed


def _part(count: int, share: float) -> int:
    """That share of a number of groups, at least one."""
    return max(1, int(share * count))
