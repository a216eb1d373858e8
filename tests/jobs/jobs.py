"""``ray job`` on the first node of a cluster, and what Ray says of jobs and of what they left."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.net.cluster import RAY, RayNodes
from tests.net.machine import nodes, why_not

SERVER = "http://127.0.0.1:8265"
PATIENCE_S = 90.0
SLOT = re.compile(r"slot \d+ · ")
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")

_ASK_JOB = """
import dataclasses, json, sys
from ray.job_submission import JobSubmissionClient
info = JobSubmissionClient().get_job_info(sys.argv[1])
print(json.dumps({"status": str(info.status.value), "code": info.driver_exit_code,
                  "message": info.message}))
"""

_ASK_CLUSTER = """
import json, ray
from ray.util.state import list_actors, list_placement_groups
ray.init(address="auto", log_to_driver=False)
print(json.dumps({"all": ray.cluster_resources(), "free": ray.available_resources(),
    "actors": [a.class_name for a in list_actors() if a.state != "DEAD"],
    "groups": [g.placement_group_id for g in list_placement_groups() if g.state != "REMOVED"]}))
"""


@dataclass(frozen=True)
class Jobs:
    """The job server of a cluster, spoken to from its first node."""

    cluster: RayNodes
    folder: Path
    """For what commands print."""

    def submit(
        self, name: str, working_dir: Path, *command: str, env: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """``ray job submit``: its exit status and all that it printed. Waits for the job."""
        options = ["--submission-id", name, "--working-dir", str(working_dir)]
        if env:
            options += ["--runtime-env-json", json.dumps({"env_vars": dict(env)})]
        return self.ray("job", "submit", *options, "--", *command)

    def start(self, name: str, working_dir: Path, *command: str) -> None:
        """Submit a job and do not wait for it."""
        options = ["--submission-id", name, "--working-dir", str(working_dir), "--no-wait"]
        code, said = self.ray("job", "submit", *options, "--", *command)
        assert code == 0, said

    def info(self, name: str) -> dict[str, Any]:
        """Status, exit status of the command and Ray's message."""
        return self._ask(_ASK_JOB, name)

    def wait(self, name: str) -> dict[str, Any]:
        """``info`` once the job has ended."""
        self.wait_until(lambda: self.info(name)["status"] in ENDED, lambda: self.logs(name))
        return self.info(name)

    def logs(self, name: str) -> str:
        """All that the job printed."""
        return self.ray("job", "logs", name)[1]

    def wait_until(self, reached: Callable[[], bool], said: Callable[[], str]) -> None:
        """Wait for something; fails with what was said if it does not come."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < deadline_s, said()
            time.sleep(0.2)

    def leftovers(self) -> dict[str, Any]:
        """Resources that are still taken, living actors and placement groups."""
        found = self._ask(_ASK_CLUSTER)
        taken = {k: n for k, n in found["all"].items() if found["free"].get(k, 0.0) < n}
        # A node's memory and object store differ by what Ray itself keeps there.
        taken = {k: n for k, n in taken.items() if "memory" not in k}
        return {"taken": taken, "actors": found["actors"], "groups": found["groups"]}

    def ray(self, *arguments: str) -> tuple[int, str]:
        """One of Ray's commands on the first node: exit status and what it printed."""
        return self._run([*RAY, *arguments])

    def _ask(self, program: str, *arguments: str) -> dict[str, Any]:
        code, said = self._run([sys.executable, "-W", "ignore", "-c", program, *arguments])
        assert code == 0, said
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found

    def _run(self, command: list[str]) -> tuple[int, str]:
        environment = {
            **self.cluster.environment,
            "RAY_API_SERVER_ADDRESS": SERVER,
            "RAY_ADDRESS": self.cluster.address,
        }
        output = self.folder / f"said-{time.monotonic_ns()}"
        process = self.cluster.nodes[0].start(command, env=environment, output=output)
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{command} does not end:\n{output.read_text()}") from None
        return code, output.read_text()


@contextmanager
def job_server(token: str | None) -> Iterator[Jobs]:
    if reason := why_not():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="lyray-jobs-", dir="/tmp"))  # sockets: a short path
    try:
        with nodes(2) as made:
            cluster = RayNodes(made, folder, token=token, jobs=True)
            cluster.start({i: {"lyray.kind": k} for i, k in enumerate(("one", "two"))})
            yield Jobs(cluster, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def last(text: str) -> dict[str, str]:
    """The JSON object with which a run says its last word."""
    found: dict[str, str] = json.loads([x for x in text.splitlines() if x.startswith("{")][-1])
    return found


def check_nothing_is_left(jobs: Jobs) -> None:
    nothing = {"taken": {}, "actors": [], "groups": []}
    jobs.wait_until(lambda: jobs.leftovers() == nothing, lambda: str(jobs.leftovers()))
    assert [jobs.cluster.actors(index) for index in range(2)] == [(), ()]


def check_a_whole_job(jobs: Jobs, work: Path) -> None:
    code, said = jobs.submit("whole", work, "lyray", "run", "one.yaml")
    assert code == 0, said
    assert last(said)["status"] == "finished"
    told = said.splitlines()
    lines = [line for line in told if SLOT.match(line)]
    assert [int(line.split()[1]) for line in lines] == list(range(len(lines)))
    assert told[told.index(lines[0]) - 1].startswith("code "), "what runs is told before it does"
    assert jobs.info("whole")["code"] == 0
    check_nothing_is_left(jobs)
