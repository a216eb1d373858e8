"""One slot: what is observed, asked, estimated, decided and recorded."""

from dataclasses import dataclass, field
from typing import Literal

from orchestrator.core.budget import BudgetOptions
from orchestrator.core.cluster import ClusterState, Device, Offer
from orchestrator.core.durable import CheckpointManifest, LedgerEntry
from orchestrator.core.model import ModelProfile
from orchestrator.core.plan import Migration, Plan
from orchestrator.core.training import ActivationCheckpointing, TrainingOptions
from orchestrator.core.view import DeviceView, Rates, ZonePath

DecisionKind = Literal["keep", "reassign", "switch", "idle"]
PHASES = ("compute", "receive", "reduce", "update", "data")


@dataclass(frozen=True, slots=True)
class Transfer:
    """Messages of one step over one directed path between stages, each timed by one clock."""

    source: str  # devices
    target: str
    num_messages: int
    size_bytes: int
    busy_s: float  # from the first byte of each to its last: no latency, no waiting


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one device did in one committed step; virtual seconds on an emulated device."""

    generation: int
    step: int
    device_id: str
    group_index: int
    num_samples: int  # of its group
    started_s: float  # on the run's clock
    ended_s: float
    step_s: float
    compute_s: float  # its own forward and backward, no waiting
    receive_s: float = 0.0
    reduce_s: float = 0.0
    update_s: float = 0.0
    data_s: float = 0.0
    wall_step_s: float = 0.0  # equals step_s where nothing is emulated
    num_operations: int = 0
    num_late: int = 0  # emulated operations whose real work outlasted the virtual time
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    loss: float | None = None  # of the whole step: sum of losses over sum of weights
    grad_norm: float | None = None
    lr: float = 0.0
    loss_scale: float = 1.0  # of fp16: what the loss was multiplied by for backward
    skipped: bool = False  # no update: the gradient was not finite
    transfers: tuple[Transfer, ...] = ()  # as far as it measured them


@dataclass(frozen=True, slots=True)
class DeviceJoined:
    """A device is there to be used."""

    device: Device


@dataclass(frozen=True, slots=True)
class DeviceLost:
    """A device is gone; ``reason`` as one line."""

    device_id: str
    reason: str
    preempted: bool = False  # taken away, as spot devices are: no failure


@dataclass(frozen=True, slots=True)
class PreemptionNotice:
    """A device will be taken away at ``deadline_s``."""

    device_id: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker reported an error. ``user_traceback`` is set when the user's code raised it."""

    device_id: str
    step: int
    message: str
    user_traceback: str = ""
    out_of_memory: bool = False  # what the plan gave the device was too much for its memory

    @property
    def would_recur(self) -> bool:
        """Whether trying again would only cost money."""
        return bool(self.user_traceback) or self.out_of_memory


@dataclass(frozen=True, slots=True)
class Recovered:
    """Devices that the plan used are gone, and whoever is left stands at one step boundary."""

    next_step: int
    source: Literal["replica", "checkpoint", "start"]
    """Where the layers of the lost devices come from: devices of other groups, which hold them
    as of ``next_step``; the newest checkpoint; or the seed, when there is none yet."""

    num_undone: int = 0
    """Committed steps that will be run again."""

    duration_s: float = 0.0
    """From the fault being known to standing there, on the run's clock."""


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """A checkpoint could not be written, however often that was tried; ``reason`` as one line."""

    step: int
    reason: str
    ends_run: bool = False  # too many in a row


ClusterEvent = (
    DeviceJoined | DeviceLost | PreemptionNotice | WorkerFailed | Recovered | CheckpointFailed
)


@dataclass(frozen=True, slots=True)
class Usage:
    """A stretch of the run's clock in which a device was held for the plan, working or not."""

    device_id: str
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Observation:
    """One slot as the backend saw it. ``offers`` are the prices in force from now on.

    ``usage`` covers the slot without gaps or overlaps: what is held across the slot's end is
    cut there and goes on in the next observation.
    """

    now_s: float
    usage: tuple[Usage, ...]
    reports: tuple[StepReport, ...]
    events: tuple[ClusterEvent, ...]
    offers: tuple[Offer, ...]
    next_step: int  # the first step not yet committed
    devices: tuple[Device, ...]  # present now, as discovered (slowdown 1)
    checkpoint_step: int | None = None  # that the newest whole checkpoint goes on with
    checkpoints: tuple[CheckpointManifest, ...] = ()  # that came to exist in the slot
    leaving: frozenset[str] = frozenset()  # present, but under notice: not to be planned with
    owes_evaluation: bool = False  # before the next step; the run does not end without it


@dataclass(frozen=True, slots=True)
class PlanningProblem:
    """All that a strategy may look at: same problem, same plan.

    ``budget_usd_per_s`` is for reference strategies that plan against the rate itself; the
    joint planner sees money only through ``backlog_usd`` / ``penalty_weight``.
    """

    cluster: ClusterState
    model: ModelProfile
    batch_samples: int
    microbatch_samples: int  # the largest allowed
    schedules: tuple[str, ...]
    max_team: int
    overlap: bool
    penalty_weight: float  # V' = V + omega_z Z, $^2/sample, less the share of overhead
    backlog_usd: float  # Q
    budget_usd_per_s: float
    incumbent: Plan | None
    under_notice: frozenset[str] = frozenset()
    """Devices that are there, but about to be taken away: they are not in ``cluster``."""

    rentable: tuple[Device, ...] = ()
    """As it would be, a device of each pool that had none at the start and may get one."""

    memory_margin_ratio: float = 0.10
    activation_checkpointing: ActivationCheckpointing = "auto"
    seed: int = 0

    @property
    def price_of_money_samples_per_usd(self) -> float:
        """Price of money: lambda = Q/V'."""
        return self.backlog_usd / self.penalty_weight


def first_problem(
    cluster: ClusterState,
    model: ModelProfile,
    training: TrainingOptions,
    *,
    max_team: int = 1,
    budget_usd_per_s: float = 1.0,
    seed: int = 0,
) -> PlanningProblem:
    """The problem of a run's first slot: nothing runs, nothing is owed, any V ranks alike.

    Also what a CostModel needs where only durations are asked: money plays no part in them.
    ``max_team`` is what the plan may ask of those who would run it.
    """
    return PlanningProblem(
        cluster=cluster,
        model=model,
        batch_samples=training.global_batch,
        microbatch_samples=training.microbatch,
        schedules=training.schedules,
        max_team=max_team,
        overlap=training.overlap,
        penalty_weight=1.0,
        backlog_usd=0.0,
        budget_usd_per_s=budget_usd_per_s,
        incumbent=None,
        activation_checkpointing=training.activation_checkpointing,
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """What the cost model says of a plan."""

    step_s: float
    samples_per_s: float
    cost_usd_per_s: float  # of the run's clock, egress included; what is billed on average
    exposed_comm_s: float = 0.0
    bubble_ratio: float = 0.0
    group_s: tuple[float, ...] = ()  # pipeline time of each group
    sync_s: float = 0.0  # gradient sums after the last group
    update_s: float = 0.0
    egress_usd_per_s: float = 0.0
    peak_memory_bytes: tuple[tuple[str, int], ...] = ()  # per device in use
    compute_s: tuple[tuple[str, float], ...] = ()  # per device in use, of one step
    interpolated: bool = False  # some time was interpolated or priced from FLOP
    surcharge_usd_per_s: float = 0.0  # blocks that it would begin, less time paid ahead

    @property
    def counted_usd_per_s(self) -> float:
        """What J counts: the cost with the surcharge of its devices."""
        return self.cost_usd_per_s + self.surcharge_usd_per_s

    @property
    def samples_per_usd(self) -> float:
        """Samples per dollar of a plan that runs."""
        return self.samples_per_s / self.cost_usd_per_s


NO_MIGRATION = Migration()
IDLE_ESTIMATE = StepEstimate(step_s=0.0, samples_per_s=0.0, cost_usd_per_s=0.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, what the cost model says of it, and its score J in $^2/s."""

    plan: Plan
    estimate: StepEstimate
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What runs in the next slot, and why. ``run_until_s``: the hard cap closes the slot there."""

    kind: DecisionKind
    plan: Plan
    predicted: StepEstimate
    reason: str
    migration: Migration = NO_MIGRATION
    run_until_s: float | None = None


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """One line of ``slots.jsonl``, source of every metric: the slot that ended at ``time_s``.

    ``plan``, ``predicted`` and ``measured`` describe the slot that ended; ``decision`` and
    ``reason`` say what was decided at its end, and ``next_plan`` what runs from now on.
    Times that money is counted in (``time_s``) are billed seconds.
    """

    slot: int
    time_s: float
    step: int  # next step to run
    generation: int
    decision: DecisionKind
    reason: str
    plan: Plan
    next_plan: Plan
    predicted: Rates
    measured: Rates
    backlog_usd: float
    penalty_weight: float
    price_of_money_samples_per_usd: float
    marginal_values: tuple[tuple[str, float], ...]  # what one more is worth, names as in the files
    spent_usd: float
    budget_usd: float  # b t, or the integral of b where it was changed
    overspend_bound_usd: float  # G1 slack: spent_usd <= budget_usd + this
    solve_s: float
    migration_s: float
    moved_bytes: int
    control_cpu_s: float
    devices: tuple[DeviceView, ...]
    loss: float | None = None
    grad_norm: float | None = None
    lr: float = 0.0
    samples: int = 0  # committed so far
    num_late: int = 0
    num_operations: int = 0
    stragglers: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    group_step_s: tuple[float, ...] = ()  # per group, measured compute of its busiest stage
    bubble_ratio: float | None = None
    price_age_s: tuple[tuple[str, float], ...] = field(default=())
    progress_backlog_usd: float = 0.0  # Z: what is missing to the progress floor
    forgiven_usd: float = 0.0  # cut off the backlog by ``budget.queue_cap`` so far
    time_constant_s: float | None = None  # tau_V = V lambda / b
    coherence_s: float | None = None  # for how long prices and speeds last; None: not known
    overhead_ratio: float = 0.0  # of the time that plans are held, what makes no samples
    budget: BudgetOptions | None = None  # in force from now on
    requested: tuple[tuple[str, int], ...] = ()  # devices that are wished for, by pool
    paths: tuple[ZonePath, ...] = ()  # between the zones of present devices, as estimated


OutcomeStatus = Literal["finished", "budget", "stopped"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended: ``status`` as in ``result.json``, ``reason`` as one line."""

    status: OutcomeStatus
    reason: str
    resumable: bool  # whether ``--resume auto`` may go on from here


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """One line of ``steps.jsonl``: a step that every group finished, and the samples it used."""

    step: int
    generation: int
    first_sample: int  # positions in the run's one global sequence, half-open
    end_sample: int
    step_s: float
    ended_s: float  # on the run's clock
    loss: float | None = None
    grad_norm: float | None = None
    lr: float = 0.0
    loss_scale: float = 1.0
    skipped: bool = False

    @property
    def samples(self) -> int:
        """Samples it used."""
        return self.end_sample - self.first_sample


RunEventKind = Literal[
    "started", "resumed", "code", "joined", "lost", "notice", "failed", "straggler", "recovered",
    "replan", "price", "fallback", "checkpoint", "skipped", "alarm", "warning", "finished",
    "budget", "stopped", "budget_changed", "scale",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One line of ``events.jsonl``: what happened, to which device, and why."""

    time_s: float  # billed seconds
    slot: int
    kind: RunEventKind
    detail: str
    device: str = ""
    duration_s: float | None = None  # of the run's clock
    cause: str = ""  # one of a few words, where a kind has several: what metrics are told apart by


@dataclass(frozen=True, slots=True)
class SlotJournal:
    """What a slot adds to the run's append-only files, beside its SlotRecord.

    ``reports`` are what the steps were made of; they and ``checkpoints``, those that came to
    exist, go to metrics, not to a file.
    """

    reports: tuple[StepReport, ...] = ()
    steps: tuple[CommittedStep, ...] = ()
    ledger: tuple[LedgerEntry, ...] = ()
    events: tuple[RunEvent, ...] = ()
    undone_from: int | None = None  # these and earlier steps from there on will be run again
    checkpoints: tuple[CheckpointManifest, ...] = ()
