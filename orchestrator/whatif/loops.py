"""The control loop of a file on a virtual clock: what would happen in its first slot, and later."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.config import RunConfig
from orchestrator.control.books import LoopOptions
from orchestrator.control.loop import ControlLoop
from orchestrator.control.pools import run_figures
from orchestrator.core.cluster import ClusterState
from orchestrator.core.model import ModelProfile
from orchestrator.core.slot import RunEvent, SlotRecord
from orchestrator.planning.assignment import SlotAssignment
from orchestrator.simulation.backend import SimulatedBackend, SimulationOptions
from orchestrator.simulation.traces import TraceEvent
from orchestrator.strategies.registry import Strategy
from orchestrator.whatif.scenario import Scenario
from orchestrator.whatif.traces import traces_of

MAX_TEAM = 1
"""What workers of this version run; a plan that none will run (``source: file``) may ask more."""

_ENDLESS_STEPS = 10**9


def figures_of(config: RunConfig, measured: ModelProfile) -> tuple[ClusterState, ModelProfile]:
    """Cluster and profile of a file in seconds of the run, as if its workers ran on this machine.

    Args:
        config: The whole file.
        measured: As measured or read, unscaled.

    Raises:
        ConfigError: If the profile does not serve the cluster.
    """
    return run_figures(
        config.cluster,
        config.emulation,
        config.training,
        measured,
        num_cores=len(os.sched_getaffinity(0)),
    )


@dataclass(frozen=True, slots=True)
class Simulated:
    """A loop, its simulated cluster, and all that they have shown."""

    loop: ControlLoop
    backend: SimulatedBackend
    traces: tuple[TraceEvent, ...] = ()
    records: list[SlotRecord] = field(default_factory=list)
    events: list[RunEvent] = field(default_factory=list)


def simulated(
    config: RunConfig,
    measured: ModelProfile,
    strategy: Strategy,
    *,
    scenario: Scenario | None = None,
    stopwatch: Callable[[], float] = lambda: 0.0,
) -> Simulated:
    """The loop of a file against a simulated cluster, at its start.

    Args:
        config: The whole file, its traces included.
        measured: The model's layers, unscaled.
        strategy: Which proposes.
        scenario: What happens to the cluster beyond the file's own traces.
        stopwatch: Seconds that ``control.plan_deadline_s`` counts; by default none pass, and
            every search comes to its end.

    Raises:
        ConfigError: If the profile does not serve the cluster, or a trace cannot be read.
    """
    told = scenario or Scenario(seed=config.run.seed)
    cluster, model = figures_of(config, measured)
    feed = config.cluster.price_feed
    traces = traces_of(config)
    steps = config.training.steps or _ENDLESS_STEPS
    num_samples = steps * config.training.global_batch
    backend = SimulatedBackend(
        cluster,
        model,
        config.training,
        SimulationOptions(
            slot_s=config.control.slot_s,
            num_samples=num_samples,
            seed=told.seed,
            max_team=config.control.max_team if config.cluster.source == "file" else MAX_TEAM,
            streams=told.streams,
        ),
        traces,
    )
    records: list[SlotRecord] = []
    events: list[RunEvent] = []
    loop = ControlLoop(
        backend=backend,
        strategy=strategy,
        assignment=SlotAssignment(config.control.plan_deadline_s),
        options=LoopOptions(
            training=config.training,
            budget=config.budget,
            control=config.control,
            billing_speedup=config.emulation.billing_speedup,
            price_max_age_s=feed.max_age_s if feed else None,
            num_steps=steps,
            num_samples=num_samples,
            seed=config.run.seed,
        ),
        cluster=cluster,
        model=model,
        sinks=(records.append,),
        book=lambda journal: events.extend(journal.events),
        stopwatch=stopwatch,
    )
    return Simulated(loop, backend, traces, records, events)
