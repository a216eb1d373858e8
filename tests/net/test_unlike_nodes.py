"""Runs on nodes that differ for real: quotas, shaped links, a pulled cable, a killed raylet."""

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.net.cluster import RayNodes
from tests.net.machine import nodes, transfer_s, why_not
from tests.net.runs import PATIENCE_S, Run, start_run
from tests.runtime.processes import stays_alive

pytestmark = [pytest.mark.net, pytest.mark.timeout(240)]

POOLS = ("full", "half", "quarter")
CORES = (1.0, 0.5, 0.25)
MBIT_PER_S = (400, 200, 100)
ALL_NEEDED = 0.6  # cores of each, with which no plan leaves a device out
GAIN = 1.25  # a quiet machine gives about twice that


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="lyray-net-", dir="/tmp"))  # sockets want a short path
    try:
        with nodes(len(POOLS)) as made:
            raylets = RayNodes(made, folder)
            raylets.start({i: {"lyray.kind": p, "lyray.pool": p} for i, p in enumerate(POOLS)})
            yield raylets
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def drifting(cluster: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run on unlike nodes; half lost three quarters of its processor time in it."""
    for node, cores, mbit_per_s in zip(cluster.nodes, CORES, MBIT_PER_S, strict=True):
        node.limit(cores)
        node.shape(mbit_per_s)
    run = start_run(
        cluster, tmp_path_factory.mktemp("drifting"), "--compare", "even-split", steps=34
    )
    run.wait_until(lambda: len(run.rows("slots.jsonl")) > 3)
    cluster.nodes[1].limit(CORES[1] / 4)
    run.wait_for_end()
    return run


def shares(groups: list[dict[str, Any]]) -> Mapping[str, float]:
    """Each device's share of the work: of the samples of a step times the layers."""
    work: Counter[str] = Counter()
    for group in groups:
        for stage in group["stages"]:
            (device,) = stage["devices"] if "devices" in stage else stage["team"]["device_ids"]
            work[device] += sum(group["microbatches"]) * (stage["end_layer"] - stage["first_layer"])
    return {device: part / work.total() for device, part in work.items()}


def test_a_shaped_link_carries_what_it_is_set_to(cluster: RayNodes, tmp_path: Path) -> None:
    num_bytes, node = 4_000_000, cluster.nodes[2]
    node.shape(MBIT_PER_S[2])
    took_s = transfer_s(cluster.nodes[0], node, num_bytes, tmp_path)
    mbit_per_s = 8e-6 * num_bytes / took_s
    assert MBIT_PER_S[2] / 2 < mbit_per_s < 1.1 * MBIT_PER_S[2]


def test_an_uneven_plan_is_faster_than_even_shares_where_devices_are_unlike(
    drifting: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """huggingface/pytorch-image-models#580: how much unequal batches gain on unlike cards."""
    joint, even, _ = json.loads((drifting.folder / "compare.json").read_text())
    assert (joint["strategy"], even["strategy"]) == ("joint", "even-split")
    uneven = shares(joint["plan"]["groups"])
    told = ", ".join(f"{device} {share:.0%}" for device, share in uneven.items())
    ratio = joint["samples_per_s"] / even["samples_per_s"]
    with capsys.disabled():
        sys.stdout.write(f"\njoint ({told}): {ratio:.2f} times the samples/s of even-split\n")
    assert list(shares(even["plan"]["groups"]).values()) == [pytest.approx(1 / 3)] * 3
    assert uneven["full-0"] > uneven.get("quarter-0", 0.0)
    assert ratio > GAIN


def test_a_kind_is_as_slow_in_its_profile_as_its_quota_makes_it(drifting: Run) -> None:
    profile = json.loads((drifting.folder / "profile.json").read_text())
    took_s = {
        times["kind"]: sum(times["forward_s"]) + sum(times["backward_s"])
        for times in profile["times"]
        if times["microbatch"] == 4
    }
    assert took_s["half"] > 1.3 * took_s["full"]
    assert took_s["quarter"] > 1.3 * took_s["half"]


def test_a_device_whose_quota_shrinks_is_named_and_gets_less(drifting: Run) -> None:
    slots = drifting.rows("slots.jsonl")
    before, last = shares(slots[3]["plan"]["groups"]), shares(slots[-1]["plan"]["groups"])
    assert any("half-0" in slot["stragglers"] for slot in slots[4:])
    assert last.get("half-0", 0.0) < before["half-0"]
    drifting.check_books()


def test_a_finished_run_leaves_no_process_on_any_node(cluster: RayNodes, drifting: Run) -> None:
    assert drifting.process.returncode == 0
    pids = [pid for index in range(len(POOLS)) for pid in cluster.actors(index)]
    assert not any(stays_alive(pid) for pid in pids)


def test_two_nodes_that_reach_the_head_but_not_each_other_are_named_before_the_run(
    cluster: RayNodes, drifting: Run, tmp_path: Path
) -> None:
    """NVIDIA/nccl#794, #1136: what hangs on the real mix of nodes is found before the run."""
    for node in cluster.nodes[1:]:
        node.isolate(on=True)
    try:
        run = start_run(cluster, tmp_path, steps=4)
        assert run.process.wait(PATIENCE_S) == 1, run.output.read_text()
    finally:
        for node in cluster.nodes[1:]:
            node.isolate(on=False)
    reason = run.result()["reason"]
    address = cluster.nodes[2].address
    assert reason.startswith(f"device half-0 does not reach device quarter-0 at {address}:")
    assert "let TCP pass between their nodes" in reason
    assert run.rows("steps.jsonl") == []


def test_two_nodes_that_lose_each_other_in_the_run_cost_one_of_them_and_no_sample(
    cluster: RayNodes, tmp_path: Path
) -> None:
    for node in cluster.nodes:
        node.limit(ALL_NEEDED)
    run = start_run(cluster, tmp_path, steps=40)
    run.wait_until(lambda: len(run.rows("slots.jsonl")) > 2)
    for node in cluster.nodes[1:]:
        node.isolate(on=True)
    try:
        run.wait_for_end()
    finally:
        for node in cluster.nodes[1:]:
            node.isolate(on=False)
    told = [row["detail"] for row in run.rows("events.jsonl") if row["kind"] == "lost"]
    assert len(set(run.lost)) == 1
    assert "half-0 does not reach device quarter-0" in told[0] or (
        "quarter-0 does not reach device half-0" in told[0]
    )
    run.check_books()


def test_a_cut_off_node_and_a_killed_raylet_cost_no_sample(
    cluster: RayNodes, drifting: Run, tmp_path: Path
) -> None:
    for node in cluster.nodes:
        node.limit(ALL_NEEDED)
    run = start_run(cluster, tmp_path, steps=28)
    run.wait_until(lambda: len(run.rows("slots.jsonl")) > 2)
    cluster.nodes[2].cut_off()
    run.wait_until(lambda: "quarter-0" in run.lost)
    cluster.kill(1)
    run.wait_for_end()
    run.check_books()
    assert run.lost == ["quarter-0", "half-0"]
    why = {e["device"]: e["detail"] for e in run.rows("events.jsonl") if e["kind"] == "lost"}
    assert "killed" not in why["quarter-0"]  # it may live on: nobody knows
    assert run.result()["recoveries"] == 2
    assert not any(stays_alive(pid) for index in (0, 1) for pid in cluster.actors(index))
    assert run.losses == pytest.approx(drifting.losses[: len(run.losses)], rel=1e-4)
