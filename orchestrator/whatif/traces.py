"""What is known of a cluster's future before a run: emulated events and the price feed."""

from collections.abc import Iterable
from functools import lru_cache

from orchestrator.config import RunConfig
from orchestrator.control.backend import PriceFeedOptions
from orchestrator.core.cluster import ClusterState
from orchestrator.errors import ConfigError
from orchestrator.inputs import read_text
from orchestrator.price_sources import make_source
from orchestrator.reports import figures
from orchestrator.simulation.traces import TraceEvent, emulated_trace, price_trace
from orchestrator.telemetry.price_rows import Reading


def traces_of(config: RunConfig, *, ask: bool = True) -> tuple[TraceEvent, ...]:
    """The events of a file, in seconds of the run.

    A server of prices is asked once, and what it says holds to the end: nobody knows its future.

    Args:
        config: The whole file.
        ask: False leaves the server out.

    Raises:
        ConfigError: If the price feed cannot be read or says something impossible.
    """
    speedup = config.emulation.billing_speedup
    events = emulated_trace(config.emulation.happenings, billing_speedup=speedup)
    feed = config.cluster.price_feed
    pools = tuple(offer.pool for offer in config.cluster.offers)
    if feed is None or (feed.path is None and not ask):
        return events
    if feed.path is None:
        rows = _asked(feed, pools).rows
        return (*events, *(_held(row.pool, row.price_per_hour / 3600 * speedup) for row in rows))
    name = f"cluster.price_feed.path {feed.path!r}"
    lines = read_text(feed.path, name, "give a CSV file").splitlines()
    try:
        return (*events, *price_trace(lines, pools, billing_speedup=speedup))
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


@lru_cache(maxsize=8)
def _asked(feed: PriceFeedOptions, pools: tuple[str, ...]) -> Reading:
    """What a server says, asked once a process: plans are compared at equal prices."""
    source = make_source(feed, pools)
    try:
        return source.read()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source.name}: {error}; mend it, or take the prices of the offers with "
            "--set cluster.price_feed=null"
        ) from None


def _held(pool: str, listed_usd_per_s: float) -> TraceEvent:
    return TraceEvent(at_s=0.0, pool=pool, price_usd_per_s=listed_usd_per_s)


def price_notes(
    config: RunConfig, traces: Iterable[TraceEvent], cluster: ClusterState
) -> list[str]:
    """Which prices a plan was made at, where a feed has a say; ``cluster``: as planned for."""
    if config.cluster.price_feed is None:
        return []
    per_hour = 3600.0 / config.emulation.billing_speedup
    read = {e.pool for e in traces if e.pool and e.at_s is not None and e.at_s <= 0}
    shown = [
        f"{offer.pool} {figures.usd(offer.price_usd_per_s * per_hour)}/h"
        + ("" if offer.pool in read else " (its offer's, no row yet)")
        for offer in cluster.offers
    ]
    return [f"Prices at second 0 of cluster.price_feed: {', '.join(shown)}."]
