"""Devices found in a Ray cluster: labelled nodes become priced devices and train in real time."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from orchestrator.config import RunConfig
from orchestrator.control.backend import OfferOptions
from orchestrator.errors import ConfigError
from orchestrator.runtime.driver import run_job
from orchestrator.runtime.inventory import found_nodes
from orchestrator.runtime.products import Products
from orchestrator.runtime.profiling import profile_cluster
from orchestrator.runtime.setup import find_devices

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(120)]

TEXT = """
run: {{name: found, storage_path: {folder}}}
training:
  task: tests.runtime.models:mlp
  task_args: {{num_layers: 4, width: 8}}
  global_batch: 8
  microbatch: 2
  steps: 12
  optimizer: {{name: sgd, lr: 0.05}}
cluster:
  source: ray
  offers:
    - {{pool: big, kind: {kind}, price_per_hour: 2.0, speed_ratio: 0.01, memory_gib: 4}}
    - {{pool: small, kind: core, price_per_hour: 1.0, speed_ratio: 0.01, memory_gib: 4}}
  links:
    - {{within: zone, latency_s: 0.0001, bandwidth_gbytes_per_s: 1}}
budget: {{average_per_hour_usd: 10}}
control: {{slot_s: 2}}
failure: {{timeout_s: 30}}
metrics: {{port: 0}}
"""


CLUSTER: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        for pool in ("big", "small"):
            cluster.add_node(num_cpus=1, labels={"lyray.kind": "core", "lyray.pool": pool})
        CLUSTER.append(cluster)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()
        cluster.shutdown()


def config(folder: Path, *, kind: str = "core") -> RunConfig:
    return RunConfig.parse(TEXT.format(folder=folder, kind=kind))


def without_links(run: RunConfig) -> RunConfig:
    """What nobody has described yet."""
    return run.model_copy(update={"cluster": replace(run.cluster, links=())})


def test_labelled_nodes_train_and_are_billed_at_their_pools_price(tmp_path: Path) -> None:
    run = config(tmp_path)
    assert run_job(run).status == "finished"
    folder = Path(run.run.run_url)
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps] == list(range(12))
    assert steps[-1]["loss"] < steps[0]["loss"]
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    assert {(row["pool"], row["price_per_hour"]) for row in ledger} <= {
        ("big", 2.0),
        ("small", 1.0),
    }
    profile = json.loads((folder / "profile.json").read_text())
    assert {row["kind"] for row in profile["times"]} == {"core"}


def test_a_node_that_no_offer_prices_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"says kind 'core', but cluster\.offers prices pool 'big'"
    ):
        run_job(config(tmp_path, kind="other"))


def test_each_kind_is_measured_and_the_links_between_its_nodes(tmp_path: Path) -> None:
    run = config(tmp_path)
    said: list[str] = []
    found = profile_cluster(without_links(run), str(Path.cwd()), said.append)
    assert found.model.kinds == ("core",)
    assert {t.microbatch for t in found.model.times} == {1, 2}
    (link,) = found.links
    assert link.place == "between: [big, small]"
    assert 0 < link.latency_s < 1
    assert link.bandwidth_bytes_per_s > 1e6
    assert said == [
        "starting 2 workers, which load the task",
        "measuring the model",
        "measuring the links",
    ]


def test_labels_resources_and_accelerator_types_become_priced_devices_side_by_side(
    tmp_path: Path,
) -> None:
    """Two labelled nodes, one named by a custom resource, one with GPUs whose type Ray knows."""
    added = [
        CLUSTER[0].add_node(num_cpus=4, resources={"lyray.pool.many": 2}),
        CLUSTER[0].add_node(num_cpus=2, num_gpus=2, resources={"accelerator_type:T4": 1}),
    ]
    more = (
        OfferOptions(pool="many", kind="v100-16", price_per_hour=0.5),
        OfferOptions(pool="cards", kind="t4", price_per_hour=0.35, spot=True),
        OfferOptions(pool="absent", kind="l4", price_per_hour=1.0),
    )
    try:
        run = config(tmp_path)
        offers = (*run.cluster.offers, *more)
        cluster = replace(run.cluster, offers=offers)
        found = find_devices(run.model_copy(update={"cluster": cluster}))
    finally:
        for node in added:
            CLUSTER[0].remove_node(node)
    assert [(o.pool, o.kind, o.count, o.devices_per_node) for o in found.options.offers] == [
        ("big", "core", 1, 1),
        ("small", "core", 1, 1),
        ("many", "v100-16", 2, 2),
        ("cards", "t4", 2, 2),
    ]
    places = {place.device_id: place for place in found.places}
    assert set(places) == {"big-0", "small-0", "many-0", "many-1", "cards-0", "cards-1"}
    assert (places["many-1"].resource, places["many-1"].num_threads) == ("lyray.pool.many", 2)
    assert (places["cards-0"].num_gpus, places["big-0"].num_gpus) == (1, 0)
    assert places["many-0"].ray_node_id == places["many-1"].ray_node_id


def test_gpus_that_neither_driver_nor_ray_can_name_are_refused_with_the_label_to_set() -> None:
    """The node itself is asked: a task with its GPUs runs there, and torch sees none."""
    node = CLUSTER[0].add_node(num_cpus=1, num_gpus=2)
    try:
        told = Products().ask(ray.nodes(), wait_s=60.0)
        assert list(told.values()) == [()]
        with pytest.raises(ConfigError, match=r"has 2 GPUs of unknown type; .*lyray\.kind=KIND"):
            found_nodes(ray.nodes(), products=told)
    finally:
        CLUSTER[0].remove_node(node)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_worker_whose_torch_cannot_use_its_gpu_says_so(tmp_path: Path) -> None:
    labels = {"lyray.kind": "core", "lyray.pool": "big"}
    node = CLUSTER[0].add_node(num_cpus=1, num_gpus=1, labels=labels)
    try:
        with pytest.raises(ConfigError, match=r"Ray gave this worker a GPU, but torch .* is built"):
            run_job(config(tmp_path))
    finally:
        CLUSTER[0].remove_node(node)
