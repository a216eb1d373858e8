"""Writes down what happens: the events of a slot as one line each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from orchestrator.control.records import NOT_FINITE, Clock, doubt_text
from orchestrator.core.cluster import ClusterState
from orchestrator.core.edits import BudgetChange, BudgetChanged
from orchestrator.core.slot import (
    CheckpointFailed,
    ClusterEvent,
    CommittedStep,
    Decision,
    DeviceJoined,
    DeviceLost,
    PreemptionNotice,
    Recovered,
    RunEvent,
    RunEventKind,
)
from orchestrator.telemetry.estimator import Straggler
from orchestrator.telemetry.prices import PriceDoubt

CHECKPOINT_FAILED = "checkpoint_failed"
"""How the warning begins that a checkpoint could not be written."""


@dataclass(frozen=True, slots=True)
class Scribe:
    """Writes the events of one slot, all with the same time."""

    time_s: float  # billed
    slot: int

    def cluster_events(self, events: Iterable[ClusterEvent]) -> list[RunEvent]:
        """Joins, losses, notices and failures."""
        written = []
        for event in events:
            if isinstance(event, DeviceJoined):
                device = event.device
                detail = f"{device.kind} of pool {device.pool} joined in {device.zone}"
                written.append(self._event("joined", detail, device.device_id))
            elif isinstance(event, DeviceLost):
                cause = "preemption" if event.preempted else "worker"
                lost = self._event("lost", event.reason, event.device_id)
                written.append(replace(lost, cause=cause))
            elif isinstance(event, PreemptionNotice):
                detail = f"will be taken away at {event.deadline_s:.0f} s of the run's clock"
                written.append(self._event("notice", detail, event.device_id))
            elif isinstance(event, Recovered):
                detail = recovery_text(event)
                made_up = self._event("recovered", detail, duration_s=event.duration_s)
                written.append(replace(made_up, cause=event.source))
            elif isinstance(event, CheckpointFailed):
                detail = f"{CHECKPOINT_FAILED}: of step {event.step}: {event.reason}"
                written.append(self._event("warning", detail))
            else:
                detail = f"step {event.step}: {event.message}"
                written.append(self._event("failed", detail, event.device_id))
        return written

    def prices(self, before: ClusterState, now: ClusterState, clock: Clock) -> list[RunEvent]:
        """Changes of price."""
        old = {offer.pool: offer.price_usd_per_s for offer in before.offers}
        return [
            self._event(
                "price",
                f"pool {offer.pool}: {clock.per_hour(old[offer.pool]):.4g} -> "
                f"{clock.per_hour(offer.price_usd_per_s):.4g} $/h",
            )
            for offer in now.offers
            if offer.pool in old and offer.price_usd_per_s != old[offer.pool]
        ]

    def doubts(
        self, before: Sequence[PriceDoubt], now: Sequence[PriceDoubt], clock: Clock
    ) -> list[RunEvent]:
        """Prices newly doubted; how long they stay so is in every slot's record."""
        known = {(doubt.pool, doubt.cause) for doubt in before}
        return [
            self._event("price", doubt_text(doubt, clock).removeprefix("price: "))
            for doubt in now
            if (doubt.pool, doubt.cause) not in known
        ]

    def stragglers(
        self,
        before: Sequence[Straggler],
        now: Sequence[Straggler],
        tried_again: Sequence[Straggler],
        cluster: ClusterState,
    ) -> list[RunEvent]:
        """What newly runs slow and in which phase, is called lasting, and runs as predicted again.

        ``tried_again``: Whose slow-down is too old to be believed.
        """
        was, found = {s.key: s for s in before}, {s.key for s in now}
        forgotten = {s.key for s in tried_again}
        written = []
        for straggler in now:
            known = was.get(straggler.key)
            if known is None:
                detail = straggler_text(straggler)
                written.append(self._event("straggler", detail, straggler.device_id))
            if straggler.lasting and not (known and known.lasting):
                detail = f"lasting: still {straggler.ratio:.3g}x slower than predicted"
                if straggler.phase != "compute":
                    detail += f" ({_phase_text(straggler)})"
                written.append(self._event("straggler", detail, straggler.device_id))
        for straggler in before:
            if straggler.key in found or not cluster.has(straggler.device_id):
                continue
            detail = "runs as predicted again"
            if straggler.key in forgotten:
                detail = "was not measured for long: counted as healthy until it is"
            if straggler.phase != "compute":
                detail = f"{_phase_text(straggler)}: {detail}"
            written.append(self._event("recovered", detail, straggler.device_id))
        return written

    def budget(self, changes: Sequence[BudgetChange], source: str) -> list[RunEvent]:
        """Keys of the budget that have other values from now on."""
        return [
            BudgetChanged(
                self.time_s,
                self.slot,
                "budget_changed",
                f"{change.text} ({source})",
                key=change.key,
                old=change.old,
                new=change.new,
                source=source,
            )
            for change in changes
        ]

    def decision(self, decision: Decision) -> list[RunEvent]:
        """A change of plan."""
        if decision.kind == "keep":
            return []
        return [self._event("replan", decision.reason, duration_s=decision.migration.pause_s)]

    def _event(
        self, kind: RunEventKind, detail: str, device: str = "", *, duration_s: float | None = None
    ) -> RunEvent:
        return RunEvent(self.time_s, self.slot, kind, detail, device, duration_s)

    def note(self, kind: RunEventKind, detail: str) -> RunEvent:
        """Anything else that concerns the run as a whole."""
        return self._event(kind, detail)

    def start(self, kind: RunEventKind, step: int, code: str) -> tuple[RunEvent, ...]:
        """Where a life of the run begins, and what code it runs, where that is known."""
        told = (self.note("code", code),) if code else ()
        return (self.note(kind, f"at step {step}"), *told)

    def skipped(self, steps: Sequence[CommittedStep]) -> tuple[RunEvent, ...]:
        """Steps of the slot that changed nothing."""
        num_skipped = sum(step.skipped for step in steps)
        if not num_skipped:
            return ()
        detail = f"{num_skipped} of {len(steps)} steps changed nothing: {NOT_FINITE}"
        if (scale := next(step.loss_scale for step in steps if step.skipped)) != 1.0:
            detail += (
                f" at a loss scale of {scale:g}, which is halved then: in fp16 a few are usual"
            )
        return (self._event("skipped", detail),)


def recovery_text(event: Recovered) -> str:
    """Where the layers of lost devices come from, and what is run again."""
    source = {
        "replica": "layers of the lost devices come from replicas in other groups",
        "checkpoint": f"all layers return to the checkpoint of step {event.next_step}",
        "start": "no checkpoint was written yet: all layers start anew from the seed",
    }[event.source]
    again = f"; {event.num_undone} steps are run again" if event.num_undone else ""
    return f"at step {event.next_step}: {source}{again}"


def straggler_text(straggler: Straggler) -> str:
    """In which phase a device is slow, and how slow."""
    if straggler.phase == "input":
        return (
            f"input: drawing samples makes its steps {straggler.ratio:.3g}x as long as its "
            "computing alone; look at the dataset, the disk or the processor there"
        )
    if straggler.phase == "link":
        return (
            f"{_phase_text(straggler)}: its messages take {straggler.ratio:.3g}x as long as "
            "cluster.links says"
        )
    return f"computes {straggler.ratio:.3g}x slower than predicted for it"


def _phase_text(straggler: Straggler) -> str:
    return f"link to {straggler.towards}" if straggler.towards else straggler.phase
