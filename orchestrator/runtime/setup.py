"""From the file to a cluster that can run: devices, workers, measured layers, run-time figures."""

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.control.backend import ClusterOptions, EmulatedEvent
from orchestrator.control.pools import build_cluster, build_rentable, run_figures
from orchestrator.core.model import ModelProfile, profile_to_json
from orchestrator.errors import ConfigError, InfeasibleError
from orchestrator.inputs import read_profile
from orchestrator.price_sources import make_source
from orchestrator.runtime.actors import Place
from orchestrator.runtime.crew import Crew
from orchestrator.runtime.free_memory import with_free_memory
from orchestrator.runtime.inventory import Numbering, found_nodes, price_nodes
from orchestrator.runtime.notices import NoticeBoard
from orchestrator.runtime.presence import EmulatedPresence, Presence, RayPresence, place_of
from orchestrator.runtime.price_feed import PricedPresence, PriceFeed
from orchestrator.runtime.products import ANSWER_S, Products
from orchestrator.runtime.rig import Rig
from orchestrator.runtime.same_code import joint_code
from orchestrator.runtime.truth import EmulatedTruth, present_by

logger = logging.getLogger(__name__)

_ray: Any = ray  # partly typed

PROFILE_FILE = "profile.json"
"""What was measured, beside the run's other files: a resumed run plans with the same figures."""


@dataclass(frozen=True, slots=True)
class Found:
    """Devices as they are there at the start: the offers, and where each worker starts."""

    options: ClusterOptions
    places: tuple[Place, ...]
    numbering: Numbering


def find_devices(
    config: RunConfig,
    next_step: int = 0,
    actors: Any = ray,
    products: Products | None = None,
) -> Found:
    """Look for devices.

    Args:
        config: The whole file.
        next_step: Of an emulated cluster, what events leave then is there.
        actors: Ray, or what offers as much of it.
        products: Asks nodes for their GPUs, and remembers.

    Raises:
        ConfigError: If the file describes a cluster that nothing can run on, or a found
            device has no price.
        InfeasibleError: If no device is left.
    """
    numbering = Numbering()
    if config.cluster.source == "emulated":
        options = _with_joining(config.cluster, config.emulation.happenings)
        devices = build_cluster(options).devices
        there = present_by(config.emulation.happenings, devices, next_step)
        if not there:
            raise InfeasibleError("every device is lost; offer further ones, or start another run")
        return Found(options, tuple(Place(d, _here(actors)) for d in there), numbering)
    if config.cluster.source == "ray":
        nodes = actors.nodes()
        told = (products or Products(actors)).ask(nodes, ANSWER_S)
        options, found = price_nodes(found_nodes(nodes, None, told), config.cluster, numbering)
        places = tuple(place_of(device) for device in found)
        return Found(options, places, numbering)
    raise ConfigError(
        "cluster.source is 'file', which is for lyray plan and lyray simulate; "
        "write emulated or ray to train"
    )


def _here(actors: Any) -> str:
    """The Ray node of this process: emulated devices share one machine, and one clock."""
    return str(actors.get_runtime_context().get_node_id())


def _with_joining(options: ClusterOptions, events: Sequence[EmulatedEvent]) -> ClusterOptions:
    """The offers with every device that ever joins them."""
    joining = Counter[str]()
    for event in events:
        joining[event.pool or ""] += event.joined
    offers = (replace(o, count=o.count + joining[o.pool]) for o in options.offers)
    return replace(options, offers=tuple(offers))


def set_up(
    config: RunConfig,
    working_dir: str,
    say: Callable[[str], None],
    *,
    warn: Callable[[str], None] = logger.warning,
    next_step: int = 0,
    actors: Any = ray,
) -> Rig:
    """Start, load, measure and connect the workers; whoever is lost meanwhile is left out.

    Args:
        config: The whole file.
        working_dir: Where the user's task is imported from.
        say: Takes one line on what is being done.
        warn: Takes one line, with a word before it, on what goes on but not as asked.
        next_step: How far the run has come.
        actors: Ray, or what offers as much of it.

    Raises:
        InfeasibleError: If no device is left.
        OrchestratorError: Whatever keeps the run from starting; started workers stay for the
            caller's ``Fleet.close``, or die with this process.
    """
    products = Products(actors)
    found = find_devices(config, next_step, actors, products)
    emulated = config.cluster.source == "emulated"
    say(f"starting {len(found.places)} workers, which load the task")
    crew = Crew(
        config,
        found.places,
        working_dir,
        host="127.0.0.1" if emulated else _ray.util.get_node_ip_address(),
        actors=actors,
    )
    task = crew.get_ready()
    say("measuring the model")
    measured = _measured(config, crew, found.options)
    crew.join()
    num_samples = config.training.num_samples(task.dataset_samples)
    everything, model = run_figures(
        found.options,
        config.emulation,
        config.training,
        measured,
        num_cores=len(os.sched_getaffinity(0)),
    )
    there = {place.device_id for place in found.places}
    devices = tuple(d for d in everything.devices if d.device_id in there)
    if not emulated:
        devices = tuple(with_free_memory(devices, crew.infos, say))
    cluster = replace(everything, devices=devices)
    truth = EmulatedTruth(
        cluster=everything,
        model=model,
        training=config.training,
        events=config.emulation.happenings,
        faults=config.emulation.faults,
        billing_speedup=config.emulation.billing_speedup,
    )
    board = NoticeBoard(config.failure.notices)
    nodes: RayPresence | None = None
    if not emulated:
        nodes = RayPresence(found.options, cluster, found.numbering, board, actors.nodes, products)
    presence: Presence = nodes or EmulatedPresence(truth, _here(actors), board)
    if config.cluster.price_feed is not None:
        feed = PriceFeed(
            make_source(config.cluster.price_feed, [o.pool for o in config.cluster.offers]),
            config.cluster.price_feed,
            billing_speedup=config.emulation.billing_speedup,
            warn=warn,
        )
        say("reading the prices")
        feed.wait()
        presence = PricedPresence(presence, feed)
    return Rig(
        crew=crew,
        cluster=cluster,
        model=model,
        presence=presence,
        nodes=nodes,
        rentable=build_rentable(found.options),
        truth=truth if emulated else None,
        num_steps=math.ceil(num_samples / config.training.global_batch),
        num_samples=num_samples,
        code=joint_code({d: info.code for d, info in crew.infos.items()}),
        evaluation_samples=task.evaluation_samples,
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
            kinds = {d.device_id: "cpu" for d in devices}
        else:
            kinds = {d.device_id: d.kind for d in devices}
        parts = profiles_of(crew, kinds)
        profile = joined(parts)
        if parts.keys() < set(kinds.values()):
            return profile  # the next life may find the others
    storage.write_json(stored, profile_to_json(profile))
    return profile


def joined(parts: Mapping[str, ModelProfile]) -> ModelProfile:
    """One profile with the times of all kinds, from what a device of each measured."""
    times = (t.scaled(1.0, kind=kind) for kind, part in parts.items() for t in part.times)
    return replace(next(iter(parts.values())), times=tuple(times))


def profiles_of(
    crew: Crew, kinds: Mapping[str, str], *, fresh: bool = False
) -> dict[str, ModelProfile]:
    """What one device of each kind measured; of a kind whose devices are all lost, nothing.

    Args:
        crew: Workers that have loaded the task.
        kinds: Of their devices.
        fresh: Measure again what was measured earlier.

    Raises:
        LostWorkerError: If nobody is left.
    """
    parts: dict[str, ModelProfile] = {}
    asked: set[str] = set()
    while True:
        left = [d for d in crew.fleet.device_ids if d not in asked and kinds[d] not in parts]
        chosen = {kinds[d]: d for d in left}
        if not chosen:
            return parts
        asked.update(chosen.values())
        answers = crew.profile(chosen.values(), fresh=fresh)
        parts |= {kinds[d]: answer for d, answer in answers.items()}
