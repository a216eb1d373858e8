"""From the file to a cluster that can run: devices, workers, measured layers, run-time figures."""

import logging
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.control.backend import ClusterOptions
from orchestrator.control.pools import build_cluster, run_figures
from orchestrator.core.model import ModelProfile, profile_to_json
from orchestrator.errors import ConfigError, InfeasibleError
from orchestrator.inputs import read_profile
from orchestrator.runtime.crew import Crew
from orchestrator.runtime.fleet import Place
from orchestrator.runtime.inventory import found_nodes, price_nodes
from orchestrator.runtime.rig import Rig
from orchestrator.runtime.truth import EmulatedTruth, lost_by

logger = logging.getLogger(__name__)

_ray: Any = ray  # partly typed

PROFILE_FILE = "profile.json"
"""What was measured, beside the run's other files: a resumed run plans with the same figures."""


def find_devices(config: RunConfig) -> tuple[ClusterOptions, tuple[Place, ...]]:
    """The offers as they are there, and where each device's worker starts.

    Raises:
        ConfigError: If the file describes a cluster that nothing can run on, or a found
            device has no price.
    """
    if config.cluster.source == "emulated":
        here = ray.get_runtime_context().get_node_id()  # one machine: one clock
        devices = build_cluster(config.cluster).devices
        return config.cluster, tuple(Place(device.device_id, here) for device in devices)
    if config.cluster.source == "ray":
        options, found = price_nodes(found_nodes(_ray.nodes()), config.cluster)
        return options, tuple(Place(d.device_id, d.ray_node_id, d.num_gpus) for d in found)
    raise ConfigError(
        "cluster.source is 'file', which is for lyray plan and lyray simulate; "
        "write emulated or ray to train"
    )


def set_up(
    config: RunConfig, working_dir: str, say: Callable[[str], None], *, next_step: int = 0
) -> Rig:
    """Start, load, measure and connect the workers.

    Args:
        config: The whole file.
        working_dir: Where the user's task is imported from.
        say: Takes one line on what is being done.
        next_step: How far the run has come: emulated devices that are lost by then stay away.

    Raises:
        InfeasibleError: If no device is left.
        OrchestratorError: Whatever keeps the run from starting; started workers stay for the
            caller's ``Fleet.close``, or die with this process.
    """
    options, places = find_devices(config)
    gone = lost_by(config.emulation.events, build_cluster(options).devices, next_step)
    places = tuple(place for place in places if place.device_id not in gone)
    if not places:
        raise InfeasibleError("every device is lost; offer further ones, or start another run")
    emulated = config.cluster.source == "emulated"
    say(f"starting {len(places)} workers, which load the task")
    crew = Crew(
        config,
        places,
        working_dir,
        host="127.0.0.1" if emulated else _ray.util.get_node_ip_address(),
        num_threads=1 if emulated else _threads(places),
    )
    dataset_samples = crew.get_ready()
    say("measuring the model")
    measured = _measured(config, crew, options)
    num_samples = config.training.num_samples(dataset_samples)
    cluster, model = run_figures(
        options,
        config.emulation,
        config.training,
        measured,
        num_cores=len(os.sched_getaffinity(0)),
    )
    devices = tuple(d for d in cluster.devices if d.device_id not in gone)
    cluster = replace(cluster, devices=devices)
    truth = EmulatedTruth(
        cluster=cluster,
        model=model,
        training=config.training,
        events=config.emulation.events,
        billing_speedup=config.emulation.billing_speedup,
    )
    return Rig(
        crew=crew,
        cluster=cluster,
        model=model,
        truth=truth if emulated else None,
        num_steps=math.ceil(num_samples / config.training.global_batch),
        num_samples=num_samples,
    )


def _measured(config: RunConfig, crew: Crew, options: ClusterOptions) -> ModelProfile:
    """The layers' figures: of an earlier life, of the user's file, or measured now.

    Emulated devices are one processor, measured once; of real devices one of each kind.
    """
    stored = storage.join(config.run.run_url, PROFILE_FILE)
    if storage.exists(stored):
        mend = "delete it to have the layers measured again"
        return read_profile(stored, key="the run's profile", mend=mend)
    if config.cluster.profile is not None:
        profile = read_profile(config.cluster.profile)
    else:
        devices = build_cluster(options).devices
        if config.cluster.source == "emulated":
            chosen = {devices[0].device_id: "cpu"}
        else:
            chosen = {d.device_id: kind for kind, d in {d.kind: d for d in devices}.items()}
        answers = crew.profile(chosen)
        parts = [
            tuple(t.scaled(1.0, kind=kind) for t in answers[device_id].times)
            for device_id, kind in chosen.items()
        ]
        first = answers[next(iter(chosen))]
        profile = replace(first, times=tuple(t for part in parts for t in part))
    storage.write_json(stored, profile_to_json(profile))
    return profile


def _threads(places: tuple[Place, ...]) -> int:
    """Threads of a worker that shares its node's cores with the node's other workers."""
    crowd = max(Counter(place.ray_node_id for place in places).values())
    return max(1, (os.cpu_count() or 1) // crowd)
