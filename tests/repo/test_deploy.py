"""What is shipped for clusters: valid by strict schemas, pinned, and open to nobody by default."""

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from benchmarks.reference_data import DATA
from orchestrator.core.cluster import known_kinds

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERAY = ("raycluster", "rayjob")


def strict(node: Any) -> Any:
    """A structural schema of Kubernetes as a JSON schema that takes no other property."""
    if not isinstance(node, dict):
        return node
    out = dict(node)
    if "properties" in node:
        out["properties"] = {name: strict(child) for name, child in node["properties"].items()}
        if not node.get("x-kubernetes-preserve-unknown-fields"):
            out.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            out[key] = strict(node[key])
    if node.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
        out["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if node.get("nullable") and "type" in out:
        out["type"] = [out["type"], "null"]
    return out


def kuberay(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "kuberay" / f"{name}.yaml").read_text())
    return found


def validator(name: str) -> jsonschema.Draft202012Validator:
    path = DATA / "kuberay" / f"ray.io_{name}s.v1.json"
    if not path.exists():
        pytest.skip(f"there is no schema at {path}")
    schema = strict(json.loads(path.read_text()))
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", KUBERAY)
def test_a_manifest_is_what_kuberay_takes(name: str) -> None:
    assert [e.message for e in validator(name).iter_errors(kuberay(name))] == []


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("rayjob", ("spec", "entrypiont")),
        ("raycluster", ("spec", "headGroupSpec", "rayStartParamz")),
    ],
)
def test_a_misspelt_key_is_found(name: str, path: tuple[str, ...]) -> None:
    check, manifest = validator(name), kuberay(name)
    at = manifest
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = "x"
    assert [path[-1] in e.message for e in check.iter_errors(manifest)] == [True]


def clusters() -> list[dict[str, Any]]:
    return [kuberay("raycluster")["spec"], kuberay("rayjob")["spec"]["rayClusterSpec"]]


@pytest.mark.parametrize("cluster", clusters(), ids=KUBERAY)
def test_pods_have_no_privileges_and_known_limits(cluster: dict[str, Any]) -> None:
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"]["limits"] == container["resources"]["requests"]
            assert not container["image"].endswith(":latest")


@pytest.mark.parametrize("cluster", clusters(), ids=KUBERAY)
def test_worker_groups_are_unlike_and_of_known_kinds(cluster: dict[str, Any]) -> None:
    labels = [
        dict(pair.split("=") for pair in group["rayStartParams"]["labels"].split(","))
        for group in cluster["workerGroupSpecs"]
    ]
    kinds = [found["lyray.kind"] for found in labels]
    assert len(set(kinds)) == len(kinds) > 1
    assert set(kinds) <= set(known_kinds())


def test_the_job_runs_on_the_cluster_that_is_shipped() -> None:
    job, cluster = clusters()[1], clusters()[0]
    groups = [[g["groupName"] for g in one["workerGroupSpecs"]] for one in (job, cluster)]
    assert groups[0] == groups[1]


def test_the_launcher_takes_the_cluster_file() -> None:
    found = find_spec("ray")
    assert found is not None
    assert found.origin is not None
    schema = Path(found.origin).parent / "autoscaler" / "ray-schema.json"
    config = yaml.safe_load((DEPLOY / "ray" / "aws.yaml").read_text())
    jsonschema.validate(config, json.loads(schema.read_text()))
    kinds = {
        n["labels"]["lyray.kind"] for n in config["available_node_types"].values() if "labels" in n
    }
    assert len(kinds) > 1
    assert kinds <= set(known_kinds())


def test_the_slurm_script_parses() -> None:
    subprocess.run(["bash", "-n", str(DEPLOY / "slurm" / "lyray.sbatch")], check=True)


def test_compose_opens_ports_on_this_machine_only_and_has_no_default_secret() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    services = yaml.safe_load(text)["services"]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert "privileged" not in service
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), service["image"]
    secrets = re.findall(r"(?:PASSWORD|TOKEN): (.*)", text)
    assert secrets
    assert all(re.fullmatch(r"\$\{\w+:\?.+\}", value) for value in secrets)


def test_grafana_is_given_the_folders_that_compose_mounts() -> None:
    """ray-project/kuberay#1493: what is mounted elsewhere is an empty page."""
    grafana = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]
    mounted = {volume.split(":")[1] for volume in grafana["volumes"]}
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/default.yml").read_text())
    assert provider["providers"][0]["options"]["path"] in mounted
    assert "/etc/grafana/provisioning" in mounted
    source = (DEPLOY / "grafana/provisioning/datasources/default.yml").read_text()
    assert set(re.findall(r"\$\{(\w+)\}", source)) <= set(grafana["environment"])


def test_images_have_pinned_bases() -> None:
    bases = re.findall(r"^FROM (\S+)", (DEPLOY / "Dockerfile").read_text(), re.M)
    assert bases
    assert all(re.search(r":\d+\.\d+\.\d+", base) for base in bases)
