"""The whole loop with a provider of machines that is slow, or delivers nothing at all."""

from collections.abc import Generator, Mapping
from dataclasses import replace

import simpy
from numpy.random import Generator as Rng

from orchestrator.control.records import Clock
from orchestrator.control.scaling import Autoscaler, AutoscalerOptions, PoolLimits, Scaler
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.cluster import ClusterState
from orchestrator.planning.lyapunov import ControlOptions
from orchestrator.simulation.backend import SimulatedBackend, SimulationOptions
from orchestrator.simulation.traces import TraceEvent
from orchestrator.simulation.world import World
from tests.simulation.closed_loop import (
    GLOBAL_BATCH,
    SLOT_S,
    Rehearsal,
    demo_cluster,
    demo_model,
    rehearsal,
    training_of,
)  # fmt: skip

OPTIONS = AutoscalerOptions(enabled=True, confirm_slots=3, idle_slots=5, launch_timeout_s=600.0)
NUM_SAMPLES = 60_000


class Provider:
    """Machines on the virtual clock: what is missing comes so much later, or never."""

    def __init__(self, delay_s: float | None) -> None:
        self._delay_s, self._counts, self._released = delay_s, dict[str, int](), set[str]()
        self.wishes: list[Mapping[str, int]] = []

    def request(self, counts: Mapping[str, int], released: frozenset[str]) -> None:
        self._counts = dict(counts)
        self._released |= released
        if not self.wishes or self.wishes[-1] != counts:
            self.wishes.append(dict(counts))

    def run(
        self, env: simpy.Environment, rng: Rng, world: World
    ) -> Generator[simpy.Event, object, None]:
        missing_s: dict[str, float] = {}
        while True:
            yield env.timeout(SLOT_S / 2)
            world.announce(self._released, env.now + 2 * SLOT_S)
            for pool, count in self._counts.items():
                if len(world.present(pool)) >= count:
                    missing_s.pop(pool, None)
                elif self._delay_s is not None and (
                    env.now - missing_s.setdefault(pool, env.now) >= self._delay_s
                ):
                    world.join(pool)
                    del missing_s[pool]


def grow(
    provider: Provider | None, *, usd_per_hour: float = 50.0, events: tuple[TraceEvent, ...] = (),
    cluster: ClusterState | None = None, pool: str = "slow",
) -> Rehearsal:  # fmt: skip
    """The demo cluster, of which one pool may grow to four devices."""
    cluster = cluster or demo_cluster()
    num_steps = -(-NUM_SAMPLES // GLOBAL_BATCH)
    backend = SimulatedBackend(
        cluster, demo_model(), training_of(num_steps),
        SimulationOptions(
            slot_s=SLOT_S, num_samples=NUM_SAMPLES, streams=(provider,) if provider else ()
        ),
        events,
    )  # fmt: skip
    scaler = Scaler(OPTIONS, {pool: PoolLimits(0, 4)}, slot_s=SLOT_S, clock=Clock())
    return rehearsal(
        budget=BudgetOptions(average_per_hour_usd=usd_per_hour),
        cluster=cluster,
        num_samples=NUM_SAMPLES,
        control=ControlOptions(slot_s=SLOT_S),
        backend=backend,
        autoscaler=Autoscaler(scaler, provider) if provider else None,
    )


def test_a_device_that_pays_is_asked_for_comes_and_makes_the_run_faster() -> None:
    provider = Provider(delay_s=3 * SLOT_S)
    found, alone = grow(provider, pool="fast").run(20), grow(None).run(20)
    assert provider.wishes == [{"fast": 2}, {"fast": 3}]
    last, before = found.records[-1], alone.records[-1]
    assert dict(last.requested) == {"fast": 3}
    assert "fast-2" in last.next_plan.device_ids
    assert last.measured.samples_per_s is not None
    assert before.measured.samples_per_s is not None
    assert last.measured.samples_per_s > 1.2 * before.measured.samples_per_s
    kinds = [event.kind for event in found.events]
    assert (kinds.count("scale"), kinds.count("joined")) == (1, 1)
    assert last.spent_usd <= last.budget_usd + last.overspend_bound_usd


def test_a_run_goes_on_with_what_is_there_where_nothing_ever_comes() -> None:
    """ray-project/ray#24875, #52202, #62483: what is PENDING may stay so; nothing waits for it."""
    provider = Provider(delay_s=None)
    found, alone = grow(provider).run(20), grow(None).run(20)
    assert {"slow": 3} in provider.wishes
    assert any("did not come" in event.detail for event in found.events)
    assert [r.samples for r in found.records] == [r.samples for r in alone.records]
    assert [r.next_plan for r in found.records] == [r.next_plan for r in alone.records]


def test_a_pool_whose_price_rises_is_given_back_and_leaves_the_bill() -> None:
    cluster = demo_cluster()
    present = (replace(offer, billed="while_present") for offer in cluster.offers[-1:])
    cluster = replace(cluster, offers=(*cluster.offers[:-1], *present))
    dear = TraceEvent(at_s=10 * SLOT_S, pool="slow", price_usd_per_s=20.0 / 3600)
    provider = Provider(delay_s=SLOT_S)
    found = grow(provider, usd_per_hour=9.0, events=(dear,), cluster=cluster).run(30)
    assert provider.wishes[-1] == {"slow": 0}
    last = found.records[-1]
    assert not [device for device in last.devices if device.pool == "slow"]
    why = [event.detail for event in found.events if event.kind == "scale"]
    assert any("given back, dearer than what it brings for 5 slots" in text for text in why)
    gone_s = next(r.time_s for r in found.records if dict(r.requested) == {"slow": 0})
    slow = [entry for entry in found.ledger if entry.pool == "slow"]
    assert max(entry.to_s for entry in slow) <= gone_s + 3 * SLOT_S
    assert not any(event.kind == "recovered" for event in found.events), "it was left in time"
