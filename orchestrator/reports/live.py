"""What a run shows while it goes on: a live view on a terminal, else one plain line a slot."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, RunEvent, SlotRecord
from orchestrator.reports import figures
from orchestrator.reports.records import evaluation_text, slot_line

_EVENTS_SHOWN = 8
_LOSSES_KEPT = 400
_SPARKS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    """What a run tells the person who started it."""

    def phase(self, text: str) -> None:
        """What is being done before the first slot, as one line."""

    def step(self, step: CommittedStep) -> None:
        """A step was committed."""

    def slot(self, record: SlotRecord) -> None:
        """A slot ended."""

    def event(self, event: RunEvent) -> None:
        """Something happened."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """The model was evaluated."""

    def close(self) -> None:
        """Nothing more will come. Safe to call twice."""


class PlainView:
    """One plain line at the start, which says what code runs, and one a slot, for logs."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._evaluation: Evaluation | None = None  # that no line has told of

    def phase(self, text: str) -> None:
        """Shows nothing."""

    def step(self, step: CommittedStep) -> None:
        """Shows nothing."""

    def slot(self, record: SlotRecord) -> None:
        """Writes the slot's line."""
        found, self._evaluation = self._evaluation, None
        self._write(slot_line(record) + (f" · {evaluation_text(found)}" if found else ""))

    def event(self, event: RunEvent) -> None:
        """Writes what code runs; what else matters is in the next slot's line."""
        if event.kind == "code":
            self._write(f"code {event.detail}")

    def evaluation(self, evaluation: Evaluation) -> None:
        """Goes with the next slot's line, the newest one."""
        self._evaluation = evaluation

    def close(self) -> None:
        """Nothing to take down."""


class LiveView:
    """Redraws one screen: progress, loss, speed, money, plan, events."""

    def __init__(self, console: Console, *, name: str, num_steps: int | None) -> None:
        self._name, self._num_steps = name, num_steps
        self._phase = "starting"
        self._record: SlotRecord | None = None
        self._step: CommittedStep | None = None
        self._evaluation: Evaluation | None = None
        self._best: Evaluation | None = None
        self._losses: deque[float] = deque(maxlen=_LOSSES_KEPT)
        self._events: deque[str] = deque(maxlen=_EVENTS_SHOWN)
        self._live = Live(
            get_renderable=self.render, console=console, refresh_per_second=4, transient=False
        )
        self._live.start()

    def phase(self, text: str) -> None:
        """Shows what is being done before the first slot."""
        self._phase = text

    def step(self, step: CommittedStep) -> None:
        """Moves the progress bar and the loss curve."""
        self._step = step
        if step.loss is not None:
            self._losses.append(step.loss)

    def slot(self, record: SlotRecord) -> None:
        """Takes over everything that is known once a slot."""
        self._record = record

    def event(self, event: RunEvent) -> None:
        """Adds a line to the events."""
        device = f" {event.device}" if event.device else ""
        self._events.append(f"slot {event.slot}  {event.kind}{device}: {event.detail}")

    def evaluation(self, evaluation: Evaluation) -> None:
        """Shows the newest one, and the best."""
        self._evaluation = evaluation
        self._best = evaluation if evaluation.best else self._best

    def close(self) -> None:
        """Leaves the last picture on the screen."""
        self._live.stop()

    def render(self) -> RenderableType:
        """The picture as it is now."""
        parts: list[RenderableType] = [self._progress()]
        if self._evaluation is not None:
            parts.append(Text(evaluation_text(self._evaluation, self._best)))
        if self._record is None:
            parts.append(Text(f"{self._phase} ...", style="dim"))
        else:
            parts += [self._figures(self._record), plan_grid(self._record)]
        if self._events:
            parts.append(Text("\n".join(self._events), style="dim"))
        return Panel(Group(*parts), title=f"lyray · {self._name}", border_style="cyan")

    def _progress(self) -> Table:
        done = self._step.step + 1 if self._step else self._record.step if self._record else 0
        row = Table.grid(padding=(0, 2), expand=False)
        total = self._num_steps
        row.add_row(
            Text(f"step {done}" + (f" of {total}" if total else ""), style="bold"),
            ProgressBar(total=total or max(done, 1), completed=done, width=30),
            Text(f"loss {figures.number(self._losses[-1])}" if self._losses else ""),
            Text(sparkline(self._losses), style="green"),
        )
        return row

    def _figures(self, record: SlotRecord) -> RenderableType:
        measured, predicted = record.measured, record.predicted
        newest_s = self._step.step_s if self._step else None
        step_s = newest_s if measured.step_s is None else measured.step_s
        rate = measured.samples_per_s or None  # no step ended: nothing to compare
        over = record.spent_usd - record.budget_usd
        average_usd = record.budget.average_per_hour_usd if record.budget else None
        grid = Table.grid(padding=(0, 2))
        for _ in range(4):
            grid.add_column()
        grid.add_row(
            "step time",
            Text(figures.seconds(step_s), style="bold"),
            f"predicted {figures.seconds(predicted.step_s)}",
            Text(figures.difference(step_s, predicted.step_s), style="dim"),
        )
        if measured.samples_per_s is None:  # nothing has been counted yet
            return Group(grid, Text("speed and money follow at the end of this slot", style="dim"))
        grid.add_row(
            "samples/s",
            Text(figures.number(measured.samples_per_s), style="bold"),
            f"predicted {figures.number(predicted.samples_per_s)}",
            Text(figures.difference(rate, predicted.samples_per_s), style="dim"),
        )
        grid.add_row(
            "cost",
            Text(f"{figures.usd(measured.cost_per_hour_usd)}/h", style="bold"),
            f"budget {figures.usd(average_usd)}/h",
            Text(f"backlog {figures.usd(record.backlog_usd)}", style="dim"),
        )
        grid.add_row(
            "spent",
            Text(figures.usd(record.spent_usd), style="bold"),
            f"budget so far {figures.usd(record.budget_usd)}",
            Text(
                f"{figures.usd(abs(over))} {'over' if over > 0 else 'under'}, bound "
                f"{figures.usd(record.overspend_bound_usd)}",
                style="yellow" if over > 0 else "dim",
            ),
        )
        return grid


def plan_grid(record: SlotRecord) -> RenderableType:
    """The plan that runs from now on as a small table: a row a device, then who is idle."""
    views = {view.device_id: view for view in record.devices}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("group", "samples", "stage", "device", "kind", "layers", "slowdown", "$/h"):
        table.add_column(
            title, justify="right" if title in ("samples", "slowdown", "$/h") else "left"
        )
    for g, group in enumerate(record.next_plan.groups):
        for s, stage in enumerate(group.stages):
            for device_id in stage.team.device_ids:
                view = views.get(device_id)
                slow = view is not None and (view.straggler or device_id in record.stragglers)
                table.add_row(
                    str(g) if s == 0 else "",
                    str(group.num_samples) if s == 0 else "",
                    str(s),
                    device_id,
                    view.kind if view else "",
                    f"{stage.first_layer}-{stage.end_layer - 1}",
                    figures.number(view.slowdown) if view else "",
                    figures.number(view.price_per_hour) if view else "",
                    style="yellow" if slow else "",
                )
    used = set(record.next_plan.device_ids)
    idle = [view.device_id for view in record.devices if view.device_id not in used]
    parts: list[RenderableType] = [table] if used else []
    return Group(*parts, Text(f"idle  {', '.join(idle)}", style="dim")) if idle else table


def sparkline(values: "deque[float]", width: int = 40) -> str:
    """The curve of the values, oldest first, in ``width`` blocks at most."""
    if len(values) < 2:
        return ""
    shown = list(values)
    block = max(1, -(-len(shown) // width))
    means = [
        sum(shown[i : i + block]) / len(shown[i : i + block]) for i in range(0, len(shown), block)
    ]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((value - low) * scale)] for value in means)
