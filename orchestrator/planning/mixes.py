"""Class by class: which mixes of templates the search moves to."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, groupby, islice

import numpy as np

from orchestrator.planning.stock import Mix, Piece, Stock, Template, is_short, make_mix

SHARES = ((1.0, 80), (0.25, 40), (0.0, 30))
"""Parts of the groups of a template that a move changes, and how many such moves are tried."""


def near(stock: Stock, state: Mix, longest: int, rng: np.random.Generator) -> Iterator[Mix]:
    """Mixes one move away, those that change most groups first; no doubles.

    Moves change the pieces of all groups of a template, of a quarter of them, or of one: add,
    drop, replace, swap, reverse, join and part teams; whole groups come, go, merge and split,
    end to end or every run of like pieces by itself.

    Args:
        stock: The classes.
        state: Where to start.
        longest: Most stages of a chain: the number of layers.
        rng: Decides the order.
    """
    seen = {state}
    for share, most in SHARES:
        moves = _Moves(stock, state, share)
        for index in rng.permutation(len(moves))[:most].tolist():
            mix = make_mix(moves.build(index))
            if mix in seen or not is_short(mix, longest):
                continue
            seen.add(mix)
            if stock.fits(mix):
                yield mix


_Build = Callable[["_Moves", int], dict[Template, int]]
"""From a number below a count to the groups that a move leaves."""


class _Moves:
    """All moves from a mix, numbered: there are thousands, of which few are ever built."""

    def __init__(self, stock: Stock, state: Mix, share: float) -> None:
        self._stock, self._state, self._share = stock, state, share
        self._base, self._blocks = dict(state), list[_Build]()
        self._firsts = [0]
        for template, count in state:
            few = [
                *_split(template),
                *_with_other_teams(stock, template),
                *_reordered(stock, template),
            ]
            self._add(len(few), _followed(template, count, few.__getitem__))
            many = (2 * len(template) + 1) * len(stock.pieces)
            other = partial(_with_piece, stock, template)
            self._add(many, _followed(template, count, other))
        if share == 1.0 and len(self._side_by_side()) > 1:
            length = len(self._side_by_side()[0])
            self._add((2 * length + 1) * len(stock.pieces), _Moves._in_all)
            if length > 1:
                self._add(length + length * (length - 1) // 2, _Moves._swapped_in_all)
        self._add(len(state), _Moves._fewer)
        singles = [(piece,) for piece in stock.pieces if (piece,) not in self._base]
        self._wanted: list[Template] = [*self._base, *singles]
        self._add(len(self._wanted), _Moves._more)
        self._add(len(state) ** 2, _Moves._merged)
        self._add(len(state), _Moves._deepened)
        self._add(1, _Moves._reversed)

    def _add(self, count: int, build: _Build) -> None:
        self._blocks.append(build)
        self._firsts.append(self._firsts[-1] + count)

    def __len__(self) -> int:
        return self._firsts[-1]

    def build(self, index: int) -> dict[Template, int]:
        """Numbers of groups after a move; as before when it changes nothing."""
        block = bisect_right(self._firsts, index) - 1
        return self._blocks[block](self, index - self._firsts[block])

    def with_others(
        self, template: Template, count: int, others: tuple[Template, ...]
    ) -> dict[Template, int]:
        """Some groups of a template follow another one, or two."""
        moved = self._part(count)
        changed = {**self._base, template: count - moved}
        for other in others:
            changed[other] = changed.get(other, 0) + moved
        return changed

    def _side_by_side(self) -> list[Template]:
        """Templates as long as the one of most groups: they differ in what devices there were."""
        longest, _ = max(self._state, key=lambda one: one[1], default=((), 0))
        return [template for template, _ in self._state if len(template) == len(longest)]

    def _in_all(self, index: int) -> dict[Template, int]:
        """One piece more, or another one in the place of one, in all that are as long."""
        return self._changed(lambda template: _with_piece(self._stock, template, index)[0])

    def _swapped_in_all(self, index: int) -> dict[Template, int]:
        """One piece less, or two swapped, in all that are as long."""

        def other(template: Template) -> Template:
            if index < len(template):
                return template[:index] + template[index + 1 :]
            pairs = combinations(range(len(template)), 2)
            return _swapped(template, *next(islice(pairs, index - len(template), None)))

        return self._changed(other)

    def _changed(self, other: Callable[[Template], Template]) -> dict[Template, int]:
        changed = dict(self._base)
        for template in self._side_by_side():
            count = changed[template]
            changed[template] -= count
            instead = other(template)
            changed[instead] = changed.get(instead, 0) + count
        return changed

    def _fewer(self, index: int) -> dict[Template, int]:
        template, count = self._state[index]
        return {**self._base, template: count - self._part(count)}

    def _more(self, index: int) -> dict[Template, int]:
        """More groups of a template, or of one device or team alone."""
        template = self._wanted[index]
        room = self._stock.room(self._state, template)
        return {
            **self._base,
            template: self._base.get(template, 0) + (self._part(room) if room else 0),
        }

    def _merged(self, index: int) -> dict[Template, int]:
        """Groups of two templates, or pairs of one, become chains of both."""
        (one, n), (two, m) = (self._state[i] for i in divmod(index, len(self._state)))
        changed = dict(self._base)
        if pairs := n // 2 if one == two else min(n, m):
            moved = self._part(pairs)
            changed[one] -= moved
            changed[two] -= moved
            changed[one + two] = changed.get(one + two, 0) + moved
        return changed

    def _deepened(self, index: int) -> dict[Template, int]:
        """Half as many groups of a template, with twice as many of each run of like pieces."""
        template, count = self._state[index]
        changed = dict(self._base)
        if count > 1:
            moved = self._part(count // 2)
            deep = tuple(piece for piece, n in _runs(template) for _ in range(2 * n))
            changed[template] -= 2 * moved
            changed[deep] = changed.get(deep, 0) + moved
        return changed

    def _reversed(self, _: int) -> dict[Template, int]:
        """All chains the other way round: their cuts, which sums share, stay aligned."""
        changed = Counter[Template]()
        for template, count in self._state:
            changed[template[::-1]] += count
        return changed

    def _part(self, count: int) -> int:
        """The share of a number of groups, at least one."""
        return max(1, int(self._share * count))


def _followed(
    template: Template, count: int, instead: Callable[[int], tuple[Template, ...]]
) -> _Build:
    return lambda moves, index: moves.with_others(template, count, instead(index))


def _with_piece(stock: Stock, template: Template, index: int) -> tuple[Template]:
    """One piece more, or another one in the place of one."""
    place, number = divmod(index, len(stock.pieces))
    p, instead = place // 2, place % 2
    return ((*template[:p], stock.pieces[number], *template[p + instead :]),)


def _split(template: Template) -> Iterator[tuple[Template, ...]]:
    """One piece less, or two chains: its parts, or such as have half of each run of like pieces.

    The latter keep a stage of every class, for instance the only one that holds the first layers.
    """
    if len(template) > 1:
        shallow = tuple(piece for piece, n in _runs(template) for _ in range((n + 1) // 2))
        if shallow != template:
            yield shallow, shallow
        yield from ((template[:p] + template[p + 1 :],) for p in range(len(template)))
        yield from ((template[:p], template[p:]) for p in range(1, len(template)))


def _runs(template: Template) -> list[tuple[Piece, int]]:
    """Pieces and how many like ones follow each other."""
    return [(piece, len(list(same))) for piece, same in groupby(template)]


def _with_other_teams(stock: Stock, template: Template) -> Iterator[tuple[Template]]:
    """Two neighbours joined to one team, or a team parted into two neighbours."""
    for p, (c, size) in enumerate(template):
        if (c, 2 * size) in stock.index_of and template[p + 1 : p + 2] == ((c, size),):
            yield ((*template[:p], (c, 2 * size), *template[p + 2 :]),)
        half = size // 2 if size % 2 == 0 else 0
        if (c, half) in stock.index_of:
            yield ((*template[:p], (c, half), (c, half), *template[p + 1 :]),)


def _swapped(template: Template, p: int, q: int) -> Template:
    pieces = list(template)
    pieces[p], pieces[q] = pieces[q], pieces[p]
    return tuple(pieces)


def _reordered(stock: Stock, template: Template) -> Iterator[tuple[Template]]:
    """Two pieces swapped, all of them reversed, or laid out otherwise."""
    for p, q in combinations(range(len(template)), 2):
        if template[q] != template[p]:
            yield (_swapped(template, p, q),)
    if len(template) > 1:
        yield (template[::-1],)
        yield from ((other,) for other in (stock.apart(template), stock.together(template)))
