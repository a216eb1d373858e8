"""Streams that change the true cluster: recorded, Markov, correlated, fail-slow; all seeded."""

from statistics import mean

import numpy as np
import pytest

from benchmarks.builders import make_cluster, make_device
from benchmarks.reference_world import reference_world
from orchestrator.core.cluster import ClusterState, Link
from orchestrator.core.slot import DeviceJoined, DeviceLost, PreemptionNotice
from orchestrator.simulation.environments import Environment, Level, MarkovChain
from orchestrator.simulation.preemptions import read_node_trace
from orchestrator.simulation.streams import Chain, Losses, Preemptions, Slowdowns, Stream
from orchestrator.simulation.world import World

LINKS = (
    *(Link(z, z, 1e-4, 6e9) for z in ("z1", "z2")),
    *(Link(a, b, 1e-3, 1e9) for a, b in (("z1", "z2"), ("z2", "z1"))),
)
CLUSTER = make_cluster(
    [make_device(f"spot-{i}", kind="gpu", node_id=f"spot-node{i}") for i in range(4)],
    links=LINKS,
)
POOL = CLUSTER.devices[0].pool
WEEK_S = 7 * 86400.0


def worlds_events(stream: Stream, end_s: float, *, seed: int = 0) -> list[tuple[float, str]]:
    """(time, what) of every loss and join."""
    world, found = World(CLUSTER, (), (stream,), seed=seed), []
    while (now_s := world.next_event_s()) <= end_s:
        for event in world.advance(now_s, 0)[0]:
            what = "lost" if isinstance(event, DeviceLost) else "joined"
            assert isinstance(event, DeviceLost | DeviceJoined)
            found.append((now_s, what))
    return found


def test_a_recorded_trace_sets_the_pool_and_replays_it_anew_at_its_end() -> None:
    trace = read_node_trace(["0,add,a", "0,add,b", "60000,remove,a", "60000,remove,b"])
    world = World(CLUSTER, (), (Preemptions(POOL, trace),))
    events, _ = world.advance(0.0, 0)
    assert [e.device_id for e in events if isinstance(e, DeviceLost)] == ["spot-2", "spot-3"]
    events, _ = world.advance(60.0, 0)
    assert [type(e) for e in events] == [DeviceLost, DeviceLost, DeviceJoined, DeviceJoined]
    assert [d.device_id for d in world.cluster.devices] == ["spot-4", "spot-5"]


def test_a_run_may_begin_inside_a_trace_or_with_no_device_at_all() -> None:
    trace = read_node_trace(["480000,add,a", "500000,add,b", "520000,remove,a"])
    early = World(CLUSTER, (), (Preemptions(POOL, trace, repeat=False),))
    early.advance(0.0, 0)
    assert early.cluster.devices == ()
    late = World(CLUSTER, (), (Preemptions(POOL, trace, start_s=510.0, repeat=False),))
    late.advance(0.0, 0)
    assert [d.device_id for d in late.cluster.devices] == ["spot-0", "spot-1"]
    late.advance(10.0, 0)
    assert [d.device_id for d in late.cluster.devices] == ["spot-1"]


def test_nodes_of_a_trace_are_announced_before_they_go_also_while_others_are() -> None:
    """ray-project/ray#63968, #66225: 30 to 120 s of notice; notices overlap."""
    trace = read_node_trace(["0,add,a", "0,add,b", "300000,remove,a", "350000,remove,b"])
    world = World(CLUSTER, (), (Preemptions(POOL, trace, notice_s=120.0, repeat=False),))
    world.advance(0.0, 0)
    told = [(s, e) for s in (180.0, 230.0, 300.0, 350.0) for e in world.advance(s, 0)[0]]
    why = "it left the simulated cluster"
    assert told == [
        (180.0, PreemptionNotice("spot-0", 300.0)),
        (230.0, PreemptionNotice("spot-1", 350.0)),
        (300.0, DeviceLost("spot-0", why, preempted=True)),
        (350.0, DeviceLost("spot-1", why, preempted=True)),
    ]
    assert world.cluster.devices == ()


def test_losses_are_correlated_and_come_back_together() -> None:
    stream = Losses(POOL, per_s=0.4 / 3600, devices=(2, 4), return_after_s=1800.0)
    found = worlds_events(stream, WEEK_S)
    instants = {at_s for at_s, what in found if what == "lost"}
    per_instant = [sum(t == at_s for t, what in found if what == "lost") for at_s in instants]
    assert mean(per_instant) > 1.8
    assert 0.25 <= len(instants) / (WEEK_S / 3600) <= 0.45  # 0.4 an hour, fewer when all are gone
    assert abs(sum(w == "lost" for _, w in found) - sum(w == "joined" for _, w in found)) <= 4


def test_the_same_seed_brings_the_same_events() -> None:
    stream = Losses(POOL, per_s=1e-4, devices=(1, 3), return_after_s=600.0)
    assert worlds_events(stream, 1e5, seed=1) == worlds_events(stream, 1e5, seed=1)
    assert worlds_events(stream, 1e5, seed=1) != worlds_events(stream, 1e5, seed=2)


def test_a_slow_device_recovers_and_slow_downs_of_two_causes_multiply() -> None:
    def stream(name: str) -> Slowdowns:
        return Slowdowns(
            name, per_s=1e-3, mean_s=300.0, least_s=60.0, most_s=900.0, ratio=(0.5, 0.5),
            pools=(POOL,), whole_share=1.0,
        )  # fmt: skip

    world, seen = World(CLUSTER, (), (stream("a"), stream("b"))), set()
    while (now_s := world.next_event_s()) < 200_000:
        assert world.advance(now_s, 0) == ((), False)  # nobody announces it
        seen.add(world.cluster.devices[0].slowdown)
    assert {1.0, 2.0, 4.0} <= seen
    assert all(np.log2(x) == int(np.log2(x)) for x in seen)


def test_congested_links_are_narrow_for_a_while() -> None:
    stream = Slowdowns(
        "net",
        per_s=1e-3,
        mean_s=60.0,
        least_s=60.0,
        most_s=60.0,
        ratio=(0.25, 0.25),
        links=("all",),
    )
    world = World(CLUSTER, (), (stream,))
    widths = set()
    while (now_s := world.next_event_s()) < 20_000:
        world.advance(now_s, 0)
        widths.add(world.cluster.links[0].bandwidth_bytes_per_s / 6e9)
    assert {1.0, 0.25} <= widths


CHAINS = (
    MarkovChain(
        "price",
        (
            Level("usual", (("dear", 0.1),)),
            Level("dear", (("usual", 0.3),), pools=(POOL,), price_ratio=3.0),
        ),
    ),
    MarkovChain(
        "presence",
        (
            Level("there", (("gone", 0.05),)),
            Level("gone", (("there", 0.2),), pools=(POOL,), present=False),
        ),
    ),
)


def test_a_chain_spends_its_stationary_share_in_every_level() -> None:
    """p / (p + q) of the time at the second level: 0.25 dear, 0.2 gone."""
    environment = Environment(60.0, CHAINS)
    assert environment.num_states == 4
    assert environment.shares == pytest.approx([0.75 * 0.8, 0.75 * 0.2, 0.25 * 0.8, 0.25 * 0.2])
    assert environment.relaxation_slots == pytest.approx(4.0)  # 1 / (0.05 + 0.2)
    state_T = environment.walk(200_000, np.random.default_rng(0))
    assert np.bincount(state_T) / len(state_T) == pytest.approx(environment.shares, abs=0.01)


def test_the_stream_of_a_chain_does_what_its_levels_say() -> None:
    world = World(CLUSTER, (), tuple(Chain(chain, 60.0) for chain in CHAINS))
    base = CLUSTER.offer(POOL).price_usd_per_s
    held: dict[tuple[float, int], float] = {}
    last_s = 0.0
    while (now_s := world.next_event_s()) < 2e6:
        key = (world.cluster.offer(POOL).price_usd_per_s / base, len(world.cluster.devices))
        held[key] = held.get(key, 0.0) + now_s - last_s
        world.advance(now_s, 0)
        last_s = now_s
    assert set(held) == {(1.0, 4), (3.0, 4), (1.0, 0), (3.0, 0)}
    assert held[3.0, 4] / last_s == pytest.approx(0.25 * 0.8, abs=0.02)


def shown(cluster: ClusterState) -> tuple[object, ...]:
    """What a state is, without the names of devices."""
    return (
        sorted((d.pool, round(d.slowdown, 9)) for d in cluster.devices),
        [round(o.price_usd_per_s, 12) for o in cluster.offers],
        sorted({round(k.bandwidth_bytes_per_s) for k in cluster.links}),
    )


def test_the_streams_of_an_environment_show_its_states_and_no_others() -> None:
    """The table's world and the closed loop's are one: the reference's 24 states."""
    world = reference_world()
    chains = tuple(Chain(chain, 60.0) for chain in world.environment.chains)
    alive = World(world.cluster, (), chains, seed=5)
    states = [shown(world.state(s)) for s in range(world.environment.num_states)]
    seen = set()
    while (now_s := alive.next_event_s()) < 6e5:
        alive.advance(now_s, 0)
        seen.add(states.index(shown(alive.cluster)))
    assert seen == set(range(24))


def test_an_impossible_chain_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match="chain 'x': level 'a' goes to 'b'; write another of a"):
        MarkovChain("x", (Level("a", (("b", 0.1),)),))
    with pytest.raises(ValueError, match=r"level 'a': next is .*sum to 1 at most"):
        Level("a", (("b", 1.5),))
    with pytest.raises(ValueError, match="level 'a' says nothing of pools"):
        Level("a", (), speed_ratio=0.5)
