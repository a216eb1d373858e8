"""The command lyray: checks files, plans, simulates, trains, reports."""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from orchestrator import commands
from orchestrator.ending import ending, run_to_its_end

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
Overlay = Annotated[
    list[str] | None,
    typer.Option(
        "--overlay", metavar="FILE", help="YAML that replaces keys of the file; may repeat."
    ),
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
def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="YAML files of runs.")],
    overlays: Overlay = None,
    overrides: Set = None,
    upload: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Also say what `ray job submit` would send of DIR."),
    ] = None,
) -> None:
    """Check files, each by itself: keys, units, names. Starts and executes nothing.

    Example: lyray validate run.yaml --upload .
    """
    commands.validate(files, overlays, overrides, upload)


@app.command()
def profile(
    config: Config,
    output: Annotated[
        str | None,
        typer.Option("-o", metavar="FILE", help="The profile file, else NAME.profile.json."),
    ] = None,
    overlays: Overlay = None,
    overrides: Set = None,
    as_json: AsJson = False,
) -> None:
    """Measure the layers of the model and the links of the cluster; write a profile file.

    Example: lyray profile run.yaml -o profile.json
    """
    unmeasured = [*(overrides or ()), "cluster.profile=null"]
    loaded = commands.load(config, overlays, unmeasured, links_known=False)
    with ending(loaded.run.run_url):
        name = f"{loaded.run.name}.profile.json" if output is None else output
        commands.profile(loaded, name, as_json=as_json)


@app.command()
def plan(
    config: Config,
    overlays: Overlay = None,
    overrides: Set = None,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Show what would run, beside the baselines. Trains nothing.

    Example: lyray plan run.yaml --html plan.html
    """
    loaded = commands.load(config, overlays, overrides)
    with ending(loaded.run.run_url):
        commands.plan(loaded, as_json=as_json, html=html)


@app.command()
def simulate(  # noqa: PLR0913 - one option each
    config: Config,
    *,
    days: Annotated[float, typer.Option(help="Billed days; the run may end first.")] = 2.0,
    overlays: Overlay = None,
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

    loaded = commands.load(config, overlays, overrides)
    with ending(loaded.run.run_url):
        asked = Comparison(loaded, days, commands.strategies(compare), scenario)
        commands.simulate(loaded, asked, as_json=as_json, html=html)


@app.command()
def run(
    config: Config,
    resume: Annotated[
        str, typer.Option(metavar="auto|never|PATH", help="Go on with what the folder holds.")
    ] = "auto",
    overlays: Overlay = None,
    overrides: Set = None,
    compare: Annotated[
        str | None, typer.Option(metavar="NAMES", help="First measure these strategies' plans.")
    ] = None,
    chaos: Annotated[str | None, typer.Option(metavar="FILE", help="Faults to inject.")] = None,
) -> None:
    """Train. The last line on stdout is one JSON object: status, reason, run_dir.

    Example: lyray run run.yaml --set training.steps=500
    """
    loaded = commands.load(config, overlays, overrides)
    with ending(loaded.run.run_url):
        commands.run(loaded, resume, commands.strategies(compare), chaos)


@app.command()
def report(  # noqa: PLR0913 - one option each
    run_dir: RunDir,
    *,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="RUN_DIR", help="Another run to compare with; may repeat."),
    ] = None,
    as_json: AsJson = False,
    html: Html = None,
    csv: Annotated[
        str | None, typer.Option(metavar="DIR", help="Write all there is as CSV files into DIR.")
    ] = None,
    bill: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Provider's bill (CSV: pool, usd) to compare with."),
    ] = None,
    bill_column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT=NAME", help="What the bill calls pool, usd or currency; may repeat."
        ),
    ] = None,
) -> None:
    """Say what happened: throughput, money, plans, faults. Also while the run goes on.

    Example: lyray report runs/byte-gpt --against runs/even-split --html report.html
    """
    commands.report(
        commands.ReportAsked(
            run_dir=run_dir,
            against=tuple(against or ()),
            as_json=as_json,
            html=html,
            csv=csv,
            bill=bill,
            bill_columns=tuple(bill_column or ()),
        )
    )


@app.command()
def budget(
    run_dir: RunDir,
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="YAML file whose section budget is taken."),
    ] = None,
    overrides: Set = None,
    as_json: AsJson = False,
) -> None:
    """Show the budget of a run and how it changed; or change it, also while the run goes on.

    Example: lyray budget runs/byte-gpt --set budget.total_usd=50
    """
    commands.budget(run_dir, config, overrides or (), as_json=as_json)


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
def schema(
    *,
    part: Annotated[
        bool, typer.Option("--part", help="Of overlays and files that others include or complete.")
    ] = False,
) -> None:
    """Print the JSON Schema of the file, for editors.

    Example: lyray schema > lyray.schema.json
    """
    from orchestrator.config import config_schema

    print(json.dumps(config_schema(part=part), indent=1))
