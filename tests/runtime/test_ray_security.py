"""One run as a user starts it, among planted secrets: where it listens, what it writes, and how."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.reports.run_page import run_page
from orchestrator.reports.run_report import read_run, report_data
from tests.runtime.processes import with_descendants
from tests.runtime.small_runs import config
from tests.runtime.sockets import listening

pytestmark = [
    pytest.mark.runtime,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="sockets are found in /proc"),
]

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
TOKEN = "c0ffee11" * 8  # as Ray wants it: hexadecimal digits
SECRETS = {
    "AWS_ACCESS_KEY_ID": "canary-of-the-key-id",
    "AWS_SECRET_ACCESS_KEY": "canary-of-the-secret-key",
    "AWS_SESSION_TOKEN": "canary-of-the-session",
    "HF_TOKEN": "canary-of-the-hub",
    "RAY_AUTH_TOKEN": TOKEN,
}
IN_A_FILE = "canary-of-the-credentials-file"


@dataclass(frozen=True)
class Seen:
    """What was seen of the run while it went on, and at its end."""

    folder: Path
    output: str
    sockets: frozenset[tuple[str, int]]
    exporter: tuple[str, int]
    metrics: str
    written_by_ray: dict[str, bytes]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    folder = tmp_path_factory.mktemp("security")
    (folder / "home" / ".aws").mkdir(parents=True)
    (folder / "home" / ".aws" / "credentials").write_text(f"[default]\nkey = {IN_A_FILE}\n")
    file = folder / "run.yaml"
    file.write_text(config(folder / "runs", steps=60).to_yaml())
    temporary = Path(tempfile.mkdtemp(prefix="ly", dir="/tmp"))  # sockets: a short path
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "AWS_"))}
    environment = kept | SECRETS | {
        "HOME": str(folder / "home"),
        "TMPDIR": str(temporary),
        "RAY_AUTH_MODE": "token",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    output = folder / "output"
    with output.open("wb") as said:
        run = subprocess.Popen(
            [sys.executable, "-m", "orchestrator", "run", str(file)],
            cwd=ROOT, env=environment, stdout=said, stderr=said, umask=0o077,
        )  # fmt: skip
    try:
        yield _look(run, folder, temporary)
    finally:
        run.terminate()
        run.wait(PATIENCE_S)
        shutil.rmtree(temporary, ignore_errors=True)


def _look(run: subprocess.Popen[bytes], folder: Path, temporary: Path) -> Seen:
    steps, output = folder / "runs" / "tiny" / "steps.jsonl", folder / "output"
    deadline_s = time.monotonic() + PATIENCE_S
    while not (steps.exists() and steps.read_text().count("\n") > 5):
        assert run.poll() is None, output.read_text()
        assert time.monotonic() < deadline_s, output.read_text()
        time.sleep(0.05)
    sockets = listening(with_descendants(run.pid))
    (target,) = json.loads((folder / "runs" / "tiny.prometheus.json").read_text())[0]["targets"]
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=PATIENCE_S) as answer:
        metrics = answer.read().decode()
    by_ray = {str(p): p.read_bytes() for p in temporary.rglob("*") if p.is_file()}
    assert run.wait(PATIENCE_S) == 0, output.read_text()
    host, port = target.rsplit(":", 1)
    return Seen(folder, output.read_text(), sockets, (host, int(port)), metrics, by_ray)


def test_every_process_of_a_run_listens_on_loopback_only(seen: Seen) -> None:
    assert seen.exporter in seen.sockets
    assert {host for host, _ in seen.sockets} == {"127.0.0.1"}, sorted(seen.sockets)
    assert len(seen.sockets) > 5, "Ray's services, the store, the workers, the metrics"


def test_no_secret_of_the_environment_is_in_files_logs_metrics_or_reports(seen: Seen) -> None:
    found = read_run(str(seen.folder / "runs" / "tiny"))
    written = {
        **{str(p): p.read_bytes() for p in (seen.folder / "runs").rglob("*") if p.is_file()},
        **seen.written_by_ray,
        "output": seen.output.encode(),
        "metrics": seen.metrics.encode(),
        "report": json.dumps(report_data(found)).encode(),
        "page": run_page(found).encode(),
    }
    secrets = [*SECRETS.values(), IN_A_FILE]
    leaks = {name: s for name, data in written.items() for s in secrets if s.encode() in data}
    assert leaks == {}
    names = {Path(name).name for name in written}
    assert {"config.yaml", "control.json", "manifest.json", "head.log", "result.json"} <= names
    assert seen.written_by_ray, "its logs"


def test_the_files_of_a_run_are_as_private_as_the_umask_says(seen: Seen) -> None:
    modes = {p: p.stat().st_mode & 0o777 for p in (seen.folder / "runs").rglob("*")}
    open_ones = {str(p.relative_to(seen.folder)): oct(m) for p, m in modes.items() if m & 0o077}
    assert open_ones == {}
    assert any(path.suffix == ".safetensors" for path in modes)
