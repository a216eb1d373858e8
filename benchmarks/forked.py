"""Actors without Ray: each in a forked process, under Ray's names for what is done with them.

Actors start within tenths of a second; they are real processes that can be killed and stopped.
"""

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from ray.exceptions import ActorDiedError, RayTaskError

from benchmarks.fleet import context, preload
from workers.actor import WorkerGreeting

preload("workers.actor", __name__)

NODE = 56 * "0"  # an id as Ray has them

Ref = Future[Any]


class _Process:
    """What runs in an actor's process: every call has a thread of its own."""

    def __init__(self, pipe: Connection, actor: object) -> None:
        self._pipe, self._actor = pipe, actor
        self._lock = threading.Lock()

    def serve(self) -> None:
        while True:
            try:
                call = self._pipe.recv()
            except (EOFError, ConnectionError):
                return  # the owner has gone, and so does what it owned
            threading.Thread(target=self._answer, args=call, daemon=True).start()

    def _answer(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            value: object = self._call(name, args)
        except Exception as error:  # nothing is lost: the asking process raises it again
            value = RayTaskError(
                name, traceback.format_exc(), error, proctitle=name, pid=os.getpid(), ip=NODE
            )
        with self._lock:
            self._pipe.send((number, value))

    def _call(self, name: str, args: tuple[Any, ...]) -> object:
        if name == "hello":  # an actor asks Ray for its node
            return WorkerGreeting(os.getpid(), NODE)
        return getattr(self._actor, name)(*args)


def _serve(pipe: Connection, actor_class: Callable[..., object], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    _Process(pipe, actor_class(*args)).serve()
    os._exit(0)  # calls that never end would keep it


class _Actor:
    """A handle: ``handle.method.remote(...)`` asks, and returns what ``get`` and ``wait`` take."""

    def __init__(self, actor_class: Callable[..., object], args: tuple[object, ...]) -> None:
        self._pipe, theirs = context.Pipe()
        # The name of a field must not hide a method of the actor's.
        self._process = context.Process(
            target=_serve, args=(theirs, actor_class, args), daemon=True
        )
        self._process.start()
        theirs.close()
        self._lock = threading.Lock()
        self._asked: dict[int, Ref] = {}
        self._number = 0
        self._is_dead = False
        threading.Thread(target=self._listen, daemon=True).start()

    def __getattr__(self, name: str) -> "_Method":
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(lambda *args: self._ask(name, args))

    def _ask(self, name: str, args: tuple[object, ...]) -> Ref:
        answer: Ref = Future()
        with self._lock:
            self._number += 1
            self._asked[self._number] = answer
            try:
                if not self._is_dead:
                    self._pipe.send((self._number, name, args))
            except OSError:
                self._is_dead = True
            if self._is_dead:
                del self._asked[self._number]
                answer.set_exception(ActorDiedError())
        return answer

    def _listen(self) -> None:
        while True:
            try:
                number, value = self._pipe.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                answer = self._asked.pop(number)
            if isinstance(value, RayTaskError):
                answer.set_exception(value)
            else:
                answer.set_result(value)
        with self._lock:
            self._is_dead = True
            left, self._asked = self._asked, {}
        for answer in left.values():
            answer.set_exception(ActorDiedError())
        self._process.join()
        self._pipe.close()


@dataclass(frozen=True, slots=True)
class _Method:
    remote: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Shell(_Method):
    def options(self, **options: object) -> "_Shell":
        return self


@dataclass(frozen=True, slots=True)
class _Context:
    def get_node_id(self) -> str:
        return NODE


class ForkedActors:
    """As much of Ray as a run's head asks for."""

    def __init__(self) -> None:
        self._started: list[_Actor] = []

    def remote(self, **options: object) -> Callable[[Callable[..., object]], _Shell]:
        """``remote(...)(cls).options(...).remote(*args)`` starts an actor; resources are free."""

        def start(actor_class: Callable[..., object]) -> _Shell:
            return _Shell(lambda *args: self._start(actor_class, args))

        return start

    def _start(self, actor_class: Callable[..., object], args: tuple[object, ...]) -> _Actor:
        self._started.append(_Actor(actor_class, args))
        return self._started[-1]

    def wait(
        self, refs: Sequence[Ref], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Ref], list[Ref]]:
        """The answers that have come, at most ``num_returns``, and the rest."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while True:
            ready = [ref for ref in refs if ref.done()][:num_returns]
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if len(ready) >= num_returns or (left_s is not None and left_s <= 0):
                return ready, [ref for ref in refs if ref not in ready]
            open_refs = [ref for ref in refs if not ref.done()]
            wait_for(open_refs, timeout=left_s, return_when=FIRST_COMPLETED)

    def get(self, ref: Ref) -> Any:
        """The answer. Raises RayTaskError for what the actor raised, ActorDiedError without one."""
        return ref.result()

    def kill(self, actor: _Actor) -> None:
        """End an actor's process."""
        actor._process.kill()

    def end(self) -> None:
        """End all that are left: the head is gone, and owned them."""
        for actor in self._started:
            actor._process.kill()
            actor._process.join()

    def get_runtime_context(self) -> _Context:
        """Where this process runs."""
        return _Context()

    def pids(self) -> tuple[int, ...]:
        """Every process that was ever started."""
        return tuple(actor._process.pid or 0 for actor in self._started)
