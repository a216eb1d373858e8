"""What the run was billed: every held interval at the price in force, append-only."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from orchestrator.control.traffic import Traffic
from orchestrator.core.cluster import ClusterState, Device, Offer
from orchestrator.core.durable import Hold, LedgerEntry
from orchestrator.core.slot import Usage

ROUNDING_S = 1e-9
"""Two times closer than this are one: the same instant reached by two sums of steps."""


class _Charge(NamedTuple):
    """A stretch paid at one price, in seconds of the run's clock."""

    from_s: float
    to_s: float
    price_usd_per_s: float
    cause: str


class Ledger:
    """Prices what was held, slot by slot. A line once returned never changes.

    Billing goes by blocks where an offer has them: a block is charged in full when it starts,
    at the price in force at that moment. The first block of a hold lasts ``minimum_s``, later
    ones ``quantum_s``; without a quantum every second counts.

    Source: docs/model.md, section 3.7.
    """

    def __init__(
        self,
        *,
        billing_speedup: float = 1.0,
        spent_usd: float = 0.0,
        spent_rest_usd: float = 0.0,
        num_entries: int = 0,
        holds: Iterable[Hold] = (),
    ) -> None:
        self._speedup = billing_speedup
        self._holds = {hold.device_id: hold for hold in holds}
        self.holds = self._sorted_holds()
        """Devices held at the end of the last interval, and up to when they are paid."""
        self.spent_usd, self.spent_rest_usd = spent_usd, spent_rest_usd
        """The sum of all lines, and what its rounding leaves out."""
        self.num_entries = num_entries

    def _sorted_holds(self) -> tuple[Hold, ...]:
        return tuple(self._holds[device_id] for device_id in sorted(self._holds))

    def close(
        self,
        usage: Sequence[Usage],
        since: ClusterState,
        now: ClusterState,
        *,
        traffic: Sequence[Traffic] = (),
        doubtful_pools: frozenset[str] = frozenset(),
    ) -> tuple[LedgerEntry, ...]:
        """Price the interval from ``since.now_s`` to ``now.now_s`` and return its new lines.

        Args:
            usage: What was held for the plan.
            since: The cluster at the start; its offers hold until those of ``now`` begin.
            now: The cluster at the end.
            traffic: Bytes that cost egress in this interval.
            doubtful_pools: Pools whose price is a guess; their lines are marked ``estimated``.
        """
        entries, in_use = [], {u.device_id for u in usage}
        known = {offer.pool for offer in since.offers}
        for held in _with_standing(usage, since, now):
            device = now.device(held.device_id) if now.has(held.device_id) else None
            device = device or since.device(held.device_id)
            new = now.offer(device.pool)
            prices = (since.offer(device.pool) if device.pool in known else new, new)
            entries += [
                self._entry(device, charge, estimated=device.pool in doubtful_pools)
                for charge in self._charges(
                    held, prices, "use" if held.device_id in in_use else "standing"
                )
            ]
        entries += [self._egress(sent, since, now) for sent in traffic if sent.size_bytes]
        parts = [self.spent_usd, self.spent_rest_usd, *(e.usd + e.egress_usd for e in entries)]
        self.spent_usd = math.fsum(parts)
        self.spent_rest_usd = math.fsum([*parts, -self.spent_usd])
        self.num_entries += len(entries)
        self._holds = {
            device_id: hold
            for device_id, hold in self._holds.items()
            if hold.until_s >= now.now_s - ROUNDING_S
        }
        self.holds = self._sorted_holds()
        return tuple(entries)

    def _charges(self, held: Usage, prices: tuple[Offer, Offer], cause: str) -> list[_Charge]:
        old, new = prices
        hold = self._holds.get(held.device_id)
        continued = hold is not None and held.from_s <= hold.until_s + ROUNDING_S
        paid_s = hold.paid_until_s if hold is not None and continued else held.from_s
        charges: list[_Charge] = []
        if not continued:
            offer = _in_force(old, new, paid_s)
            if offer.minimum_s > offer.quantum_s:
                charges.append(
                    _Charge(paid_s, paid_s + offer.minimum_s, offer.price_usd_per_s, "block")
                )
                paid_s = charges[-1].to_s
        while paid_s < held.to_s - ROUNDING_S:
            offer = _in_force(old, new, paid_s)
            end_s = held.to_s
            if offer is old and new.valid_from_s > paid_s:
                end_s = min(end_s, new.valid_from_s)
            if offer.quantum_s > 0:
                blocks = math.ceil((end_s - paid_s - ROUNDING_S) / offer.quantum_s)
                end_s = paid_s + max(1, blocks) * offer.quantum_s
            charges.append(_Charge(paid_s, end_s, offer.price_usd_per_s, cause))
            paid_s = end_s
        self._holds[held.device_id] = Hold(held.device_id, held.to_s, max(paid_s, held.to_s))
        return charges

    def _entry(self, device: Device, charge: _Charge, *, estimated: bool) -> LedgerEntry:
        return LedgerEntry(
            from_s=charge.from_s * self._speedup,
            to_s=charge.to_s * self._speedup,
            device=device.device_id,
            pool=device.pool,
            price_per_hour=charge.price_usd_per_s * 3600 / self._speedup,
            usd=charge.price_usd_per_s * (charge.to_s - charge.from_s),
            cause=charge.cause,
            estimated=estimated,
        )

    def _egress(self, sent: Traffic, since: ClusterState, now: ClusterState) -> LedgerEntry:
        return LedgerEntry(
            from_s=since.now_s * self._speedup,
            to_s=now.now_s * self._speedup,
            device=sent.device_id,
            pool=sent.pool,
            price_per_hour=0.0,
            usd=0.0,
            egress_bytes=sent.size_bytes,
            egress_usd=sent.usd,
            cause="egress",
        )


def slot_bill_bound_usd(cluster: ClusterState, slot_s: float, egress_usd_per_s: float) -> float:
    """Most that a slot can be billed: every device held all the time, one block each paid ahead.

    This is C_max of docs/model.md, section 4.2, for the prices in force.
    """
    blocks = math.fsum(
        offer.price_usd_per_s * (slot_s + max(offer.minimum_s, offer.quantum_s))
        for offer in (cluster.offer(device.pool) for device in cluster.devices)
    )
    return blocks + egress_usd_per_s * slot_s


def _with_standing(
    usage: Sequence[Usage], since: ClusterState, now: ClusterState
) -> tuple[Usage, ...]:
    """Intervals to bill: as used, but all the time for devices billed while present."""
    present = set[str]()
    for cluster in (since, now):
        pools = {offer.pool for offer in cluster.offers if offer.billed == "while_present"}
        present |= {device.device_id for device in cluster.devices if device.pool in pools}
    whole = [Usage(device_id, since.now_s, now.now_s) for device_id in present]
    billed = [u for u in usage if u.device_id not in present] + whole
    return tuple(sorted((u for u in billed if u.to_s > u.from_s), key=_order))


def _order(usage: Usage) -> tuple[str, float]:
    return usage.device_id, usage.from_s


def _in_force(old: Offer, new: Offer, at_s: float) -> Offer:
    return new if at_s >= new.valid_from_s - ROUNDING_S else old
