"""Class by class: which mixes of templates the search starts from."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, product

from orchestrator.planning.roster import dealt_out
from orchestrator.planning.stock import Mix, Piece, Stock, Template, is_apart, is_short, make_mix

DEPTHS = (1, 2, 4, 8, 16, 3, 6, 12)
"""Stages of the first guesses that have one team size throughout."""

FILLS = (1.0, 0.75, 0.5)
"""Parts of what is left idle over the speed of a group: so many more groups are tried."""

FEW_CLASSES = 5
"""So many are chained two by two, and left out of the first guesses, in every way."""


def seeds(
    stock: Stock, seconds_per_sample: Sequence[float], most_groups: int, longest: int
) -> Iterator[Mix]:
    """All devices in one shape each, then chains over several classes; all that fit.

    Args:
        stock: The classes.
        seconds_per_sample: Of the whole model on each of the stock's pieces.
        most_groups: Samples of the batch: each group needs one. The fastest devices come first.
        longest: Most stages of a chain: the number of layers.
    """
    speed = [
        min(seconds_per_sample[stock.index_of[c, size]] * size for size in one.sizes)
        for c, one in enumerate(stock.classes)
    ]
    fastest = sorted(range(len(stock.classes)), key=lambda c: (speed[c], c))
    seen: set[Mix] = set()
    for mix in _guesses(stock, fastest, seconds_per_sample, most_groups):
        if mix and mix not in seen and is_short(mix, longest) and stock.fits(mix):
            seen.add(mix)
            yield mix


def _guesses(
    stock: Stock, fastest: Sequence[int], seconds_per_sample: Sequence[float], most_groups: int
) -> Iterator[Mix]:
    """Those that use all devices in few shapes come first: there may be time for no more."""
    roomiest = sorted(fastest, key=lambda c: -stock.classes[c].memory_bytes)
    shapes: list[list[tuple[Template, int]]] = []
    num_nodes = sum(len(one.nodes) for one in stock.classes)
    for size, depth in product(sorted({size for _, size in stock.pieces}), (*DEPTHS, num_nodes)):
        if depth in DEPTHS:
            templates = (((c, size),) * depth for c in fastest if (c, size) in stock.index_of)
            shapes.append([(t, count) for t in templates if (count := stock.most(t))])
            yield _first_of(shapes[-1], most_groups)
        template = _through_all_nodes(stock, fastest, size, depth)
        yield _first_of([(template, stock.most(template))], most_groups) if template else ()
    for template in _in_best_teams(stock, fastest, seconds_per_sample):
        yield _first_of([(template, stock.most(template))], most_groups)
    devices = [c for c in fastest for _ in range(stock.classes[c].num_devices)]
    for depth in DEPTHS[1:]:
        if num_groups := min(len(devices) // depth, most_groups):
            chains = [tuple((c, 1) for c in hand) for hand in dealt_out(devices, num_groups)]
            yield make_mix(Counter(chains))
            yield make_mix(Counter(map(stock.apart, chains)))
    for shape in shapes:
        every = bool(shape) and len(shape[0][0]) == 1
        yield from (_first_of(some, most_groups) for some in _some_of(shape, every=every))
    # Early stages keep most microbatches in flight.
    for template in _in_best_teams(stock, roomiest, seconds_per_sample):
        yield _first_of([(template, stock.most(template))], most_groups)
    for template in _across(stock, fastest):
        yield _first_of(_with_whole_nodes(stock, template, fastest), most_groups)
        yield _first_of([(template, stock.most(template))], most_groups)


def _through_all_nodes(stock: Stock, fastest: Sequence[int], size: int, depth: int) -> Template:
    """A chain with stages on nodes of their own, of every class in proportion to its nodes.

    The same stages of several groups share nodes, inside which their gradients are summed.
    """
    num_nodes = [len(stock.classes[c].nodes) for c in fastest]
    counts = [round(depth * n / sum(num_nodes)) for n in num_nodes]
    template = tuple(
        (c, size)
        for c, count in zip(fastest, counts, strict=True)
        if (c, size) in stock.index_of
        for _ in range(count)
    )
    return stock.apart(template) if len(template) > 1 else ()


def _in_best_teams(
    stock: Stock, order: Sequence[int], seconds_per_sample: Sequence[float]
) -> Iterator[Template]:
    """Chains with the same part of every class each, in the teams that make most of its devices.

    One, two, four and so on share the cluster; too small classes are left out.
    """
    every = [one.num_devices for one in stock.classes]
    num_chains = 1
    while num_chains <= max(every):
        template = _drawn(stock, order, seconds_per_sample, every, num_chains)
        for pieces in (template, template[::-1]):
            yield from (pieces, stock.apart(pieces))
        num_chains *= 2


def _drawn(
    stock: Stock,
    order: Sequence[int],
    seconds_per_sample: Sequence[float],
    free: Sequence[int],
    num_chains: int,
) -> Template:
    """The chain when so many of them share what is free of every class."""
    template: list[Piece] = []
    for c in order:
        each = free[c] // num_chains
        sizes = [size for size in stock.classes[c].sizes if size <= each]
        if sizes:
            size = min(sizes, key=lambda s: (s * seconds_per_sample[stock.index_of[c, s]], s))
            template += [(c, size)] * (each // size)
    return tuple(template)


def filled(
    stock: Stock, state: Mix, seconds_per_sample: Sequence[float], most_groups: int, longest: int
) -> Iterator[Mix]:
    """A mix and other chains over what it leaves idle: as fast as its own ones, or fewer.

    Args: see ``seeds``.
    """
    left = [one.num_devices for one in stock.classes]
    for template, count in state:
        for c, size in template:
            left[c] -= count * abs(size)
    main, _ = max(state, key=lambda one: one[1])

    def speed(piece: Piece) -> float:
        return 1.0 / seconds_per_sample[stock.index_of[piece]]

    singles = [speed((c, 1)) for c in range(len(stock.classes))]
    as_fast = sum(n * one for n, one in zip(left, singles, strict=True)) / sum(map(speed, main))
    order = sorted(range(len(singles)), key=lambda c: (-singles[c], c))
    num_groups = sum(count for _, count in state)
    for num_chains in dict.fromkeys(int(share * as_fast) for share in FILLS):
        template = _drawn(stock, order, seconds_per_sample, left, max(1, num_chains))
        for pieces in (template, template[::-1]):
            other = stock.apart(pieces) if is_apart(main) else pieces
            room = 0
            if 0 < len(other) <= longest:
                room = min(stock.room(state, other), most_groups - num_groups)
            if room > 0:
                yield make_mix({**dict(state), other: dict(state).get(other, 0) + room})


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


def _first_of(some: Sequence[tuple[Template, int]], most_groups: int) -> Mix:
    """As many groups as the batch has samples, the first ones first."""
    found: dict[Template, int] = {}
    for template, count in some:
        found[template] = min(count, most_groups - sum(found.values()))
    return make_mix(found)


def _across(stock: Stock, fastest: Sequence[int]) -> Iterator[Template]:
    """Chains over one node of each of two, three or all classes, fastest first or last.

    Nodes are split into teams alike; of few classes two neighbours in every way, and one device
    of each of any. What has least memory may have to come first, or last.
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
    least = 2 if len(fastest) <= FEW_CLASSES else len(fastest)
    for count in range(least, len(fastest) + 1):
        for some in combinations(fastest, count):
            singles = tuple((c, 1) for c in some)
            yield from (singles, singles[::-1])


def _side_by_side(sizes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The smallest of each, the second smallest of each, and so on; the largest where it ends."""
    most = max(map(len, sizes))
    return [tuple(one[min(i, len(one) - 1)] for one in sizes) for i in range(most)]


def _with_whole_nodes(
    stock: Stock, template: Template, fastest: Sequence[int]
) -> list[tuple[Template, int]]:
    """As many groups of a template as fit, and chains over the nodes that are left untouched."""
    if not stock.most(template):
        return []
    found = {template: stock.most(template)}
    needed = stock.num_nodes(make_mix(found))
    for c in fastest:
        alone = ((c, 1),) * stock.classes[c].node_size
        if left := len(stock.classes[c].nodes) - needed.get(c, 0):
            found[alone] = found.get(alone, 0) + left
    return list(found.items())
