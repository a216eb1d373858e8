"""``lyray budget``: what it shows, checks and writes."""

import fcntl
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.config import RunConfig
from orchestrator.control.persistence import RunStore
from orchestrator.runtime.budget_edit import edit_budget
from orchestrator.runtime.folder import open_folder

TEXT = """
run: {{name: r, storage_path: {folder}}}
training: {{task: "m:t", global_batch: 8, steps: 10}}
cluster:
  source: emulated
  offers: [{{pool: p, kind: t4, zone: z1, price_per_hour: 1.0}}]
budget: {{average_per_hour_usd: 1.0, total_usd: 5.0}}
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was started and is not going on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    open_folder(RunConfig.parse(TEXT.format(folder=tmp_path)), "auto")
    return tmp_path / "r"


def lyray(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lyray", "budget", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(str(end.value.code or 0))


def written(run_dir: Path) -> RunConfig:
    return RunConfig.load(run_dir / "config.yaml")


def test_a_key_is_edited_and_what_changes_is_told_with_when_it_applies(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lyray(monkeypatch, "r", "--set", "budget.total_usd=50") == 0
    assert capsys.readouterr().out.splitlines() == [
        "budget.total_usd: 5 -> 50",
        f"wrote {run_dir}/config.yaml: it applies when the run is started again",
    ]
    assert written(run_dir).budget.total_usd == 50.0
    assert lyray(monkeypatch, "r", "--set", "budget.total_usd=50") == 0
    assert capsys.readouterr().out == "nothing changes\n"


def test_while_a_job_holds_the_folder_an_edit_applies_at_a_slots_end(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (run_dir / "lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lyray(monkeypatch, "r", "--set", "budget.total_usd=50") == 0
    assert "it applies at the end of the slot under way, or of the next" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["budget: {{average_per_hour_usd: 7}}\n", TEXT])
def test_the_section_of_a_file_is_taken_whole_and_nothing_else_of_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    before = written(run_dir)
    Path("b.yaml").write_text(text.replace("steps: 10", "steps: 99").format(folder="elsewhere"))
    assert lyray(monkeypatch, "r", "b.yaml", "--set", "budget.horizon_hours=3") == 0
    after = written(run_dir)
    assert (after.training, after.run) == (before.training, before.run)
    assert after.budget.horizon_hours == 3.0
    assert after.budget.total_usd == (5.0 if text == TEXT else None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "budget.total_usd=-5"), "budget.total_usd is -5.0; it must be positive"),
        (
            ("--set", "budget.totl_usd=5"),
            "did you mean total_usd?",
        ),
        (("--set", "training.steps=5"), "of a run that goes on only the budget changes"),
        (("--set", "budget.limits=[{zone: z9, max_per_hour_usd: 1}]"), "budget.limits[0]"),
        (("none.yaml",), "none.yaml does not exist"),
        (("other.yaml",), "other.yaml has no section budget; write budget: {...}"),
    ],
)
def test_what_validate_would_refuse_is_not_written(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    Path("other.yaml").write_text("run: {name: other}\n")
    before = (run_dir / "config.yaml").read_bytes()
    assert lyray(monkeypatch, "r", *arguments) == 2
    assert message in capsys.readouterr().err
    assert (run_dir / "config.yaml").read_bytes() == before


def test_a_run_that_is_over_and_a_folder_without_one_are_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"status": "finished", "reason": "all steps are done", "resumable": False}
    RunStore(str(run_dir)).write_result(result)
    assert lyray(monkeypatch, "r", "--set", "budget.total_usd=50") == 2
    assert "is over (was done before: all steps are done)" in capsys.readouterr().err
    assert lyray(monkeypatch, "nowhere") == 2
    assert "nowhere holds no run" in capsys.readouterr().err


def test_without_an_edit_it_shows_what_is_in_force_what_is_awaited_and_what_is_wrong(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lyray(monkeypatch, "r", "--set", "budget.total_usd=50") == 0
    capsys.readouterr()
    assert lyray(monkeypatch, "r") == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "total_usd 5 50" in lines
    assert lines[-1] == "what is wanted applies when the run is started again"
    assert lyray(monkeypatch, "r", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["in_force"]["total_usd"], data["wanted"]["total_usd"]) == (5.0, 50.0)
    text = (run_dir / "config.yaml").read_text().replace("total_usd: 50", "total_usd: -5")
    (run_dir / "config.yaml").write_text(text)
    assert lyray(monkeypatch, "r") == 0
    assert "not followed: " in capsys.readouterr().out
    assert lyray(monkeypatch, "r", "--set", "budget.total_usd=7") == 0  # which mends it
    assert written(run_dir).budget.total_usd == 7.0


def test_two_editors_at_once_lose_no_edit(run_dir: Path) -> None:
    edits = {"total_usd": 50.0, "average_per_hour_usd": 3.0, "horizon_hours": 7.0}
    with ThreadPoolExecutor() as editors:
        for _ in range(5):
            edit_budget(str(run_dir), None, ["budget.total_usd=5", "budget.horizon_hours=9"])
            told = [f"budget.{name}={value}" for name, value in edits.items()]
            list(editors.map(lambda override: edit_budget(str(run_dir), None, [override]), told))
            budget = written(run_dir).budget
            assert {name: getattr(budget, name) for name in edits} == edits
