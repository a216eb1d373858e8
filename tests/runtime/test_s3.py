"""A run whose files lie in an object store, against a server that speaks S3 on loopback."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import lines, storage
from orchestrator.config import RunConfig
from orchestrator.control.persistence import CheckpointStore, RunStore
from tests.runtime.reference import train_alone
from tests.runtime.s3 import BUCKET, Fault, Server, s3_server
from tests.runtime.small_runs import TEXT
from workers.worker import WorkerSpec

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(180)]

PATIENCE_S = 120.0
STEPS = 120  # so many that the first checkpoint is up, hiccups and all, long before the last step


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(autouse=True)
def _well(server: Server) -> None:
    server.fail()


def test_files_are_written_listed_and_removed(server: Server) -> None:
    folder = f"s3://{BUCKET}/files"
    assert storage.list_names(folder) == ()
    assert not storage.exists(folder)
    for name in ("one", "two/three"):
        storage.write_bytes(f"{folder}/{name}", name.encode())
    assert storage.read_bytes(f"{folder}/two/three") == b"two/three"
    assert storage.list_names(folder) == ("one", "two")
    assert storage.exists(f"{folder}/two")
    assert (storage.is_file(f"{folder}/two"), storage.is_file(f"{folder}/one")) == (False, True)
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(f"{folder}/none")
    storage.delete(folder)
    assert storage.list_names(folder) == ()


def test_what_another_process_writes_is_seen_though_drivers_keep_listings(server: Server) -> None:
    url = f"s3://{BUCKET}/shared/new"
    assert storage.list_names(f"s3://{BUCKET}/shared") == ()
    assert not storage.exists(url)
    code = f"from orchestrator import storage; storage.write_bytes({url!r}, b'x')"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert storage.exists(url)
    assert storage.list_names(f"s3://{BUCKET}/shared") == ("new",)


def test_lines_are_appended_in_parts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PART_BYTES", 20)
    url = f"s3://{BUCKET}/lines/steps.jsonl"
    rows = [f"row {i}" for i in range(12)]
    for row in rows:
        lines.append_lines(url, [row])
    assert lines.read_lines(url) == tuple(rows)
    assert len(storage.list_names(f"s3://{BUCKET}/lines")) == 3
    lines.keep_lines(url, 5)
    assert lines.read_lines(url) == tuple(rows[:5])


def test_a_bucket_that_is_not_there_is_named_and_not_made(server: Server) -> None:
    with pytest.raises(FileNotFoundError, match=r"bucket does not exist: 's3://typo/run/x'"):
        storage.write_bytes("s3://typo/run/x", b"")
    assert not storage.exists("s3://typo")


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError")])
def test_an_answer_that_asks_for_patience_is_given_some(
    server: Server, status: int, code: str
) -> None:
    """ray-project/ray#47939, #55350: one hiccup of the object store ends training."""
    server.fail(Fault("PUT", "hiccup", 3, status, code))
    storage.write_bytes(f"s3://{BUCKET}/hiccup", b"x")
    assert server.left() == [0]
    assert storage.read_bytes(f"s3://{BUCKET}/hiccup") == b"x"


def test_a_right_that_is_missing_is_told_at_once(server: Server) -> None:
    server.fail(Fault("PUT", "secret", 100, 403, "AccessDenied"))
    with pytest.raises(PermissionError, match=f"AccessDenied: 's3://{BUCKET}/secret'"):
        storage.write_bytes(f"s3://{BUCKET}/secret", b"x")
    assert server.left() == [99]


# A whole run ---------------------------------------------------------------------------


def lyray(*arguments: str) -> subprocess.Popen[str]:
    """The command of a user."""
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
    )


def ended(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=PATIENCE_S)
    return output


def kill_after_a_checkpoint(file: Path, store: CheckpointStore) -> None:
    """Start a run and kill the job's process once a checkpoint exists."""
    process = lyray("run", str(file))
    deadline_s = time.monotonic() + PATIENCE_S
    while not store.steps():
        assert time.monotonic() < deadline_s, "no checkpoint came"
        assert process.poll() is None, ended(process)
        time.sleep(0.05)
    process.kill()
    ended(process)


def losses_alone(run: RunConfig) -> list[float]:
    training = run.training
    spec = WorkerSpec(
        task=training.task, task_args=training.task_args, options=training,
        seed=run.run.seed, run_url=run.run.run_url,
    )  # fmt: skip
    return train_alone(spec, training.steps or 0)[1]


@pytest.mark.long
def test_a_run_in_a_bucket_survives_hiccups_and_a_kill_resumes_and_is_reported(
    server: Server, tmp_path: Path
) -> None:
    """ray-project/ray#46814: restored, yet the loss is high and the epoch is 1."""
    file = tmp_path / "tiny.yaml"
    folder = f"s3://{BUCKET}/jobs"
    file.write_text(
        TEXT.format(folder=folder, task="tests.runtime.models:mlp", steps=STEPS, events="")
    )
    run = RunConfig.load(str(file))
    store, records = CheckpointStore(run.run.run_url), RunStore(run.run.run_url)
    server.fail(Fault("PUT", r"layer-\d+", 2), Fault("PUT", "steps.jsonl", 2, 500, "InternalError"))
    kill_after_a_checkpoint(file, store)
    assert server.left() == [0, 0]
    manifest = store.latest()
    assert manifest is not None
    assert manifest.step < STEPS

    second = lyray("run", str(file))
    output = ended(second)
    assert second.returncode == 0, output
    (resumed,) = [e["detail"] for e in records.read("events") if e["kind"] == "resumed"]
    # Head and workers end a moment after the job's process, on a busy machine a longer one: a
    # late checkpoint has a step of its own, the last one at most.
    assert resumed in {f"at step {step}" for step in range(manifest.step, STEPS + 1)}
    steps = records.read("steps")
    assert [row["step"] for row in steps] == list(range(STEPS))
    assert [row["loss"] for row in steps] == pytest.approx(
        losses_alone(run), rel=1e-4
    )  # rounding adds up
    assert len(store.steps()) == 2  # keep_checkpoints

    report = lyray("report", run.run.run_url, "--json")
    assert json.loads(ended(report))["status"] == "finished"
    exported = lyray("export", run.run.run_url, "-o", f"s3://{BUCKET}/weights.safetensors")
    output = ended(exported)
    assert exported.returncode == 0, output
    assert storage.size_bytes(f"s3://{BUCKET}/weights.safetensors") > 0
