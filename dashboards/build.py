"""Writes the Grafana dashboards: ``python dashboards/build.py`` (``make dashboards``).

Every panel is one row of a table; predicted and measured stand in one panel. The JSON is
committed; a test builds it again and compares, and looks every metric up in METRICS.
"""

from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import ScaleDistribution, StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef

FOLDER = Path(__file__).parent
RUN = '{run="$run"}'
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24  # columns of Grafana's grid


@dataclass(frozen=True, slots=True)
class Panel:
    """A time series, or the newest numbers: queries by legend, unit in Grafana's naming."""

    title: str
    unit: str
    queries: dict[str, str]
    text: str = ""
    newest: bool = False
    stacked: bool = False
    flag: bool = False
    """Values are 0 or 1."""

    wide: bool = False
    """Values of unlike size in one panel: the axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class Page:
    """A dashboard: its file, title and panels in reading order."""

    name: str
    title: str
    panels: tuple[Panel, ...]


OVERVIEW = Page(
    "overview",
    "lyray overview",
    (
        Panel(
            "Now",
            "none",
            {
                "steps": f"lyray_steps_total{RUN}",
                "samples/s": f"lyray_samples_per_second{RUN}",
                "groups": f"lyray_groups{RUN}",
                "plans so far": f"lyray_generation{RUN}",
            },
            newest=True,
        ),
        Panel(
            "Budget spent",
            "percentunit",
            {"spent": f"lyray_budget_spent_ratio{RUN}"},
            "Of the hard cap, else of what the average allows over its horizon.",
            newest=True,
        ),
        Panel(
            "Budget used up",
            "dateTimeFromNow",
            {"used up": f"lyray_budget_exhaustion_timestamp_seconds{RUN} * 1000"},
            "If money goes as in the last billed hour; empty while nothing is spent.",
            newest=True,
        ),
        Panel(
            "Step time",
            "s",
            {
                "measured": f"lyray_measured_step_seconds{RUN}",
                "predicted": f"lyray_predicted_step_seconds{RUN}",
            },
            "Median step of each slot against what the planner predicted for it.",
        ),
        Panel(
            "Throughput",
            "none",
            {
                "samples/s": f"lyray_samples_per_second{RUN}",
                "predicted": f"lyray_predicted_samples_per_second{RUN}",
            },
        ),
        Panel(
            "Loss",
            "none",
            {"loss": f"lyray_loss{RUN}", "evaluation: {{metric}}": f"lyray_evaluation{RUN}"},
            "Of the newest step, and what the newest evaluation found.",
        ),
        Panel(
            "Cost per hour",
            "currencyUSD",
            {
                "cost": f"lyray_cost_usd_per_hour{RUN}",
                "predicted": f"lyray_predicted_cost_usd_per_hour{RUN}",
                "budget": f"lyray_budget_usd_per_hour{RUN}",
            },
            "The budget is a long-term average: the cost may stand above it for a while.",
        ),
        Panel(
            "Spent",
            "currencyUSD",
            {
                "spent": f"lyray_spent_usd{RUN}",
                "whole budget": f"lyray_spent_usd{RUN} / lyray_budget_spent_ratio{RUN}",
                "backlog": f"lyray_backlog_usd{RUN}",
            },
            "The whole budget is the hard cap, else what the average allows over its horizon.",
        ),
        Panel(
            "The plan",
            "none",
            {
                "stages of group {{group}}": f"lyray_stages{RUN}",
                "microbatches of group {{group}}": f"lyray_num_microbatches{RUN}",
            },
        ),
        Panel(
            "Prediction error",
            "percentunit",
            {"measured over predicted": f"lyray_prediction_error_ratio{RUN}"},
            "Of the step time, less one.",
        ),
        Panel(
            "Where a step goes",
            "s",
            {"{{phase}}": 'avg by (phase) (lyray_step_phase_seconds{run="$run",phase!="bubble"})'},
            "Mean of a step over groups, of each group's busiest device.",
            stacked=True,
        ),
    ),
)

DEVICES = Page(
    "devices",
    "lyray devices",
    (
        Panel(
            "Devices",
            "none",
            {"{{pool}} {{state}}": f"sum by (pool, state) (lyray_devices{RUN})"},
            stacked=True,
        ),
        Panel(
            "Slow-down",
            "none",
            {"{{device}}": f"lyray_device_slowdown_ratio{RUN}"},
            "Measured compute time over the device's own prediction; 1 is healthy.",
        ),
        Panel(
            "Utilisation",
            "percentunit",
            {"{{device}}": f"lyray_device_utilization_ratio{RUN}"},
            "Share of the time that a device was held in a slot in which it computed.",
        ),
        Panel(
            "Bubbles",
            "percentunit",
            {"group {{group}}": f"lyray_bubble_ratio{RUN}"},
            "Share of device time in steps without compute.",
        ),
        Panel(
            "Stragglers",
            "none",
            {"{{device}}": f"lyray_device_straggler{RUN}"},
            "1 while a device is named one.",
            flag=True,
        ),
        Panel(
            "Memory",
            "bytes",
            {
                "{{device}}": f"lyray_peak_memory_bytes{RUN}",
                "{{device}} predicted": f"lyray_predicted_peak_memory_bytes{RUN}",
                "{{device}} has": f"lyray_device_memory_bytes{RUN}",
            },
            "Most in use in a slot, against what the plan reckons with and what there is.",
            wide=True,
        ),
        Panel(
            "Workers",
            "none",
            {"{{device}}": f"lyray_worker_up{RUN}"},
            "0 in the slot of a loss.",
            flag=True,
        ),
        Panel(
            "Waiting for neighbours and data",
            "s",
            {
                "group {{group}}: {{phase}}": 'lyray_step_phase_seconds{run="$run",'
                'phase=~"receive|reduce|data"}'
            },
        ),
        Panel(
            "Links",
            "Bps",
            {"{{source_zone}} to {{target_zone}}": f"lyray_link_bandwidth_bytes_per_second{RUN}"},
            "Slowest path between devices of two zones, as the planner reckons with it.",
        ),
        Panel(
            "Latency of links",
            "s",
            {"{{source_zone}} to {{target_zone}}": f"lyray_link_latency_seconds{RUN}"},
            "Longest between devices of two zones.",
        ),
        Panel(
            "Checkpoints",
            "s",
            {
                "age of the newest": f"time() - lyray_checkpoint_timestamp_seconds{RUN}",
                "written in": f"lyray_checkpoint_duration_seconds_sum{RUN}"
                f" / lyray_checkpoint_duration_seconds_count{RUN}",
            },
            "What a crash would lose, and the mean time to write one while training goes on.",
        ),
        Panel(
            "Size of a checkpoint",
            "bytes",
            {"newest": f"lyray_checkpoint_bytes{RUN}"},
        ),
        Panel(
            "Samples by status",
            "none",
            {"{{status}}": f"lyray_lease_samples{RUN}"},
            "Committed ones, and those still to come.",
        ),
    ),
)

MONEY = Page(
    "money",
    "lyray money",
    (
        Panel(
            "Bill",
            "currencyUSD",
            {"{{pool}}": f"sum by (pool) (lyray_cost_usd_total{RUN})"},
            "Billed for devices so far.",
            stacked=True,
        ),
        Panel(
            "Above the average",
            "currencyUSD",
            {
                "backlog": f"lyray_backlog_usd{RUN}",
                "bound": f"lyray_overspend_bound_usd{RUN}",
            },
            "What is owed to the average, and the most that may be.",
        ),
        Panel(
            "Price of money",
            "none",
            {"samples per $": f"lyray_price_of_money_samples_per_usd{RUN}"},
            "What one more dollar is worth to the planner now.",
        ),
        Panel("V", "none", {"V": f"lyray_penalty_weight{RUN}"}, "In squared dollars per sample."),
        Panel(
            "What one more adds",
            "none",
            {"{{of}} {{where}}": f"lyray_marginal_value_samples_per_second{RUN}"},
            "Samples/s of one more device of a pool, $/h of budget or of a limit, microbatch.",
        ),
        Panel(
            "One more device pays below",
            "currencyUSD",
            {"{{pool}}": f"lyray_break_even_usd_per_hour{RUN}"},
            "Rent one more of a pool while its price per hour is below; no curve: at any price.",
        ),
        Panel(
            "Decisions",
            "none",
            {"{{decision}}": f"sum by (decision) (increase(lyray_decisions_total{RUN}[5m]))"},
            "In five minutes.",
            stacked=True,
        ),
        Panel(
            "Planning",
            "s",
            {
                "search, assignment, decision": "rate(lyray_planning_duration_seconds_sum"
                f"{RUN}[5m]) / rate(lyray_planning_duration_seconds_count{RUN}[5m])"
            },
            "Mean of a slot.",
        ),
        Panel(
            "Age of prices",
            "s",
            {"{{pool}}": f"lyray_price_age_seconds{RUN}"},
        ),
    ),
)

PAGES = (OVERVIEW, DEVICES, MONEY)

REPLANS = (
    dashboard.AnnotationQuery()
    .name("re-plans")
    .datasource(DATASOURCE)
    .enable(True)
    .icon_color("orange")
    .expr(f"sum by (decision, reason) (increase(lyray_replans_total{RUN}[$__rate_interval])) > 0")
)
"""Changes of plan, with their reasons, in every panel."""


def build(page: Page) -> dashboard.Dashboard:
    """The dashboard of one run, chosen by the variable ``run``."""
    made = (
        dashboard.Dashboard(page.title)
        .uid(f"lyray-{page.name}")
        .tags(["lyray"])
        .refresh("10s")
        .time("now-30m", "now")
        .annotation(REPLANS)
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("run")
            .datasource(DATASOURCE)
            .query("label_values(lyray_generation, run)")
            .refresh(2)
        )
    )
    for panel in page.panels:
        made = made.with_panel(_view(panel))
    return made


def _view(panel: Panel) -> stat.Panel | timeseries.Panel:
    view = stat.Panel().height(4) if panel.newest else timeseries.Panel().height(8)
    view = (
        view.title(panel.title)
        .description(panel.text)
        .unit(panel.unit)
        .datasource(DATASOURCE)
        .span(WIDTH // 3 if panel.newest else WIDTH // 2)
    )
    if panel.stacked and isinstance(view, timeseries.Panel):
        stacks = common.StackingConfig().mode(StackingMode.NORMAL)
        view = view.stacking(stacks).fill_opacity(40).min(0)
    if panel.wide and isinstance(view, timeseries.Panel):
        scale = common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(10)
        view = view.scale_distribution(scale)
    if panel.flag:
        view = view.min(0).max(1).decimals(0)
    for letter, (legend, expression) in zip("ABCD", panel.queries.items(), strict=False):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(letter)
        view = view.with_target(query)
    return view


def as_json(built: dashboard.Dashboard) -> str:
    """The text of a dashboard's file."""
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


if __name__ == "__main__":
    for page in PAGES:
        (FOLDER / f"{page.name}.json").write_text(as_json(build(page)), "utf-8")
