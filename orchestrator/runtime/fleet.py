"""The worker actors of a run: started in parallel, asked together, heard in one place."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import (
    ActorUnavailableError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from orchestrator.errors import LostWorkerError, OrchestratorError
from orchestrator.runtime.actors import (
    OUT_OF_MEMORY,
    Greeting,
    Member,
    News,
    Place,
    Recruit,
    Starter,
)
from orchestrator.runtime.trouble import SYMPTOMS, Loss

logger = logging.getLogger(__name__)

LINGER_S = 1.0
"""A worker gathers reports this long before it sends them: one call a second and worker."""

SILENT_S = 5.0
"""After a first failure, a worker that answers nothing for this long is taken for hung."""

UNREACHABLE_S = 0.1
"""Whoever cannot be reached is asked again after this long."""

CLOSED = "closed"
"""Why a worker is gone that nobody lost."""

_OURS, _ITS_OWN, _SYMPTOM = range(3)
"""An error of ours ends the run; its own ends a worker; a symptom is another's end, seen."""

Answer = TypeVar("Answer")


class Fleet:
    """One actor per device. Not for several threads at once, ``close`` apart."""

    def __init__(
        self,
        actor_class: type,
        places: Sequence[Place],
        arguments: Callable[[Place], tuple[object, ...]],
        *,
        linger_s: float = LINGER_S,
        actors: Any = ray,
    ) -> None:
        """Start every actor; returns before they are up.

        Args:
            actor_class: The worker's Ray shell; its ``hello`` returns a Greeting and its
                ``poll(linger_s)`` News.
            places: One per device, in the order of their ranks.
            arguments: Constructor arguments of the actor at a place.
            linger_s: How long a worker gathers reports before it sends them.
            actors: Ray, or what offers as much of it.
        """
        self._linger_s, self._actors = linger_s, actors
        self._starter, self._arguments = Starter(actors, actor_class), arguments
        self._members = {place.device_id: self._start(place) for place in places}
        self._recruits: dict[str, Recruit] = {}

    def _start(self, place: Place) -> Member:
        return self._starter.start(place, self._arguments(place))

    @property
    def device_ids(self) -> tuple[str, ...]:
        """Devices whose worker is not known to be gone, in the order of their ranks."""
        return tuple(d for d, m in self._members.items() if m.lost is None)

    @property
    def losses(self) -> tuple[Loss, ...]:
        """Workers that are gone, but not because the fleet was closed."""
        return tuple(
            Loss(d, m.lost) for d, m in self._members.items() if m.lost and m.lost != CLOSED
        )

    def greet(self, timeout_s: float) -> Mapping[str, Greeting]:
        """Wait until every process is up; one that is not in time is lost."""
        answers, _ = self.ask("hello", object, timeout_s=timeout_s, patience_s=timeout_s)
        greetings = {device_id: cast("Greeting", answer) for device_id, answer in answers.items()}
        for device_id, greeting in greetings.items():
            self._members[device_id].greeting = greeting
        return greetings

    def ask(
        self,
        method: str,
        answer: type[Answer],
        *arguments: object,
        timeout_s: float,
        device_ids: Iterable[str] | None = None,
        each: Mapping[str, tuple[object, ...]] | None = None,
        patience_s: float = SILENT_S,
    ) -> tuple[dict[str, Answer], tuple[Loss, ...]]:
        """Call a method on several workers at once and wait for all answers.

        A worker that is silent, or fails by itself, is ended.

        Args:
            method: Name of the method.
            answer: What it returns.
            arguments: The same for everyone.
            timeout_s: Longest wait for all of them together.
            device_ids: Whom to ask; everyone when absent.
            each: Further arguments by device.
            patience_s: How long the others may take once one has failed: longer than they wait
                for it themselves, else they are taken for hung.

        Returns:
            The answers, and who was lost. A worker that only lost contact with another is in
            neither: it can be asked again.

        Raises:
            OrchestratorError: What a worker raised of our own errors, which the next would, too.
        """
        calls = self._calls(arguments, device_ids, each)
        answers, errors = self._answers(method, answer, calls, timeout_s, patience_s)
        losses = []
        for device_id, (kind, error) in errors.items():
            if kind == _OURS:
                raise error
            if kind == _SYMPTOM:
                continue
            member = self._members[device_id]
            if member.lost is None:
                self.expel(device_id, f"{error}; it was ended")
            losses.append(Loss(device_id, str(member.lost)))
        return answers, tuple(losses)

    def _calls(
        self,
        arguments: tuple[object, ...],
        device_ids: Iterable[str] | None,
        each: Mapping[str, tuple[object, ...]] | None,
    ) -> dict[str, tuple[object, ...]]:
        """What to call each worker with."""
        asked = self.device_ids if device_ids is None else device_ids
        return {d: (*arguments, *(each or {}).get(d, ())) for d in asked}

    def _answers(
        self,
        method: str,
        answer: type[Answer],
        calls: Mapping[str, tuple[object, ...]],
        timeout_s: float,
        patience_s: float,
    ) -> tuple[dict[str, Answer], dict[str, tuple[int, OrchestratorError]]]:
        """The answers that came, and of the other workers the errors with their kinds."""
        pending = {
            getattr(self._members[d].actor, method).remote(*arguments): d
            for d, arguments in calls.items()
        }
        answers: dict[str, Answer] = {}
        errors: dict[str, tuple[int, OrchestratorError]] = {}
        deadline_s = time.monotonic() + timeout_s
        while pending:
            ready, _ = self._actors.wait(
                list(pending), timeout=max(0.0, deadline_s - time.monotonic())
            )
            if not ready:
                silence = _ITS_OWN, _no_answer(pending.values(), method, timeout_s)
                errors.update(dict.fromkeys(pending.values(), silence))
                break
            for ref in ready:
                device_id = pending.pop(ref)
                try:
                    answers[device_id] = self._actors.get(ref)
                    assert isinstance(answers[device_id], answer), f"{method!r} answered nonsense"
                except RayError as error:
                    # The others may know more: the cause is rarely the first to be told.
                    errors[device_id] = self._explain(error, device_id, method)
                    deadline_s = min(deadline_s, time.monotonic() + patience_s)
        return answers, errors

    def tell(
        self, method: str, *arguments: object, device_ids: Iterable[str] | None = None
    ) -> None:
        """Call a method on several workers and wait for nothing."""
        for device_id in self.device_ids if device_ids is None else device_ids:
            member = self._members[device_id]
            if member.lost is None:
                getattr(member.actor, method).remote(*arguments)

    def gather(self, timeout_s: float) -> tuple[tuple[tuple[str, News], ...], tuple[Loss, ...]]:
        """Return what workers reported, each with its device, and who was lost.

        Returns after ``timeout_s``, or earlier when there is something.
        """
        refs = self._polls()
        if not refs:
            time.sleep(timeout_s)
            return (), ()
        heard: list[tuple[str, News]] = []
        losses: list[Loss] = []
        ready, _ = self._actors.wait(list(refs), num_returns=1, timeout=timeout_s)
        if ready:  # whoever else is ready comes along: fewer wake-ups
            ready, _ = self._actors.wait(list(refs), num_returns=len(refs), timeout=0)
        for ref in ready:
            device_id = refs[ref]
            member = self._members[device_id]
            member.poll = None
            try:
                heard.append((device_id, self._actors.get(ref)))
                member.asked_s, member.unreachable = None, False
            except ActorUnavailableError:
                member.unreachable = True  # a silence that lasts is judged by ``kill_silent``
            except RayError as error:
                member.lost = _end(error, member)
                losses.append(Loss(device_id, member.lost))
        if ready and not heard and not losses:
            time.sleep(min(timeout_s, UNREACHABLE_S))  # each of them errs at once
        return tuple(heard), tuple(losses)

    def _polls(self) -> dict[Any, str]:
        """What every worker is asked, answered or not, with its device."""
        refs: dict[Any, str] = {}
        for device_id, member in self._members.items():
            if member.lost is not None:
                continue
            if member.poll is None:
                member.poll = member.actor.poll.remote(self._linger_s)
            if member.asked_s is None:
                member.asked_s = time.monotonic()
            refs[member.poll] = device_id
        return refs

    def kill_silent(self, longest_s: float) -> tuple[Loss, ...]:
        """End, by pid, every worker that was asked and has answered nothing for ``longest_s``.

        A blocked collective cannot be stopped from within; the closing sockets of a killed
        process free its neighbours at once, which ``ray.kill`` does only after 5 s.
        """
        losses = []
        for device_id, member in self._members.items():
            if member.lost is not None or member.asked_s is None:
                continue
            silent_s = time.monotonic() - member.asked_s - self._linger_s
            if silent_s > longest_s and not self._has_answered(member):
                reason = (
                    f"{member.out_of_touch} for {silent_s:.0f} s"
                    if member.unreachable
                    else f"it answered nothing for {silent_s:.0f} s and was ended"
                )
                losses.append(self.expel(device_id, reason))
        return tuple(losses)

    def _has_answered(self, member: Member) -> bool:
        """Whether its answer only was not heard yet."""
        # All may have been asked something that takes long; its silence is counted from before.
        return member.poll is not None and bool(self._actors.wait([member.poll], timeout=0)[0])

    def kill(self, device_id: str) -> None:
        """End one worker's process at once, on whatever node it is."""
        self._members[device_id].kill()

    def expel(self, device_id: str, reason: str) -> Loss:
        """End one worker, which is lost from now on, for this reason."""
        self.kill(device_id)
        self._members[device_id].lost = reason
        return Loss(device_id, reason)

    def enlist(self, place: Place, *arguments: object) -> None:
        """Start one more worker and have it load; it belongs to the fleet once it is ready."""
        member = self._start(place)
        actor: Any = member.actor
        answers = actor.hello.remote(), actor.load.remote(*arguments)
        self._recruits[place.device_id] = Recruit(member, answers, time.monotonic())

    def dismiss(self, device_id: str) -> None:
        """End a worker that is being started: its device is gone."""
        self._actors.kill(self._recruits.pop(device_id).member.actor)

    @property
    def recruited(self) -> frozenset[str]:
        """Devices whose workers are being started."""
        return frozenset(self._recruits)

    def muster(self, longest_s: float) -> tuple[tuple[str, ...], tuple[Loss, ...]]:
        """Return who has become ready, and who did not make it within ``longest_s``; no waiting."""
        ready, losses = [], []
        for device_id, recruit in tuple(self._recruits.items()):
            done, _ = self._actors.wait(list(recruit.answers), num_returns=2, timeout=0)
            reason = ""
            if len(done) == 2:
                try:
                    recruit.member.greeting = self._actors.get(recruit.answers[0])
                    self._actors.get(recruit.answers[1])
                except RayError as error:  # also: its node has just gone
                    oom = isinstance(error, OutOfMemoryError)
                    why = OUT_OF_MEMORY if oom else f"failed: {str(error).splitlines()[-1]}"
                    reason = f"its new worker {why}"
            elif time.monotonic() - recruit.started_s > longest_s:
                reason = f"its new worker was not ready within {longest_s:.0f} s"
            else:
                continue
            del self._recruits[device_id]
            if reason:
                self._actors.kill(recruit.member.actor)
                losses.append(Loss(device_id, reason))
            else:
                self._members.pop(device_id, None)  # the lost one; the new one ranks last
                self._members[device_id] = recruit.member
                ready.append(device_id)
        return tuple(ready), tuple(losses)

    def close(self, timeout_s: float) -> None:
        """Let every worker close its sockets, then end the processes. Safe to call twice."""
        living = [m for m in self._members.values() if m.lost is None]
        refs = [m.actor.close.remote() for m in living]
        if refs:
            self._actors.wait(refs, num_returns=len(refs), timeout=timeout_s)
        for member in living:
            self._actors.kill(member.actor)
            member.lost = CLOSED
        for recruit in self._recruits.values():
            self._actors.kill(recruit.member.actor)
        self._recruits.clear()

    def _explain(
        self, error: RayError, device_id: str, method: str
    ) -> tuple[int, OrchestratorError]:
        """What one worker's error means, and of what kind it is."""
        if not isinstance(error, RayTaskError):
            if isinstance(error, ActorUnavailableError):
                self.kill(device_id)  # it may live on out of reach, and hold its device
            member = self._members[device_id]
            member.lost = _end(error, member)
            return _ITS_OWN, LostWorkerError(
                f"device {device_id} was lost: {member.lost} during {method!r}"
            )
        cause = error.cause
        if isinstance(cause, OrchestratorError):
            return _OURS, cause
        text = f"{type(cause).__name__}: {cause}"
        symptom = any(sign in text for sign in SYMPTOMS)
        return _SYMPTOM if symptom else _ITS_OWN, LostWorkerError(
            f"device {device_id} failed in {method!r}: {text}"
        )


def _end(error: RayError, member: Member) -> str:
    """What Ray knows of a worker's end; of a node that is cut off nobody knows what it does."""
    if isinstance(error, OutOfMemoryError):
        return f"its process {OUT_OF_MEMORY}"
    if not isinstance(error, RayActorError) or isinstance(error, ActorUnavailableError):
        return member.out_of_touch
    if "its node has died" in str(error):
        return member.out_of_touch
    if error.actor_init_failed:
        return f"its worker did not start: {str(error).strip().splitlines()[-1]}"
    return "its process was killed"


def _no_answer(device_ids: Iterable[str], method: str, timeout_s: float) -> LostWorkerError:
    names = sorted(device_ids)
    return LostWorkerError(
        f"device{'s' * (len(names) > 1)} {', '.join(names)} did not answer {method!r} within "
        f"{timeout_s:.0f} s; raise failure.timeout_s if the machine is only slow"
    )
