"""What the head and a worker say to each other: spec and assignment down, parts and ends up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from orchestrator.core.code import NO_CODE, Code, KnownCode
from orchestrator.core.durable import CheckpointManifest
from orchestrator.core.evaluation import NOTHING_EVALUATED, Evaluated
from orchestrator.core.plan import Move, Plan
from orchestrator.core.training import TrainingOptions
from orchestrator.errors import ConfigError
from workers.emulation import EmulatedStage
from workers.faults import ProcessFault
from workers.update import Verdict

EndReason = Literal["hold", "window", "finished", "failed"]

Holders = Mapping[int, tuple[str, ...]]
"""Devices that hold each layer; a layer that nobody holds is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What every worker of a run needs to know before any plan exists."""

    task: str
    task_args: Mapping[str, Any] = field(default_factory=dict)
    options: TrainingOptions
    seed: int
    run_url: str
    timeout_s: float = 60.0
    evaluation_s: float = 60.0
    """By which a round of an evaluation may take longer than a step."""

    transport: str = "tcp"
    working_dir: str | None = None
    """Where ``task`` is imported from."""

    device: str = "cpu"
    dataset_samples: int | None = None
    """What others found in the dataset; None: nobody did."""

    code: KnownCode | None = None
    """What the job runs, as far as others had it; None: nobody had."""

    check: bool = True
    """Whether it looks whether the task can be trained: one worker of a run does, at the start."""

    faults: tuple[ProcessFault, ...] = ()
    """To break this worker's process with; emulated runs only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A plan to take a place in. The same for all workers of the world, idle ones included."""

    generation: int
    plan: Plan
    device_ids: tuple[str, ...]  # of the world, in rank order
    first_step: int
    end_step: int
    moves: tuple[Move, ...] = ()
    """Where moved layers should come from; workers find out themselves what these leave open."""

    restore: CheckpointManifest | None = None
    emulation: Mapping[str, EmulatedStage] | None = None
    discard: bool = False
    """Run on a copy of the fresh (or restored) model, which the next assignment forgets."""

    checkpoint: bool = True
    evaluated: Evaluated = NOTHING_EVALUATED
    """What is done of evaluations; the rest is done by this plan."""

    clock_zero_s: float = 0.0
    """What reports subtract from ``time.monotonic`` to be on the run's clock."""


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """What the task turned out to be."""

    dataset_samples: int | None
    """None: a stream that does not say."""

    evaluation_samples: int = 0
    """Of the evaluation dataset; 0 where none is evaluated."""

    free_bytes: float = inf
    """Of the device's memory, what this process has of it included; inf: nobody knows."""

    shares_memory: bool = False
    """Whether with every other device of its machine that is a processor."""

    code: Code = NO_CODE
    """What the worker has loaded."""


def agreed_samples(infos: Mapping[str, TaskInfo]) -> int | None:
    """The length of the dataset that all devices see alike.

    Raises:
        ConfigError: If they do not; names the devices.
    """
    devices: dict[int | None, list[str]] = {}
    for device_id, info in infos.items():
        devices.setdefault(info.dataset_samples, []).append(device_id)
    if len(devices) > 1:
        told = (f"{length} samples on {', '.join(ids)}" for length, ids in devices.items())
        raise ConfigError(
            f"training.task: Task.dataset has {', but '.join(told)}; every device must see the "
            "same data"
        )
    return next(iter(devices))


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Why a run stopped, at which step boundary; ``failed`` comes with a WorkerFailed."""

    next_step: int
    reason: EndReason


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a worker stands after a fault has ended its run."""

    next_step: int
    """The first step it has not applied."""

    summed: bool
    """Whether it holds the summed gradients of that step, so that it could apply it."""

    verdict: Verdict | None
    """Of the newest step it applied, for a worker that missed the vote on it."""

    layers: tuple[int, ...]
    """Layers it holds as of ``next_step``."""


def last_applied(standings: Mapping[str, Standing]) -> tuple[int, Verdict | None]:
    """The boundary to go on from, and the verdict of the step before it.

    It is the one behind the newest step that anybody left has applied: all others hold its
    summed gradients. A step that only a lost worker applied is no one's: it is run again.
    """
    able = [s for s in standings.values() if s.layers] or list(standings.values())
    newest = max(able, key=lambda standing: standing.next_step)
    return newest.next_step, newest.verdict


def holders_of(standings: Mapping[str, Standing]) -> Holders:
    """Who holds each layer."""
    layers = sorted({layer for standing in standings.values() for layer in standing.layers})
    return {
        layer: tuple(d for d, standing in standings.items() if layer in standing.layers)
        for layer in layers
    }
