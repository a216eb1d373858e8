"""What survives a restart: ledger entries, manifests, control state."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from orchestrator.core.budget import Allowance, BudgetOptions
from orchestrator.core.cluster import Offer
from orchestrator.core.plan import Move, Plan


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


def stays_below(path: str) -> bool:
    """Whether what a file calls another one lies below its folder, on any storage."""
    return path.isprintable() and not (
        set(path.split("/")) & {"", ".", ".."} or set(path) & set("\\:*?[")
    )


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """One layer's file in a checkpoint; ``path`` is relative to the checkpoint."""

    layer: int
    path: str
    size_bytes: int
    checksum: str  # sha256 hex

    def __post_init__(self) -> None:
        if not stays_below(self.path):
            raise ValueError(f"path is {self.path!r}, which does not lie in the checkpoint")


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """What one worker wrote of the checkpoint at ``step``: the layers that it owns first."""

    step: int
    generation: int
    files: tuple[CheckpointFile, ...]
    problem: str = ""
    """Why it could not be written, where it could not; there are no files then."""

    write_s: float = 0.0  # from the step boundary to the last file being durable


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """Written last: a checkpoint without it does not exist. ``step`` is the next step to run."""

    step: int
    generation: int
    files: tuple[CheckpointFile, ...]
    num_layers: int
    samples_committed: int
    seed: int
    optimizer: str = ""
    schema: str = "lyray.checkpoint/1"
    write_s: float = 0.0  # from the step boundary to the last file being durable
    unix_s: float | None = None  # when it was written, seconds since 1970

    @property
    def size_bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.size_bytes for file in self.files)


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
class Trend:
    """What is known of a quantity that should stay as predicted: log(measured / predicted).

    Windows are bounded and rounded, so that a state of a thousand devices stays small.
    """

    level: float = 0.0  # what planning counts with
    now: float = 0.0  # what the newest steps say: the level, unless that is an average
    averaged: bool = False
    num_steps: int = 0  # measured since the level was last given up; 0: not measured
    noise: tuple[float, ...] = ()  # of steps: median deviation of each of the last slots
    means: tuple[float, ...] = ()  # of the steps of each of the last slots
    nows: tuple[float, ...] = ()  # at the ends of those slots
    up: float = 0.0  # cumulative sums, and the samples since they were last zero
    down: float = 0.0
    since_up: tuple[float, ...] = ()
    since_down: tuple[float, ...] = ()
    slots_unseen: int = 0  # since it was last measured
    num_trials: int = 0  # given up and found slow again, in a row
    on_trial: bool = False  # given up while slow, and not proved well since
    given_up: float = 0.0  # the level then
    slots_slow: int = 0  # in a row
    slots_well: int = 0


@dataclass(frozen=True, slots=True)
class PriceMemory:
    """The offer of a pool that is believed, when it was read, and readings not believed yet."""

    offer: Offer
    read_s: float
    seen_s: float = -inf  # newest reading, believed or not
    doubted: tuple[float, ...] = ()
    missing: bool = False


@dataclass(frozen=True, slots=True)
class Estimates:
    """What a run has learned of its cluster."""

    speeds: Sequence[tuple[str, Trend]] = ()  # by device
    inputs: Sequence[tuple[str, Trend]] = ()  # by device: drawing samples, beside its computing
    input_scales_s: tuple[tuple[str, float], ...] = ()  # a sample computed, when it first drew one
    links: Sequence[tuple[tuple[str, str], Trend]] = ()  # by node, from and to
    prices: tuple[PriceMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class ControlState:
    """All that the loop needs to go on after its process died, as if it had not.

    The random numbers of a search come from a generator that starts anew with ``seed`` every
    time, so that the seed is all there is to keep of them.
    """

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
    slowdowns: tuple[tuple[str, float], ...] = ()  # for planning; older files know no estimates
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
    spent_rest_usd: float = 0.0  # what rounding left out of ``spent_usd``
    estimates: Estimates = Estimates()
    granted: tuple[Plan, ...] = ()  # earlier plans whose last step may still commit
    moves: tuple[Move, ...] = ()  # of the last change of plan, not yet billed
    run_until_s: float | None = None  # where the hard cap closes the slot
    seed: int = 0
    budget: BudgetOptions | None = None  # in force; None: that of the run's file
    allowance: Allowance | None = None  # None: of an older version, one b for all time
    inherited_usd: float = 0.0  # overspent when the budget changed, and not paid back yet
