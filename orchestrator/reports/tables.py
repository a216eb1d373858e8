"""What-if: candidate plans side by side, as rows, as a table on a terminal and as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group as Parts
from rich.table import Table
from rich.text import Text

from orchestrator.core.cluster import ClusterState
from orchestrator.core.plan import Plan
from orchestrator.core.slot import StepEstimate
from orchestrator.reports import figures
from orchestrator.reports.records import plan_data, plan_words
from orchestrator.reports.worth import WORTH_FIGURES, WORTH_HEAD, Worth, worth_cells
from orchestrator.storage import Json

ROW_HEAD = (
    "strategy", "samples: device[layers] > ...", "step", "samples/s", "$/h", "$/1M samples",
    "memory", "CHOSEN",
)  # fmt: skip
PLAN_COLUMN = 1
FIGURE_COLUMNS = (2, 3, 4, 5, 6)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One strategy's plan with its figures; ``problem`` says why there is none."""

    strategy: str
    plan: Plan
    estimate: StepEstimate
    cost_per_hour_usd: float  # of a billed hour
    usd_per_million_samples: float | None  # None when idle
    tightest_device: str = ""
    tightest_peak_bytes: int = 0
    tightest_memory_bytes: int = 0
    pools: tuple[tuple[str, str], ...] = ()  # (device, pool) of all present
    chosen: bool = False
    problem: str = ""

    @property
    def memory_ratio(self) -> float | None:
        """Predicted peak over memory on the tightest device."""
        memory = self.tightest_memory_bytes
        return self.tightest_peak_bytes / memory if memory else None


def make_row(
    strategy: str, plan: Plan, estimate: StepEstimate, cluster: ClusterState, billing_speedup: float
) -> PlanRow:
    """The row of a plan.

    Args:
        strategy: Who proposes it.
        plan: What it proposes.
        estimate: In seconds and dollars of the run's clock.
        cluster: Where it would run.
        billing_speedup: Billed seconds per second of the run's clock.
    """
    memory = {d.device_id: d.memory_bytes for d in cluster.devices}
    peaks = [(peak / memory[device], device, peak) for device, peak in estimate.peak_memory_bytes]
    _, tightest, peak = max(peaks, default=(0.0, "", 0))
    rate = estimate.samples_per_s
    return PlanRow(
        strategy=strategy,
        plan=plan,
        estimate=estimate,
        cost_per_hour_usd=estimate.cost_usd_per_s * 3600 / billing_speedup,
        usd_per_million_samples=1e6 * estimate.cost_usd_per_s / rate if rate else None,
        tightest_device=tightest,
        tightest_peak_bytes=peak,
        tightest_memory_bytes=memory.get(tightest, 0),
        pools=tuple((d.device_id, d.pool) for d in cluster.devices),
    )


def plan_table(rows: Sequence[PlanRow], *, batch_samples: int) -> Parts:
    """The rows for a terminal of any width: figures with a tick, then who does what."""
    title = f"Plans for a global batch of {batch_samples}"
    numbers = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    plans = Table(box=None, padding=(0, 1, 0, 0))
    for index, name in enumerate(ROW_HEAD):
        if index != PLAN_COLUMN:
            figure = index in FIGURE_COLUMNS
            numbers.add_column(
                Text(name),
                justify="right" if figure else "left",
                no_wrap=name != "memory",  # long names of devices go on below
                overflow="fold",
            )
    plans.add_column("strategy", no_wrap=True)
    plans.add_column(Text(ROW_HEAD[PLAN_COLUMN]))
    for row in rows:
        style = "bold" if row.chosen else "red" if row.problem else ""
        cells = [Text(cell) for cell in row_cells(row)]
        plans.add_row(cells[0], cells.pop(PLAN_COLUMN), style=style)
        numbers.add_row(*cells, style=style)
    return Parts(numbers, "", plans)


def worth_table(worth: Worth) -> Table:
    """What one more device, dollar or microbatch is worth, for a terminal."""
    title = f"What one more adds beside {worth.beside}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for index, name in enumerate(WORTH_HEAD):
        right = index in WORTH_FIGURES
        table.add_column(Text(name), justify="right" if right else "left", no_wrap=True)
    for cells in worth_cells(worth):
        table.add_row(*map(Text, cells))
    return table


def _figures(row: PlanRow) -> tuple[str, ...]:
    if row.problem:
        return ("-",) * 5
    memory = f"{row.tightest_device} {figures.percent(row.memory_ratio)}"
    return (
        figures.seconds(row.estimate.step_s),
        figures.number(row.estimate.samples_per_s),
        figures.usd(row.cost_per_hour_usd),
        figures.usd_number(row.usd_per_million_samples),
        memory if row.tightest_device else "-",
    )


def row_cells(row: PlanRow) -> tuple[str, ...]:
    """The cells of a row in the order of ``ROW_HEAD``."""
    what = row.problem or plan_words(plan_data(row.plan, ()), dict(row.pools))
    return (row.strategy, what, *_figures(row), "✔" if row.chosen else "")


def row_data(row: PlanRow, cluster: ClusterState) -> dict[str, Json]:
    """A row as JSON: seconds of the run's clock, dollars per billed hour."""
    data: dict[str, Json] = {"strategy": row.strategy, "chosen": row.chosen}
    if row.problem:
        return {**data, "problem": row.problem}
    estimate = row.estimate
    return {
        **data,
        "plan": plan_data(row.plan, [d.device_id for d in cluster.devices]),
        "inflight": [[stage.inflight for stage in group.stages] for group in row.plan.groups],
        "step_s": estimate.step_s,
        "samples_per_s": estimate.samples_per_s,
        "cost_per_hour_usd": row.cost_per_hour_usd,
        "usd_per_million_samples": row.usd_per_million_samples,
        "bubble_ratio": estimate.bubble_ratio,
        "exposed_comm_s": estimate.exposed_comm_s,
        "sync_s": estimate.sync_s,
        "update_s": estimate.update_s,
        "tightest": {
            "device": row.tightest_device,
            "peak_memory_bytes": row.tightest_peak_bytes,
            "memory_bytes": row.tightest_memory_bytes,
        },
        "peak_memory_bytes": dict(estimate.peak_memory_bytes),
        "interpolated": estimate.interpolated,
    }
