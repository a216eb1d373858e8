"""Ray's autoscaler as the provider of machines: asked through its SDK, for as long as a run."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import ray

from orchestrator.config import RunConfig
from orchestrator.control.records import Clock
from orchestrator.control.scaling import Autoscaler, AutoscalerOptions, PoolLimits, Scaler
from orchestrator.runtime.inventory import POOL_RESOURCE
from orchestrator.runtime.presence import RayPresence
from orchestrator.runtime.rig import Rig

logger = logging.getLogger(__name__)

GRACE_SLOTS = 2.0
"""A device that is given back is under notice for so many slots: the plan does without it then."""

Bundles = list[dict[str, float]]


class RayProvisioner:
    """Asks for one bundle ``{"lyray.pool.POOL": 1}`` a device; see ``Provisioner``.

    Ray keeps one such request for the whole cluster, the newest, until another replaces it.
    """

    def __init__(
        self, presence: RayPresence, grace_s: float, ask: Callable[[Bundles], None] | None = None
    ) -> None:
        """``ask``: sends the whole request; None: to the autoscaler of the cluster."""
        self._presence, self._grace_s, self._ask = presence, grace_s, ask or _ask_ray
        self._asked: dict[str, int] | None = None

    def request(self, counts: Mapping[str, int], released: frozenset[str]) -> None:
        """See ``Provisioner``. An autoscaler that cannot be reached is asked again next time."""
        self._presence.give_back(released, counts, self._grace_s)
        if counts == self._asked:
            return
        try:
            self._ask([{f"{POOL_RESOURCE}{p}": 1.0} for p, n in counts.items() for _ in range(n)])
        except (RuntimeError, ConnectionError, ValueError) as error:
            logger.warning("Ray's autoscaler cannot be asked: %s", error)
        else:
            self._asked = dict(counts)


@contextmanager
def asking(options: AutoscalerOptions) -> Iterator[None]:
    """Whatever happens inside, nothing is asked for any more when the block ends."""
    try:
        yield
    finally:
        if options.enabled and ray.is_initialized():
            try:
                _ask_ray([])
            except (RuntimeError, ConnectionError) as error:
                logger.warning("the request to Ray's autoscaler may still stand: %s", error)


def autoscaler_of(config: RunConfig, rig: Rig) -> Autoscaler | None:
    """What decides on devices and who brings them; None where nobody is to be asked."""
    options = config.cluster.autoscaler
    if not options.enabled or rig.nodes is None:
        return None
    slot_s, limits = config.control.slot_s, dict[str, PoolLimits]()
    for offer in config.cluster.offers:
        mine = [device for device in rig.cluster.devices if device.pool == offer.pool]
        if offer.max_count is not None:
            size = sum(device.node_id == mine[0].node_id for device in mine)
            size = size or offer.devices_per_node
            limits[offer.pool] = PoolLimits(offer.min_count, offer.max_count, size)
    scaler = Scaler(options, limits, slot_s=slot_s, clock=Clock())
    return Autoscaler(scaler, RayProvisioner(rig.nodes, GRACE_SLOTS * slot_s), rig.rentable)


def _ask_ray(bundles: Bundles) -> None:
    from ray.autoscaler.sdk import (  # noqa: PLC0415 - loads the launcher's code
        request_resources,
    )

    request_resources(bundles=bundles)
