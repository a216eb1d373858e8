import logging
from math import inf

import pytest

from benchmarks.builders import make_cluster, make_device
from orchestrator.control.backend import EmulatedEvent
from orchestrator.core.slot import DeviceJoined, DeviceLost
from orchestrator.simulation.traces import TraceEvent, emulated_trace, price_trace
from orchestrator.simulation.world import World

CLUSTER = make_cluster([make_device("fast-0"), make_device("fast-1"), make_device("mid-0")])


def test_a_slow_down_is_there_but_nobody_announces_it() -> None:
    world = World(CLUSTER, [TraceEvent(at_step=5, device="fast-0", speed_ratio=0.4)])
    assert world.advance(10.0, 4) == ((), False)
    assert world.advance(11.0, 5) == ((), False)
    assert [d.slowdown for d in world.cluster.devices] == [2.5, 1.0, 1.0]


def test_a_slow_down_of_a_pool_hits_all_of_it() -> None:
    world = World(CLUSTER, [TraceEvent(at_s=5.0, pool="fast", speed_ratio=0.5)])
    world.advance(5.0, 0)
    assert [d.slowdown for d in world.cluster.devices] == [2.0, 2.0, 1.0]


def test_a_price_is_in_force_from_the_moment_it_happens() -> None:
    world = World(CLUSTER, [TraceEvent(at_s=7.0, pool="mid", price_usd_per_s=0.5)])
    assert world.next_event_s() == 7.0
    assert world.advance(7.0, 0) == ((), True)
    offer = world.cluster.offer("mid")
    assert (offer.price_usd_per_s, offer.valid_from_s) == (0.5, 7.0)
    assert world.next_event_s() == inf


def test_a_loss_is_announced_once() -> None:
    world = World(CLUSTER, [TraceEvent(at_step=1, device="fast-1", lost=True)])
    events, _ = world.advance(1.0, 1)
    assert [e.device_id for e in events if isinstance(e, DeviceLost)] == ["fast-1"]
    assert world.advance(2.0, 2) == ((), False)
    assert not world.cluster.has("fast-1")


def test_joined_devices_get_the_next_numbers_of_their_pool() -> None:
    world = World(CLUSTER, [TraceEvent(at_s=1.0, pool="fast", joined=2)])
    events, _ = world.advance(1.0, 0)
    assert [e.device.device_id for e in events if isinstance(e, DeviceJoined)] == [
        "fast-2", "fast-3",
    ]  # fmt: skip
    assert world.cluster.device("fast-3").kind == "gpu"


def test_emulated_events_become_trace_events_in_dollars_of_the_runs_seconds() -> None:
    events = (
        EmulatedEvent(at_step=100, device="fast-0", speed_ratio=0.4),
        EmulatedEvent(at_step=150, pool="mid", price_per_hour=3.6),
    )
    slow, dear = emulated_trace(events, billing_speedup=60.0)
    assert (slow.at_step, slow.device, slow.speed_ratio) == (100, "fast-0", 0.4)
    assert dear.price_usd_per_s == pytest.approx(0.06)


def test_a_price_feed_is_read_in_billed_seconds() -> None:
    lines = ["time_s,pool,price_per_hour", "0,mid,3.6", "600,mid,7.2"]
    first, second = price_trace(lines, {"mid"}, billing_speedup=60.0)
    assert (first.at_s, first.price_usd_per_s) == (0.0, pytest.approx(0.06))
    assert (second.at_s, second.price_usd_per_s) == (10.0, pytest.approx(0.12))


@pytest.mark.parametrize("bad", ["nan", "-1", "0", "inf", "1e-300", "1e300"])
def test_a_reading_that_is_no_price_is_passed_over_with_a_warning(
    bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert price_trace(["time_s,pool,price_per_hour", f"0,mid,{bad}"], {"mid"}) == ()
    assert "line 2" in caplog.text


def test_a_broken_line_of_a_price_feed_is_named() -> None:
    header = "time_s,pool,price_per_hour"
    for line, message in (
        ("soon,mid,1.0", r"line 3: time_s is 'soon'; write seconds since the start of the run"),
        ("1700000000,mid,1.0", r"line 3: time_s is 1700000000; .*no seconds since 1970"),
        ("nan,mid,1.0", r"line 3: time_s is nan; write seconds"),
        ("0,mid,$1", r"line 3: price_per_hour is '\$1'; write a number of dollars"),
        ("0,mid", r"line 3: price_per_hour is missing; write a number of dollars"),
    ):
        with pytest.raises(ValueError, match=message):
            price_trace([header, "0,mid,1.0", line], {"mid"})


def test_spaces_after_commas_and_more_columns_do_no_harm() -> None:
    (event,) = price_trace(["time_s, pool, price_per_hour, zone", "0, mid, 3.6, z1"], {"mid"})
    assert (event.pool, event.price_usd_per_s) == ("mid", pytest.approx(0.001))


def test_a_price_feed_without_its_header_or_of_another_cluster_is_refused() -> None:
    for lines in ([], ["0,mid,1.0"]):
        with pytest.raises(ValueError, match="line 1 lacks pool, price_per_hour, time_s"):
            price_trace(lines, {"mid"})
    with pytest.raises(ValueError, match=r"line 2: .*a pool of cluster.offers: fast"):
        price_trace(["time_s,pool,price_per_hour", "0,mid,1.0"], {"fast"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "a"},
        {"at_s": 1.0, "at_step": 1, "device": "a"},
        {"at_s": 1.0},
        {"at_s": 1.0, "device": "a", "pool": "b"},
    ],
)
def test_a_trace_event_has_one_moment_and_one_subject(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="exactly one of"):
        TraceEvent(**wrong)  # type: ignore[arg-type]
