"""``ray job submit`` on a Ray cluster of two nodes, with and without token authentication."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.conftest import TASK
from tests.jobs.jobs import SLOT, Jobs, check_a_whole_job, check_nothing_is_left, job_server, last

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

TOKEN = "0123456789abcdef" * 4
FOR_EVER = ("--set", "training.steps=1000000")


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """Of a cluster that asks for a token, as Ray's own default is."""
    with job_server(TOKEN) as found:
        yield found


def test_a_job_streams_a_line_a_slot_ends_with_its_reason_and_leaves_nothing(
    jobs: Jobs, work: Path
) -> None:
    """ray-project/ray#31183, #38142: the exit status is lost; ray-project/ray-llm#51: a group is.

    verl-project/verl#2890: nothing came after the submission line.
    """
    check_a_whole_job(jobs, work)
    written = [path for path in (work.parent / "runs").rglob("*") if path.is_file()]
    assert written
    assert [path for path in written if TOKEN.encode() in path.read_bytes()] == []
    assert TOKEN not in jobs.logs("whole")


@pytest.mark.parametrize(
    ("options", "code", "status"),
    [
        (("--set", "training.batch=3"), 2, "bad_config"),
        (("--set", "budget.total_usd=0.005", *FOR_EVER), 3, "budget"),
        (("--set", "training.task_args={broken: true}"), 5, "user_error"),
    ],
)
def test_a_job_that_fails_says_why_in_its_last_line_and_by_its_exit_status(
    jobs: Jobs, work: Path, options: tuple[str, ...], code: int, status: str
) -> None:
    """ray-project/ray#31183, #38142: the CLI knows 0 and 1; ray-project/ray-llm#51: a leak."""
    name = f"fails-{code}"
    exit_status, said = jobs.submit(name, work, "lyray", "run", "one.yaml", *options)
    assert exit_status == 1, "Ray's command knows no other"
    assert last(said)["status"] == status
    assert jobs.info(name)["code"] == code
    check_nothing_is_left(jobs)


def test_a_stopped_job_writes_a_checkpoint_and_the_next_one_goes_on(jobs: Jobs, work: Path) -> None:
    """ray-project/kuberay#1374, ray-project/ray#20553, #23564, verl-project/verl#2890.

    Logs came at the end only; here every slot that is over is there while the job runs.
    """
    run = work.parent / "runs" / "one"
    jobs.start("stopped", work, "lyray", "run", "one.yaml", *FOR_EVER)
    steps = run / "steps.jsonl"
    jobs.wait_until(lambda: steps.exists() and steps.read_text().count("\n") > 5,
                    lambda: jobs.logs("stopped"))  # fmt: skip
    jobs.wait_until(lambda: SLOT.search(jobs.logs("stopped")) is not None,
                    lambda: jobs.logs("stopped"))  # fmt: skip
    assert jobs.info("stopped")["status"] == "RUNNING"
    jobs.ray("job", "stop", "stopped")
    assert jobs.wait("stopped")["status"] == "STOPPED"
    assert last(jobs.logs("stopped"))["status"] == "stopped"
    done = json.loads((run / "result.json").read_text())["steps"]
    assert (run / "checkpoints" / f"step-{done:06d}" / "manifest.json").exists()
    check_nothing_is_left(jobs)
    more = ("--set", f"training.steps={done + 20}")
    code, said = jobs.submit("again", work, "lyray", "run", "one.yaml", *more)
    assert code == 0, said
    rows = [json.loads(line) for line in steps.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(done + 20))
    assert [row["first_sample"] for row in rows] == [16 * s for s in range(done + 20)]


def test_two_jobs_share_a_cluster(jobs: Jobs, work: Path) -> None:
    """Each its own run, ports and targets."""
    for name in ("one", "two"):
        jobs.start(f"pair-{name}", work, "lyray", "run", f"{name}.yaml")
    for name in ("one", "two"):
        assert jobs.wait(f"pair-{name}")["code"] == 0, jobs.logs(f"pair-{name}")
        assert last(jobs.logs(f"pair-{name}"))["run_dir"].endswith(f"/{name}")
    check_nothing_is_left(jobs)


def test_what_the_cluster_does_not_have_is_refused_at_once(jobs: Jobs, work: Path) -> None:
    """Ray itself would let the job wait for ever."""
    offer = "cluster.offers=[{pool: big, kind: big, count: 4, price_per_hour: 1}]"
    code, said = jobs.submit("lacking", work, "lyray", "run", "one.yaml", "--set", offer)
    assert code == 1
    assert last(said)["status"] in {"bad_config", "infeasible"}, said
    check_nothing_is_left(jobs)


def test_whoever_was_killed_leaves_nothing(jobs: Jobs, work: Path) -> None:
    """ray-project/ray-llm#51: a group that leaks keeps nodes, and they cost money."""
    steps = work.parent / "runs" / "one" / "steps.jsonl"
    jobs.start("killed", work, "lyray", "run", "one.yaml", *FOR_EVER)
    jobs.wait_until(lambda: steps.exists() and steps.read_text().count("\n") > 5,
                    lambda: jobs.logs("killed"))  # fmt: skip
    drivers = [
        pid for pid, line in jobs.cluster.nodes[0].processes().items() if "lyray run" in line
    ]
    assert drivers
    for pid in drivers:
        os.kill(pid, signal.SIGKILL)
    assert jobs.wait("killed")["status"] == "FAILED"
    check_nothing_is_left(jobs)


def test_an_edited_task_is_told_by_another_hash_and_the_same_one_by_the_same(
    jobs: Jobs, work: Path
) -> None:
    """ray-project/ray#53635: edits were ignored, and nothing said so."""
    told = []
    for edit in ("", "", "# edited\n"):
        (work / "mytask.py").write_text(TASK + edit)
        name = f"edited-{len(told)}"
        options = ("--set", f"run.name={name}", "--set", "training.steps=2")
        code, said = jobs.submit(name, work, "lyray", "run", "one.yaml", *options)
        assert code == 0, said
        digest = json.loads((work.parent / "runs" / name / "result.json").read_text())["code"]
        assert f"code {digest[:8]} (mytask), lyray " in said
        told.append(digest)
    assert told[0] == told[1] != told[2]
