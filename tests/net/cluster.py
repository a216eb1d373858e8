"""A Ray cluster with one raylet on each node of a ``machine``, and lyray's command on the first."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.net.machine import Node

ROOT = Path(__file__).parents[2]
RAY = (sys.executable, "-m", "ray.scripts.scripts")
PORT = 6380
START_S = 60.0
STARTED = "Ray runtime started"
ACTORS = ("ray::HeadActor", "ray::WorkerActor")

_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",  # else a lost node is missed after half a minute
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class RayNodes:
    """Raylets, each on a node of its own; the first one serves the cluster."""

    def __init__(
        self,
        nodes: Sequence[Node],
        folder: Path,
        *,
        token: str | None = None,
        jobs: bool = False,
        provided: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        """Take over nodes without limits: a raylet has 30 s to come up.

        Args:
            nodes: The first one has the head.
            folder: Empty, and its path short: the path of a socket has 107 bytes at most.
            token: Whoever speaks to Ray has to have it; None: anybody may.
            jobs: Whether the head takes jobs.
            provided: Node types that Ray's autoscaler may start beside them, on the first node.
        """
        self.nodes = tuple(nodes)
        self.address = f"{nodes[0].address}:{PORT}"
        self._folder, self._jobs = folder, jobs
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RAY_")
        } | _ENVIRONMENT
        # Entrypoints of jobs are looked up where the raylets were started.
        commands = f"{Path(sys.executable).parent}{os.pathsep}"
        self.environment["PATH"] = commands + self.environment.get("PATH", os.defpath)
        self._autoscaling: list[str] = []
        if provided is not None:
            file = folder / "autoscaling.json"
            file.write_text(json.dumps(_autoscaling(provided, self.address)))
            self._autoscaling = ["--autoscaling-config", str(file)]
            self.environment |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        if token is not None:
            self.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}

    def start(self, labels: Mapping[int, Mapping[str, str]]) -> None:
        """Start raylets on these nodes, with these labels, and wait until they are up.

        Raises:
            RuntimeError: If one does not come up, with what it said.
        """
        if 0 in labels:
            self._start(0, labels[0])
            self._wait(0)
        others = [index for index in labels if index]
        for index in others:
            self._start(index, labels[index])
        for index in others:
            self._wait(index)

    def kill(self, index: int) -> None:
        """End the raylet of a node with SIGKILL, as a machine that loses power does."""
        for pid, command in self.nodes[index].processes().items():
            if command.partition(" ")[0].endswith("/raylet"):
                os.kill(pid, signal.SIGKILL)

    def actors(self, index: int) -> tuple[int, ...]:
        """Processes of a node in which an actor lives: a head or a worker."""
        running = self.nodes[index].processes().items()
        return tuple(pid for pid, command in running if command.startswith(ACTORS))

    def run(self, *arguments: str | Path, output: Path) -> subprocess.Popen[bytes]:
        """Start ``lyray`` with these arguments on the first node."""
        environment = self.environment | {"RAY_ADDRESS": self.address}
        command = [sys.executable, "-m", "orchestrator", *arguments]
        return self.nodes[0].start(command, env=environment, output=output)

    def _start(self, index: int, labels: Mapping[str, str]) -> None:
        node, told = self.nodes[index], [f"{name}={value}" for name, value in labels.items()]
        role = ["--address", self.address]
        if index == 0:
            role = ["--head", "--port", str(PORT), f"--include-dashboard={self._jobs}"]
            role += self._autoscaling
        self._log(index).write_text("")
        options = {
            "--node-ip-address": node.address,
            "--temp-dir": str(self._folder / str(index)),
            "--labels": ",".join(told),
            "--num-cpus": "1",  # one thread each: what a quota below one core leaves use for
            "--object-store-memory": "100000000",
        }
        command = [*RAY, "start", "--block", *role, *(x for pair in options.items() for x in pair)]
        node.start(command, env=self.environment, output=self._log(index))

    def _wait(self, index: int) -> None:
        deadline_s = time.monotonic() + START_S
        while STARTED not in self._log(index).read_text():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"node {index}: {self._log(index).read_text()}")
            time.sleep(0.1)

    def _log(self, index: int) -> Path:
        return self._folder / f"node{index}.log"


_LISTS = (
    "cluster_synced_files", "file_mounts_sync_continuously", "initialization_commands",
    "setup_commands", "head_setup_commands", "worker_setup_commands", "head_start_ray_commands",
    "worker_start_ray_commands", "rsync_exclude", "rsync_filter",
)  # fmt: skip


def _autoscaling(provided: Mapping[str, Mapping[str, object]], address: str) -> dict[str, object]:
    """A file for Ray's autoscaler whose provider starts raylets as processes of this machine."""
    head = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
    return {
        "cluster_name": "provided",
        "max_workers": 4,
        "idle_timeout_minutes": 0.05,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "use_node_id_as_ip": True,
        },
        "available_node_types": {"ray.head.default": head, **provided},
        "head_node_type": "ray.head.default",
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in _LISTS},
    }
