"""One SlotRecord as a line: of JSON for slots.jsonl, of plain text for a log."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from orchestrator import storage
from orchestrator.core.evaluation import LOSS, Evaluation
from orchestrator.core.plan import Group, Plan
from orchestrator.core.slot import SlotRecord
from orchestrator.core.view import DeviceView, Rates, Spread
from orchestrator.reports import figures
from orchestrator.storage import Json

MAX_LINES = 12
"""Groups of a plan that are told one by one; of more, alike ones share a line."""


RECOMPUTES = " (recomputes)"
"""Behind a stage that keeps its layers' inputs only, and runs them again in backward."""


def plan_data(plan: Plan, device_ids: Iterable[str]) -> dict[str, Json]:
    """A plan in the form of the user's files.

    Args:
        plan: What runs.
        device_ids: All present devices; those not in the plan are listed as idle.
    """
    used = set(plan.device_ids)
    groups: list[Json] = [_group_data(group) for group in plan.groups]
    idle: list[Json] = [d for d in device_ids if d not in used]
    return {"groups": groups, "idle": idle, "schedule": plan.schedule}


def plan_words(plan: Mapping[str, object], pools: Mapping[str, str]) -> str:
    """A plan in the form of the user's files in words, a line a group.

    Each line has the group's samples, then device[first layer:end layer] of every stage, and
    which of them recompute.
    Where there are many groups, alike ones share a line that counts them and names pools.

    Args:
        plan: What runs.
        pools: Of every device of the plan.
    """
    groups = plan.get("groups")
    if not isinstance(groups, list) or not groups:
        return "idle"
    lines = []
    for indices in alike_groups(groups, pools):
        group = groups[indices[0]]
        folded = len(indices) > 1
        chain = " > ".join(
            f"{_team(stage, pools) if folded else '+'.join(stage['devices'])}"
            f"[{stage['first_layer']}:{stage['end_layer']}]"
            f"{RECOMPUTES if stage.get('recompute') else ''}"
            for stage in group["stages"]
        )
        samples = sum(group["microbatches"])
        lines.append(f"{len(indices)} x {samples}: {chain}" if folded else f"{samples}: {chain}")
    rest = len(lines) - MAX_LINES
    return "\n".join(lines[:MAX_LINES] + ([f"and {rest} more"] if rest > 0 else []))


def alike_groups(
    groups: Sequence[Mapping[str, Any]], pools: Mapping[str, str]
) -> tuple[tuple[int, ...], ...]:
    """Indices of groups that run the same samples and layers on teams of the same pools.

    Each group stands alone while a person can read them one by one.

    Args:
        groups: In the form of the user's files.
        pools: Of every device.
    """
    if len(groups) <= MAX_LINES:
        return tuple((index,) for index in range(len(groups)))
    found: dict[tuple[object, ...], list[int]] = {}
    for index, group in enumerate(groups):
        stages = tuple(
            (
                _team(stage, pools),
                stage["first_layer"],
                stage["end_layer"],
                stage.get("recompute", False),
            )
            for stage in group["stages"]
        )
        found.setdefault((sum(group["microbatches"]), stages), []).append(index)
    return tuple(map(tuple, found.values()))


def _team(stage: Mapping[str, Any], pools: Mapping[str, str]) -> str:
    """A team by its pool and size."""
    names = dict.fromkeys(pools.get(device, device) for device in stage["devices"])
    size = len(stage["devices"])
    return "+".join(names) + (f" x{size}" if size > 1 else "")


def slot_data(record: SlotRecord) -> dict[str, Json]:
    """A slot in the form of one line of ``slots.jsonl``: billed seconds, true dollars."""
    present = [view.device_id for view in record.devices if view.state != "lost"]
    plan = plan_data(record.plan, present)
    same = record.next_plan is record.plan  # as in most slots
    return {
        "slot": record.slot,
        "time_s": record.time_s,
        "step": record.step,
        "generation": record.generation,
        "decision": record.decision,
        "reason": record.reason,
        "plan": plan,
        "next_plan": plan if same else plan_data(record.next_plan, present),
        "predicted": _rates_data(record.predicted),
        "measured": _rates_data(record.measured),
        "backlog_usd": record.backlog_usd,
        "penalty_weight": record.penalty_weight,
        "price_of_money_samples_per_usd": record.price_of_money_samples_per_usd,
        "progress_backlog_usd": record.progress_backlog_usd,
        "forgiven_usd": record.forgiven_usd,
        "time_constant_s": record.time_constant_s,
        "coherence_s": record.coherence_s,
        "overhead_ratio": record.overhead_ratio,
        "requested": dict(record.requested),
        "price_age_s": dict(record.price_age_s),
        "marginal_values": dict(record.marginal_values),
        "spent_usd": record.spent_usd,
        "budget_usd": record.budget_usd,
        "overspend_bound_usd": record.overspend_bound_usd,
        "budget_per_hour_usd": record.budget.average_per_hour_usd if record.budget else None,
        "solve_s": record.solve_s,
        "migration_s": record.migration_s,
        "moved_bytes": record.moved_bytes,
        "control_cpu_s": record.control_cpu_s,
        "loss": storage.finite(record.loss),
        "grad_norm": storage.finite(record.grad_norm),
        "lr": record.lr,
        "samples": record.samples,
        "num_operations": record.num_operations,
        "num_late": record.num_late,
        "bubble_ratio": record.bubble_ratio,
        "stragglers": list(record.stragglers),
        "fallbacks": list(record.fallbacks),
        "devices": {view.device_id: _device_data(view) for view in record.devices},
    }


def slot_json(record: SlotRecord) -> str:
    """The line of ``slots.jsonl`` itself, without a line break.

    Its floats are those of ``json``, in a fourth of the time that a thousand devices take there.
    """
    return to_json(slot_data(record), inf_nan_mode="null").decode()


def evaluation_text(found: Evaluation, best: Evaluation | None = None) -> str:
    """An evaluation in one line, and the best one where it is another."""
    values = {LOSS: found.loss, **found.metrics}
    shown = ", ".join(f"{name} {figures.number(value)}" for name, value in values.items())
    text = f"evaluation at step {found.step}: {shown}"
    if best is None or best.step == found.step:
        return f"{text} (the best so far)" if found.best else text
    shown = ", ".join(
        f"{name} {figures.number(value)}"
        for name, value in {LOSS: best.loss, **best.metrics}.items()
    )
    return f"{text} (the best was that of step {best.step}: {shown})"


def slot_line(record: SlotRecord) -> str:
    """The one line a log shows of a slot: progress, speed, money, decision."""
    measured, predicted = record.measured, record.predicted
    parts = [f"slot {record.slot}", f"step {record.step}"]
    if record.loss is not None:
        parts.append(f"loss {figures.number(record.loss)}")
    if measured.step_s is not None:
        parts.append(
            f"step time {figures.seconds(measured.step_s)} "
            f"(predicted {figures.seconds(predicted.step_s)})"
        )
        parts.append(f"{figures.number(measured.samples_per_s)} samples/s")
    parts.append(f"{figures.usd(measured.cost_per_hour_usd)}/h")
    parts.append(f"spent {figures.usd(record.spent_usd)} of {figures.usd(record.budget_usd)}")
    if record.stragglers:
        parts.append(f"straggler {', '.join(record.stragglers)}")
    parts.append(decision_text(record))
    return " · ".join(parts)


def decision_text(record: SlotRecord) -> str:
    """What was decided and why; a reason that names the decision stands alone."""
    if record.reason.startswith(f"{record.decision}:"):
        return record.reason
    return f"{record.decision}: {record.reason}"


def _group_data(group: Group) -> dict[str, Json]:
    stages: list[Json] = [
        {
            "devices": list(stage.team.device_ids),
            "first_layer": stage.first_layer,
            "end_layer": stage.end_layer,
            **({"recompute": True} if stage.recompute else {}),
        }
        for stage in group.stages
    ]
    return {"microbatches": list(group.microbatches), "stages": stages}


def _rates_data(rates: Rates) -> dict[str, Json]:
    return {
        "step_s": storage.finite(rates.step_s),
        "samples_per_s": storage.finite(rates.samples_per_s),
        "cost_per_hour_usd": storage.finite(rates.cost_per_hour_usd),
        "peak_memory_bytes": dict(rates.peak_memory_bytes),
    }


def _device_data(view: DeviceView) -> dict[str, Json]:
    data: dict[str, Json] = {
        "kind": view.kind,
        "pool": view.pool,
        "state": view.state,
        "slowdown": view.slowdown,
        "straggler": view.straggler,
        "price_per_hour": view.price_per_hour,
        "memory_bytes": view.memory_bytes,
    }
    if view.utilization_ratio is not None:
        data["utilization_ratio"] = float(f"{view.utilization_ratio:.4g}")
    if view.steps is not None:  # least, median and most of the slot's steps
        data["compute_s"] = _spread_data(view.steps.compute)
        data["wait_s"] = _spread_data(view.steps.wait)
        data["input_s"] = _spread_data(view.steps.input)
    return data


def _spread_data(spread: Spread) -> Json:
    times_s = (spread.least_s, spread.median_s, spread.most_s)
    if spread.least_s == spread.most_s:  # of one step, as where slots are short
        return [float(f"{spread.least_s:.4g}")] * len(times_s)
    return [float(f"{time_s:.4g}") for time_s in times_s]
