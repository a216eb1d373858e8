"""Pieces of nodes: whether parts of groups fit the nodes of a class, and onto which they go."""

from collections.abc import Mapping, Sequence


def num_nodes(counts: Mapping[int, int], node_size: int) -> int:
    """Nodes that parts of these sizes fill, largest first; exact for powers of two.

    Args:
        counts: How many parts there are of each number of devices.
        node_size: Devices of a node.
    """
    full = 0
    room: dict[int, int] = {}  # free devices of a begun node -> how many such nodes
    for size in sorted(counts, reverse=True):
        left = counts[size]
        for free in sorted(f for f in room if f >= size):
            if not left:
                break
            fits = free // size
            used = min(room[free], -(-left // fits))
            whole, rest = (used, 0) if used * fits <= left else (used - 1, left - (used - 1) * fits)
            room[free] -= used
            _leave(room, free - fits * size, whole)
            if rest:
                _leave(room, free - rest * size, 1)
            left -= whole * fits + rest
        if left:
            fits = node_size // size
            whole, rest = divmod(left, fits)
            full += whole + bool(rest)
            _leave(room, node_size - fits * size, whole)
            if rest:
                _leave(room, node_size - rest * size, 1)
    return full


def _leave(room: dict[int, int], free: int, nodes: int) -> None:
    if free and nodes:
        room[free] = room.get(free, 0) + nodes


def assign(sizes: Sequence[int], node_sizes: Sequence[int]) -> list[int] | None:
    """A node for every part, largest first, each on the fullest node that still takes it.

    Args:
        sizes: Devices of every part.
        node_sizes: Free devices of every node.

    Returns:
        Node indices, or None when some part finds no place.
    """
    most = max(node_sizes, default=0)
    open_by_free: list[list[int]] = [[] for _ in range(most + 1)]
    for node in range(len(node_sizes) - 1, -1, -1):
        open_by_free[node_sizes[node]].append(node)
    found = [-1] * len(sizes)
    for part in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[part]
        free = next((f for f in range(size, most + 1) if open_by_free[f]), None)
        if free is None:
            return None
        node = open_by_free[free].pop()
        found[part] = node
        open_by_free[free - size].append(node)
    return found


def spread(sizes: Sequence[int], node_sizes: Sequence[int]) -> list[int] | None:
    """A node of its own for every part, emptiest first.

    Args:
        sizes: Devices of every part.
        node_sizes: Free devices of every node.

    Returns:
        Node indices, or None when there are too few nodes.
    """
    order = sorted(range(len(node_sizes)), key=lambda node: (-node_sizes[node], node))
    found = [-1] * len(sizes)
    for node, part in zip(order, sorted(range(len(sizes)), key=lambda i: -sizes[i]), strict=False):
        if node_sizes[node] < sizes[part]:
            return None
        found[part] = node
    return found if -1 not in found else None
