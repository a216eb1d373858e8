"""The command lyray: checks files, plans, simulates, trains, reports."""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from orchestrator import storage
from orchestrator.ending import ending, run_to_its_end, tell
from orchestrator.errors import ConfigError

if TYPE_CHECKING:
    from orchestrator.config import RunConfig
    from orchestrator.core.model import ModelProfile
    from orchestrator.reports.live import View
    from orchestrator.whatif.rehearsal import Comparison

app = typer.Typer(
    help="Train a PyTorch model on unlike devices, as fast as a long-term cost budget allows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
RunDir = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Folder of the run.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file; may repeat."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
Html = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Write a page of its own to FILE.")
]


def main() -> NoReturn:
    """Run the command line and end the process with the exit code of what happened."""
    sys.path.insert(0, str(Path.cwd()))  # the user's task lies in the working directory
    run_to_its_end(lambda: app(prog_name="lyray", standalone_mode=True))


def _show_version(asked: bool) -> None:
    if asked:
        print(f"lyray {version('lyray')}")
        raise typer.Exit


@app.callback()
def lyray(
    *,
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version of lyray and exit.",
        ),
    ] = False,
) -> None:
    """What may stand before the commands."""


@app.command()
def validate(config: Config, overrides: Set = None) -> None:
    """Check a file: keys, units, names. Starts and executes nothing.

    Example: lyray validate run.yaml
    """
    from orchestrator.whatif.summary import summary
    from orchestrator.whatif.traces import traces_of

    checked = _load(config, overrides)
    traces_of(checked)
    print(f"{config}: fine. {summary(checked)}")


@app.command()
def profile(
    config: Config,
    output: Annotated[
        str | None,
        typer.Option("-o", metavar="FILE", help="The profile file, else NAME.profile.json."),
    ] = None,
    overrides: Set = None,
    as_json: AsJson = False,
) -> None:
    """Measure the layers of the model and the links of the cluster; write a profile file.

    Example: lyray profile run.yaml -o profile.json
    """
    loaded = _load(config, [*(overrides or ()), "cluster.profile=null"], links_known=False)
    with ending(loaded.run.run_url):
        name = f"{loaded.run.name}.profile.json" if output is None else output
        _profile(loaded, name, as_json=as_json)


@app.command()
def plan(config: Config, overrides: Set = None, as_json: AsJson = False, html: Html = None) -> None:
    """Show what would run, beside the baselines. Trains nothing.

    Example: lyray plan run.yaml --html plan.html
    """
    loaded = _load(config, overrides)
    with ending(loaded.run.run_url):
        _plan(loaded, as_json=as_json, html=html)


@app.command()
def simulate(  # noqa: PLR0913 - one option each
    config: Config,
    *,
    days: Annotated[float, typer.Option(help="Billed days; the run may end first.")] = 2.0,
    overrides: Set = None,
    as_json: AsJson = False,
    compare: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Other strategies, comma separated; or all.")
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(metavar="FILE", help="Trouble for the cluster: docs/scenarios.md.")
    ] = None,
    html: Html = None,
) -> None:
    """Run the closed loop on a virtual clock: no device, no training.

    Example: lyray simulate run.yaml --days 7 --compare all --html simulated.html
    """
    from orchestrator.whatif.rehearsal import Comparison

    loaded = _load(config, overrides)
    with ending(loaded.run.run_url):
        asked = Comparison(loaded, days, _strategies(compare), scenario)
        _simulate(loaded, asked, as_json=as_json, html=html)


@app.command()
def run(
    config: Config,
    resume: Annotated[
        str, typer.Option(metavar="auto|never|PATH", help="Go on with what the folder holds.")
    ] = "auto",
    overrides: Set = None,
    compare: Annotated[
        str | None, typer.Option(metavar="NAMES", help="First measure these strategies' plans.")
    ] = None,
    chaos: Annotated[str | None, typer.Option(metavar="FILE", help="Faults to inject.")] = None,
) -> None:
    """Train. The last line on stdout is one JSON object: status, reason, run_dir.

    Example: lyray run run.yaml --set training.steps=500
    """
    loaded = _load(config, overrides)
    with ending(loaded.run.run_url):
        _run(loaded, resume, _strategies(compare), chaos)


@app.command()
def report(
    run_dir: RunDir,
    as_json: AsJson = False,
    html: Html = None,
    bill: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Provider's bill (CSV: pool, usd) to compare with."),
    ] = None,
) -> None:
    """Say what happened: throughput, money, plans, faults. Also while the run goes on.

    Example: lyray report runs/byte-gpt --html report.html
    """
    from rich.console import Console

    from orchestrator.inputs import check_output, read_text
    from orchestrator.reports.run_page import run_page
    from orchestrator.reports.run_report import compare_bill, read_run, report_data
    from orchestrator.reports.run_text import print_report

    check_output(html, "--html")
    found = read_run(run_dir)
    compared = () if bill is None else compare_bill(found, read_text(bill, bill, "give a CSV file"))
    if html is not None:
        storage.write_bytes(html, run_page(found).encode())
    if as_json:
        print(json.dumps(report_data(found, compared), indent=1, allow_nan=False))
        return
    print_report(Console(), found, compared)
    if html is not None:
        print(f"wrote {html}")


@app.command()
def export(
    run_dir: RunDir,
    output: Annotated[str, typer.Option("-o", metavar="FILE", help="The safetensors file.")],
    best: Annotated[bool, typer.Option("--best", help="Of the best evaluation.")] = False,
) -> None:
    """Write the trained weights as one safetensors file with the user's own names.

    Example: lyray export runs/byte-gpt -o byte_gpt.safetensors
    """
    from orchestrator.export import export_weights
    from orchestrator.inputs import check_output

    check_output(output, "-o")
    exported = export_weights(run_dir, output, best=best)
    print(
        f"wrote {output}: {exported.num_tensors} tensors of step {exported.step} "
        f"({exported.size_bytes:,} bytes)"
    )


@app.command()
def devices(
    *,
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/devices.md.")] = False,
) -> None:
    """Show the kinds of devices that are known: speed, memory, usual prices.

    Example: lyray devices
    """
    from rich.console import Console

    from orchestrator.core.cluster import known_kinds
    from orchestrator.reports.device_table import device_page, device_table

    kinds = known_kinds().values()
    Console().print(device_table(kinds)) if not markdown else print(device_page(kinds), end="")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the file, for editors.

    Example: lyray schema > lyray.schema.json
    """
    from orchestrator.config import config_schema

    print(json.dumps(config_schema(), indent=1))


def _load(path: str, overrides: list[str] | None, *, links_known: bool = True) -> "RunConfig":
    """Read a file and check the names in it: kinds, links, files, the task."""
    from orchestrator.config import RunConfig
    from orchestrator.control.pools import build_cluster, build_devices, run_figures
    from orchestrator.inputs import check_file, check_folder, read_profile
    from orchestrator.support import find_task

    config = RunConfig.load(path, overrides or ())
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


def _measured(config: "RunConfig") -> "ModelProfile":
    """The model's layers: of the profile file, or found in this process."""
    from orchestrator.inputs import read_profile

    if config.cluster.profile is not None:
        return read_profile(config.cluster.profile)
    from orchestrator.runtime.processes import look_at_model

    return look_at_model(config)


def _profile(config: "RunConfig", output: str, *, as_json: bool) -> None:
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


def _plan(config: "RunConfig", *, as_json: bool, html: str | None) -> None:
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


def _simulate(config: "RunConfig", found: "Comparison", *, as_json: bool, html: str | None) -> None:
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


def _run(config: "RunConfig", resume: str, compare: tuple[str, ...], chaos: str | None) -> None:
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


def _strategies(names: str | None) -> tuple[str, ...]:
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
    usd = config.budget.average_per_hour_usd
    return LiveView(console, name=name, num_steps=num_steps, budget_per_hour_usd=usd)
