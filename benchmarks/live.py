"""Whole runs on an embedded Ray for benchmarks: their config, and their processes in /proc."""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.builders import make_profile
from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.core.model import profile_to_json

NUM_LAYERS = 6
TIMEOUT_S = 12.0
PARAM_BYTES = 300.0  # of a layer: next to nothing, so that groups with replicas pay off
SAMPLE_S = 0.0005  # forward of a layer: a step takes some 0.1 s

_TEXT = """
run: {{name: live, storage_path: "{folder}"}}
training:
  task: "benchmarks.tasks:chain"
  task_args: {{num_layers: {layers}, width: 8, num_samples: 64}}
  global_batch: 8
  microbatch: 2
  steps: 1000000
  optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}
  checkpoint_every_steps: 100
cluster:
  source: emulated
  profile: "{folder}/profile.json"
  offers:
    - {{pool: fast, kind: a100-40, count: {fast}, price_per_hour: 3}}
    - {{pool: slow, kind: t4, count: {slow}, price_per_hour: 1, zone: z2}}
  links:
    - {{within: zone, latency_s: 0.0001, bandwidth_gbytes_per_s: 1}}
    - {{between: [z1, z2], latency_s: 0.0001, bandwidth_gbytes_per_s: 1}}
budget: {{average_per_hour_usd: 20, horizon_hours: 400}}
control: {{slot_s: 1}}
failure: {{timeout_s: {timeout_s}, max_failures: -1}}
metrics: {{port: 0}}
emulation: {{time_scale: 2, billing_speedup: 60, events: [{events}]}}
"""


def make_config(folder: Path, *, fast: int, slow: int, events: Sequence[str] = ()) -> RunConfig:
    """A run of short steps in slots of a second that goes on until it is stopped.

    Args:
        folder: Of all its files; empty.
        fast: Number of fast devices, of which each can hold the whole model.
        slow: Number of slow ones, in a zone of their own.
        events: Entries of ``emulation.events``.
    """
    profile = make_profile(
        {"cpu": [SAMPLE_S] * NUM_LAYERS}, microbatches=(1, 2), param_bytes=PARAM_BYTES
    )
    storage.write_json(str(folder / "profile.json"), profile_to_json(profile))
    text = _TEXT.format(
        folder=folder,
        layers=NUM_LAYERS,
        timeout_s=TIMEOUT_S,
        fast=fast,
        slow=slow,
        events=", ".join(events),
    )
    return RunConfig.parse(text)


def processes(config: RunConfig) -> dict[str, int]:
    """Process ids of the head ("head") and of the workers (by device) that live now.

    A process of a run is known by its output, which goes to a file of its own.
    """
    logs = Path(config.run.run_url).resolve() / "logs"
    found = {}
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):  # it has ended, or belongs to someone else
            target = output.readlink()
            if target.parent == logs:
                found[target.stem] = int(output.parent.parent.name)
    return found


def stop() -> None:
    """Have the run of this process stop at its next step boundary."""
    os.kill(os.getpid(), signal.SIGTERM)
