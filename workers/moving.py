"""Moves of layers between running workers when a plan takes over from another."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from workers.process_groups import OwnerSet, ProcessGroups
from workers.state import ModelState, pack, unpack
from workers.transport import Transport

MOVE_TAGS = 1 << 30
"""A layer travels under this tag plus its number: above the tags of steps."""


@dataclass(frozen=True, slots=True)
class RankedMove:
    """One layer's state sent from one rank to another."""

    layer: int
    source: int
    target: int


def holders(groups: ProcessGroups, held: Iterable[int], num_layers: int) -> tuple[OwnerSet, ...]:
    """Ranks that hold each layer; collective over the world.

    Asked from the workers themselves, so it does not matter who remembers which plan, how many
    idle slots lie between, or whether the head is a new one.
    """
    row = torch.zeros(num_layers, dtype=torch.uint8)
    row[sorted(held)] = 1
    table = groups.gather(row)
    return tuple(tuple(torch.nonzero(column).flatten().tolist()) for column in table.unbind(1))


def find_moves(
    now: Sequence[OwnerSet],
    owners: Sequence[OwnerSet],
    wished: Mapping[tuple[int, int], int],
) -> tuple[RankedMove, ...]:
    """For each layer the new owners minus the old ones; sources round robin among the old ones.

    Args:
        now: Ranks that hold each layer.
        owners: Ranks that shall hold it.
        wished: (layer, target) to source; obeyed where that source holds the layer.
    """
    moves = []
    for layer, (sources, targets) in enumerate(zip(now, owners, strict=True)):
        for turn, target in enumerate(t for t in targets if sources and t not in sources):
            source = wished.get((layer, target), -1)
            if source not in sources:
                source = sources[turn % len(sources)]
            moves.append(RankedMove(layer, source, target))
    return tuple(moves)


def move_layers(
    state: ModelState,
    moves: Sequence[RankedMove],
    rank: int,
    transport: Transport,
    timeout_s: float,
) -> None:
    """Send and receive what concerns this rank.

    Raises:
        PeerLostError: If a peer is gone.
        TimeoutError: If nothing comes for ``timeout_s``.
    """
    incoming = [
        (move, transport.expect(move.source, MOVE_TAGS + move.layer))
        for move in moves
        if move.target == rank
    ]
    for move in moves:
        if move.source == rank:
            packed = pack(state.tensors(move.layer))
            transport.send(packed, move.target, MOVE_TAGS + move.layer)
    for move, ticket in incoming:
        header, flat = transport.receive(ticket, timeout_s).tensors
        state.load(move.layer, unpack(header, flat))
    transport.flush(timeout_s)
