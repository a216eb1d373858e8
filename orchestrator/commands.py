"""What each command of lyray does once its arguments are read; heavy modules load where needed."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import storage
from orchestrator.ending import tell
from orchestrator.errors import ConfigError, OrchestratorError

if TYPE_CHECKING:
    from orchestrator.config import RunConfig
    from orchestrator.core.model import ModelProfile
    from orchestrator.reports.live import View
    from orchestrator.reports.run_report import RunFound
    from orchestrator.whatif.rehearsal import Comparison


def load(
    path: str,
    overlays: Sequence[str] | None = None,
    overrides: Sequence[str] | None = None,
    *,
    links_known: bool = True,
) -> "RunConfig":
    """Read a file and check the names in it: kinds, links, files, the task."""
    from orchestrator.config import RunConfig
    from orchestrator.control.pools import build_cluster, build_devices, run_figures
    from orchestrator.inputs import check_file, check_folder, read_profile
    from orchestrator.support import find_task

    config = RunConfig.load(path, overrides or (), overlays or ())
    (build_cluster if links_known else build_devices)(config.cluster)
    feed, profile = config.cluster.price_feed, config.cluster.profile
    for key, file in (
        ("cluster.profile", profile),
        ("training.init_from", config.training.init_from),
        ("cluster.price_feed.path", feed.path if feed else None),
    ):
        if file is not None:
            check_file(file, f"{path}: {key}")
    if profile is not None:
        measured = read_profile(profile)
        if config.cluster.source != "ray":  # there the kinds are known once devices are found
            run_figures(config.cluster, config.emulation, config.training, measured, num_cores=1)
    check_folder(config.run.run_url, "run.storage_path with run.name")
    find_task(config.training.task, config.training.task_args, Path.cwd())
    return config


def _tell_upload(files: Sequence[str], config: "RunConfig", folder: str) -> None:
    """Say what ``ray job submit --working-dir FOLDER`` would send for a run of these files."""
    from orchestrator.runtime.upload import look_at_upload
    from orchestrator.support import find_task

    task = find_task(config.training.task, config.training.task_args, Path.cwd())
    here = [Path(file) for file in files if "://" not in file]
    print(look_at_upload(Path(folder), [*here, *([task] if task else [])]))


def validate(
    files: Sequence[str],
    overlays: Sequence[str] | None,
    overrides: Sequence[str] | None,
    folder: str | None = None,
) -> None:
    """Check files, a line each; with ``folder``, say what a job of each would send of it.

    Raises:
        OrchestratorError: Of the only file; of several, that some are wrong, once all of them
            are told.
    """
    wrong = []
    for file in files:
        try:
            _validate(file, overlays, overrides, folder)
        except OrchestratorError as error:
            if len(files) == 1:
                raise
            wrong.append(file)
            said = str(error)
            print(f"lyray: {said if said.startswith(file) else f'{file}: {said}'}", file=sys.stderr)
    if wrong:
        raise ConfigError(f"{len(wrong)} of {len(files)} files are wrong: {', '.join(wrong)}")


def _validate(
    file: str,
    overlays: Sequence[str] | None,
    overrides: Sequence[str] | None,
    folder: str | None,
) -> None:
    from orchestrator.layers import read_layers
    from orchestrator.whatif.summary import summary
    from orchestrator.whatif.traces import traces_of

    checked = load(file, overlays, overrides)
    traces_of(checked, ask=False)
    if folder is not None:
        _tell_upload(read_layers(file, overlays or ()).files, checked, folder)
    print(f"{file}: fine. {summary(checked)}")


def _measured(config: "RunConfig") -> "ModelProfile":
    """The model's layers: of the profile file, or found in this process."""
    from orchestrator.inputs import read_profile

    if config.cluster.profile is not None:
        return read_profile(config.cluster.profile)
    from orchestrator.runtime.processes import look_at_model

    return look_at_model(config)


def profile(config: "RunConfig", output: str, *, as_json: bool) -> None:
    """Measure layers and links, write the profile file ``output``, and say what was found."""
    from rich.console import Console

    from orchestrator.core.model import profile_to_json
    from orchestrator.inputs import check_output
    from orchestrator.reports.profile_table import print_profile
    from orchestrator.runtime.profiling import profile_cluster

    check_output(output, "-o")
    with Console(stderr=True).status("loading the task") as status:  # shown on a terminal only
        found = profile_cluster(config, str(Path.cwd()), status.update)
    storage.write_json(output, profile_to_json(found.model))
    if as_json:
        print(json.dumps({"profile": output, **found.to_data()}, indent=1, allow_nan=False))
        return
    print_profile(Console(), found.model, found.words, [link.rule for link in found.links])
    print(f"wrote {output}; name it as cluster.profile to plan and run with these figures")


def plan(config: "RunConfig", *, as_json: bool, html: str | None) -> None:
    """Print the plans that could run; write page and trace where ``html`` says so."""
    from rich.console import Console

    from orchestrator.inputs import check_output
    from orchestrator.reports.plan_page import plan_page, trace_json
    from orchestrator.reports.tables import plan_table, worth_table
    from orchestrator.reports.worth import WORTH_HELP
    from orchestrator.whatif.plans import what_if, what_if_data

    check_output(html, "--html")
    found = what_if(config, _measured(config), stopwatch=time.monotonic)
    written = []
    if html is not None:
        page = plan_page(
            config.run.name, found.rows, found.problem.cluster, found.timelines, found.notes,
            found.worth,
        )  # fmt: skip
        trace = str(Path(html).with_suffix(".trace.json"))
        storage.write_bytes(html, page.encode())
        storage.write_bytes(
            trace,
            trace_json(found.chosen.plan, found.timelines, found.chosen.estimate).encode(),
        )
        written = [html, trace]
    if as_json:
        print(json.dumps(what_if_data(config, found), indent=1, allow_nan=False))
        return
    console = Console()
    console.print(plan_table(found.rows, batch_samples=config.training.global_batch))
    if found.worth is not None:
        console.print()
        console.print(worth_table(found.worth))
        console.print(WORTH_HELP, style="dim", highlight=False)
    for note in found.notes:
        console.print(note, style="dim", highlight=False)
    if written:
        print(f"wrote {' and '.join(written)} (the trace opens in ui.perfetto.dev)")


def simulate(config: "RunConfig", found: "Comparison", *, as_json: bool, html: str | None) -> None:
    """Run the rehearsals of ``found`` and print them side by side."""
    from rich.console import Console

    from orchestrator.inputs import check_output
    from orchestrator.whatif.rehearsal_page import rehearsal_page
    from orchestrator.whatif.rehearsal_table import rehearsal_data, rehearsal_table

    check_output(html, "--html")
    measured = _measured(config)
    with Console(stderr=True).status("simulating") as status:  # shown on a terminal only
        results = found.run(measured, status.update)
    if html is not None:
        storage.write_bytes(html, rehearsal_page(config, results).encode())
    if as_json:
        print(json.dumps(rehearsal_data(config, results), indent=1, allow_nan=False))
        return
    Console().print(rehearsal_table(config, results))
    if html is not None:
        print(f"wrote {html}")


def run(config: "RunConfig", resume: str, compare: tuple[str, ...], chaos: str | None) -> None:
    """Train, and end the process with the run's exit code."""
    from orchestrator.runtime.chaos import with_chaos
    from orchestrator.runtime.driver import exit_code, run_job, with_callbacks
    from orchestrator.runtime.news import Comparing

    view = with_callbacks(config, (), _view(config))
    comparing = Comparing(compare) if compare else None
    try:
        outcome = run_job(with_chaos(config, chaos), resume=resume, view=view, comparing=comparing)
    finally:
        view.close()
    if view.error is not None:
        raise view.error
    tell(outcome.status, outcome.reason, config.run.run_url)
    sys.exit(exit_code(outcome))


def strategies(names: str | None) -> tuple[str, ...]:
    """The strategies of ``--compare``."""
    from orchestrator.support import STRATEGIES

    given = STRATEGIES if names == "all" else tuple(filter(None, (names or "").split(",")))
    for name in given:
        if name not in STRATEGIES:
            raise ConfigError(f"--compare {name}: write all, or some of {', '.join(STRATEGIES)}")
    return given


def _view(config: "RunConfig") -> "View":
    from rich.console import Console

    from orchestrator.reports.live import LiveView, PlainView

    console = Console()
    if not console.is_terminal:
        return PlainView(lambda line: print(line, flush=True))
    name, num_steps = config.run.name, config.training.steps
    return LiveView(console, name=name, num_steps=num_steps)


def budget(run_dir: str, file: str | None, overrides: Sequence[str], *, as_json: bool) -> None:
    """Show the budget of a run and its history, or write another one down."""
    from rich.console import Console

    from orchestrator.reports.budget_table import budget_data, print_budget
    from orchestrator.runtime.budget_edit import budget_of, edit_budget

    if file is not None or overrides:
        changes, url, when = edit_budget(run_dir, file, overrides)
        if not as_json:
            for change in changes:
                print(change.text)
            print(f"wrote {url}: it applies {when}" if changes else "nothing changes")
            return
    found = budget_of(run_dir)
    if as_json:
        print(json.dumps(budget_data(found.in_force, found.wanted, found.events), indent=1))
        return
    print_budget(Console(), found.in_force, found.wanted, found.events)
    if found.awaited:
        print(f"what is wanted applies {found.when}")
    if found.problem:
        print(f"not followed: {found.problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAsked:
    """What ``lyray report`` is asked for."""

    run_dir: str
    against: tuple[str, ...]
    as_json: bool
    html: str | None
    csv: str | None
    bill: str | None
    bill_columns: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.against and self.bill is not None:
            raise ConfigError("--bill is compared with one run; leave out --against")
        if self.csv == "":
            raise ConfigError("--csv '' names no folder; give the path of one")
        if self.bill_columns and self.bill is None:
            raise ConfigError(f"--bill-column {self.bill_columns[0]!r}: give the --bill it is of")


def report(asked: ReportAsked) -> None:
    """Print the report of a run, as text or JSON; write its page and files where asked."""
    from rich.console import Console

    from orchestrator.inputs import check_folder, check_output, read_text
    from orchestrator.reports.bill import BillLine, bill_columns, compare_bill, read_bill
    from orchestrator.reports.csv_files import write_csv
    from orchestrator.reports.run_page import run_page
    from orchestrator.reports.run_report import read_run, report_data
    from orchestrator.reports.run_text import print_report

    check_output(asked.html, "--html")
    if asked.csv is not None:
        check_folder(asked.csv, "--csv")
    columns = bill_columns(asked.bill_columns)
    found = read_run(asked.run_dir)
    reconciled: tuple[BillLine, ...] = ()
    if asked.bill is not None:
        text = read_text(asked.bill, asked.bill, "give a CSV file")
        reconciled = compare_bill(found.pools, read_bill(text, columns))
    written = (
        []
        if asked.csv is None
        else [storage.join(asked.csv, n) for n in write_csv(found, asked.csv)]
    )
    if asked.against:
        _compare(found, asked, written)
        return
    if asked.html is not None:
        storage.write_bytes(asked.html, run_page(found, reconciled).encode())
        written.append(asked.html)
    if asked.as_json:
        print(json.dumps(report_data(found, reconciled), indent=1, allow_nan=False))
        return
    print_report(Console(), found, reconciled)
    for name in written:
        print(f"wrote {name}")


def _compare(found: "RunFound", asked: ReportAsked, written: list[str]) -> None:
    """Print a run beside others, or write their common page."""
    from rich.console import Console

    from orchestrator.reports.comparison import compare_runs, comparison_data
    from orchestrator.reports.comparison_page import comparison_page, print_comparison
    from orchestrator.reports.run_report import read_run, report_data

    compared = compare_runs((found, *map(read_run, asked.against)))
    if asked.html is not None:
        storage.write_bytes(asked.html, comparison_page(compared).encode())
        written.append(asked.html)
    if asked.as_json:
        data = {**report_data(found), "comparison": comparison_data(compared)}
        print(json.dumps(data, indent=1, allow_nan=False))
        return
    print_comparison(Console(), compared)
    for name in written:
        print(f"wrote {name}")
