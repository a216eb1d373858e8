import re
from dataclasses import replace

import pytest

from benchmarks.builders import GIB, make_profile
from orchestrator.control.backend import ClusterOptions, LinkOptions, OfferOptions
from orchestrator.control.pools import (
    EFFICIENCY_RATIO,
    auto_time_scale,
    build_cluster,
    build_kinds,
    complete_profile,
    emulated_profile,
)
from orchestrator.core.cluster import known_kinds
from orchestrator.core.model import LayerSizes
from orchestrator.errors import ConfigError

FAST = OfferOptions(
    pool="fast", kind="a100-40", count=3, devices_per_node=2, zone="z1", price_per_hour=3.6
)
SLOW = OfferOptions(
    pool="slow", kind="t4", zone="z2", price_per_hour=0.36, memory_gib=12, speed_ratio=0.22,
    discount_ratio=0.5, minimum_s=60, billed="while_present",
)  # fmt: skip
LINKS = (
    LinkOptions(within="node", latency_s=1e-5, bandwidth_gbytes_per_s=50),
    LinkOptions(within="zone", latency_s=1e-4, bandwidth_gbytes_per_s=3),
    LinkOptions(
        between=("z1", "z2"), latency_s=2e-3, bandwidth_gbytes_per_s=0.02, egress_usd_per_gb=0.01
    ),
)


def options(*offers, links=LINKS):
    return ClusterOptions(source="emulated", offers=offers or (FAST, SLOW), links=links)


def test_devices_are_numbered_in_their_pool_and_packed_on_nodes():
    cluster = build_cluster(options())
    assert [(d.device_id, d.node_id) for d in cluster.devices] == [
        ("fast-0", "fast-node0"), ("fast-1", "fast-node0"), ("fast-2", "fast-node1"),
        ("slow-0", "slow-node0"),
    ]  # fmt: skip
    assert cluster.device("slow-0").memory_bytes == 12 * GIB
    assert cluster.device("fast-0").memory_bytes == 40 * GIB


def test_the_most_specific_link_joins_two_devices():
    cluster = build_cluster(options())
    fast = [cluster.device(f"fast-{i}") for i in range(3)]
    slow = cluster.device("slow-0")
    assert cluster.link(fast[0], fast[1]).bandwidth_bytes_per_s == 50e9
    assert cluster.link(fast[0], fast[2]).bandwidth_bytes_per_s == 3e9
    assert cluster.link(fast[0], slow) == replace(
        cluster.link(slow, fast[0]), source="z1", target="z2"
    )
    assert cluster.link(slow, fast[0]).egress_usd_per_byte == pytest.approx(0.01e-9)


def test_a_rule_for_one_direction_wins_over_the_reversed_one():
    back = LinkOptions(between=("z2", "z1"), bandwidth_gbytes_per_s=0.5)
    cluster = build_cluster(options(links=(*LINKS, back)))
    fast, slow = cluster.device("fast-0"), cluster.device("slow-0")
    assert cluster.link(slow, fast).bandwidth_bytes_per_s == 0.5e9
    assert cluster.link(fast, slow).bandwidth_bytes_per_s == 0.02e9


def test_prices_are_dollars_per_second_of_the_run():
    """skypilot-org/skypilot#1962: discounts; the slow pool's is one half."""
    cluster = build_cluster(options(), billing_speedup=60)
    assert cluster.offer("fast").price_usd_per_s == pytest.approx(3.6 / 3600 * 60)
    slow = cluster.offer("slow")
    assert slow.price_usd_per_s == pytest.approx(0.36 * 0.5 / 3600 * 60)
    assert slow.minimum_s == 1.0  # 60 billed seconds
    assert slow.billed == "while_present"
    link = cluster.link(cluster.device("fast-0"), cluster.device("slow-0"))
    assert link.egress_usd_per_byte == pytest.approx(0.01e-9)  # bytes are not sped up


def test_time_scale_slows_links_once():
    cluster = build_cluster(options(), time_scale=10)
    link = cluster.link(cluster.device("fast-0"), cluster.device("slow-0"))
    assert link.latency_s == pytest.approx(2e-2)
    assert link.bandwidth_bytes_per_s == pytest.approx(0.02e8)
    assert link.transfer_s(1000) == pytest.approx(10 * (2e-3 + 1000 / 0.02e9))


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (LINKS[:2], "links from zone 'z1' to 'z2'; add {between: [z1, z2]"),
        (LINKS[::2], "links inside zone 'z1'; add {within: zone"),
    ],
)
def test_a_link_that_is_needed_but_not_described_is_refused(links, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_cluster(options(links=links))


def test_a_zone_with_one_device_a_node_with_node_links_and_a_single_zone_need_no_more():
    alone = replace(FAST, count=1)
    assert build_cluster(options(alone, links=())).links == ()
    one_node = replace(FAST, count=2)
    assert len(build_cluster(options(one_node, links=LINKS[:1])).links) == 1


def test_an_unknown_kind_needs_speed_and_memory():
    strange = replace(FAST, kind="npu-9", speed_ratio=0.5)
    with pytest.raises(ConfigError, match=re.escape("cluster.offers[1].kind is 'npu-9'")):
        build_kinds(options(SLOW, strange))
    kinds = build_kinds(options(replace(strange, memory_gib=8)))
    assert kinds["npu-9"].fp32_flop_per_s == 0.5 * known_kinds()["a100-40"].fp32_flop_per_s
    assert kinds["npu-9"].memory_bytes == 8 * GIB


def test_two_pools_of_one_kind_at_unlike_speeds_become_two_kinds():
    other = replace(SLOW, pool="spare", speed_ratio=None)
    cluster = build_cluster(options(SLOW, other))
    assert [d.kind for d in cluster.devices] == ["t4@slow", "t4"]
    assert set(build_kinds(options(SLOW, other))) == {"t4@slow", "t4"}


def test_a_kind_without_times_is_priced_from_flop_at_a_share_of_its_peak():
    profile = replace(
        make_profile({"a100-40": [0.1, 0.2]}, microbatches=(4,)),
        forward_flop_per_sample=(8.1e12, 16.2e12),
    )
    done = complete_profile(profile, {"t4": known_kinds()["t4"]}, "fp32")
    rows = [t for t in done.times if t.kind == "t4"]
    assert [t.microbatch for t in rows] == [1, 2, 4]
    assert rows[1].forward_s == pytest.approx((2.0 / EFFICIENCY_RATIO, 4.0 / EFFICIENCY_RATIO))
    assert rows[1].backward_s == pytest.approx((4.0 / EFFICIENCY_RATIO, 8.0 / EFFICIENCY_RATIO))
    assert all(t.estimated for t in rows)
    assert not any(t.estimated for t in done.times if t.kind == "a100-40")


def test_a_light_layer_takes_as_long_as_its_bytes_take_to_move():
    sizes = LayerSizes(1, (3.2e9, 0.0), (1.6e9, 0.0), (1.6e9, 6.4e9))
    light = replace(
        make_profile(),
        layers=("embedding", "norm"),
        sizes=(sizes,),
        times=(),
        forward_flop_per_sample=(1.0, 1.0),
    )
    done = complete_profile(light, {"t4": known_kinds()["t4"]}, microbatch=2)  # 3.2e11 bytes/s
    row = done.times[-1]
    assert row.forward_s == pytest.approx((0.01 + 2 * 0.01, 2 * 0.02))
    assert row.backward_s == pytest.approx((0.06, 0.08))
    unknown = replace(known_kinds()["t4"], memory_bandwidth_bytes_per_s=None)
    assert sum(complete_profile(light, {"t4": unknown}).times[-1].forward_s) < 1e-9


def test_a_kind_that_cannot_be_priced_is_refused():
    with pytest.raises(ConfigError, match="no times for kind 't4' and no forward_flop_per_sample"):
        complete_profile(make_profile(), {"t4": known_kinds()["t4"]}, "fp32")


def test_overridden_speed_scales_the_measured_times_of_the_kind():
    kinds = build_kinds(options(SLOW, replace(SLOW, pool="spare", speed_ratio=None)))
    profile = make_profile({"t4": [0.1, 0.2]})
    done = complete_profile(profile, kinds, "fp32")
    ratio = 8.1e12 / (0.22 * 19.5e12)
    (row,) = [t for t in done.times if t.kind == "t4@slow"]
    assert row.forward_s == pytest.approx((0.1 * ratio, 0.2 * ratio))


def test_emulated_kinds_take_the_measured_times_by_their_speed():
    profile = make_profile({"cpu": [0.001, 0.002]}, microbatches=(1, 2))
    kinds = build_kinds(options())
    done = emulated_profile(profile, kinds, time_scale=10)
    rows = {(t.kind, t.microbatch): t.forward_s for t in done.times}
    assert rows["a100-40", 1] == pytest.approx((0.01, 0.02))
    assert rows["t4", 2] == pytest.approx((0.02 / 0.22, 0.04 / 0.22))
    assert set(done.kinds) == {"a100-40", "t4"}
    assert done.step_overhead_s == 0.03


def test_measured_times_of_an_emulated_kind_are_kept_and_scaled():
    profile = make_profile({"cpu": [0.001], "t4": [0.5]})
    done = emulated_profile(profile, build_kinds(options()), time_scale=2)
    assert next(t for t in done.times if t.kind == "t4").forward_s == (1.0,)


def test_auto_scale_gives_ten_ms_to_the_forward_of_a_balanced_chain():
    kinds = build_kinds(options())
    profile = make_profile({"cpu": [0.002, 0.004]}, microbatches=(4,))
    scale = auto_time_scale(
        profile, kinds, {"a100-40": 2, "t4": 1}, num_cores=64, global_batch=64, microbatch=4
    )
    # Forward of the whole model at microbatch 4: 24 ms on a fast device.
    assert scale * 0.024 / (2 + 0.22) == pytest.approx(0.010)


def test_auto_scale_keeps_real_work_within_its_share_of_the_cores():
    kinds = build_kinds(options())
    profile = make_profile({"cpu": [0.2, 0.4]}, microbatches=(4,), update_s=0.1)
    scale = auto_time_scale(
        profile, kinds, {"a100-40": 4}, num_cores=2, global_batch=64, microbatch=4
    )
    step_s = scale * 16 * 4 * 1.8 / 4  # four devices without bubbles
    real_s = 2.2 * (16 * 4 * 1.8 + 4 * 0.2)
    assert real_s / step_s == pytest.approx(0.45 * 2)


def test_a_kind_that_was_measured_in_teams_only_is_refused_with_the_mend():
    profile = make_profile({"a100-40": [0.1]})
    teams = replace(profile, times=tuple(replace(t, team_size=4) for t in profile.times))
    message = "has times for kind 'a100-40' in teams of 4 only; measure single devices of it too"
    with pytest.raises(ConfigError, match=message):
        complete_profile(teams, build_kinds(options(FAST)))


def test_a_kind_at_another_speed_takes_the_times_of_all_its_teams():
    profile = make_profile({"a100-40": [0.1]})
    teams = replace(
        profile, times=(*profile.times, *(replace(t, team_size=2) for t in profile.times))
    )
    half = replace(FAST, speed_ratio=0.5, pool="half")
    found = complete_profile(teams, build_kinds(options(FAST, half)))
    added = [t for t in found.times if t.kind == "a100-40@half"]
    assert [(t.team_size, t.forward_s, t.estimated) for t in added] == [
        (1, (0.2,), True), (2, (0.2,), True),
    ]  # fmt: skip
