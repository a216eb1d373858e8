"""The reference data as our own nouns: units, state, update time, links, the ideal."""

import json
from dataclasses import replace
from math import log2
from pathlib import Path

import pytest

from benchmarks import reference_data
from benchmarks.builders import make_device
from benchmarks.reference_data import GPT_NEO, OPT_350, Share
from orchestrator.config import RunConfig
from orchestrator.control.links import build_links
from orchestrator.control.pools import build_cluster, build_kinds, complete_profile
from orchestrator.core.model import profile_from_json
from orchestrator.planning.tables import LayerTables

pytestmark = pytest.mark.skipif(
    bool(reference_data.missing()), reason=reference_data.missing() or "the data are there"
)

MIX = (Share("A100-40", 8), Share("V100-16", 4))


def test_state_is_24_bytes_a_parameter() -> None:
    profile = reference_data.read_profile(OPT_350)
    params = sum(profile.sizes_of(1).param_bytes)
    assert params == 4 * 407_431_168
    assert params * (1 + profile.optimizer_bytes_per_param_byte) == 24 * 407_431_168


def test_the_update_time_is_that_of_the_embedding_and_shared_out_by_parameters() -> None:
    profile = reference_data.read_profile(OPT_350, ["A100-40"])
    first = profile.times[0]
    assert (first.kind, first.team_size, first.microbatch) == ("a100-40", 1, 1)
    assert first.update_s[0] == 0.002938
    assert first.update_s[1] == pytest.approx(0.002938 * 50_384_896 / 214_433_792)


def test_holes_stay_holes() -> None:
    tables = LayerTables(reference_data.read_profile(GPT_NEO))
    assert tables.team_sizes("a100-40") == (1, 2, 4)
    assert tables.team_sizes("a100-80") == (1, 2)
    assert tables.times("v100-16", 1, 8).beyond


@pytest.mark.parametrize("model", [OPT_350, GPT_NEO])
def test_a_written_profile_and_config_are_read_as_they_were_written(
    model: str, tmp_path: Path
) -> None:
    profile, config = reference_data.write_files(model, MIX, tmp_path)
    read = profile_from_json(json.loads(profile.read_text("utf-8")))
    assert read == reference_data.read_profile(model, [share.kind for share in MIX])
    options = RunConfig.load(config).cluster
    written = reference_data.cluster_options(MIX, model=model)
    assert replace(options, profile=None) == written
    assert complete_profile(read, build_kinds(options)) == read  # every kind has its times


def test_links_follow_the_fit_up_to_the_largest_bandwidth_seen() -> None:
    cluster = build_cluster(reference_data.cluster_options(MIX))
    one, mate, far = (cluster.device(f"a100-40-{i}") for i in (0, 1, 4))
    inside = cluster.link(one, mate)
    x = log2(64)  # megabytes
    fitted = 0.8303558 * x * x + 15.58397854 * x + 31.19114521
    assert inside.rate_bytes_per_s(64e6) == pytest.approx(fitted * 1e9)
    assert inside.rate_bytes_per_s(1e9) == pytest.approx(243_214_602_913.5, rel=2e-3)
    assert inside.transfer_s(1000) == pytest.approx(inside.transfer_s(1_000_000))
    assert cluster.link(one, far).rate_bytes_per_s(1e9) < 7e9


def test_unlike_kinds_have_a_link_of_their_own_each_way() -> None:
    mix = (Share("RTX-2080", 4, 0.5), Share("RTX-3090", 4, 0.5))
    devices = [
        make_device(f"{kind}-0", pool=kind, zone=reference_data.ZONE)
        for kind in ("rtx-2080", "rtx-3090")
    ]
    links = build_links(devices, reference_data.cluster_options(mix).links)
    rates = {(k.source, k.target): k.rate_bytes_per_s(1e9) for k in links}
    assert rates["rtx-2080", "rtx-3090"] != rates["rtx-3090", "rtx-2080"]


@pytest.mark.parametrize(("each", "ideal"), [(8, 0.0533), (32, 0.2133)])
def test_the_ideal_is_all_devices_at_their_best_microbatch(each: int, ideal: float) -> None:
    mix = (Share("A100-40", each), Share("V100-16", each))
    assert reference_data.ideal_steps_per_s(OPT_350, mix) == pytest.approx(ideal, abs=5e-5)


def test_a_kind_without_a_price_asks_for_one() -> None:
    assert reference_data.parse_share("A100-80=8@4.1") == Share("A100-80", 8, 4.1)
    with pytest.raises(ValueError, match="A100-80 has no price in the data; write A100-80=N@PRICE"):
        _ = Share("A100-80", 8).price
