import math
import re

from orchestrator.core.cluster import known_kinds

NAMES = {
    "b200", "h200-sxm", "h100-sxm", "h100-pcie", "mi300x", "a100-40", "a100-80", "a40", "a6000",
    "a10", "a10g", "l40s", "l40", "l4", "t4", "v100-16", "v100-32", "p100", "rtx-3090",
    "rtx-4090", "rtx-2080-ti", "gtx-1080-ti",
}  # fmt: skip


def test_the_catalogue_lists_the_documented_kinds_each_with_its_source():
    assert set(known_kinds()) == NAMES
    assert all(kind.source for kind in known_kinds().values())


def test_peaks_are_dense_and_memory_is_in_bytes():
    h100 = known_kinds()["h100-sxm"]
    assert h100.peak_flop_per_s("bf16") == 989e12  # 1979 is the sparse figure
    assert h100.memory_bytes == 80 * 2**30


def test_a_kind_without_bf16_units_runs_bf16_at_its_fp32_peak():
    assert known_kinds()["t4"].peak_flop_per_s("bf16") == 8.1e12


def test_every_figure_is_positive_and_finite():
    for kind in known_kinds().values():
        rates = (kind.fp32_flop_per_s, kind.fp16_flop_per_s, kind.peak_flop_per_s("bf16"))
        assert all(0 < rate < math.inf for rate in rates)
        assert 10 * 2**30 < kind.memory_bytes < 200 * 2**30


def test_units_are_those_of_the_names():
    for kind in known_kinds().values():
        assert 5e12 < kind.fp32_flop_per_s < 2e14
        assert kind.fp16_flop_per_s < 3e15
        assert kind.bf16_flop_per_s in (None, kind.fp16_flop_per_s)
        bandwidth = kind.memory_bandwidth_bytes_per_s
        assert bandwidth is None or 2e11 < bandwidth < 1e13


def test_every_price_has_its_provider_its_day_and_its_source():
    prices = [price for kind in known_kinds().values() for price in kind.prices]
    assert {price.market for price in prices} == {"on demand", "spot"}
    for price in prices:
        assert price.provider
        assert price.source
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", price.date)
        assert 0.05 < price.usd_per_hour < 20


def test_spot_costs_less_than_on_demand_wherever_one_provider_has_both():
    for kind in known_kinds().values():
        listed = {(p.provider, p.market): p.usd_per_hour for p in kind.prices}
        for (provider, market), price in listed.items():
            if market == "spot" and (provider, "on demand") in listed:
                assert price < listed[provider, "on demand"]
