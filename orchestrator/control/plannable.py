"""Which devices the next plan may use: none about to go, too dear, or of unknown price."""

from collections.abc import Set
from dataclasses import replace

from orchestrator.core.cluster import ClusterState


def plannable(
    cluster: ClusterState, *, leaving: Set[str], stale: Set[str], kept: Set[str]
) -> ClusterState:
    """The cluster with the devices that may be planned with.

    Devices that are paid for whether they are used or not stay, whatever they cost.

    Args:
        cluster: All that is there.
        leaving: Devices under notice.
        stale: Pools whose price nobody knows.
        kept: Devices in use, which stay at their pool's upper price where it is not known.
    """
    barred = {offer.pool for offer in cluster.offers if offer.is_too_dear}
    if not (leaving or stale or barred):
        return cluster
    devices = tuple(
        device
        for device in cluster.devices
        if device.device_id not in leaving
        and (
            cluster.offer(device.pool).billed == "while_present"
            or (
                device.pool not in barred and (device.pool not in stale or device.device_id in kept)
            )
        )
    )
    return replace(cluster, devices=devices)


def why_none(cluster: ClusterState, *, leaving: Set[str], stale: Set[str]) -> str:
    """Why ``plannable`` has no devices, where it has none: a word for metrics, and a sentence."""
    if not cluster.devices:
        return "no_device: none is there; the run waits for one"
    pools = {d.pool for d in cluster.devices if d.device_id not in leaving}
    if not pools:
        return "no_device: every one is about to be taken away; the run waits for another"
    if pools & stale:
        return "price_unknown: the price feed is too old for every pool that is on offer"
    return (
        f"price_limit: {', '.join(sorted(pools))} cost more than their max_price_per_hour; the run "
        "waits for lower prices"
    )
