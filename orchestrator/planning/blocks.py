"""Billing by blocks as the score of a plan sees it: what renting anew costs, what is paid."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

from orchestrator.core.cluster import ClusterState


def with_surcharges(
    cluster: ClusterState,
    paid_until_s: Mapping[str, float],
    *,
    horizon_s: float,
    slot_s: float,
    prepaid_is_free: bool,
) -> ClusterState:
    """The cluster whose devices know what counts in J beside their price.

    A device that is rented anew begins a block: what of it lies beyond ``H_e D`` is paid
    whether it is used or not, and is spread over ``H_e D``. Time that a held device is paid
    ahead costs nothing more, spread the same way; all that are held of a pool share it evenly,
    so that a pool has two prices at most. Blocks within a slot have ended before anything else
    could be decided, and count as seconds do.

    Args:
        cluster: At the start of a slot.
        paid_until_s: Devices held, and up to when they are paid; seconds of the run's clock.
        horizon_s: H_e D.
        slot_s: D.
        prepaid_is_free: False where Q is above ``V rho_hat``: the full price then counts, or
            the average might never be met (G1).

    Source: docs/model.md, section 3.7.
    """
    surcharge: dict[str, float] = {}
    for offer in cluster.offers:
        block_s = max(offer.minimum_s, offer.quantum_s)
        if offer.billed == "while_present" or block_s <= slot_s:
            continue
        mine = [d.device_id for d in cluster.devices if d.pool == offer.pool]
        held = [device_id for device_id in mine if device_id in paid_until_s]
        surcharge |= dict.fromkeys(mine, offer.price_usd_per_s * max(0.0, block_s / horizon_s - 1))
        surcharge |= dict.fromkeys(held, 0.0)
        if held and prepaid_is_free:
            ahead_s = [paid_until_s[device_id] - cluster.now_s for device_id in held]
            free = fmean(min(1.0, max(0.0, s / horizon_s)) for s in ahead_s)
            surcharge |= dict.fromkeys(held, -offer.price_usd_per_s * free)
    if not any(surcharge.values()):
        return cluster
    devices = tuple(
        replace(device, surcharge_usd_per_s=surcharge.get(device.device_id, 0.0))
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)


def without_surcharges(cluster: ClusterState) -> ClusterState:
    """The cluster as its bills have it in the long run, where blocks are used to their end."""
    if not any(d.surcharge_usd_per_s or d.entry_usd_per_sample for d in cluster.devices):
        return cluster
    devices = tuple(
        replace(device, surcharge_usd_per_s=0.0, entry_usd_per_sample=0.0)
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)
