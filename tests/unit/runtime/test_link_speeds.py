"""Links as measured: the line to paste says what messages took."""

from itertools import product

import pytest
import yaml

from orchestrator.control.backend import LinkOptions
from orchestrator.control.links import build_links
from orchestrator.core.cluster import Device
from orchestrator.runtime.link_speeds import PAIRS, Timings, as_rules, fitted, places_of

SIZES = (1, 4096, 1 << 16, 1 << 20, 1 << 24)
PLACE = "within: zone, pool: fast"


def timings(latency_s: float, bytes_per_s: float, sizes: tuple[int, ...] = SIZES) -> Timings:
    return tuple((size, latency_s + size / bytes_per_s) for size in sizes)


def device(pool: str, index: int, node: int) -> Device:
    return Device(f"{pool}-{index}", pool, "t4", f"{pool}-node{node}", "z1", 2**30)


DEVICES = (
    *(device("fast", index, index // 2) for index in range(4)),
    *(device("slow", index, index) for index in range(2)),
)


def read(rule: str) -> LinkOptions:
    (found,) = yaml.safe_load(rule)
    return LinkOptions(**{k: tuple(v) if k == "between" else v for k, v in found.items()})


@pytest.mark.parametrize(("latency_s", "rate"), [(1e-5, 5e10), (1e-4, 3e9), (0.02, 2e7)])
def test_latency_and_bandwidth_come_back(latency_s: float, rate: float) -> None:
    link = fitted(PLACE, [timings(latency_s, rate)])
    assert link.points == ()
    rule = read(link.rule)
    assert (rule.within, rule.pool) == ("zone", "fast")
    assert rule.latency_s == pytest.approx(latency_s, rel=0.01)
    assert rule.bandwidth_gbytes_per_s == pytest.approx(rate / 1e9, rel=0.01)


def test_a_link_whose_rate_depends_on_the_size_gets_points() -> None:
    rates = {4096: 1e8, 1 << 16: 1e9, 1 << 20: 4e9, 1 << 24: 5e9}
    told = ((1, 1e-5), *((size, 1e-5 + size / rate) for size, rate in rates.items()))
    rule = read(fitted(PLACE, [told]).rule)
    assert dict(rule.points) == pytest.approx(rates, rel=0.01)


def test_the_median_of_the_pairs_counts_and_only_sizes_that_all_reached() -> None:
    slow = timings(1e-4, 1e6, SIZES[:3])
    link = fitted(PLACE, [timings(1e-4, 1e9), timings(1e-4, 1.1e9), slow])
    assert link.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert max((size for size, _ in link.points), default=0) <= SIZES[2]


def test_messages_without_any_time_have_a_rate_nevertheless() -> None:
    link = fitted(PLACE, [((1, 1e-5), (4096, 1e-5))])
    assert link.bandwidth_bytes_per_s > 0


def test_every_path_between_devices_has_a_rule_of_some_pairs() -> None:
    found = places_of(DEVICES)
    assert set(found) == {
        "within: node, pool: fast", PLACE, "between: [fast, slow]", "within: zone, pool: slow",
    }  # fmt: skip
    assert all(1 <= len(pairs) <= PAIRS for pairs in found.values())
    assert found["within: node, pool: fast"][0] == ("fast-0", "fast-1")


def test_the_lines_describe_the_cluster() -> None:
    pairs = [pair for chosen in places_of(DEVICES).values() for pair in chosen]
    measured = as_rules(DEVICES, dict.fromkeys(pairs, timings(1e-4, 1e9)))
    links = build_links(DEVICES, [read(link.rule) for link in measured])
    ends = {(link.source, link.target) for link in links}
    assert ends >= {*product(("fast", "slow"), repeat=2), ("fast-node0", "fast-node0")}


def test_pairs_that_were_lost_leave_no_line() -> None:
    (link,) = as_rules(DEVICES, {("slow-0", "slow-1"): timings(1e-4, 1e9)})
    assert link.place == "within: zone, pool: slow"
