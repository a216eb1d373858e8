"""Whether all nodes reach each other: told by name, not by a hang; and whom to do without."""

import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.control.recovery import Timeouts
from orchestrator.errors import OrchestratorError
from orchestrator.runtime.actors import Place
from orchestrator.runtime.fleet import Fleet

MEND = (
    "let TCP pass between their nodes on every port, with packets as large as their interfaces send"
)


@dataclass(frozen=True, slots=True, order=True)
class Miss:
    """A device that another one did not reach."""

    device_id: str
    other_id: str
    address: str
    why: str

    @property
    def ends(self) -> tuple[str, str]:
        """Both devices."""
        return self.device_id, self.other_id

    def __str__(self) -> str:
        return (
            f"device {self.device_id} does not reach device {self.other_id} at {self.address} "
            f"({self.why})"
        )


def by_node(places: Iterable[Place]) -> tuple[tuple[str, ...], ...]:
    """The devices of each node: they share its network, and so one of them speaks for all."""
    found: dict[str, list[str]] = {}
    for place in places:
        found.setdefault(place.ray_node_id or place.device_id, []).append(place.device_id)
    return tuple(tuple(devices) for devices in found.values())


def find_misses(
    fleet: Fleet, speakers: Sequence[str], host: str, timeouts: Timeouts
) -> tuple[Miss, ...]:
    """Have workers send each other messages of several sizes, which must come back.

    Any plan may join any two devices, later if not at first. Whoever is lost meanwhile is left out.

    Args:
        fleet: Workers that are up, and run no step.
        speakers: Of these, one a node.
        host: Where this process can be reached by all of them.
        timeouts: How long each pair, and all together, may take.
    """
    if len(speakers) < 2:
        return ()
    secret = secrets.token_bytes(32)
    addresses, _ = fleet.ask(
        "listen", str, host, secret, timeouts.receive_s,
        timeout_s=timeouts.hold_s, patience_s=timeouts.hold_s, device_ids=speakers,
    )  # fmt: skip
    missed, _ = fleet.ask(
        "reach", tuple, secret, timeouts.receive_s,
        timeout_s=timeouts.start_s, patience_s=timeouts.start_s, device_ids=addresses,
        each={d: ({o: at for o, at in addresses.items() if o != d},) for d in addresses},
    )  # fmt: skip
    fleet.tell("stop_listening", device_ids=addresses)
    there = set(fleet.device_ids)
    found = (Miss(device, *one) for device, all_found in missed.items() for one in all_found)
    return tuple(sorted(miss for miss in found if there.issuperset(miss.ends)))


def refuse(misses: Sequence[Miss]) -> None:
    """Let a run begin only where there are none.

    Raises:
        OrchestratorError: If there are; names both devices, address and mend.
    """
    if misses:
        more = f", and {len(misses) - 1} more like this" if len(misses) > 1 else ""
        raise OrchestratorError(
            f"{misses[0]}{more}; {MEND}, or keep one of the two out of the cluster"
        )


def expel_apart(
    fleet: Fleet,
    nodes: Iterable[Sequence[str]],
    order: Sequence[str],
    host: str,
    timeouts: Timeouts,
) -> bool:
    """End those who do not reach all others, with all of their node; whether there are any.

    Args:
        fleet: Workers that are up, and run no step.
        nodes: The devices of each.
        order: Who may be done without; those at the end go first.
        host: Where this process can be reached by all of them.
        timeouts: How long each pair, and all together, may take.
    """
    by_speaker = {devices[0]: devices for devices in nodes}
    dispensable = [device_id for device_id in order if device_id in by_speaker]
    if not dispensable:
        return False  # others of their nodes were found to reach all
    found = without(find_misses(fleet, tuple(by_speaker), host, timeouts), dispensable)
    for speaker, miss in found.items():
        for device_id in by_speaker[speaker]:
            fleet.expel(device_id, f"{miss}; it was left out: {MEND}")
    return bool(found)


def without(misses: Iterable[Miss], order: Sequence[str]) -> dict[str, Miss]:
    """Whom to do without so that they reach each other and all others; a pair that says why.

    Args:
        misses: Pairs; of those with nobody in ``order`` nothing is said.
        order: Who may be done without. Whoever is in most pairs goes first; of several, the last.
    """
    left = [miss for miss in misses if not set(order).isdisjoint(miss.ends)]
    found = dict[str, Miss]()
    while left:
        counts = Counter(device for miss in left for device in miss.ends if device in order)
        worst = max(counts, key=lambda device: (counts[device], order.index(device)))
        found[worst] = next(miss for miss in left if worst in miss.ends)
        left = [miss for miss in left if worst not in miss.ends]
    return found
