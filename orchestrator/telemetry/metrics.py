"""Every metric of a run, declared once; the exporter of ``telemetry.exporter`` shows them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PREFIX = "lyray_"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions:
    """YAML section ``metrics``."""

    port: int = 9400
    """Port of the exporter; 0 or a taken one: the next free port."""

    host: str = "127.0.0.1"
    """Address it listens on."""

    tensorboard: bool = False
    """Scalars for TensorBoard in the folder ``tensorboard`` of the run."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; write 0 (any free port) to 65535")
        if not self.host:
            raise ValueError("host is empty; write an address, for example 127.0.0.1")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; every series also has the label ``run``."""

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_BYTES = tuple(10.0**k for k in range(3, 13))

METRICS: Mapping[str, Metric] = {
    "steps_total": Metric("counter", "Committed optimizer steps."),
    "samples_total": Metric("counter", "Committed samples."),
    "steps_discarded_total": Metric("counter", "Steps without an update.", ("reason",)),
    "loss": Metric("gauge", "Loss of the newest step, mean over its weights."),
    "evaluation": Metric("gauge", "Newest evaluation: its loss and metrics.", ("metric",)),
    "evaluation_step": Metric("gauge", "Updates that the model had at the newest evaluation."),
    "best_evaluation_step": Metric("gauge", "The same of the best evaluation so far."),
    "evaluation_duration_seconds": Metric(
        "histogram", "Length of an evaluation.", buckets=_SECONDS
    ),
    "grad_norm": Metric("gauge", "Norm of the newest step's gradient, before clipping."),
    "learning_rate": Metric("gauge", "Learning rate of the newest step."),
    "step_duration_seconds": Metric("histogram", "Length of a step.", buckets=_SECONDS),
    "step_phase_seconds": Metric(
        "gauge", "Mean time of a step in a phase, of the group's busiest device.",
        ("group", "phase"),
    ),
    "bubble_ratio": Metric("gauge", "Share of device time in steps without compute.", ("group",)),
    "peak_memory_bytes": Metric("gauge", "Largest memory in use in the slot.", ("device",)),
    "predicted_peak_memory_bytes": Metric(
        "gauge", "Largest memory the planner reckons with.", ("device",)
    ),
    "samples_per_second": Metric("gauge", "Samples over the slot's real length."),
    "predicted_step_seconds": Metric("gauge", "Step time the planner predicted for the slot."),
    "measured_step_seconds": Metric("gauge", "Median step time of the slot."),
    "prediction_error_ratio": Metric("gauge", "Measured over predicted step time, less one."),
    "predicted_samples_per_second": Metric("gauge", "Rate the planner predicted for the slot."),
    "predicted_cost_usd_per_hour": Metric("gauge", "Cost the planner predicted for the slot."),
    "requested_devices": Metric("gauge", "Devices the autoscaler is asked for.", ("pool",)),
    "devices": Metric("gauge", "Devices by what they do.", ("kind", "pool", "state")),
    "device_slowdown_ratio": Metric(
        "gauge", "Measured over own predicted compute time; 1: as predicted.", ("device",)
    ),
    "device_utilization_ratio": Metric(
        "gauge", "Share of the slot's time held in which it computed.", ("device",)
    ),
    "device_memory_bytes": Metric("gauge", "All the memory that it has.", ("device",)),
    "link_bandwidth_bytes_per_second": Metric(
        "gauge", "Slowest path between devices of two zones, as planned with.",
        ("source_zone", "target_zone"),
    ),
    "link_latency_seconds": Metric(
        "gauge", "Longest latency between devices of two zones, as planned with.",
        ("source_zone", "target_zone"),
    ),
    "device_straggler": Metric("gauge", "1: named a straggler.", ("device",)),
    "worker_up": Metric("gauge", "1: there; 0: lost in the last slot.", ("device",)),
    "generation": Metric("gauge", "Number of the running plan."),
    "groups": Metric("gauge", "Groups of the running plan; 0: idle."),
    "stages": Metric("gauge", "Stages of a group.", ("group",)),
    "num_microbatches": Metric("gauge", "Microbatches of a group in one step.", ("group",)),
    "plan_info": Metric("gauge", "What the plan was made with.", ("schedule", "strategy")),
    "decisions_total": Metric("counter", "Decisions, one a slot.", ("decision", "reason")),
    "replans_total": Metric("counter", "Decisions that changed the plan.", ("decision", "reason")),
    "replan_duration_seconds": Metric(
        "histogram", "Pause that a change of plan costs, as planned.", buckets=_SECONDS
    ),
    "planning_duration_seconds": Metric(
        "histogram", "Search, assignment and decision of a slot.", buckets=_SECONDS
    ),
    "migration_bytes": Metric("histogram", "Bytes a change of plan moves.", buckets=_BYTES),
    "control_cpu_seconds_total": Metric("counter", "Processor time of the control loop."),
    "cost_usd_total": Metric("counter", "Dollars billed for devices.", ("pool",)),
    "egress_usd_total": Metric("counter", "Dollars billed for egress.", ("zone",)),
    "egress_bytes_total": Metric("counter", "Bytes that cost egress.", ("zone",)),
    "cost_usd_per_hour": Metric("gauge", "Dollars of the slot over its real length."),
    "budget_usd_per_hour": Metric("gauge", "The long-term average that is allowed."),
    "budget_spent_ratio": Metric("gauge", "Spent of the hard cap, else of the average's horizon."),
    "spent_usd": Metric("gauge", "Billed since the run began, over all its lives."),
    "budget_exhaustion_timestamp_seconds": Metric(
        "gauge",
        "Unix time at which budget_spent_ratio is 1 if money goes as in the last billed hour.",
    ),
    "overspend_bound_usd": Metric("gauge", "Most that may be spent above the average so far."),
    "backlog_usd": Metric("gauge", "Virtual queue of the budget."),
    "penalty_weight": Metric("gauge", "V, in squared dollars per sample."),
    "progress_backlog_usd": Metric("gauge", "Virtual queue of the progress floor."),
    "forgiven_usd": Metric("gauge", "Cut off the backlog by its cap; never paid back."),
    "price_of_money_samples_per_usd": Metric("gauge", "Backlog over V, raised by the floor's."),
    "time_constant_seconds": Metric("gauge", "How fast the price of money follows, billed."),
    "overhead_ratio": Metric(
        "gauge", "Share of the time in which plans are held that makes no samples."
    ),
    "coherence_seconds": Metric("gauge", "For how long prices and speeds last, billed."),
    "warnings_total": Metric("counter", "Alarms and warnings of a run.", ("reason",)),
    "marginal_value_samples_per_second": Metric(
        "gauge",
        "What one more adds to the rate: $/h of budget, egress or a zone, microbatch, device, "
        "percent of a least share.",
        ("of", "where"),
    ),
    "break_even_usd_per_hour": Metric(
        "gauge", "Price below which one more device of the pool pays.", ("pool",)
    ),
    "same_cost_usd_per_hour": Metric(
        "gauge", "Price below which one more device makes samples cheaper.", ("pool",)
    ),
    "price_age_seconds": Metric("gauge", "Since the pool's price was last read.", ("pool",)),
    "losses_total": Metric("counter", "Devices lost.", ("reason",)),
    "recoveries_total": Metric(
        "counter", "Losses made up for, by where layers came from.", ("source",)
    ),
    "recovery_duration_seconds": Metric(
        "histogram", "From a fault being known to all standing at one step.", buckets=_SECONDS
    ),
    "fallbacks_total": Metric("counter", "Second-best ways taken.", ("reason",)),
    "checkpoint_duration_seconds": Metric(
        "histogram", "From the step boundary to the last file being durable.", buckets=_SECONDS
    ),
    "checkpoint_bytes": Metric("gauge", "Size of the newest checkpoint."),
    "checkpoint_timestamp_seconds": Metric("gauge", "Unix time of the newest checkpoint."),
    "lease_samples": Metric("gauge", "Samples of the run by status.", ("status",)),
    "emulation_late_ratio": Metric("gauge", "Share of emulated operations that came late."),
    "build_info": Metric("gauge", "Version that runs.", ("version",)),
}  # fmt: skip
"""Name, without the prefix, to what it is. Declared here and nowhere else."""

REASONS = frozenset(
    {
        "keep", "reassign", "switch", "budget_wait", "budget_cap_reached", "budget_cap_near",
        "price_unknown", "price_limit", "no_device", "no_feasible_plan", "user_rows_infeasible",
        "finished", "budget", "stopped", "assignment", "deadline", "not_finite", "worker",
        "preemption", "price", "price_feed", "budget_infeasible", "tau_v", "queue_cap",
        "budget_refused", "config_ignored",
        "checkpoint_failed", "checkpoint_damaged",
    }
)  # fmt: skip
"""Values of the label ``reason``; any other text is shown as ``other``."""


def reason_label(text: str) -> str:
    """The stable word that a reason begins with, ``other`` when it is not a known one."""
    word = text.split(":", 1)[0].strip()
    return word if word in REASONS else "other"
