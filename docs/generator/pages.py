"""The reference, written from the code: each page is a function that returns its Markdown.

Nothing here is committed: ``hooks.py`` adds the pages when the site is built.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer
import yaml

from docs.generator.errors import errors_page
from docs.generator.keys import config_page
from docs.generator.markdown_text import code, first_line, table, unit_of
from docs.generator.records import api_page, files_page
from orchestrator import cli
from orchestrator.strategies import registry
from orchestrator.telemetry.metrics import METRICS, PREFIX, REASONS

ROOT = Path(__file__).parents[2]


def commands_page() -> str:
    """The commands with arguments and options, as ``--help`` shows them."""
    group: Any = typer.main.get_command(cli.app)
    parts = [
        "# Command line",
        "`lyray` and `python -m orchestrator` are the same program. Every command shows this with "
        "`--help`. How a command ends: [exit codes](../operations.md#exit-codes).",
        table(
            ["command", "what it does"],
            [
                [f"[`lyray {name}`](#lyray-{name})", first_line(command.help)]
                for name, command in group.commands.items()
            ],
        ),
    ]
    for name, command in group.commands.items():
        text, _, example = command.help.partition("Example:")
        given = [p for p in command.params if not p.opts[0].startswith("-")]
        usage = " ".join(
            ["lyray", name, *(_argument(p) for p in given)]
            + (["[OPTIONS]"] if len(given) < len(command.params) else [])
        )
        parts += [f"## lyray {name}", text.strip(), f"```text\n{usage}\n```"]
        if command.params:
            parts.append(table(["argument or option", "default", "meaning"], _options(command)))
        if example:
            parts.append(f"```bash\n{example.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _argument(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name.upper()).removesuffix("...")
    return f"{name}{'...' * (parameter.nargs != 1 or parameter.multiple)}"


def _options(command: Any) -> Iterator[list[str]]:
    for option in command.params:
        names = [name for name in (*option.opts, *option.secondary_opts) if name.startswith("-")]
        value = "" if getattr(option, "is_flag", False) else option.metavar or _value_name(option)
        shown = ", ".join(code(f"{name} {value}".strip()) for name in names)
        default = "required" if option.required else option.default
        plain = "" if default in (None, False, (), []) else str(default)
        yield [shown or code(_argument(option)), plain, option.help or ""]


def _value_name(option: Any) -> str:
    return {float: "NUMBER", int: "NUMBER"}.get(type(option.default), "TEXT")


def metrics_page() -> str:
    """The table of ``telemetry.metrics``."""
    rows = [
        [code(PREFIX + name), m.kind, ", ".join(map(code, m.labels)), unit_of(name), m.text]
        for name, m in METRICS.items()
    ]
    return "\n\n".join(
        [
            "# Metrics",
            "What the exporter of a run shows to Prometheus on `metrics.port`. Every series also "
            "has the label `run`. Histograms have the series `_bucket`, `_sum` and `_count`. "
            "Series of a device that is gone vanish with the next slot. How to scrape and draw "
            "them: [Prometheus and Grafana](../how-to/monitor.md).",
            table(["metric", "type", "labels", "unit", "meaning"], rows),
            "## Values of the label `reason`",
            "Any other reason is shown as `other`.",
            ", ".join(code(reason) for reason in sorted(REASONS)),
        ]
    )  # fmt: skip


def alerts_page() -> str:
    """The rules that are shipped for Prometheus, with what the operations guide says of them."""
    guide = (ROOT / "docs" / "operations.md").read_text("utf-8")
    told = {
        name: (when, what)
        for name, when, what in re.findall(
            r"^\| `(Lyray\w+)` \| (.+?) \| (.+?) \|$", guide, re.MULTILINE
        )
    }
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text("utf-8"))["groups"]
    parts = [
        "# Alerts and recording rules",
        "The rules of `deploy/prometheus/rules.yml`. Each alert is held to cases by "
        "`promtool test rules`. What fires and what to do are the words of the "
        "[operations guide](../operations.md#alarms-and-warnings).",
    ]
    rules = [rule for group in groups for rule in group["rules"]]
    for rule in (rule for rule in rules if "alert" in rule):
        name, severity = rule["alert"], rule["labels"]["severity"]
        when, what = told[name]
        metrics = dict.fromkeys(re.findall(r"\blyray_(\w+)", rule["expr"]))
        shown = ", ".join(code(PREFIX + metric) for metric in metrics if metric in METRICS)
        waits = f", after {rule['for']}" if "for" in rule else ""
        parts += [
            f"## {name}",
            f"**Fires when** {when} ({severity}{waits}).",
            f"**What to do:** {what}.",
            *([f"**Look at** {shown} ([metrics](metrics.md))."] if shown else []),
            f"**Says** {code(rule['annotations']['summary'])}",
            f"```promql\n{rule['expr'].strip()}\n```",
        ]
    records = [[code(r["record"]), code(r["expr"].strip())] for r in rules if "record" in r]
    parts += ["## Recording rules", table(["series", "is"], records)]
    return "\n\n".join(parts) + "\n"


def strategies_page() -> str:
    """The registry's strategies, each with what its class or recipe says of itself."""
    rows = []
    for name, factory in registry.STRATEGIES.items():
        text = first_line(_recipe(factory).__doc__)
        if isinstance(factory, partial) and factory.keywords.get("rebalance"):
            text += " Shares follow the speeds."
        rows.append([code(name), text, "yes" if name in registry.TUNED else ""])
    return "\n\n".join(
        [
            "# Strategies",
            "Values of `control.strategy`. `joint` is the default; the others are there to be "
            "compared with: `lyray plan` shows some beside it, `lyray simulate --compare all` "
            "runs all of them at equal cost. A strategy with a number of its own takes it from "
            "the first state of the cluster.",
            table(["strategy", "what it does", "number of its own"], rows),
            "How `joint` decides: [drift plus penalty](../concepts/drift-plus-penalty.md) and "
            "[how a plan is found](../concepts/planning.md).",
        ]
    )


def _recipe(factory: Callable[..., object]) -> object:
    if not isinstance(factory, partial):
        return factory
    return factory.args[0] if factory.args else factory.func


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/cli.md": commands_page,
    "reference/config-keys.md": config_page,
    "reference/metrics.md": metrics_page,
    "reference/alerts.md": alerts_page,
    "reference/files.md": files_page,
    "reference/python.md": api_page,
    "reference/strategies.md": strategies_page,
    "reference/errors.md": errors_page,
}
"""Where each page lies on the site, and what writes it."""
