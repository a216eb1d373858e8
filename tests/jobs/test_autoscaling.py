"""Runs on Ray's autoscaler: nodes that are asked for, given back, killed and replaced.

The provider is the one with which Ray tests its own autoscaler: raylets as processes.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import RunConfig
from tests.net.cluster import RayNodes
from tests.net.machine import nodes, why_not
from tests.net.runs import Run, start_run
from tests.runtime.reference import train_alone
from workers.worker import WorkerSpec

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

SMALL = {
    "resources": {"CPU": 1, "lyray.pool.small": 1},
    "node_config": {},
    "min_workers": 1,
    "max_workers": 3,
}
NEW = {"resources": {"CPU": 1, "lyray.pool.new": 1}, "node_config": {}, "max_workers": 1}
OPTIONS = (
    "cluster.offers=[{pool: own, kind: one, price_per_hour: 1, speed_ratio: 0.01, memory_gib: 4},"
    " {pool: small, kind: two, price_per_hour: 1, speed_ratio: 0.01, memory_gib: 4, min_count: 1,"
    " max_count: 2}]",
    "cluster.links=[{within: zone, latency_s: 0.0003, bandwidth_gbytes_per_s: 0.1}]",
    "cluster.autoscaler={enabled: true, confirm_slots: 2, idle_slots: 4}",
)
THIRD = {"lyray.kind": "three", "lyray.pool": "third"}

_ASK = """
import json, ray
from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental.internal_kv import _internal_kv_get
ray.init(address="auto", log_to_driver=False)
nodes = [n for n in ray.nodes() if n["Alive"]]
print(json.dumps({"small": sum("lyray.pool.small" in n["Resources"] for n in nodes),
    "asked": json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or "null")}))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="lyray-auto-", dir="/tmp"))  # sockets: a short path
    try:
        with nodes(2) as made:
            raylets = RayNodes(made, folder, provided={"small": SMALL, "new": NEW})
            raylets.start({0: {"lyray.kind": "one", "lyray.pool": "own"}})
            yield raylets
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def look(cluster: RayNodes, folder: Path) -> dict[str, Any]:
    """Nodes of the pool that are there, and what Ray's control plane says is asked for."""
    environment = cluster.environment | {"RAY_ADDRESS": cluster.address}
    command, output = [sys.executable, "-W", "ignore", "-c", _ASK], folder / "looked"
    process = cluster.nodes[0].start(command, env=environment, output=output)
    try:
        assert process.wait(60) == 0, output.read_text()
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    found: dict[str, Any] = json.loads(output.read_text().splitlines()[-1])
    return found


def test_a_run_asks_for_a_device_that_pays_trains_on_it_and_takes_its_request_back(
    cluster: RayNodes, tmp_path: Path
) -> None:
    """ray-project/ray#24875, #52202, #62483: it never waits for what is PENDING."""
    wait_until(cluster, tmp_path, {"small": 1, "asked": None})
    prices = tmp_path / "prices.csv"
    prices.write_text("time_s,pool,price_per_hour\n0,small,1\n")
    feed = f"cluster.price_feed={{path: {prices}, every_s: 1, max_age_s: 100000}}"
    options = [part for option in (*OPTIONS, feed) for part in ("--set", option)]
    run = start_run(cluster, tmp_path, *options, steps=1000)
    run.wait_until(lambda: "small-1" in used(run))
    one = {"lyray.pool.small": 1.0}
    assert look(cluster, tmp_path)["asked"] == [one, one]
    now_s = run.rows("slots.jsonl")[-1]["time_s"]
    dearer = [f"{now_s + 3 * n},small,{4.0**n}" for n in range(1, 6)]  # a jump is not believed
    prices.write_text("\n".join(["time_s,pool,price_per_hour", "0,small,1", *dearer, ""]))
    run.wait_until(lambda: "given back" in str(run.rows("events.jsonl")))
    # Ray takes the node away while the run goes on.
    wait_until(cluster, tmp_path, {"small": 1, "asked": [one]})
    run.process.terminate()
    assert run.process.wait(90) == 143, run.output.read_text()
    events = run.rows("events.jsonl")
    told = Counter(row["kind"] for row in events)
    assert told["scale"] >= 2
    assert told["joined"] >= 1
    assert not [row for row in events if row["kind"] == "recovered" and row["cause"]]
    assert set(run.lost) == {"small-1"}
    asked = [slot["requested"] for slot in run.rows("slots.jsonl")]
    assert asked[0] == {"small": 1}
    assert asked[-2:] == [{"small": 1}, {}]
    steps = run.rows("steps.jsonl")
    assert [row["step"] for row in steps] == list(range(len(steps)))
    assert [row["first_sample"] for row in steps] == [48 * row["step"] for row in steps]
    spent_usd = sum(row["usd"] for row in run.rows("ledger.jsonl"))
    assert run.result()["spent_usd"] == pytest.approx(spent_usd, abs=1e-9)
    wait_until(cluster, tmp_path, {"small": 1, "asked": []})
    assert not cluster.actors(0)


def test_the_first_device_of_a_pool_is_asked_for_and_trained_on(
    cluster: RayNodes, tmp_path: Path
) -> None:
    """Of a kind that no node had when the run started: its times are guesses until it works."""
    offers = OPTIONS[0].replace("]", ", {pool: new, kind: other, price_per_hour: 0.1,"
                                " speed_ratio: 0.01, memory_gib: 4, max_count: 1}]")  # fmt: skip
    options = [part for option in (offers, *OPTIONS[1:]) for part in ("--set", option)]
    run = start_run(cluster, tmp_path, *options, steps=1000)
    run.wait_until(lambda: "new-0" in used(run))
    done = len(run.rows("steps.jsonl"))
    run.wait_until(lambda: len(run.rows("steps.jsonl")) > done + 5)
    run.process.terminate()
    assert run.process.wait(90) == 143, run.output.read_text()
    assert run.rows("slots.jsonl")[0]["requested"]["new"] == 0
    steps = run.rows("steps.jsonl")
    assert [row["first_sample"] for row in steps] == [48 * n for n in range(len(steps))]
    assert {row["pool"] for row in run.rows("ledger.jsonl")} >= {"own", "new"}
    assert not cluster.actors(0)


def test_a_node_that_is_killed_and_one_that_comes_for_it_cost_no_sample_and_no_digit(
    cluster: RayNodes, tmp_path: Path
) -> None:
    """The node that comes was not there at the start; the losses are those of one process."""
    wait_until(cluster, tmp_path, {"small": 1})
    cluster.start({1: THIRD})
    third = OPTIONS[0].replace("]", ", {pool: third, kind: three, price_per_hour: 1,"
                               " speed_ratio: 0.01, memory_gib: 4}]")  # fmt: skip
    text = (third, OPTIONS[1], "training.task_args={num_layers: 1}", "training.global_batch=24")
    run = start_run(
        cluster, tmp_path, *(p for option in text for p in ("--set", option)), steps=10_000
    )
    run.wait_until(lambda: "third-0" in used(run) and len(run.rows("slots.jsonl")) > 2)
    cluster.kill(1)
    run.wait_until(lambda: run.lost == ["third-0"])
    cluster.start({1: THIRD})
    run.wait_until(lambda: any(row["kind"] == "joined" for row in run.rows("events.jsonl")))
    run.wait_until(lambda: "third-0" in used(run))
    done = len(run.rows("steps.jsonl"))
    run.wait_until(lambda: len(run.rows("steps.jsonl")) > done + 5)
    run.process.terminate()
    assert run.process.wait(90) == 143, run.output.read_text()
    steps = run.rows("steps.jsonl")
    assert [row["first_sample"] for row in steps] == [24 * n for n in range(len(steps))]
    assert [row["end_sample"] for row in steps] == [24 * (n + 1) for n in range(len(steps))]
    spent_usd = sum(row["usd"] for row in run.rows("ledger.jsonl"))
    assert run.result()["spent_usd"] == pytest.approx(spent_usd, abs=1e-9)
    config = RunConfig.load(str(tmp_path / "run.yaml"), text)
    training = config.training
    spec = WorkerSpec(task=training.task, task_args=training.task_args, options=training,
                      seed=config.run.seed, run_url=config.run.run_url)  # fmt: skip
    _, losses = train_alone(spec, len(steps))
    assert run.losses == pytest.approx(losses, rel=1e-4)
    assert not cluster.actors(0)
    assert not cluster.actors(1)


def wait_until(cluster: RayNodes, folder: Path, wanted: dict[str, Any]) -> None:
    """Look until all that is wanted is so."""
    found: dict[str, Any] = {}
    for _ in range(30):  # each takes a second or more
        found = look(cluster, folder)
        if found | wanted == found:
            return
    raise AssertionError(f"{found}, not {wanted}")


def used(run: Run) -> set[str]:
    """Devices of the newest plan."""
    slots = run.rows("slots.jsonl")
    groups = slots[-1]["next_plan"]["groups"] if slots else []
    return {d for group in groups for stage in group["stages"] for d in stage["devices"]}
