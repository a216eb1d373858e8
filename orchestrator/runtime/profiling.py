"""What ``lyray profile`` does: each kind that is there measures the layers, and links are timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from orchestrator.config import RunConfig
from orchestrator.control.pools import build_devices
from orchestrator.core.model import ModelProfile
from orchestrator.runtime.crew import Crew
from orchestrator.runtime.link_speeds import MeasuredLink, as_rules, places_of
from orchestrator.runtime.processes import look_at_model
from orchestrator.runtime.session import ray_session
from orchestrator.runtime.setup import find_devices, joined, profiles_of
from orchestrator.storage import Json, to_json

_ray: Any = ray  # partly typed


@dataclass(frozen=True, slots=True)
class Profiled:
    """The layers, links where there are any to measure, and how long that took."""

    model: ModelProfile
    layers_s: float
    links: tuple[MeasuredLink, ...] = ()
    links_s: float = 0.0
    words: tuple[str, ...] = ()
    """What a reader must know about the figures."""

    def to_data(self) -> dict[str, Json]:
        """What ``lyray profile --json`` prints beside the file."""
        return {
            "kinds": list(self.model.kinds),
            "layers": self.model.num_layers,
            "layers_s": self.layers_s,
            "links": [{"rule": link.rule, "figures": to_json(link)} for link in self.links],
            "links_s": self.links_s,
            "notes": list(self.words),
        }


def profile_cluster(config: RunConfig, working_dir: str, say: Callable[[str], None]) -> Profiled:
    """Measure, whatever was measured before.

    Emulated devices are one processor, this one, measured once, and their links are as the file
    says. With ``cluster.source: file`` there is no device: layers are described, not run.

    Args:
        config: The whole file.
        working_dir: Where the user's task is imported from.
        say: Takes one line on what is being done.

    Raises:
        UserCodeError: If the user's code raises.
        OrchestratorError: Whatever keeps the cluster from being measured.
    """
    if config.cluster.source == "ray":
        with ray_session(0):
            return _profile_there(config, working_dir, say)
    described = config.cluster.source == "file"
    say("describing the model" if described else "measuring the model")
    start_s = time.monotonic()
    model = look_at_model(config, fresh=True)
    layers_s = time.monotonic() - start_s
    words = (
        f"Nothing was run: the model was described in {layers_s:.1f} s. Kinds are priced from FLOP."
        if described
        else f"Measured on this processor in {layers_s:.1f} s. The links of emulated devices are "
        "as cluster.links says."
    )
    return Profiled(model, layers_s, words=(words,))


def _profile_there(config: RunConfig, working_dir: str, say: Callable[[str], None]) -> Profiled:
    found = find_devices(config)
    devices = build_devices(found.options)
    say(f"starting {len(found.places)} workers, which load the task")
    host = _ray.util.get_node_ip_address()
    crew = Crew(config, found.places, working_dir, host=host, actors=ray)
    try:
        crew.get_ready()
        say("measuring the model")
        start_s = time.monotonic()
        parts = profiles_of(crew, {d.device_id: d.kind for d in devices}, fresh=True)
        layers_s = time.monotonic() - start_s
        say("measuring the links")
        start_s = time.monotonic()
        pairs = [pair for chosen in places_of(devices).values() for pair in chosen]
        links = as_rules(devices, crew.time_messages(pairs))
        links_s = time.monotonic() - start_s
        words = (
            f"Layers were measured in {layers_s:.1f} s, links in {links_s:.1f} s. The links are "
            "what TCP gives; write egress_usd_per_gb beside those that cost money."
        )
        return Profiled(joined(parts), layers_s, links, links_s, (words,))
    finally:
        crew.fleet.close(config.failure.timeouts.receive_s)
