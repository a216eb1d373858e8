"""Nodes of one machine that differ for real: namespaces, shaped links, processor quotas.

Each node is a network namespace on a bridge that has no way out, and a control group. Their
names are fixed, so one test run at a time has them.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "lyray-"
SWITCH = f"{PREFIX}switch"
LOCK = Path("/run/lock/lyray-nodes")
PERIOD_US = 10_000
"""Of quotas: far shorter than a microbatch, so that a quota slows one down evenly."""

BURST = "128kb"
PATIENCE_S = 2.0  # from SIGTERM to SIGKILL


def why_not() -> str | None:
    """What this machine lacks for such nodes; None when they can be had."""
    if os.geteuid() != 0:
        return "it takes root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (Debian: apt-get install iproute2)"
    if _hierarchy() is None:
        return "no control group hierarchy limits processor time (cgroup cpu controller)"
    try:
        with nodes(1) as (node,):
            node.shape(100)
            node.limit(0.5)
    except (subprocess.CalledProcessError, OSError) as error:
        detail = getattr(error, "stderr", None) or error
        return f"namespaces, shaped links or quotas are not allowed: {str(detail).strip()}"
    return None


@contextmanager
def nodes(count: int) -> Iterator[tuple["Node", ...]]:
    """So many nodes on one bridge, and nothing of them left afterwards.

    Waits until no other test run has any; what one that was killed left is taken down first.
    """
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _clear()
        made: list[Node] = []
        try:
            _ip("netns", "add", SWITCH)
            _ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
            _ip("-n", SWITCH, "link", "set", "bridge", "up")
            made += (Node(index) for index in range(count))
            yield tuple(made)
        finally:
            _clear()
            for process in (process for node in made for process in node.started):
                process.wait()


class Node:
    """A machine of its own, as far as network and processor time go."""

    def __init__(self, index: int) -> None:
        """Make its namespace, its cable to the switch and its control group."""
        self.namespace = f"{PREFIX}{index}"
        self.address = f"10.77.0.{10 + index}"
        self._port = f"port{index}"  # its end of the cable at the switch
        hierarchy = _hierarchy()
        assert hierarchy is not None, "see why_not"
        self._group = hierarchy / self.namespace
        self.started: list[subprocess.Popen[bytes]] = []
        here, switch = ("-n", self.namespace), ("-n", SWITCH)
        _ip("netns", "add", self.namespace)
        _ip(*switch, "link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns",
            self.namespace)  # fmt: skip
        _ip(*switch, "link", "set", self._port, "master", "bridge", "up")
        _ip(*here, "link", "set", "lo", "up")
        _ip(*here, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip(*here, "link", "set", "eth0", "up")
        self._group.mkdir()
        self._put_first()

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], output: Path
    ) -> subprocess.Popen[bytes]:
        """Start a command on this node, in a session of its own.

        Args:
            command: Program and arguments.
            env: Its whole environment.
            output: A file for what it prints; never a pipe, which its children would hold open.
        """
        # The control group first: ``ip netns exec`` hides the hierarchy.
        enter = f'echo $$ > {self._group}/cgroup.procs; exec ip netns exec {self.namespace} "$@"'
        with output.open("ab") as file:
            process = subprocess.Popen(
                ["sh", "-c", enter, "sh", *command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def shape(self, mbit_per_s: float) -> None:
        """Limit its cable, both ways."""
        rate = ("root", "tbf", "rate", f"{mbit_per_s}mbit", "burst", BURST, "latency", "100ms")
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", *rate)
        _run("tc", "-n", SWITCH, "qdisc", "replace", "dev", self._port, *rate)

    def limit(self, cores: float | None) -> None:
        """Limit the processor time of all that runs on it; None: without limit."""
        quota_us = None if cores is None else round(cores * PERIOD_US)
        if (self._group / "cpu.max").exists():
            quota = "max" if quota_us is None else str(quota_us)
            (self._group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (self._group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._group / "cpu.cfs_quota_us").write_text(str(-1 if quota_us is None else quota_us))

    def _put_first(self) -> None:
        """Serve it before whatever else the machine does, so that its quota is what limits it."""
        for name, weight in (("cpu.shares", "102400"), ("cpu.weight", "10000")):
            if (self._group / name).exists():
                (self._group / name).write_text(weight)

    def isolate(self, *, on: bool) -> None:
        """Let it reach only nodes that are not isolated themselves; or all of them again."""
        mode = "on" if on else "off"
        _ip("-n", SWITCH, "link", "set", self._port, "type", "bridge_slave", "isolated", mode)

    def cut_off(self) -> None:
        """Pull its cable."""
        _ip("-n", SWITCH, "link", "set", self._port, "down")

    def processes(self) -> dict[int, str]:
        """What runs on it: the command of every process."""
        found = {}
        for pid in _pids((self._group,)):
            with suppress(OSError):  # it has just ended
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = line.replace(b"\0", b" ").decode().strip()
        return found


def transfer_s(source: Node, target: Node, num_bytes: int, folder: Path) -> float:
    """Seconds until so many bytes of one TCP stream have come from one node to another."""
    told = folder / "received"
    receiver = target.start([sys.executable, "-c", _RECEIVE, target.address], env={}, output=told)
    while "ready" not in (told.read_text() if told.exists() else ""):
        assert receiver.poll() is None, told.read_text()
        time.sleep(0.02)
    command = [sys.executable, "-c", _SEND, target.address, str(num_bytes)]
    assert source.start(command, env={}, output=folder / "sent").wait(PATIENCE_S * 10) == 0
    assert receiver.wait(PATIENCE_S * 10) == 0, told.read_text()
    return float(told.read_text().split()[-1])


_RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    start_s = time.monotonic()
    while connection.recv(1 << 20):
        pass
    print(time.monotonic() - start_s)
"""

_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""


def _clear() -> None:
    """Take down every namespace and group of ours, and only what runs in them."""
    hierarchy = _hierarchy()
    groups = tuple(hierarchy.glob(f"{PREFIX}*")) if hierarchy else ()
    for number in (signal.SIGTERM, signal.SIGKILL):
        _end(groups, number)
    for line in _ip("netns", "list").splitlines():
        if line.startswith(PREFIX):
            _ip("netns", "del", line.split()[0])
    for group in groups:
        group.rmdir()


def _end(groups: Sequence[Path], number: signal.Signals) -> None:
    """Send a signal to all that runs in these groups, and wait a while until it is gone."""
    for pid in _pids(groups):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    deadline_s = time.monotonic() + PATIENCE_S
    while _pids(groups) and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _pids(groups: Sequence[Path]) -> tuple[int, ...]:
    return tuple(int(p) for group in groups for p in (group / "cgroup.procs").read_text().split())


def _hierarchy() -> Path | None:
    """Where control groups with processor quotas are made: version 1, or 2."""
    old, new = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    if (old / "cgroup.procs").exists():
        return old
    children = new / "cgroup.subtree_control"
    with suppress(OSError):
        if "cpu" not in children.read_text().split():
            children.write_text("+cpu")
        return new
    return None


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":  # for .ci/run
    raise SystemExit(why_not())
