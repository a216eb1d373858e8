"""Writes the Grafana dashboards: ``python dashboards/build.py`` (``make dashboards``).

Every panel is one row of ``OVERVIEW``; predicted and measured stand in one panel. The JSON is
committed; a test builds it again and compares, and looks every metric up in METRICS.
"""

from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

FOLDER = Path(__file__).parent
RUN = '{run="$run"}'
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True, slots=True)
class Panel:
    """One time series panel: queries by legend, unit in Grafana's naming."""

    title: str
    unit: str
    queries: dict[str, str]
    text: str = ""


OVERVIEW = (
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
        {"spent": f"lyray_spent_usd{RUN}", "backlog": f"lyray_backlog_usd{RUN}"},
    ),
    Panel(
        "Price of money",
        "none",
        {"samples per $": f"lyray_price_of_money_samples_per_usd{RUN}"},
        "What one more dollar is worth to the planner now.",
    ),
    Panel(
        "Device slowdown",
        "none",
        {"{{device}}": f"lyray_device_slowdown_ratio{RUN}"},
        "Measured compute time over the device's own prediction; 1 is healthy.",
    ),
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
    Panel("Devices", "none", {"{{pool}} {{state}}": f"lyray_devices{RUN}"}),
    Panel("Bubbles", "percentunit", {"group {{group}}": f"lyray_bubble_ratio{RUN}"}),
    Panel(
        "Re-plans",
        "none",
        {"{{decision}}": f"sum by (decision) (increase(lyray_decisions_total{RUN}[5m]))"},
    ),
)


def overview() -> dashboard.Dashboard:
    """The overview of one run, chosen by the variable ``run``."""
    made = (
        dashboard.Dashboard("lyray overview")
        .uid("lyray-overview")
        .tags(["lyray"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("run")
            .datasource(DATASOURCE)
            .query("label_values(lyray_generation, run)")
            .refresh(2)
        )
    )
    for panel in OVERVIEW:
        view = (
            timeseries.Panel()
            .title(panel.title)
            .description(panel.text)
            .unit(panel.unit)
            .datasource(DATASOURCE)
            .span(12)
            .height(8)
        )
        for letter, (legend, expression) in zip("ABCD", panel.queries.items(), strict=False):
            query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(letter)
            view = view.with_target(query)
        made = made.with_panel(view)
    return made


def as_json(built: dashboard.Dashboard) -> str:
    """The text of a dashboard's file."""
    return JSONEncoder(sort_keys=True, indent=2).encode(built.build()) + "\n"


if __name__ == "__main__":
    (FOLDER / "overview.json").write_text(as_json(overview()), "utf-8")
