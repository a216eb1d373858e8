"""The files of a run: control state, append-only records, checkpoints with their manifest last."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, TypeVar

from orchestrator import lines, storage
from orchestrator.control.ledger_file import charge, ledger_entry, ledger_lines
from orchestrator.core.durable import (
    CHECKPOINTS,
    CheckpointManifest,
    ControlState,
    Estimates,
    Hold,
    LedgerEntry,
    checkpoint_name,
)
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, SlotJournal
from orchestrator.decoding import field_names
from orchestrator.errors import ConfigError, DamagedCheckpointError

T = TypeVar("T")
RecordName = Literal["slots", "steps", "evaluations", "ledger", "events"]

STATE_FILE, TRENDS_FILE = "control.json", "trends.json"
RESULT_FILE, MANIFEST_FILE = "result.json", "manifest.json"
DAMAGED_FILE = "manifest.damaged.json"
"""What the manifest of a checkpoint is called that turned out to be damaged."""

TRENDS_S = 30.0
"""What was learned of a thousand devices, their inputs and links takes ten times as long to write
as all else of their slot."""

logger = logging.getLogger(__name__)


class RunStore:
    """Reads and writes the files of one run (docs: files of a run)."""

    def __init__(self, run_url: str) -> None:
        self.run_url = run_url
        self._trends_unix_s = -math.inf
        self._texts: dict[str, tuple[object, str]] = {}  # of the newest state, by field

    def url(self, *parts: str) -> str:
        """Where a file of the run lies."""
        return storage.join(self.run_url, *parts)

    def delete_unfinished(self) -> None:
        """Remove files that a process was writing when it was killed; no other may write now."""
        folder = storage.local_path(self.run_url)
        for path in folder.glob(f"*{storage.TEMPORARY}*") if folder else ():
            path.unlink(missing_ok=True)

    def save_state(self, state: ControlState) -> None:
        """Replace the control state; what it says happened must already be in the ledger.

        What was learned of speeds, inputs and links is most of the bytes, and nothing that a few
        slots would not teach again: it has a file of its own, which is at most ``TRENDS_S`` older,
        but for a state without a time of writing.
        """
        learned, written_s = state.estimates, state.saved_unix_s
        if written_s is None or not 0 <= written_s - self._trends_unix_s < TRENDS_S:
            storage.write_json(self.url(TRENDS_FILE), replace(learned, prices=()))
            self._trends_unix_s = -math.inf if written_s is None else written_s
        known = replace(state, estimates=Estimates(prices=learned.prices))
        names = field_names(ControlState)
        rows = (f'"{name}": {self._text(name, known)}' for name in names)  # as write_json would
        text = "{\n" + ",\n".join(rows) + "\n}\n"
        storage.write_bytes(self.url(STATE_FILE), text.encode())

    def _text(self, name: str, state: ControlState) -> str:
        """Of one field. What is in it cannot change: the very same object has the same text.

        Most of a state is its plan, which stays, and what a slot adds is saved twice.
        """
        value: object = getattr(state, name)
        held, text = self._texts.get(name, (None, ""))
        if not text or held is not value:
            text = storage.json_text(value)
            self._texts[name] = value, text
        return text

    def load_state(self, billing_speedup: float) -> ControlState | None:
        """The state to go on from, None when the run never got that far.

        Ledger lines written after the state was saved are dollars all the same: they are
        added to what was spent and to the backlog, and what they paid for is not charged again:
        neither seconds nor what the last change of plan sent.

        Args:
            billing_speedup: Billed seconds of one of the run's.

        Raises:
            ConfigError: If a file is damaged or missing, or the ledger is shorter than the state
                says.
        """
        entries = self.read_ledger()
        if not storage.exists(self.url(STATE_FILE)):
            if entries:  # nothing is billed before a first decision, which is saved
                raise ConfigError(
                    f"{self.url(STATE_FILE)} is missing, but the ledger has {len(entries)} lines; "
                    "put the file back, or start under another run.name"
                )
            return None
        with _undamaged(self.url(STATE_FILE)):
            state = storage.read_json(ControlState, self.url(STATE_FILE))
        if storage.exists(self.url(TRENDS_FILE)):
            with _undamaged(self.url(TRENDS_FILE)):
                learned = storage.read_json(Estimates, self.url(TRENDS_FILE))
            state = replace(state, estimates=replace(learned, prices=state.estimates.prices))
        if len(entries) < state.num_ledger_entries:
            raise ConfigError(
                f"{self.url('ledger.jsonl')} has {len(entries)} lines, but the run had written "
                f"{state.num_ledger_entries}; put the file back before resuming"
            )
        late = entries[state.num_ledger_entries :]
        late_usd = math.fsum(e.usd + e.egress_usd for e in late)
        return replace(
            state,
            num_ledger_entries=len(entries),
            spent_usd=state.spent_usd + late_usd,
            backlog_usd=state.backlog_usd + late_usd,
            inherited_usd=state.inherited_usd and state.inherited_usd + late_usd,
            holds=_paid(state, late, billing_speedup),
            moves=() if late else state.moves,
        )

    def write_journal(self, journal: SlotJournal) -> None:
        """Append what a slot adds to steps, ledger and events."""
        lines.append_lines(self.url("ledger.jsonl"), ledger_lines(journal.ledger))
        self._append("steps", map(step_json, journal.steps))
        self._append("events", journal.events)

    def append(self, name: RecordName, row: Mapping[str, object]) -> None:
        """Append one record, given as plain data."""
        self._append(name, (row,))

    def read_ledger(self) -> tuple[LedgerEntry, ...]:
        """Every line of the ledger. Raises ConfigError when it is damaged."""
        return tuple(self._each("ledger", ledger_entry))

    def charges(self) -> Iterator[LedgerEntry]:
        """The same, one after the other and without devices, which is a tenth of the work."""
        return self._each("ledger", charge)

    def read(self, name: RecordName) -> tuple[dict[str, object], ...]:
        """Every line of one record file, as plain data. Raises ConfigError when it is damaged."""
        return tuple(self.rows(name))

    def rows(self, name: RecordName) -> Iterator[dict[str, object]]:
        """As ``read``, one line after the other: of many, no more than one is held as data."""
        return self._each(name, lambda line: _object(storage.parse_json(line)))

    def _each(self, name: RecordName, parse: Callable[[str], T]) -> Iterator[T]:
        url = self.url(f"{name}.jsonl")
        with _undamaged(url):
            for number, line in enumerate(lines.each_line(url), start=1):
                try:
                    found = parse(line)
                except ValueError as error:
                    raise _damaged(f"line {number} of {url}", error) from None
                yield found

    def rewind_steps(self, next_step: int) -> None:
        """Forget the lines of steps that a restored checkpoint undoes; they will run again.

        Raises:
            ConfigError: If the file is damaged, or has not every step before it: a checkpoint
                exists only once they are on file. A run that began with the checkpoint of another
                one has none.
        """
        url = self.url("steps.jsonl")
        with _undamaged(url):
            steps = [_step_of(row) for row in self.read("steps")]
            kept = [step for step in steps if step < next_step]
            if kept != list(range(next_step - len(kept), next_step)):
                raise ValueError(f"it has not every step before {next_step}")
        lines.keep_lines(url, len(kept))

    def write_evaluation(self, evaluation: Evaluation) -> None:
        """Append a whole evaluation; the steps before it must be on file."""
        self._append("evaluations", (evaluation_json(evaluation),))

    def read_evaluations(self) -> tuple[Evaluation, ...]:
        """Every evaluation on record. Raises ConfigError when the file is damaged."""
        rows = self.read("evaluations")
        with _undamaged(self.url("evaluations.jsonl")):
            return tuple(storage.from_json(Evaluation, row) for row in rows)

    def best_step(self) -> int | None:
        """The step of the best evaluation on record, None without any."""
        steps = [e.step for e in self.read_evaluations() if e.best]
        return steps[-1] if steps else None

    def rewind_evaluations(self, next_step: int) -> None:
        """Forget those of steps that a restored checkpoint undoes; they will come again."""
        kept = [e for e in self.read_evaluations() if e.step <= next_step]
        lines.keep_lines(self.url("evaluations.jsonl"), len(kept))

    def write_result(self, result: Mapping[str, object]) -> None:
        """Write ``result.json``."""
        storage.write_json(self.url(RESULT_FILE), result)

    def read_result(self) -> dict[str, object] | None:
        """What ``result.json`` says, None when the run has not ended.

        Raises:
            ConfigError: If it is damaged.
        """
        url = self.url(RESULT_FILE)
        if not storage.exists(url):
            return None
        with _undamaged(url):
            found = _object(storage.parse_json(storage.read_bytes(url)))
            if not isinstance(found.get("status"), str):
                raise ValueError("it has no status")  # noqa: TRY004 - of the file
            return found

    def _append(self, name: RecordName, rows: Iterable[object]) -> None:
        lines.append_lines(self.url(f"{name}.jsonl"), map(storage.json_text, rows))


def _paid(
    state: ControlState, late: Iterable[LedgerEntry], billing_speedup: float
) -> tuple[Hold, ...]:
    """Up to when each device is paid once these lines, which the state does not know, count."""
    holds = {hold.device_id: hold for hold in state.holds}
    for entry in late:
        if entry.cause != "egress":
            known = holds.get(entry.device, Hold(entry.device, state.time_s, state.time_s))
            paid_s = max(known.paid_until_s, entry.to_s / billing_speedup)
            holds[entry.device] = replace(known, paid_until_s=paid_s)
    return tuple(holds[device_id] for device_id in sorted(holds))


class CheckpointStore:
    """The checkpoints of one run. One without a manifest does not exist."""

    def __init__(self, run_url: str, *, keep_checkpoints: int = 2) -> None:
        self._url = storage.join(run_url, CHECKPOINTS)
        self._keep = keep_checkpoints

    def url(self, step: int, *parts: str) -> str:
        """Folder of the checkpoint that goes on with ``step``, or a file in it."""
        return storage.join(self._url, checkpoint_name(step), *parts)

    def write_manifest(self, manifest: CheckpointManifest, also: Collection[int] = ()) -> None:
        """Make a checkpoint exist, then remove the oldest ones beyond ``keep_checkpoints``.

        What cannot be removed stays, until a later checkpoint tries again; ``also``: steps whose
        checkpoints stay as long as they are named here.

        Raises:
            ValueError: If a layer has no file: such a checkpoint could not be restored.
            OSError: If the storage refuses; older checkpoints are untouched.
        """
        missing = sorted(set(range(manifest.num_layers)) - {f.layer for f in manifest.files})
        if missing:
            raise ValueError(f"checkpoint of step {manifest.step} lacks the layers {missing}")
        storage.write_json(self.url(manifest.step, MANIFEST_FILE), manifest)
        try:
            self.prune(also)
        except OSError as error:
            logger.warning("an old checkpoint could not be removed: %s", error)

    def steps(self) -> tuple[int, ...]:
        """Steps with a whole checkpoint, ascending."""
        return tuple(
            step for step in self._folders() if storage.exists(self.url(step, MANIFEST_FILE))
        )

    def latest(self) -> CheckpointManifest | None:
        """The newest whole checkpoint, None when there is none."""
        steps = self.steps()
        return self.read(steps[-1]) if steps else None

    def read(self, step: int) -> CheckpointManifest:
        """The manifest of one checkpoint.

        Raises:
            FileNotFoundError: If the checkpoint is not whole.
            DamagedCheckpointError: If the manifest is damaged.
        """
        url = self.url(step, MANIFEST_FILE)
        try:
            return storage.read_json(CheckpointManifest, url)
        except ValueError as error:
            raise DamagedCheckpointError(f"{url} is damaged: {error}", step) from None

    def set_aside(self, step: int) -> None:
        """Let a damaged checkpoint exist no longer; its files stay to be looked at."""
        manifest = storage.read_bytes(self.url(step, MANIFEST_FILE))
        storage.write_bytes(self.url(step, DAMAGED_FILE), manifest)
        storage.delete(self.url(step, MANIFEST_FILE))

    def prune(self, also: Collection[int] = ()) -> None:
        """Remove whole checkpoints beyond ``keep_checkpoints``, and broken ones older than those.

        A checkpoint without a manifest that is newer than the newest whole one may be under
        way and stays.
        """
        whole = self.steps()
        kept = {*whole[-self._keep :], *also}
        for step in self._folders():
            if whole and step < whole[-1] and step not in kept:
                self._remove(step)

    def _remove(self, step: int) -> None:
        storage.delete(self.url(step, MANIFEST_FILE))  # first: half a checkpoint must not exist
        storage.delete(self.url(step))

    def _folders(self) -> tuple[int, ...]:
        names = storage.list_names(self._url)
        return tuple(
            sorted(
                int(name.removeprefix("step-"))
                for name in names
                if name.startswith("step-") and name.removeprefix("step-").isdigit()
            )
        )


@contextmanager
def _undamaged(url: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # no JSON, no text, or not the keys that are written there
        raise _damaged(url, error) from None


def _damaged(url: str, error: ValueError) -> ConfigError:
    return ConfigError(
        f"{url} is damaged: {error}; put a copy back, or start under another run.name"
    )


def _object(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"it is {value!r}, no object")  # noqa: TRY004 - of the file
    return value


def step_json(step: CommittedStep) -> dict[str, object]:
    """One line of ``steps.jsonl``."""
    return {
        "step": step.step,
        "loss": storage.finite(step.loss),
        "grad_norm": storage.finite(step.grad_norm),
        "lr": step.lr,
        **({"loss_scale": step.loss_scale} if step.loss_scale != 1.0 else {}),
        "samples": step.samples,
        "step_s": step.step_s,
        "generation": step.generation,
        "first_sample": step.first_sample,
        "end_sample": step.end_sample,
    }


def evaluation_json(evaluation: Evaluation) -> storage.Json:
    """One line of ``evaluations.jsonl``."""
    metrics = {name: storage.finite(value) for name, value in evaluation.metrics.items()}
    shown = replace(evaluation, loss=storage.finite(evaluation.loss), metrics=metrics)
    return storage.to_json(shown)


def _step_of(row: Mapping[str, object]) -> int:
    step = row.get("step")
    if not isinstance(step, int):
        raise ValueError(f"the line {row} is of no step")  # noqa: TRY004 - of the file
    return step
