import math

from orchestrator.core.cluster import known_kinds

NAMES = {
    "h200-sxm", "h100-sxm", "h100-pcie", "a100-40", "a100-80", "l40s", "l4", "a10g", "t4",
    "v100-16", "v100-32", "p100", "rtx-3090", "rtx-4090", "rtx-2080-ti", "gtx-1080-ti",
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
