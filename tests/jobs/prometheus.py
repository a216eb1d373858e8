"""A real Prometheus on the first node of a cluster, with the project's own configuration."""

import json
import shutil
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.net.cluster import ROOT, RayNodes
from tests.net.machine import Node

SHIPPED = ROOT / "deploy" / "prometheus"
ADDRESS = "127.0.0.1:29090"
PATIENCE_S = 30.0

_ASK = """
import sys, urllib.request
sys.stdout.write(urllib.request.urlopen(sys.argv[1]).read().decode())
"""


@dataclass(frozen=True)
class Prometheus:
    """A server that scrapes every run of a folder."""

    node: Node
    folder: Path

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression gives now."""
        return list(self.ask("query", query=expression)["result"])

    def history(self, expression: str, last_s: float) -> list[dict[str, Any]]:
        """The same over the last seconds, a value a second."""
        end_s = time.time()
        times = {"start": str(end_s - last_s), "end": str(end_s), "step": "1"}
        return list(self.ask("query_range", query=expression, **times)["result"])

    def ask(self, what: str, **parameters: str) -> Any:
        """Data of an answer of the HTTP interface."""
        url = f"http://{ADDRESS}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        output = self.folder / f"answer-{time.monotonic_ns()}"
        asking = self.node.start([sys.executable, "-c", _ASK, url], env={}, output=output)
        assert asking.wait(PATIENCE_S) == 0, output.read_text()
        return json.loads(output.read_text())["data"]

    def is_ready(self) -> bool:
        """Whether it answers."""
        output = self.folder / "ready"
        url = f"http://{ADDRESS}/-/ready"
        return self.node.start([sys.executable, "-c", _ASK, url], env={}, output=output).wait() == 0


@contextmanager
def prometheus(cluster: RayNodes, folder: Path, runs: Path) -> Iterator[Prometheus]:
    """Prometheus as shipped, but for the folder of the runs and how often it looks."""
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus (Debian: apt-get install prometheus)")
    config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    (discovery,) = config["scrape_configs"][0]["file_sd_configs"]
    discovery["files"] = [str(runs / Path(path).name) for path in discovery["files"]]
    discovery["refresh_interval"] = "1s"
    shutil.copytree(SHIPPED, folder / "shipped")
    file = folder / "shipped" / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    command = [
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={ADDRESS}",
    ]
    node = cluster.nodes[0]
    output = folder / "prometheus.log"
    server = node.start(command, env=cluster.environment, output=output)
    try:
        found = Prometheus(node, folder)
        deadline_s = time.monotonic() + PATIENCE_S
        while not found.is_ready():
            assert server.poll() is None, output.read_text()
            assert time.monotonic() < deadline_s, output.read_text()
            time.sleep(0.2)
        yield found
    finally:
        server.terminate()
        try:
            server.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            server.kill()
