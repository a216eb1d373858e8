"""The command line: messages, exit codes and the last line on stdout."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.builders import make_profile
from orchestrator import cli, commands, storage
from orchestrator.control.persistence import RunStore
from orchestrator.core.model import profile_to_json
from orchestrator.errors import (
    InfeasibleError,
    LostWorkerError,
    OrchestratorError,
    UserCodeError,
)
from tests.price_server import price_server, prices, says

CONFIG = """
run: {name: tiny, storage_path: ./runs}
training: {task: "job:task", task_args: {width: 4}, global_batch: 8, microbatch: 2, steps: 20}
cluster:
  source: file
  profile: profile.json
  offers:
    - {pool: fast, kind: a100-40, count: 2, price_per_hour: 3.6}
    - {pool: slow, kind: t4, count: 1, price_per_hour: 0.36}
  links: [{within: zone, latency_s: 0.0001, bandwidth_gbytes_per_s: 3}]
budget: {average_per_hour_usd: 4.0}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file, a task and a profile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "binary.py").write_bytes(b"\xff\0")
    (tmp_path / "job.py").write_text("def task(width=64): raise RuntimeError('never run')\n")
    profile = make_profile({"a100-40": [0.01] * 4, "t4": [0.04] * 4}, microbatches=(1, 2))
    (tmp_path / "profile.json").write_text(json.dumps(storage.to_json(profile_to_json(profile))))
    return tmp_path


def lyray(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["lyray", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    code = end.value.code
    return code if isinstance(code, int) else 0


def last_line(out: str) -> dict[str, object]:
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_a_good_file_is_fine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lyray(monkeypatch, "validate", "run.yaml") == 0
    out = capsys.readouterr().out
    assert out == "run.yaml: fine. tiny: 20 steps of 8 samples on 3 devices, $4.00/h on average\n"


def test_the_version_is_that_of_the_installed_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lyray(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"lyray {version('lyray')}\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("budget.average_per_hour_usd=-4", "budget.average_per_hour_usd is -4.0"),
        ("training.task=job:tusk", "defines no 'tusk'; did you mean job:task?"),
        ("training.task_args={widht: 4}", "training.task_args.widht is not an argument of task()"),
        ("cluster.profile=none.json", "cluster.profile is 'none.json', which does not exist"),
        ("training.init_from=none.st", "training.init_from is 'none.st', which does not exist"),
        ("cluster.offers[0].kind=a101", "cluster.offers[0].kind is 'a101'"),
        ("cluster.links=[]", "cluster.links says nothing of links inside zone 'z1'"),
        ("cluster.profile=.", "cluster.profile is '.', which is no file; give a file"),
        ("cluster.profile=run.yaml", "cluster.profile 'run.yaml' is no JSON: line 2"),
        ("training.init_from=none://x", "training.init_from is 'none://x', which cannot be read"),
        ("run.storage_path=run.yaml", "run.yaml is no folder; give a folder that can be written"),
        ("run.storage_path=none://x", "Protocol not known: none; give a folder"),
        ("run.storage_path=~nobody-here/x", "the home of an unknown user; give a path"),
        ("training.task=binary:task", "binary.py is no Python: source code string cannot contain"),
    ],
)
def test_a_bad_file_ends_with_2_one_message_and_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    override: str,
    message: str,
) -> None:
    assert lyray(monkeypatch, "validate", "run.yaml", "--set", override) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("lyray: ")
    assert "Traceback" not in err
    assert len(out.splitlines()) == 1
    assert last_line(out)["status"] == "bad_config"
    assert message in str(last_line(out)["reason"])


def test_several_files_are_checked_each_by_itself_and_all_that_are_wrong_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "other.yaml").write_text(CONFIG.replace("tiny", "other"))
    (folder / "bad.yaml").write_text(CONFIG.replace("steps: 20", "steps: soon"))
    (folder / "lost.yaml").write_text(CONFIG.replace("profile.json", "none.json"))
    files = ["bad.yaml", "run.yaml", "lost.yaml", "other.yaml"]
    assert lyray(monkeypatch, "validate", *files) == 2
    out, err = capsys.readouterr()
    fine = [line for line in out.splitlines() if ": fine. " in line]
    assert [line.partition(":")[0] for line in fine] == ["run.yaml", "other.yaml"]
    assert err.splitlines() == [
        'lyray: bad.yaml: training.steps is "soon"; write a whole number',
        "lyray: lost.yaml: cluster.profile is 'none.json', which does not exist; give a file",
        "lyray: 2 of 4 files are wrong: bad.yaml, lost.yaml",
    ]
    assert last_line(out)["reason"] == "2 of 4 files are wrong: bad.yaml, lost.yaml"
    assert lyray(monkeypatch, "validate", "run.yaml", "other.yaml") == 0


@pytest.mark.parametrize("command", ["validate", "plan", "simulate"])
def test_a_file_is_laid_over_the_run_file(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    command: str,
) -> None:
    (folder / "over.yaml").write_text("budget: {average_per_hour_usd: -7}")
    assert lyray(monkeypatch, command, "run.yaml", "--overlay", "over.yaml") == 2
    said = "lyray: over.yaml: budget.average_per_hour_usd is -7.0; it must be positive\n"
    assert capsys.readouterr().err == said
    overrides = ["--set", "budget.average_per_hour_usd=5"]
    assert lyray(monkeypatch, command, "run.yaml", "--overlay", "over.yaml", *overrides) == 0


@pytest.mark.parametrize(
    "arguments", [["validate", "none.yaml"], ["report", "none"], ["export", "none", "-o", "x"],
                  ["profile", "none.yaml"], ["simulate", "run.yaml", "--days", "0"],
                  ["simulate", "run.yaml", "--compare", "best"],
                  ["run", "run.yaml", "--compare", "even-split,best"],
                  ["run", "run.yaml", "--chaos", "none.yaml"], ["nonsense"], ["run"],
                  ["plan", "run.yaml", "--nonsense"], ["simulate", "run.yaml", "--days", "inf"],
                  ["plan", "run.yaml", "--html", "."], ["plan", "run.yaml", "--html", ""],
                  ["plan", "run.yaml", "--html", "run.yaml/page.html"], ["report", "run.yaml"],
                  ["report", "none://x"], ["export", "none://x", "-o", "x"],
                  ["export", ".", "-o", "."], ["validate", "none://x"]],
)  # fmt: skip
def test_wrong_arguments_end_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert lyray(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert last_line(out)["status"] == "bad_config"
    assert err
    assert "Traceback" not in err


def test_ctrl_c_while_the_file_is_read_ends_with_130_and_a_status_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestrator.commands.load", load)
    assert lyray(monkeypatch, "run", "run.yaml") == 130
    assert last_line(capsys.readouterr().out)["status"] == "stopped"


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (InfeasibleError("no plan fits"), 4, "infeasible"),
        (UserCodeError("step 7 raised", "Traceback of the user"), 5, "user_error"),
        (LostWorkerError("fast-0 is gone"), 6, "too_few_workers"),
        (OrchestratorError("odd"), 1, "failed"),
        (PermissionError(13, "Permission denied", "runs/tiny"), 2, "bad_config"),
        (OSError(28, "No space left on device"), 1, "failed"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_every_error_ends_with_its_own_code_and_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    status: str,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(commands, "run", fails)
    assert lyray(monkeypatch, "run", "run.yaml") == code
    out, err = capsys.readouterr()
    line = last_line(out)
    assert set(line) == {"status", "reason", "run_dir"}
    assert line["status"] == status
    assert str(line["run_dir"]).endswith("/runs/tiny")
    if isinstance(error, UserCodeError):  # the user's own traceback first, once
        assert err.splitlines() == ["Traceback of the user", "lyray: step 7 raised"]


def test_our_own_mistake_shows_no_trace_but_names_the_file_that_has_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("in the deep")

    monkeypatch.setattr(commands, "run", fails)
    assert lyray(monkeypatch, "run", "run.yaml") == 1
    out, err = capsys.readouterr()
    assert last_line(out)["status"] == "failed"
    assert err.startswith("lyray: lyray failed: ZeroDivisionError: in the deep; please report")
    assert len(err.splitlines()) == 1
    log = Path(err.split()[-1])
    assert "in fails" in log.read_text()
    log.unlink()


def test_plan_prints_the_baselines_beside_the_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert lyray(monkeypatch, "plan", "run.yaml", "--html", "plan.html") == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    figures = lines[2 : lines.index("", 2) if "" in lines else None]
    ticked = [line.split()[0] for line in figures if "✔" in line]
    assert ticked == ["joint"]
    for name in ("even-split", "proportional", "balanced-pipeline"):
        assert any(line.startswith(name) for line in lines)
    assert "wrote plan.html and plan.trace.json" in out
    assert (folder / "plan.html").read_text().startswith("<!doctype html>")
    assert json.loads((folder / "plan.trace.json").read_text())["traceEvents"]


def test_plan_as_json_is_one_object_whose_shares_hold_the_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lyray(monkeypatch, "plan", "run.yaml", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    for row in data["candidates"]:
        shares = [sum(group["microbatches"]) for group in row["plan"]["groups"]]
        assert sum(shares) == 8
        assert row["cost_per_hour_usd"] == pytest.approx(
            3600 * row["usd_per_million_samples"] / 1e6 * row["samples_per_s"]
        )
    even = next(row for row in data["candidates"] if row["strategy"] == "even-split")
    assert sorted(sum(g["microbatches"]) for g in even["plan"]["groups"]) == [2, 3, 3]
    chosen, *others = data["candidates"]
    assert chosen["chosen"]
    assert all(chosen["samples_per_s"] >= row["samples_per_s"] * (1 - 1e-9) for row in others)


def test_a_plan_above_the_budget_is_shown_with_one_that_keeps_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lyray(monkeypatch, "plan", "run.yaml", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    chosen, cheaper = data["candidates"][:2]
    assert chosen["cost_per_hour_usd"] > 4.0
    assert cheaper["strategy"] == "joint in budget"
    assert cheaper["cost_per_hour_usd"] <= 4.0
    share = f"{400.0 / chosen['cost_per_hour_usd']:.3g} % of the time"
    assert any(share in note for note in data["notes"])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0,fast,3\n", "line 1 lacks pool, price_per_hour, time_s, but 0, fast, 3; the first"),
        ("", "line 1 lacks pool, price_per_hour, time_s; the first line names the columns"),
        ("time_s,pool,price_per_hour\n0,quick,3\n", "line 2: pool is 'quick'; write a pool of"),
    ],
)
@pytest.mark.parametrize("command", ["validate", "plan"])
def test_a_broken_price_feed_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    command: str,
    lines: str,
    message: str,
) -> None:
    (folder / "prices.csv").write_text(lines)
    feed = ["--set", "cluster.source=file", "--set", "cluster.price_feed.path=prices.csv"]
    assert lyray(monkeypatch, command, "run.yaml", *feed) == 2
    assert f"cluster.price_feed.path 'prices.csv': {message}" in capsys.readouterr().err


def test_a_plan_is_made_at_the_prices_that_a_server_says_and_validate_asks_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "token").write_text("s3cr3t")
    with price_server(says(prices(fast=1.8, slow=0.9))) as server:
        feed = ["--set", f"cluster.price_feed={{url: '{server.url}', token_file: token}}",
                "--set", "cluster.offers[1].discount_ratio=0.5"]  # fmt: skip
        assert lyray(monkeypatch, "validate", "run.yaml", *feed) == 0
        assert not server.asked
        capsys.readouterr()
        assert lyray(monkeypatch, "plan", "run.yaml", "--json", *feed) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert any("fast $1.80/h, slow $0.4500/h." in note for note in notes)
        assert server.asked == [("/prices.json", "Bearer s3cr3t")]


def test_a_plan_with_a_server_of_prices_that_is_down_says_how_to_do_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with price_server(says("out of order", 500)) as server:
        feed = ["--set", f"cluster.price_feed.url={server.url}"]
        for command in ("plan", "simulate"):
            assert lyray(monkeypatch, command, "run.yaml", *feed) == 2
            assert capsys.readouterr().err == (
                f"lyray: cluster.price_feed.url '{server.url}': it answers with status 500; mend "
                "it, or take the prices of the offers with --set cluster.price_feed=null\n"
            )


def test_a_run_without_the_token_of_its_feed_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed = "cluster.price_feed={url: 'http://127.0.0.1:9/', token_file: none}"
    assert lyray(monkeypatch, "run", "run.yaml", "--set", feed) == 2
    assert capsys.readouterr().err == (
        "lyray: cluster.price_feed.token_file 'none' does not exist; write the token to it\n"
    )


def test_a_model_that_fits_on_no_device_is_infeasible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--set", "cluster.offers[0].memory_gib=0.001",
             "--set", "cluster.offers[1].memory_gib=0.001"]  # fmt: skip
    assert lyray(monkeypatch, "simulate", "run.yaml", *small) == 4
    assert lyray(monkeypatch, "plan", "run.yaml", *small) == 4
    out, err = capsys.readouterr()
    assert last_line(out)["status"] == "infeasible"
    assert " GiB on " in err


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is no JSON: line 1"), ('{"model": "m"}', "is wrong: "), ("[]", "is wrong: ")],
)
def test_a_broken_profile_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    content: str,
    message: str,
) -> None:
    (folder / "profile.json").write_text(content)
    assert lyray(monkeypatch, "plan", "run.yaml") == 2
    assert f"cluster.profile 'profile.json' {message}" in capsys.readouterr().err


def test_a_kind_that_the_profile_does_not_know_is_named_before_anything_is_planned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = "cluster.offers=[{pool: fast, kind: v100-16, count: 2, price_per_hour: 3.6}]"
    assert lyray(monkeypatch, "validate", "run.yaml", "--set", kind) == 2
    assert "has no times for kind 'v100-16'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "profile"])
def test_without_a_profile_the_task_is_built_and_its_error_is_the_users(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert lyray(monkeypatch, command, "run.yaml", "--set", "cluster.profile=null") == 5
    out, err = capsys.readouterr()
    assert "RuntimeError: never run" in err
    assert last_line(out)["status"] == "user_error"


def test_a_report_is_written_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "runs" / "tiny").mkdir(parents=True)
    (folder / "runs" / "tiny" / "config.yaml").write_text(CONFIG)
    RunStore(str(folder / "runs" / "tiny")).write_result({"status": "finished", "reason": "done"})
    (folder / "bill.csv").write_text("pool,usd\nfast,1.5\n")
    assert lyray(monkeypatch, "report", "runs/tiny", "--html", "r.html", "--bill", "bill.csv") == 0
    out = capsys.readouterr().out
    assert "tiny: finished" in out
    assert "Ledger against the bill" in out
    assert out.endswith("wrote r.html\n")
    assert (folder / "r.html").exists()
    assert lyray(monkeypatch, "report", "runs/tiny", "--against", "runs/tiny", "--csv", "out") == 0
    assert "tiny (2)" in capsys.readouterr().out
    assert (folder / "out" / "slots.csv").exists()
    assert lyray(monkeypatch, "report", "runs/tiny", "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "finished"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--csv", ""], "--csv '' names no folder"),
        (["--csv", "run.yaml"], "run.yaml is no folder"),
        (["--against", "none"], "none holds no run"),
        (["--bill", "run.yaml", "--against", "runs/tiny"], "leave out --against"),
        (["--bill-column", "pool=x"], "give the --bill it is of"),
        (["--bill", "run.yaml"], "it needs pool and usd"),
        (["--bill", "none.csv"], "none.csv does not exist"),
    ],
)
def test_a_report_that_cannot_be_made_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path,
    options: list[str], message: str,
) -> None:  # fmt: skip
    (folder / "runs" / "tiny").mkdir(parents=True)
    (folder / "runs" / "tiny" / "config.yaml").write_text(CONFIG)
    assert lyray(monkeypatch, "report", "runs/tiny", *options) == 2
    assert message in str(last_line(capsys.readouterr().out)["reason"])


def test_the_kinds_are_shown_with_their_usual_prices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lyray(monkeypatch, "devices", "--markdown") == 0
    rows = capsys.readouterr().out.splitlines()
    (row,) = [row for row in rows if row.startswith("| a100-40 |")]
    assert "1.48 Lambda" in row
    assert "- a100-40: $1.48/h on demand at Lambda (2026-05-07); techbytes.app" in "\n".join(rows)


def test_the_schema_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lyray(monkeypatch, "schema") == 0
    assert json.loads(capsys.readouterr().out)["properties"]["budget"]


@pytest.mark.parametrize(
    "command",
    [
        "validate",
        "profile",
        "plan",
        "simulate",
        "run",
        "report",
        "budget",
        "export",
        "devices",
        "schema",
    ],
)
def test_the_help_of_every_command_shows_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert lyray(monkeypatch, command, "--help") == 0
    assert f"Example: lyray {command}" in capsys.readouterr().out


def test_validating_loads_nothing_heavy_and_runs_no_user_code(folder: Path) -> None:
    code = (
        "import sys; sys.argv = ['lyray', 'validate', 'run.yaml']\n"
        "import atexit; atexit.register(lambda: print(*sys.modules))\n"
        "from orchestrator.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=True
    )
    first, modules = done.stdout.splitlines()
    assert first.startswith("run.yaml: fine")
    loaded = {name.partition(".")[0] for name in modules.split()}
    assert not loaded & {"ray", "torch", "cvxpy", "simpy", "job"}


def test_the_module_is_the_same_program(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "validate", "run.yaml"],
        capture_output=True, text=True, cwd=folder, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_plan_obeys_the_limits_and_ends_with_4_where_none_can(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    config = (folder / "run.yaml").read_text()
    zoned = config.replace("kind: t4,", "kind: t4, zone: z2,").replace(
        "links: [", "links: [{between: [z1, z2], latency_s: 0.001, bandwidth_gbytes_per_s: 1}, "
    )
    limited = zoned.replace("usd: 4.0}", "usd: 4.0, limits: [{zone: z2, max_per_hour_usd: 0.3}]}")
    (folder / "run.yaml").write_text(limited)
    assert lyray(monkeypatch, "plan", "run.yaml", "--json") == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    ours = [row["plan"] for row in candidates if row["strategy"].startswith("joint")]
    assert all("slow-0" in plan["idle"] for plan in ours)
    assert ["slow-0"] in [plan["idle"] for plan in ours]
    nowhere = "{zone: z1, max_per_hour_usd: 0.01}"
    (folder / "run.yaml").write_text(limited.replace("0.3}]", f"0.3}}, {nowhere}]"))
    assert lyray(monkeypatch, "plan", "run.yaml") == 4
    said = str(last_line(capsys.readouterr().out))
    assert "the one that comes nearest breaks zone z2: 1.2 times its limit" in said
