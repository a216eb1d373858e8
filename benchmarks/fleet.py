"""Forked workers on loopback, without Ray: each child runs a Worker; orders come over a pipe.

Children are forked by a fork server, a process that has imported torch and run nothing: a
process that has used autograd cannot be forked, one that is spawned costs seconds.
"""

import logging
import multiprocessing
import os
import threading
import traceback
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Any

import torch

from orchestrator.core.cluster import Team
from orchestrator.core.durable import CheckpointManifest
from orchestrator.core.plan import Group, Plan, Stage
from orchestrator.core.training import OptimizerOptions, TrainingOptions
from workers.meeting import Meeting
from workers.worker import Assignment, RunEnd, Worker, WorkerSpec

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 60.0  # nothing here takes seconds on an idle machine; a hang must not take for ever

context = multiprocessing.get_context("forkserver")

_preloaded = ["torch._dynamo", "workers.worker", __name__]


def preload(*modules: str) -> None:
    """Have the fork server import these modules too, before it starts the first child."""
    _preloaded.extend(modules)
    context.set_forkserver_preload(_preloaded)


preload()


class ChildError(RuntimeError):
    """A call raised in a child; the text is its traceback."""


class _Child:
    """What runs in a worker's process: answers every order; ``run`` has a thread of its own."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._worker: Worker | None = None

    def serve(self) -> None:
        while True:
            try:
                number, name, args = self._pipe.recv()
            except (EOFError, ConnectionError):
                return
            if name == "run":
                threading.Thread(target=self._answer, args=(number, name, args)).start()
            else:
                self._answer(number, name, args)

    def _answer(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            value, ok = self._call(name, args), True
        except Exception:  # nothing is lost: the asking process raises it again, with this text
            value, ok = traceback.format_exc(), False
        with self._lock:
            self._pipe.send((number, ok, value))

    def _run_apart(self, step: int) -> tuple[RunEnd, dict[int, str]]:
        assert self._worker is not None
        self._worker.extend(step + 1)
        return self._worker.run(), self._worker.checksums()

    def _call(self, name: str, args: tuple[Any, ...]) -> object:
        if name == "start":
            if self._worker is not None:
                self._worker.close()
            self._worker = Worker(*args)
            return self._worker.load()
        assert self._worker is not None
        if name == "news":
            items = []
            try:
                while True:
                    items.append(self._worker.outbox.get_nowait())
            except Empty:
                return items
        if name == "run_apart":
            return [self._run_apart(step) for step in range(*args)]
        if name == "count":  # native threads and open files
            return [len(list(Path("/proc/self", what).iterdir())) for what in ("task", "fd")]
        if name == "ask":  # a function of a module that the caller has preloaded
            return args[0](self._worker)
        return getattr(self._worker, name)(*args)


def _child(pipe: Connection) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    os.chdir(ROOT)
    _Child(pipe).serve()


class Fleet:
    """A world of forked workers. ``devices`` names them in rank order."""

    def __init__(self, devices: Sequence[str]) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # the fork server passes it on
        self.devices = tuple(devices)
        self._number = 0
        self._meeting: Meeting | None = None
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []
        self._answers: list[dict[int, tuple[bool, Any]]] = [{} for _ in self.devices]
        for _ in self.devices:
            ours, theirs = context.Pipe()
            process = context.Process(target=_child, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(0.5 if error is None else 0.0)
            if process.is_alive():
                process.kill()
                process.join()

    def start(self, spec: WorkerSpec) -> list[Any]:
        """Give every process a new worker of this spec, and join them."""
        infos = self.each("start", [(spec, device) for device in self.devices])
        self.meet()
        return infos

    def meet(self) -> None:
        """Join the workers, through a store of their own."""
        self._meeting = Meeting("127.0.0.1")
        world = len(self.devices)
        self.each("connect", [(self._meeting.invitation, r, world) for r in range(world)])

    def send(
        self, name: str, args: tuple[Any, ...] = (), ranks: Iterable[int] | None = None
    ) -> Any:
        """Order without waiting; ``receive`` takes the answers."""
        self._number += 1
        chosen = list(range(len(self._pipes)) if ranks is None else ranks)
        for rank in chosen:
            self._pipes[rank].send((self._number, name, args))
        return self._number, chosen

    def receive(self, order: tuple[int, list[int]]) -> list[Any]:
        """Wait for the answers to an order of ``send``; values by rank."""
        number, ranks = order
        return [self._answer(rank, number) for rank in ranks]

    def all(self, name: str, *args: Any, ranks: Iterable[int] | None = None) -> list[Any]:
        """Call a method on every worker at the same time; values by rank."""
        return self.receive(self.send(name, args, ranks))

    def each(self, name: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method with each worker's own arguments at the same time."""
        self._number += 1
        for pipe, mine in zip(self._pipes, args, strict=True):
            pipe.send((self._number, name, mine))
        return [self._answer(rank, self._number) for rank in range(len(self._pipes))]

    def news(self) -> list[list[Any]]:
        """Reports, checkpoint parts and failures since the last call, by rank."""
        return self.all("news")

    def _answer(self, rank: int, number: int) -> Any:
        answers = self._answers[rank]  # orders overlap: a run ends when it ends
        while number not in answers:
            if not wait([self._pipes[rank]], PATIENCE_S):
                raise TimeoutError(f"{self.devices[rank]} did not answer within {PATIENCE_S} s")
            got, ok, value = self._pipes[rank].recv()
            answers[got] = ok, value
        ok, value = answers.pop(number)
        if not ok:
            raise ChildError(f"{self.devices[rank]}:\n{value}")
        return value

    # Training ------------------------------------------------------------------------

    def install(self, plan: Plan, *, first_step: int, end_step: int, **options: Any) -> None:
        """Give every worker its place in a plan."""
        assignment = self.assignment(plan, first_step=first_step, end_step=end_step, **options)
        self.all("install", assignment)

    def assignment(
        self, plan: Plan, *, first_step: int, end_step: int, **options: Any
    ) -> Assignment:
        """A plan as workers take it."""
        return Assignment(
            generation=plan.generation,
            plan=plan,
            device_ids=self.devices,
            first_step=first_step,
            end_step=end_step,
            **options,
        )

    def run_apart(self, plan: Plan, first_step: int, end_step: int) -> int:
        """Run step by step and compare the bits of all replicas after each.

        Returns the number of layers that have replicas.
        """
        ranks = [self.devices.index(d) for d in plan.device_ids]
        answers = self.all("run_apart", first_step, end_step, ranks=ranks)
        num_replicated = 0
        for step, row in enumerate(zip(*answers, strict=True), start=first_step):
            held = defaultdict(list)
            for end, checksums in row:
                assert end.next_step == step + 1, f"{row}; {self.news()}"
                for layer, checksum in checksums.items():
                    held[layer].append(checksum)
            unlike = sorted(layer for layer, found in held.items() if len(set(found)) > 1)
            assert not unlike, f"replicas of layers {unlike} differ after step {step}"
            num_replicated = sum(len(found) > 1 for found in held.values())
        return num_replicated

    def run(self, plan: Plan) -> RunEnd:
        """Run the active workers to the end of their window; all must stop at the same step."""
        ranks = [self.devices.index(d) for d in plan.device_ids]
        ends = self.all("run", ranks=ranks)
        assert len(set(ends)) == 1, f"workers stopped apart: {ends}; {self.news()}"
        assert ends[0].reason != "failed", self.news()
        return ends[0]

    def save(self, step: int, *, generation: int = 0, num_layers: int) -> CheckpointManifest:
        """Write a checkpoint at the boundary before ``step``."""
        files = [file for part in self.all("save", step) for file in part.files]
        files.sort(key=lambda file: file.layer)
        assert [file.layer for file in files] == list(range(num_layers))
        return CheckpointManifest(step, generation, tuple(files), num_layers, 0, 0)


def make_plan(
    groups: Sequence[tuple[Sequence[tuple[str, int]], Sequence[int]]],
    *,
    generation: int = 1,
    schedule: str = "1f1b",
    extra: int = 0,
) -> Plan:
    """Build a plan from, per group, ((device, number of layers) per stage, microbatches).

    ``extra`` is added to 1F1B's own K_s = S - s on every stage but the last.
    """
    made = []
    for chain, microbatches in groups:
        stages, first = [], 0
        for index, (device, num_layers) in enumerate(chain):
            ahead = len(chain) - index
            team = Team(device, "node", "cpu", (device,))
            inflight = ahead + extra if ahead > 1 else 1
            stages.append(Stage(team, first, first + num_layers, inflight))
            first += num_layers
        made.append(Group(tuple(stages), tuple(microbatches)))
    return Plan(generation, schedule, tuple(made))


def make_spec(task: str, run_url: str, **changes: Any) -> WorkerSpec:
    """Build the spec of a run: 20 steps of SGD with momentum, unless ``changes`` say so.

    ``changes`` are fields of WorkerSpec or of TrainingOptions; ``optimizer`` is a dictionary.
    """
    of_worker = {f.name for f in fields(WorkerSpec)} & set(changes)
    worker = {name: changes.pop(name) for name in of_worker}
    optimizer = dict(changes.pop("optimizer", {"name": "sgd", "lr": 0.05, "momentum": 0.9}))
    options = TrainingOptions(
        task=task,
        optimizer=OptimizerOptions(
            name=optimizer.pop("name"),
            lr=optimizer.pop("lr"),
            groups=optimizer.pop("groups", ()),
            arguments=optimizer,
        ),
        **{"steps": 20, **changes},
    )
    fixed = {"seed": 3, "timeout_s": 30.0, "run_url": run_url}
    return WorkerSpec(task=options.task, options=options, **{**fixed, **worker})
