"""A plan as one self-contained HTML page: who does what, and every instruction of one step."""

import json
from collections.abc import Sequence
from html import escape
from typing import cast

from orchestrator.core.cluster import ClusterState
from orchestrator.core.plan import Plan, Stage
from orchestrator.core.schedule import FORWARD
from orchestrator.core.slot import StepEstimate
from orchestrator.planning.event import Span
from orchestrator.reports import figures
from orchestrator.reports.records import MAX_LINES, RECOMPUTES, alike_groups, plan_data
from orchestrator.reports.svg import (
    CHARACTER_WIDTH,
    element,
    fitted,
    legend,
    page,
    svg,
    table,
    text,
    ticks,
    tiles,
)
from orchestrator.reports.tables import FIGURE_COLUMNS, ROW_HEAD, PlanRow, row_cells
from orchestrator.reports.worth import Worth, worth_parts
from orchestrator.storage import Json

Timeline = tuple[tuple[Span, ...], ...]
"""The spans of one group, per stage."""

_FORWARD, _BACKWARD, _SUM, _UPDATE = 0, 1, 2, 7  # colours of the palette


def plan_page(
    name: str,
    rows: Sequence[PlanRow],
    cluster: ClusterState,
    timelines: Sequence[Timeline],
    notes: Sequence[str] = (),
    worth: Worth | None = None,
) -> str:
    """The page.

    Args:
        name: Of the run.
        rows: All candidates, for the table; the first is drawn.
        cluster: Where it runs.
        timelines: Of each group of the chosen plan.
        notes: What a reader must know about the figures.
        worth: What one more of each thing is worth, where it is known.
    """
    chosen = rows[0]
    estimate = chosen.estimate
    body = [
        f"<h1>{escape(name)}: what would run</h1>",
        f'<p class="soft">{escape(chosen.strategy)}, schedule {escape(chosen.plan.schedule)}; '
        "times are predicted, in seconds of the run's clock</p>",
        tiles(
            {
                "step": figures.seconds(estimate.step_s),
                "samples/s": figures.number(estimate.samples_per_s),
                "cost per hour": figures.usd(chosen.cost_per_hour_usd),
                "per million samples": figures.usd(chosen.usd_per_million_samples),
                "devices in use": f"{len(chosen.plan.device_ids)} of {len(cluster.devices)}",
                "time devices wait": figures.percent(estimate.bubble_ratio),
            }
        ),
        *[f'<p class="soft">{escape(note)}</p>' for note in notes],
        "<h2>Groups, stages and shares</h2>",
        groups_picture(chosen.plan, cluster),
        "<h2>One step</h2>",
        gantt(chosen.plan, timelines, estimate, cluster),
        "<h2>Candidates</h2>",
        table(
            ROW_HEAD,
            [row_cells(row) for row in rows],
            right=FIGURE_COLUMNS,
            chosen=next((i for i, row in enumerate(rows) if row.chosen), -1),
        ),
        *worth_parts(worth),
    ]
    return page(f"lyray plan: {name}", body)


def groups_picture(plan: Plan, cluster: ClusterState) -> str:
    """Each group as a bar of its share of the batch and a chain of its stages, layers to scale.

    Where there are many groups, alike ones share a row.
    """
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(d.kind for d in cluster.devices))}
    if plan.is_idle:
        return '<p class="soft">Nothing runs: every device is idle.</p>'
    left, row_height, width = 190, 74, 1080
    parts: list[str] = []
    scale = (width - left) / plan.num_layers
    folds = _folds(plan, cluster)
    for row, alike in enumerate(folds):
        g, group = alike[0], plan.groups[alike[0]]
        top = row * row_height + 6
        share = len(alike) * group.num_samples / plan.num_samples
        name = f"group {g}" if len(alike) == 1 else f"{len(alike)} groups"
        each, num = "" if len(alike) == 1 else " each", len(group.microbatches)
        parts += [
            text(0, top + 16, name, font_weight=600),
            text(0, top + 33, f"{group.num_samples} samples{each} ({figures.percent(share)})"),
            text(0, top + 49, f"{num} microbatch{'es' * (num > 1)}", class_="soft"),
            element("rect", x=112, y=top + 39, width=60, height=8, rx=4, fill="var(--line)"),
            element("rect", x=112, y=top + 39, width=60 * share, height=8, rx=4, fill="var(--c2)"),
        ]
        for stage in group.stages:
            x = left + stage.first_layer * scale
            box = (stage.end_layer - stage.first_layer) * scale - 4
            device = cluster.device(stage.team.device_ids[0])
            layers = layers_text(stage)
            layers += RECOMPUTES if stage.recompute else ""
            lines = ["+".join(stage.team.device_ids), device.kind, layers]
            title = f"<title>{escape(', '.join([*lines, device.zone]))}</title>"
            box_parts = element(
                "rect", title, x=x, y=top, width=box, height=56, rx=7,
                fill=f"var(--c{kinds[device.kind] % 8})",
            )  # fmt: skip
            parts.append(box_parts)
            for i, line in enumerate(lines):
                shown = fitted(line, box - 16)
                parts.append(text(x + 8, top + 18 + 16 * i, shown, class_="on"))
    used = set(plan.device_ids)
    idle = [d.device_id for d in cluster.devices if d.device_id not in used]
    bottom = len(folds) * row_height
    if idle:
        names = idle if len(idle) <= MAX_LINES else [*idle[:MAX_LINES], f"{len(idle)} in all"]
        parts.append(text(0, bottom + 16, f"idle: {', '.join(names)}", class_="soft"))
    drawing = svg(width, bottom + (26 if idle else 0), parts, "groups, stages and shares")
    return f'{legend(kinds)}<div class="card">{drawing}</div>'


def gantt(
    plan: Plan, timelines: Sequence[Timeline], estimate: StepEstimate, cluster: ClusterState
) -> str:
    """Every forward and backward of one step, a row a stage; then gradient sums and update."""
    if plan.is_idle:
        return ""
    left, right, row_height, width = 150, 30, 26, 1080
    total_s = estimate.step_s
    scale = (width - left - right) / total_s
    parts: list[str] = []
    y = 8.0
    for alike in _folds(plan, cluster):
        g, group = alike[0], plan.groups[alike[0]]
        for s, (stage, spans) in enumerate(zip(group.stages, timelines[g], strict=True)):
            device = "+".join(stage.team.device_ids)
            parts.append(text(0, y + 14, fitted(f"{g}.{s}  {device}", left - 8)))
            parts += [
                _span(span, left + span.start_s * scale, y, (span.end_s - span.start_s) * scale)
                for span in spans
            ]
            y += row_height
        y += 8
    pipeline_s = max(estimate.group_s)
    for name, colour, start_s, length_s in (
        ("gradient sums", _SUM, pipeline_s, estimate.sync_s),
        ("update", _UPDATE, pipeline_s + estimate.sync_s, estimate.update_s),
    ):
        if length_s > 0:
            title = f"<title>{name}: {figures.seconds(length_s)}</title>"
            parts.append(
                element("rect", title, x=left + start_s * scale, y=4,
                        width=max(1.0, length_s * scale), height=y - 12,
                        fill=f"var(--c{colour})", opacity=0.55)
            )  # fmt: skip
    for at in ticks(0.0, total_s, 8):
        x = left + at * scale
        parts.append(element("line", x1=x, x2=x, y1=y - 4, y2=y + 2, class_="axis"))
        parts.append(text(x, y + 16, figures.seconds(at), class_="soft", text_anchor="middle"))
    names = {"forward": _FORWARD, "backward": _BACKWARD, "gradient sums": _SUM, "update": _UPDATE}
    drawing = svg(width, y + 24, parts, "timeline of one step")
    return f'{legend(names)}<div class="card">{drawing}</div>'


def _folds(plan: Plan, cluster: ClusterState) -> tuple[tuple[int, ...], ...]:
    """Groups that share a row."""
    groups = plan_data(plan, ())["groups"]
    assert isinstance(groups, list)
    pools = {device.device_id: device.pool for device in cluster.devices}
    return alike_groups(cast("list[dict[str, Json]]", groups), pools)


def layers_text(stage: Stage) -> str:
    """Which layers a stage holds, as a person counts them: both ends included."""
    last = stage.end_layer - 1
    return f"layers {stage.first_layer}-{last}" if last > stage.first_layer else f"layer {last}"


def _span(span: Span, x: float, y: float, width: float) -> str:
    forward = span.op == FORWARD
    title = (
        f"<title>{'forward' if forward else 'backward'} of microbatch {span.microbatch}: "
        f"{figures.seconds(span.start_s)} to {figures.seconds(span.end_s)}</title>"
    )
    box = element(
        "rect", title, x=x, y=y, width=max(0.6, width - 0.6), height=20, rx=2,
        fill=f"var(--c{_FORWARD if forward else _BACKWARD})",
    )  # fmt: skip
    label = str(span.microbatch)
    if width > len(label) * CHARACTER_WIDTH + 4:
        box += text(x + width / 2, y + 14, label, class_="on", text_anchor="middle")
    return box


def trace_json(plan: Plan, timelines: Sequence[Timeline], estimate: StepEstimate) -> str:
    """One step as a Chrome trace (chrome://tracing, ui.perfetto.dev): a process a group."""
    events: list[Json] = []
    for g, (group, stages) in enumerate(zip(plan.groups, timelines, strict=True)):
        samples = group.num_samples
        events.append(_named("process_name", g, 0, f"group {g} ({samples} samples)"))
        for s, (stage, spans) in enumerate(zip(group.stages, stages, strict=True)):
            device = "+".join(stage.team.device_ids)
            layers = layers_text(stage)
            events.append(_named("thread_name", g, s, f"stage {s}: {device}, {layers}"))
            events += [_event(f"{i.op}{i.microbatch}", g, s, i.start_s, i.end_s) for i in spans]
            pipeline_s = max(estimate.group_s)
            update_s = pipeline_s + estimate.sync_s
            if estimate.sync_s > 0:
                events.append(_event("gradient sums", g, s, pipeline_s, update_s))
            if estimate.update_s > 0:
                events.append(_event("update", g, s, update_s, update_s + estimate.update_s))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(name: str, process: int, thread: int, label: str) -> dict[str, Json]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": {"name": label}}


def _event(name: str, process: int, thread: int, start_s: float, end_s: float) -> dict[str, Json]:
    kinds = {"F": "forward", "B": "backward"}
    return {
        "name": name, "cat": kinds.get(name[0], name), "ph": "X", "pid": process, "tid": thread,
        "ts": 1e6 * start_s, "dur": 1e6 * (end_s - start_s),
    }  # fmt: skip
