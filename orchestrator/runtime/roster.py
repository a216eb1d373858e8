"""The devices of a run as they come, are about to go, and go; their workers follow them."""

import logging
from collections.abc import Iterable

from orchestrator.control.quarantine import Quarantine
from orchestrator.core.cluster import Device, Offer
from orchestrator.core.slot import ClusterEvent, DeviceJoined, DeviceLost, PreemptionNotice
from orchestrator.runtime.rig import Rig
from orchestrator.runtime.trouble import Loss
from orchestrator.runtime.watch import Watch

logger = logging.getLogger(__name__)


class Roster:
    """Who is there: gives every device a worker, and takes it from those that went."""

    def __init__(
        self, rig: Rig, *, slot_s: float, start_s: float, next_step: int, now_s: float
    ) -> None:
        """Take a first look; changes nothing.

        Args:
            rig: Workers that are loaded and connected.
            slot_s: Length of a slot, by which a device that fails again and again is kept away.
            start_s: Longest time for a new worker to get ready.
            next_step: Where the run stands.
            now_s: On the run's clock.
        """
        self._presence, self._crew, self._fleet = rig.presence, rig.crew, rig.crew.fleet
        self._start_s = start_s
        self._devices = {device.device_id: device for device in rig.cluster.devices}
        self._quarantine = Quarantine(slot_s)
        self._sight = self._presence.look(next_step, now_s)

    @property
    def notices(self) -> tuple[PreemptionNotice, ...]:
        """One for every device that is about to go."""
        return tuple(PreemptionNotice(d, at_s) for d, at_s in self._sight.leaving_s.items())

    @property
    def leaving(self) -> frozenset[str]:
        """Devices that are about to go, and those that went, but whose loss is not heard yet."""
        return frozenset(self._sight.leaving_s) | (
            set(self._fleet.device_ids) - self._sight.present.keys()
        )

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices that have a worker, those about to go among them.

        One that went counts until its loss is heard: so long it is held, and has to have a price.
        """
        there = set(self._fleet.device_ids)
        return tuple(d for d in self._devices.values() if d.device_id in there)

    @property
    def is_empty(self) -> bool:
        """Whether no device is there, with or without a worker."""
        return not self._sight.present

    def offers(self) -> tuple[Offer, ...]:
        """Prices in force."""
        return self._presence.offers()

    def is_repriced(self, since: Iterable[Offer]) -> bool:
        """Whether a price is another one now; that it was read again is no news."""
        was = {offer.pool: offer.price_usd_per_s for offer in since}
        return any(o.price_usd_per_s != was.get(o.pool, o.price_usd_per_s) for o in self.offers())

    def look(self, watch: Watch, now_s: float) -> list[ClusterEvent]:
        """See who has come and who is about to go; start workers where there are none.

        Args:
            watch: Told of devices that have a worker again, and of such that are of no use: who
                does not reach all others does not join.
            now_s: On the run's clock.
        """
        fleet, before, events = self._fleet, self._sight, list[ClusterEvent]()
        sight = self._sight = self._presence.look(watch.progress.next_step, now_s)
        for device_id in fleet.device_ids:
            if device_id not in sight.present:
                fleet.kill(device_id)  # heard of as any other loss
        for device_id in fleet.recruited - sight.present.keys():
            fleet.dismiss(device_id)
        for device_id in sight.leaving_s.keys() - before.leaving_s.keys():
            events.append(PreemptionNotice(device_id, sight.leaving_s[device_id]))
        for device_id in before.leaving_s.keys() & sight.present.keys() - sight.leaving_s.keys():
            events.append(DeviceJoined(sight.present[device_id].device))  # called off
        known = {*fleet.device_ids, *fleet.recruited, *sight.leaving_s}
        for device_id in sorted(sight.present.keys() - known):
            if not (fleet.device_ids and self._quarantine.holds(device_id, now_s)):
                self._crew.enlist(sight.present[device_id].place)
        return events + self._muster(watch, now_s)

    def _muster(self, watch: Watch, now_s: float) -> list[ClusterEvent]:
        """Take in new workers that are ready and reach all others."""
        ready, losses = self._fleet.muster(self._start_s)
        for loss in losses:
            logger.warning("device %s: %s", loss.device_id, loss.reason)
            self._quarantine.lost(loss.device_id, now_s)
        for device_id in ready:
            watch.welcome(device_id)
        if ready:
            self._crew.part(watch, ready)
        there = [d for d in ready if d in self._fleet.device_ids]
        self._devices |= {d: self._sight.present[d].device for d in there}
        return [DeviceJoined(self._devices[device_id]) for device_id in there]

    def strike(self, loss: Loss, next_step: int, now_s: float) -> DeviceLost:
        """Take note of a loss; whoever was not taken away is kept off for a while."""
        preempted = self._presence.is_preemption(loss.device_id)
        if not preempted:
            self._quarantine.lost(loss.device_id, now_s)
        return DeviceLost(loss.device_id, f"{loss.reason} (step {next_step})", preempted)
