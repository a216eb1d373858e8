"""Before the first step: whether all devices reach each other; told by name, not by a hang."""

import secrets

from orchestrator.control.recovery import Timeouts
from orchestrator.errors import OrchestratorError
from orchestrator.runtime.fleet import Fleet


def check_pairs(fleet: Fleet, host: str, timeouts: Timeouts) -> None:
    """Have every worker send every other one messages of several sizes, which must come back.

    Any plan may join any two devices, later if not at first. Whoever is lost meanwhile is left out.

    Args:
        fleet: Workers that are up, and not joined yet.
        host: Where this process can be reached by all of them.
        timeouts: How long each pair, and all together, may take.

    Raises:
        OrchestratorError: If a device does not reach another; names both, address and mend.
    """
    secret = secrets.token_bytes(32)
    addresses, _ = fleet.ask(
        "listen", str, host, secret, timeouts.receive_s,
        timeout_s=timeouts.hold_s, patience_s=timeouts.hold_s,
    )  # fmt: skip
    missed, _ = fleet.ask(
        "reach", tuple, secret, timeouts.receive_s,
        timeout_s=timeouts.start_s, patience_s=timeouts.start_s, device_ids=addresses,
        each={d: ({o: at for o, at in addresses.items() if o != d},) for d in addresses},
    )  # fmt: skip
    fleet.tell("stop_listening")
    there = set(fleet.device_ids)
    failed = sorted(
        (device, *found)
        for device, all_found in missed.items()
        for found in all_found
        if {device, found[0]} <= there
    )
    if not failed:
        return
    device, other, address, why = failed[0]
    more = f", and {len(failed) - 1} more like this" if len(failed) > 1 else ""
    raise OrchestratorError(
        f"device {device} does not reach device {other} at {address} ({why}){more}; let TCP pass "
        "between their nodes on every port, with packets as large as their interfaces send, or "
        "keep one of the two out of the cluster"
    )
