"""What ``result.json`` says of a run that has ended."""

from importlib.metadata import version

from orchestrator.control.persistence import evaluation_json
from orchestrator.core.durable import ControlState
from orchestrator.core.slot import CommittedStep, SlotRecord
from orchestrator.runtime.evaluations import Evaluations
from orchestrator.storage import Json


def result_ending(
    run_url: str, status: str, reason: str, *, resumable: bool, code: str | None = None
) -> dict[str, Json]:
    """How it ended, and which code it ran: a digest, None where that is not known."""
    return {
        "status": status,
        "reason": reason,
        "run_dir": run_url,
        "resumable": resumable,
        "code": code,
    }


def result_figures(
    state: ControlState | None,
    slot: SlotRecord | None,
    step: CommittedStep | None,
    judged: Evaluations,
) -> dict[str, Json]:
    """What the run has come to.

    Args:
        state: As it was saved last; None: before the first slot.
        slot: The last one of this life.
        step: The same.
        judged: Evaluations so far.
    """
    billed_h = slot.time_s / 3600.0 if slot else 0.0
    newest, best = judged.whole[-1:], judged.best
    budget = state.budget if state else None
    return {
        "steps": state.next_step if state else 0,
        "samples": state.samples_committed if state else 0,
        "final_loss": step.loss if step else None,
        "evaluation": evaluation_json(newest[0]) if newest else None,
        "best_evaluation": evaluation_json(best) if best else None,
        "spent_usd": state.spent_usd if state else 0.0,
        "average_per_hour_usd": slot.spent_usd / billed_h if slot and billed_h else None,
        "budget_per_hour_usd": budget.average_per_hour_usd if budget else None,
        "billed_hours": billed_h,
        "replans": state.num_replans if state else 0,
        "recoveries": state.num_failures + state.num_preemptions if state else 0,
        "versions": {name: version(name) for name in ("lyray", "ray", "torch")},
    }
