"""When one more device of a pool is asked for, and when one is given back."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from orchestrator.control.quarantine import Quarantine
from orchestrator.control.records import Clock

if TYPE_CHECKING:
    from orchestrator.core.cluster import ClusterState, Device
    from orchestrator.core.plan import Plan
    from orchestrator.planning.margins import MarginalValues


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerOptions:
    """YAML ``cluster.autoscaler``: whether Ray's autoscaler is asked for devices."""

    enabled: bool = False
    """Pools with ``max_count`` are asked for and given back."""

    confirm_slots: int = 3
    """Slots in a row in which one more device must pay before it is asked for."""

    idle_slots: int = 10
    """Slots in a row for which a node must stand idle beside the plan before it is given back."""

    launch_timeout_s: float = 600.0
    """What was asked for and has not come after so many seconds is no longer asked for."""

    def __post_init__(self) -> None:
        for name in ("confirm_slots", "idle_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; write 1 or more")
        if not self.launch_timeout_s > 0:
            raise ValueError(f"launch_timeout_s is {self.launch_timeout_s}; it must be positive")


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """How many devices of a pool there may be; nodes come and go as a whole."""

    min_count: int
    max_count: int
    devices_per_node: int = 1


class Provisioner(Protocol):
    """Whoever makes machines come and go. What it is asked for may come late, or never."""

    def request(self, counts: Mapping[str, int], released: frozenset[str]) -> None:
        """Have so many devices of these pools, and take away those that are given back.

        Args:
            counts: Devices by pool, those that are there among them; the whole wish, every time.
            released: Devices that are given back from now on. The plan may still have some of
                them: they are under notice before they go.
        """


@dataclass(frozen=True, slots=True)
class Scene:
    """What a slot's end shows of devices and of what one more is worth."""

    cluster: "ClusterState"
    plan: "Plan"
    """What runs from now on."""

    step_s: float
    """Its predicted step time; 0 where nothing runs."""

    values: "MarginalValues | None"
    """None: nobody knows in this slot."""

    @property
    def used(self) -> frozenset[str]:
        """Devices of the plan."""
        return frozenset(self.plan.device_ids)

    def unprofitable(self, pool: str, ran: "Ran") -> frozenset[str]:
        """Devices of a plan whose price would bring more elsewhere than their share of samples.

        Only of a pool that is billed while it is present: of others the plan leaves them idle. A
        device's share is its part of what its group makes, by the prices in the group; more
        than that the run cannot lose with it. The group that makes most for its price is
        spared: the model fits on its devices, whatever goes.
        """
        cluster, offer = self.cluster, self.cluster.offer(pool)
        if offer.billed != "while_present" or self.values is None:
            return frozenset()
        worth = {}  # samples per dollar of each group that is there
        for group in ran.plan.groups:
            if all(map(cluster.has, group.device_ids)):
                usd_per_s = sum(map(cluster.price_usd_per_s, group.device_ids))
                worth[group] = group.num_samples / ran.step_s / usd_per_s
        best = max(worth, key=lambda group: worth[group], default=None)
        price_of_money = self.values.price_of_money_samples_per_usd
        poor = [g for g, samples_per_usd in worth.items() if samples_per_usd < price_of_money]
        devices = (d for group in poor if group is not best for d in group.device_ids)
        return frozenset(d for d in devices if cluster.device(d).pool == pool)


@dataclass(frozen=True, slots=True)
class Ran:
    """The plan that ran last, and its predicted step time."""

    plan: "Plan"
    step_s: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """What is wished for from now on, and why it changed."""

    counts: Mapping[str, int]
    released: frozenset[str] = frozenset()
    reasons: tuple[str, ...] = ()


@dataclass(slots=True)
class _Pool:
    """What is remembered of a pool."""

    wanted: int
    asked_s: float | None = None  # since when more is wanted than there is
    num_paying: int = 0  # slots in a row
    samples_per_s: float = 0.0  # that one more was worth, when it was last known
    too_many: Counter[str] = field(default_factory=Counter)  # slots in a row, by device


class Scaler:
    """Wishes for devices slot by slot. Nothing ever waits for a wish to come true.

    One more is wished for when its price has been below what it is worth (``pays below``) for
    some slots while no device of the pool stood idle. A node is given back when no plan has used
    it for some slots; or, where it is billed while it is present, so that leaving it idle saves
    nothing, when its dollars would have brought more elsewhere than its share of the samples. A
    run that waits for money goes by the plan that ran last.
    What does not come in time is given up. Each further time that a pool's device was given
    back, or did not come, the pool is left alone for twice as long. A budget that cannot be kept
    lets nothing be asked for: the price of money rises until no device pays.
    """

    def __init__(
        self,
        options: AutoscalerOptions,
        pools: Mapping[str, PoolLimits],
        *,
        slot_s: float,
        clock: Clock,
    ) -> None:
        """``pools``: those that may be asked for; ``clock``: tells prices as people do."""
        self._options, self._limits, self._clock = options, pools, clock
        self._pools: dict[str, _Pool] = {}
        self._going: frozenset[str] = frozenset()  # given back, and still seen
        self._ran: Ran | None = None
        self._rest = Quarantine(options.idle_slots * slot_s)

    def look(self, scene: Scene) -> Scaling:
        """What to wish for after this slot."""
        seen = {device.device_id for device in scene.cluster.devices}
        self._going &= seen
        if scene.used:
            self._ran = Ran(scene.plan, scene.step_s)
        reasons, released = list[str](), set[str]()
        for pool in self._limits:
            present = self._present(scene, pool)
            known = self._pools.setdefault(pool, _Pool(wanted=len(present)))
            reasons += self._follow(pool, known, len(present), scene.cluster.now_s)
            self._note(pool, known, present, scene)
        if reason := self._ask(scene):
            reasons.append(reason)
        for pool, known in self._pools.items():
            node = self._superfluous(pool, known, self._present(scene, pool))
            if node:
                released.update(node)
                known.wanted -= len(node)
                self._rest.lost(pool, scene.cluster.now_s)
                worked = self._ran is not None and set(self._ran.plan.device_ids) & set(node)
                why = "dearer than what it brings" if worked else "idle"
                reasons.append(
                    f"pool {pool}: {', '.join(sorted(node))} given back, {why} for "
                    f"{self._options.idle_slots} slots; {known.wanted} wanted"
                )
        self._going |= released
        counts = {pool: known.wanted for pool, known in self._pools.items()}
        return Scaling(counts, frozenset(released), tuple(reasons))

    def _present(self, scene: Scene, pool: str) -> list["Device"]:
        """Devices of a pool that are there and have not been given back."""
        return [
            device
            for device in scene.cluster.devices
            if device.pool == pool and device.device_id not in self._going
        ]

    def _follow(self, pool: str, known: _Pool, present: int, now_s: float) -> Iterable[str]:
        """Take note of what came and what went; give up what does not come."""
        if present >= known.wanted:
            known.wanted, known.asked_s = present, None
            return
        if known.asked_s is None:
            known.asked_s = now_s  # one was lost: another may come in its place
        if now_s - known.asked_s < self._options.launch_timeout_s:
            return
        missing, known.wanted, known.asked_s = known.wanted - present, present, None
        self._rest.lost(pool, now_s)
        yield (
            f"pool {pool}: {missing} asked for {self._options.launch_timeout_s:.0f} s ago did not "
            f"come; {present} wanted"
        )

    def _note(self, pool: str, known: _Pool, present: list["Device"], scene: Scene) -> None:
        """Count slots in which one more pays, and in which devices stand idle beside a plan."""
        too_many = set[str]()
        if self._ran is not None:  # a run that waits for money goes on with it
            ids = {device.device_id for device in present}
            too_many = ids.difference(self._ran.plan.device_ids)
            too_many |= ids & scene.unprofitable(pool, self._ran)
        known.too_many = Counter({d: known.too_many[d] + 1 for d in too_many})
        waits = known.asked_s is not None  # with it here, a further one is worth something else
        pays = bool(scene.used) and not too_many and not waits and self._pays(pool, known, scene)
        known.num_paying = known.num_paying + 1 if pays else 0

    def _pays(self, pool: str, known: _Pool, scene: Scene) -> bool:
        """Whether one more brings more samples than its dollars would elsewhere."""
        if scene.values is None:
            return False
        for worth in scene.values.devices:
            if worth.pool == pool:
                known.samples_per_s = worth.samples_per_s
        offer = scene.cluster.offer(pool)
        if offer.is_too_dear:
            return False  # no plan would have it
        cost_samples_per_s = offer.price_usd_per_s * scene.values.price_of_money_samples_per_usd
        return known.samples_per_s > cost_samples_per_s

    def _ask(self, scene: Scene) -> str | None:
        """Wish for one more node, of the pool that brings most for its price.

        What one more is worth is known beside what is there, and not beside others that are
        asked for: so it is one at a time, and all count anew after it.
        """
        now_s, offer = scene.cluster.now_s, scene.cluster.offer
        ready = [
            pool
            for pool, known in self._pools.items()
            if known.num_paying >= self._options.confirm_slots
            and known.wanted + self._limits[pool].devices_per_node <= self._limits[pool].max_count
            and not self._rest.holds(pool, now_s)
        ]
        if not ready:
            return None
        best = max(ready, key=lambda p: self._pools[p].samples_per_s / offer(p).price_usd_per_s)
        for known in self._pools.values():
            known.num_paying = 0
        chosen, more = self._pools[best], self._limits[best].devices_per_node
        chosen.wanted, chosen.asked_s = chosen.wanted + more, now_s
        price = self._clock.per_hour(offer(best).price_usd_per_s)
        return (
            f"pool {best}: {more} more asked for; one would add {chosen.samples_per_s:.4g} "
            f"samples/s, which at {price:.4g} $/h has paid for {self._options.confirm_slots} "
            f"slots; {chosen.wanted} wanted"
        )

    def _superfluous(self, pool: str, known: _Pool, present: list["Device"]) -> list[str]:
        """The devices of a node that nothing has used for long, the one that came last."""
        nodes: dict[str, list[str]] = {}
        for device in present:
            nodes.setdefault(device.node_id, []).append(device.device_id)
        for devices in reversed(nodes.values()):
            idle = all(known.too_many[d] >= self._options.idle_slots for d in devices)
            if idle and len(present) - len(devices) >= self._limits[pool].min_count:
                return devices
        return []


@dataclass(frozen=True, slots=True)
class Autoscaler:
    """Who decides on devices, and who brings them."""

    scaler: Scaler
    provisioner: Provisioner
    rentable: tuple["Device", ...] = ()
    """A device, as it would be, of each pool that had none at the start."""

    def follow(self, scene: Scene) -> Scaling:
        """Wish for what a slot's end shows, and say what changed."""
        scaling = self.scaler.look(scene)
        self.provisioner.request(scaling.counts, scaling.released)
        return scaling
