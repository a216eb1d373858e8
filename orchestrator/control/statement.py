"""What a run has come to: the state that a later life of it needs, and the totals of a slot."""

from typing import TYPE_CHECKING

from orchestrator.control.records import Totals
from orchestrator.core.durable import ControlState
from orchestrator.core.plan import Plan

if TYPE_CHECKING:
    from orchestrator.control.books import Books


def control_state(books: "Books", plan: Plan, run_until_s: float | None) -> ControlState:
    """All that a later life of the run needs; ``plan`` runs until then, or ran last."""
    treasury, cluster = books.treasury, books.estimator.cluster
    queues = treasury.queues
    return ControlState(
        slot=books.slot + 1,
        generation=plan.generation,
        plan=plan,
        time_s=cluster.now_s,
        backlog_usd=queues.backlog_usd,
        penalty_weight=treasury.penalty_weight,
        best_ratio_samples_per_usd=treasury.best_ratio_samples_per_usd,
        spent_usd=books.ledger.spent_usd,
        num_ledger_entries=books.ledger.num_entries,
        next_step=books.leases.next_step,
        samples_committed=books.leases.samples_committed,
        checkpoint_step=books.checkpoint_step,
        slowdowns=tuple((d.device_id, d.slowdown) for d in cluster.devices),
        num_replans=books.num_replans,
        num_skipped=books.leases.num_skipped,
        num_failures=books.num_failures,
        num_preemptions=books.num_preemptions,
        holds=books.ledger.holds,
        forgiven_usd=queues.forgiven_usd,
        slot_bill_max_usd=treasury.slot_bill_max_usd,
        standing_excess_usd=treasury.standing_excess_usd,
        progress_backlog_usd=queues.progress_usd,
        progress_backlog_max_usd=queues.progress_max_usd,
        placeholder_usd=treasury.placeholder_usd,
        opening_samples_per_usd=treasury.opening_samples_per_usd,
        estimated_samples_per_usd=treasury.estimated_samples_per_usd,
        reference_samples_per_s=treasury.reference_samples_per_s,
        alarm_marks=books.alarms.marks,
        held_s=treasury.overhead.held_s,
        working_s=treasury.overhead.working_s,
        spent_rest_usd=books.ledger.spent_rest_usd,
        estimates=books.estimator.estimates,
        granted=books.leases.granted_before(plan),
        moves=books.moves,
        run_until_s=run_until_s,
        seed=books.options.seed,
        budget=treasury.budget,
        allowance=treasury.allowance,
        inherited_usd=treasury.inherited_usd,
    )


def totals(books: "Books", control_cpu_s: float) -> Totals:
    """What the run has come to."""
    treasury, cluster = books.treasury, books.estimator.cluster
    return Totals(
        slot=books.slot,
        cluster=cluster,
        next_step=books.leases.next_step,
        samples=books.leases.samples_committed,
        backlog_usd=treasury.queues.backlog_usd,
        penalty_weight=treasury.penalty_weight,
        price_of_money_samples_per_usd=treasury.price_of_money_samples_per_usd,
        progress_backlog_usd=treasury.queues.progress_usd,
        forgiven_usd=treasury.queues.forgiven_usd,
        time_constant_s=treasury.time_constant_s,
        coherence_s=books.alarms.coherence_s,
        spent_usd=books.ledger.spent_usd,
        budget_usd=treasury.allowance.at(cluster.now_s),
        budget=treasury.budget,
        overspend_bound_usd=treasury.overspend_bound_usd,
        stragglers=tuple(
            sorted({s.device_id for s in books.estimator.stragglers if s.phase != "link"})
        ),
        doubts=books.estimator.doubts,
        price_age_s=books.estimator.price_age_s,
        control_cpu_s=control_cpu_s,
        overhead_ratio=treasury.overhead.ratio,
    )
