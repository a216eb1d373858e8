"""What is shipped for clusters: valid by strict schemas, pinned, and open to nobody by default."""

import json
import posixpath
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import jsonschema
import pytest
import yaml
from compose_spec import PyCompose

from benchmarks.reference_data import DATA
from orchestrator.core.cluster import known_kinds
from orchestrator.telemetry.discovery import discovery_file

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


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def refusal(composed: dict[str, Any]) -> str:
    """What a strict parser of compose files says against one; empty: nothing."""
    try:
        PyCompose.from_json(json.dumps(composed)).to_spec()
    except ValueError as error:
        return str(error)
    return ""


SERVICES = sorted(compose()["services"])


def test_compose_is_what_the_specification_allows() -> None:
    assert refusal(compose()) == ""


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("imgae", "x", "imgae"),
        ("healthcheck", {"test": ["CMD", "true"], "intervall": "5s"}, "intervall"),
        ("depends_on", {"head": {"condition": "service_heathy"}}, "service_heathy"),
        ("ports", ["127.0.0.1:web:80"], "web"),
    ],
)
def test_a_slip_in_compose_is_found(key: str, value: object, said: str) -> None:
    composed = compose()
    composed["services"]["head"][key] = value
    assert said in refusal(composed)


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_pinned_unprivileged_watched_and_local(name: str) -> None:
    service = compose()["services"][name]
    assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), service["image"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert int(service["user"].split(":")[0]) > 0
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service
    assert service["healthcheck"]["test"][0] == "CMD"


def test_what_compose_mounts_and_builds_is_in_the_tree() -> None:
    composed = compose()
    for name, service in composed["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_dir(), (name, volume)
                assert volume.endswith(":ro"), (name, volume)
            else:
                assert source in composed["volumes"], (name, volume)
        if "build" in service:
            context = DEPLOY / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()
        for other in service.get("depends_on", ()):
            assert "healthcheck" in composed["services"][other]


def test_compose_has_no_default_secret() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    secrets = re.findall(r"(?:PASSWORD|TOKEN): (.*)", text)
    assert "GF_SECURITY_ADMIN_PASSWORD" in text, "without it Grafana's is admin"
    assert secrets
    assert all(re.fullmatch(r"\$\{\w+:\?.+\}", value) for value in secrets)


def test_prometheus_is_given_what_its_configuration_reads() -> None:
    """ray-project/kuberay#1493: a configuration that is mounted elsewhere scrapes nothing."""
    service = compose()["services"]["prometheus"]
    mounted = {v.split(":")[1]: DEPLOY / v.split(":")[0] for v in service["volumes"]}
    (config,) = (PurePosixPath(c.partition("=")[2]) for c in service["command"] if "config" in c)
    assert (mounted[str(config.parent)] / config.name).is_file()
    scraped = yaml.safe_load((DEPLOY / "prometheus" / config.name).read_text())["scrape_configs"]
    path, in_rays_folder = scraped[0]["file_sd_configs"][0]["files"]
    assert discovery_file("s3://bucket/run").match(Path(in_rays_folder).name)
    assert posixpath.normpath(config.parent / PurePosixPath(path).parent) in mounted


def test_grafana_is_given_the_folders_that_compose_mounts() -> None:
    """ray-project/kuberay#1493: what is mounted elsewhere is an empty page."""
    grafana = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["grafana"]
    mounted = {volume.split(":")[1] for volume in grafana["volumes"]}
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/default.yml").read_text())
    assert provider["providers"][0]["options"]["path"] in mounted
    assert "/etc/grafana/provisioning" in mounted
    source = (DEPLOY / "grafana/provisioning/datasources/default.yml").read_text()
    assert set(re.findall(r"\$\{(\w+)\}", source)) <= set(grafana["environment"])


def test_the_image_has_a_pinned_base_and_pinned_packages_and_runs_as_nobody_special() -> None:
    """No digest of the base is written: whoever builds may add ``@sha256:...`` behind its tag."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    steps = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    done = [(name, rest) for name, _, rest in steps]
    bases = [rest for name, rest in done if name == "FROM"]
    assert bases
    assert all(re.search(r":\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?$", base) for base in bases)
    users = [rest for name, rest in done if name == "USER"]
    assert users
    assert int(users[-1]) > 0
    assert done.index(("USER", users[-1])) > max(i for i, (n, r) in enumerate(done) if "pip" in r)
    installs = [rest for name, rest in done if "pip install" in rest]
    assert all("--no-cache-dir" in rest and "-c constraints.txt" in rest for rest in installs)
    assert all(name not in {"ADD", "MAINTAINER"} and "sudo" not in rest for name, rest in done)
    assert not re.search(r"(PASSWORD|TOKEN|SECRET)=", "\n".join(lines))
    for copied in (rest.split()[:-1] for name, rest in done if name == "COPY"):
        assert all((DEPLOY.parent / path).exists() for path in copied), copied
