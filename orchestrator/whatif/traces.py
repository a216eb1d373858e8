"""What a file itself tells of its cluster's future: emulated events and the price feed."""

from collections.abc import Iterable

from orchestrator.config import RunConfig
from orchestrator.core.cluster import ClusterState
from orchestrator.errors import ConfigError
from orchestrator.inputs import read_text
from orchestrator.reports import figures
from orchestrator.simulation.traces import TraceEvent, emulated_trace, price_trace


def traces_of(config: RunConfig) -> tuple[TraceEvent, ...]:
    """The events of a file, in seconds of the run.

    Raises:
        ConfigError: If the price feed cannot be read or says something impossible.
    """
    speedup = config.emulation.billing_speedup
    events = emulated_trace(config.emulation.happenings, billing_speedup=speedup)
    feed = config.cluster.price_feed
    if feed is None:
        return events
    name = f"cluster.price_feed.path {feed.path!r}"
    lines = read_text(feed.path, name, "give a CSV file").splitlines()
    pools = {offer.pool for offer in config.cluster.offers}
    try:
        return (*events, *price_trace(lines, pools, billing_speedup=speedup))
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def price_notes(
    config: RunConfig, traces: Iterable[TraceEvent], cluster: ClusterState
) -> list[str]:
    """Which prices a plan was made at, where a feed has a say; ``cluster``: as planned for."""
    if config.cluster.price_feed is None:
        return []
    per_hour = 3600.0 / config.emulation.billing_speedup
    read = {e.pool for e in traces if e.read and e.at_s is not None and e.at_s <= 0}
    shown = [
        f"{offer.pool} {figures.usd(offer.price_usd_per_s * per_hour)}/h"
        + ("" if offer.pool in read else " (its offer's, no row yet)")
        for offer in cluster.offers
    ]
    return [f"Prices at second 0 of cluster.price_feed: {', '.join(shown)}."]
