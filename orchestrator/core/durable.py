"""What survives a restart: ledger entries, manifests, control state."""

from dataclasses import dataclass

from orchestrator.core.plan import Plan


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One priced interval of one device. Append-only; a correction is a new entry.

    ``from_s`` and ``to_s`` are billed seconds, ``price_per_hour`` is the price used.
    """

    from_s: float
    to_s: float
    device: str
    pool: str
    price_per_hour: float
    usd: float
    egress_bytes: float = 0.0
    egress_usd: float = 0.0
    cause: str = "use"  # use | block | egress | standing | correction
    estimated: bool = False


CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints."""

STATE_DICT_KEY = "state_dict"
"""Metadata of a layer's file: a JSON object, name in the user's model -> tensor of the file."""


def checkpoint_name(step: int) -> str:
    """Folder of the checkpoint from which ``step`` is the next to run, below ``CHECKPOINTS``."""
    return f"step-{step:06d}"


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One layer's file in a checkpoint; ``path`` is relative to the checkpoint."""

    layer: int
    path: str
    size_bytes: int
    checksum: str  # sha256 hex


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """What one worker wrote of the checkpoint at ``step``: the layers that it owns first."""

    step: int
    generation: int
    files: tuple[CheckpointFile, ...]
    problem: str = ""
    """Why it could not be written, where it could not; there are no files then."""


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """Written last: a checkpoint without it does not exist. ``step`` is the next step to run."""

    step: int
    generation: int
    files: tuple[CheckpointFile, ...]
    num_layers: int
    samples_committed: int
    seed: int
    loss_scale: float = 1.0
    optimizer: str = ""
    schema: str = "lyray.checkpoint/1"


@dataclass(frozen=True, slots=True)
class Hold:
    """A device held for the run, and up to when it has been charged; seconds of the run's clock."""

    device_id: str
    until_s: float  # held so far, without a gap
    paid_until_s: float  # later than until_s where a block was charged ahead


@dataclass(frozen=True, slots=True)
class AlarmMark:
    """Queues and totals at one moment, between which the alarm of section 4.6 looks for growth."""

    time_s: float  # of the run's clock
    backlog_usd: float  # Q
    progress_usd: float  # Z
    penalty_weight: float  # V: the scale of both
    spent_usd: float
    samples: int  # committed


@dataclass(frozen=True, slots=True)
class ControlState:
    """All that the loop needs to go on after its process died."""

    slot: int
    generation: int
    plan: Plan
    time_s: float  # of the run's clock, summed over all lives of the run
    backlog_usd: float
    penalty_weight: float
    best_ratio_samples_per_usd: float  # rho's running maximum
    spent_usd: float
    num_ledger_entries: int
    next_step: int
    samples_committed: int
    checkpoint_step: int | None
    slowdowns: tuple[tuple[str, float], ...] = ()
    num_failures: int = 0
    num_preemptions: int = 0
    num_replans: int = 0
    num_skipped: int = 0  # steps without an update: the gradient was not finite
    holds: tuple[Hold, ...] = ()
    forgiven_usd: float = 0.0  # cut off the backlog by ``budget.queue_cap``
    slot_bill_max_usd: float = 0.0  # C_max so far
    standing_excess_usd: float = 0.0  # what presence alone has cost beyond the average
    progress_backlog_usd: float = 0.0  # Z of ``budget.min_samples_per_s``
    progress_backlog_max_usd: float = 0.0
    placeholder_usd: float | None = None  # Q_0; None: the price of money was never estimated
    opening_samples_per_usd: float = 0.0  # the price at which the backlog opened
    estimated_samples_per_usd: float = 0.0  # lambda_hat: more than that under a cap
    reference_samples_per_s: float = 0.0  # r_ref, the rate expected at the budget
    alarm_marks: tuple[AlarmMark, ...] = ()  # of the last window
    saved_unix_s: float | None = None  # when, while ``plan`` is held; None: the run has ended
    held_s: float = 0.0  # in which plans were held, older slots fading; 0: never
    working_s: float = 0.0  # what committed steps took of it
