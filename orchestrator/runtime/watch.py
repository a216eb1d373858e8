"""Workers between two step boundaries: let run, held, heard, and missed when they fall silent."""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from orchestrator.control.recovery import Timeouts
from orchestrator.core.evaluation import Evaluated
from orchestrator.core.slot import ClusterEvent, WorkerFailed
from orchestrator.runtime.actors import News
from orchestrator.runtime.fleet import SILENT_S, Fleet
from orchestrator.runtime.progress import Progress, window_steps
from orchestrator.runtime.trouble import SYMPTOMS, Loss, Trouble

logger = logging.getLogger(__name__)

WAKE_S = 0.25
"""Longest wait inside a slot before stop requests and emulated events are looked at again."""

MUCH = 1.25
"""A patience that is so many times what the workers were told is worth telling them."""


class Watch:
    """Lets the workers of a plan run in a window of steps and gathers what they say."""

    def __init__(
        self,
        fleet: Fleet,
        timeouts: Timeouts,
        *,
        slot_s: float,
        progress: Progress,
        last_step: int,
        silent_s: float = SILENT_S,
    ) -> None:
        """Take charge of workers.

        Args:
            fleet: The workers.
            timeouts: How long silence and slowness are borne.
            slot_s: Length of a slot, from which that of a window follows.
            progress: Where the workers stand.
            last_step: Where they stop for good.
            silent_s: After a first failure, how long the others may be silent.
        """
        self.progress = progress
        self.running: set[str] = set()
        self.holding = False
        self.step_s = 0.0  # predicted; how many steps a window has follows from it
        self.last_step = last_step
        self._fleet = fleet
        self._timeouts = timeouts
        self._slot_s = slot_s
        self._silent_s = silent_s
        self._window_end = 0
        self._moved_s = 0.0  # when a step was last begun or finished
        self._told_s = 0.0  # the patience that the workers have
        self._had_s = 0.0  # and had before: a step that was under way goes by it to its end
        self._trouble = Trouble()
        self._aborting = False
        self._lost: list[Loss] = []
        self._gone: set[str] = set()
        self._waits_for: dict[str, str] = {}  # by device, as heard last

    @property
    def finished(self) -> bool:
        """Whether every step has been done, and evaluated where that is due."""
        return self.progress.next_step >= self.last_step and not self.progress.owes_evaluation

    @property
    def _reached(self) -> tuple[int, Evaluated]:
        return self.progress.next_step, self.progress.evaluations.done

    @property
    def reach(self) -> int:
        """The step before which workers stop if they hear nothing more."""
        window = window_steps(self._slot_s, self.step_s)
        return min(self.last_step, self.progress.next_step + window)

    @property
    def patience_s(self) -> float:
        """How long the step under way may take; see ``Timeouts.patience_s``."""
        return self._timeouts.patience_s(self.progress.recent_s, self.step_s)

    @property
    def _borne_s(self) -> float:
        """How long workers may still wait for each other, whatever they were told last."""
        step_s = max(self._had_s, self._told_s, self.patience_s)
        longer_s = self._timeouts.checkpoint_s if self.progress.owes_evaluation else 0.0
        return step_s + longer_s

    def go(self, device_ids: Sequence[str]) -> None:
        """Let these workers run on; nothing happens while they do or when nothing is left."""
        if self.running or self.finished:
            return
        self._window_end = self.reach
        self.holding = False
        self.running = set(device_ids)
        self._moved_s = time.monotonic()
        self._told_s = self._had_s = self.patience_s
        self._fleet.tell("run", self._window_end, self._told_s, device_ids=device_ids)

    def hold(self) -> None:
        """Ask for a stop at the next step boundary."""
        if not self.holding:
            self.holding = True
            self._fleet.tell("hold", device_ids=tuple(self.running))

    def pump(self, timeout_s: float) -> None:
        """Hear the workers for a while, and move the window's end along while they run."""
        heard, losses = self._fleet.gather(timeout_s)
        before = self._reached
        for device_id, news in heard:
            self._take(device_id, news)
        for loss in losses:
            self._lose(loss)
        if self._reached != before:
            self._moved_s, self._had_s = time.monotonic(), self._told_s
        remaining = self._window_end - self.progress.next_step
        patience_s = self.patience_s
        is_news = not 1 / MUCH < patience_s / max(self._told_s, 1e-9) < MUCH
        nears_end = 2 * remaining < self.reach - self.progress.next_step
        if self.running and not self.holding and (nears_end or is_news):
            self._window_end, self._told_s = self.reach, patience_s
            running = tuple(self.running)
            self._fleet.tell("extend", self._window_end, patience_s, device_ids=running)

    def events(self) -> tuple[ClusterEvent, ...]:
        """What went wrong, the cause first; waits a while until the cause is known."""
        self._end_silent(self._timeouts.receive_s)
        self._end_stuck()
        if not self._trouble:
            return ()
        deadline_s = time.monotonic() + self._timeouts.receive_s + self._silent_s
        while not self._trouble.cause_is_known(self.running) and time.monotonic() < deadline_s:
            self.pump(WAKE_S)
            self._end_silent(self._silent_s)
        if not self._trouble.cause_is_known(self.running):
            # Whoever waited for a neighbour has given up by now; these were not waiting.
            self._end(self.running, "it did not get on with its step and was ended")
        return self._trouble.take(self.progress.next_step)

    def stand(self) -> tuple[ClusterEvent, ...]:
        """Wait until every worker stands at the same step boundary; return what went wrong.

        Whoever does not get there in time is ended; nobody else would notice a lone one.
        """
        self.hold()
        longest_s = self._borne_s + self._timeouts.hold_s
        deadline_s = time.monotonic() + longest_s
        while self.running:
            self.pump(WAKE_S)
            if events := self.events():
                return events
            if time.monotonic() > deadline_s:
                self._end(
                    self.running,
                    f"it reached no step boundary within {longest_s:.0f} s and was ended; raise "
                    "failure.timeout_s if steps take so long",
                )
        return self.events()

    def drain(self) -> None:
        """Wait until whoever was told to abort has ended its run; end those that do not.

        Afterwards all that was reported is heard, and nothing runs. What went wrong meanwhile
        is what the abort brought about.
        """
        self.holding = self._aborting = True  # no window moves any more
        deadline_s = time.monotonic() + self._borne_s
        while self.running and time.monotonic() < deadline_s:
            self.pump(WAKE_S)
            self._end_silent(self._silent_s)
        self._end(self.running, "it did not leave its step and was ended")
        self._trouble = Trouble()
        self._aborting = False

    def end_failed(self, events: Iterable[ClusterEvent]) -> bool:
        """End whoever failed by itself: who knows what state it is in. Whether there was one."""
        failures = [event for event in events if isinstance(event, WorkerFailed)]
        own = [f for f in failures if not f.message.startswith(SYMPTOMS)]
        for failure in own:
            self._end([failure.device_id], f"it failed: {failure.message}")
        return bool(own)

    def lose(self, losses: Iterable[Loss]) -> None:
        """Take note of workers that are gone already."""
        for loss in losses:
            self._lose(loss)

    def welcome(self, device_id: str) -> None:
        """A device that was lost has a new worker, which can be lost again."""
        self._gone.discard(device_id)

    def lost(self) -> tuple[Loss, ...]:
        """Devices lost since the last call."""
        lost, self._lost = tuple(self._lost), []
        return lost

    def _take(self, device_id: str, news: News) -> None:
        self._waits_for[device_id] = news.waits_for
        for report in news.reports:
            self.progress.report(report)
        for done in news.rounds:
            self.progress.evaluations.take(done)
        for part in news.parts:
            self.progress.part(part)
        if news.failure is not None:
            self._trouble.failed(news.failure)
        if news.failure is not None or news.ended_before is not None:
            self.running.discard(device_id)
        broken = self._trouble or self._aborting  # then some may have come further than others
        if news.ended_before is not None and not self.running and not broken:
            assert news.ended_before == self.progress.next_step, (
                f"{device_id} stands before step {news.ended_before}, "
                f"the run before step {self.progress.next_step}"
            )

    def _lose(self, loss: Loss) -> None:
        if loss.device_id in self._gone:
            return  # ended by us, and then missed
        logger.warning("device %s is lost: %s", loss.device_id, loss.reason)
        self._gone.add(loss.device_id)
        self._trouble.lost(loss)
        self._lost.append(loss)
        self.running.discard(loss.device_id)

    def _end_silent(self, longest_s: float) -> None:
        for loss in self._fleet.kill_silent(longest_s):
            self._lose(self._with_wait(loss))

    def _end_stuck(self) -> None:
        """End workers that answer but finish no step: nobody else would notice a lone one.

        Whoever others wait for is named by them first.
        """
        longest_s = self._borne_s + self._timeouts.receive_s
        if self.running and time.monotonic() - self._moved_s > longest_s:
            self._end(
                self.running,
                f"it finished no step within {longest_s:.0f} s and was ended; raise "
                "failure.timeout_s if steps take so long",
            )

    def _end(self, device_ids: Iterable[str], reason: str) -> None:
        for device_id in sorted(device_ids):
            self._fleet.kill(device_id)
            self._lose(self._with_wait(Loss(device_id, reason)))

    def _with_wait(self, loss: Loss) -> Loss:
        """The loss of one that was ended, and what its run waited for if that was the data."""
        call = self._waits_for.pop(loss.device_id, "")
        reason = f"{loss.reason}; it waited for samples: {call}" if call else loss.reason
        return replace(loss, reason=reason)
