"""From the user's link rules to the paths between nodes, pools and zones."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import permutations, product

from orchestrator.control.backend import LinkOptions
from orchestrator.core.cluster import Device, Link
from orchestrator.errors import ConfigError

GB = 1e9

_FIGURES = "latency_s: ..., bandwidth_gbytes_per_s: ..."


def build_links(
    devices: Iterable[Device],
    rules: Sequence[LinkOptions],
    *,
    time_scale: float = 1.0,
) -> tuple[Link, ...]:
    """Links inside every node and zone, between zones, and of pools with rules of their own.

    Rules that name pools win over those that do not; a rule for the ordered pair over the
    reversed pair's; of equal rules the last one. A node without a rule of its own falls back
    to its pool's and its zone's. ``time_scale`` slows all links down.

    Raises:
        ConfigError: If two devices are joined by no rule.
    """
    rulebook = _Rules(tuple(devices), rules)
    rulebook.check()
    return tuple(_link(source, target, rule, time_scale) for source, target, rule in rulebook.all())


class _Rules:
    """The rule that counts for each node, pair of pools and pair of zones of some devices."""

    def __init__(self, devices: Sequence[Device], rules: Sequence[LinkOptions]) -> None:
        self.zone_of = {d.pool: d.zone for d in sorted(devices, key=lambda d: d.pool)}
        self.zones = sorted({d.zone for d in devices})
        self.nodes = sorted({(d.node_id, d.pool) for d in devices})
        self._devices = devices
        self._within = {(r.within, r.pool): r for r in rules if r.within is not None}
        self._between = {r.between: r for r in rules if r.between is not None}

    def all(self) -> Iterator[tuple[str, str, LinkOptions]]:
        """Ends and rule of every link, the inside of nodes first."""
        for node, pool in self.nodes:
            if rule := self.inside_node(pool):
                yield node, node, rule
        for source, target in product(self.zone_of, repeat=2):
            if rule := self.pools(source, target):
                yield source, target, rule
        for zone in self.zones:
            if rule := self._within.get(("zone", None)):
                yield zone, zone, rule
        for source, target in permutations(self.zones, 2):
            if rule := self.between(source, target):
                yield source, target, rule

    def inside_node(self, pool: str) -> LinkOptions | None:
        return self._within.get(("node", pool)) or self._within.get(("node", None))

    def pools(self, source: str, target: str) -> LinkOptions | None:
        """The rule that names these pools. A name that is a zone's too means the zone."""
        if source == target:
            return self._within.get(("zone", source))
        if {source, target} <= set(self.zones):
            return None
        return self.between(source, target)

    def between(self, source: str, target: str) -> LinkOptions | None:
        return self._between.get((source, target)) or self._between.get((target, source))

    def check(self) -> None:
        """Raise ConfigError on the first pair of devices that no rule joins."""
        inner = self._within.get(("zone", None))
        for pool, zone in self.zone_of.items():
            if not (inner or self.pools(pool, pool)) and self._needs_own(pool):
                raise ConfigError(
                    f"cluster.links says nothing of links inside zone {zone!r}; add "
                    f"{{within: zone, {_FIGURES}}} (or with pool: {pool})"
                )
        for source, target in permutations(self.zone_of, 2):
            zones = (self.zone_of[source], self.zone_of[target])
            wider = inner if zones[0] == zones[1] else self.between(*zones)
            if wider or self.pools(source, target):
                continue
            if zones[0] == zones[1]:
                raise ConfigError(
                    f"cluster.links says nothing of links inside zone {zones[0]!r} from pool "
                    f"{source!r} to {target!r}; add {{between: [{source}, {target}], {_FIGURES}}}, "
                    "or {within: zone, ...} for all pools"
                )
            raise ConfigError(
                f"cluster.links says nothing of links from zone {zones[0]!r} to {zones[1]!r}; add "
                f"{{between: [{zones[0]}, {zones[1]}], {_FIGURES}}} (or between their pools)"
            )

    def _needs_own(self, pool: str) -> bool:
        """Whether devices of the pool meet over more than the inside of a node."""
        members = [d.node_id for d in self._devices if d.pool == pool]
        return len(members if self.inside_node(pool) is None else set(members)) > 1


def _link(source: str, target: str, rule: LinkOptions, time_scale: float) -> Link:
    gbytes_per_s = rule.bandwidth_gbytes_per_s
    points = tuple((size, rate / time_scale) for size, rate in rule.points)
    return Link(
        source=source,
        target=target,
        latency_s=rule.latency_s * time_scale,
        bandwidth_bytes_per_s=points[-1][1]
        if gbytes_per_s is None
        else gbytes_per_s * GB / time_scale,
        egress_usd_per_byte=rule.egress_usd_per_gb / GB,
        points=points,
    )
