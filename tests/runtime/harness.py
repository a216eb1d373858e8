"""Forked workers that know the models and stores of these tests, and specs that name one."""

import time
from typing import Any

from benchmarks import fleet
from benchmarks.fleet import PATIENCE_S, Fleet
from orchestrator.core.durable import CheckpointPart
from workers.worker import WorkerSpec

fleet.preload("tests.runtime.models", "tests.runtime.stores")


def make_spec(task: str, run_url: str, **changes: Any) -> WorkerSpec:
    """The spec of a run of one of our models, or of ``module:function``."""
    name = task if ":" in task else f"tests.runtime.models:{task}"
    return fleet.make_spec(name, run_url, **changes)


def parts_of(items: list[list[object]]) -> list[CheckpointPart]:
    """What of the workers' news tells of checkpoints."""
    return [item for news in items for item in news if isinstance(item, CheckpointPart)]


def wait_for_parts(fleet: Fleet, count: int) -> list[CheckpointPart]:
    """Hear the workers until they have told of that many parts; all other news are lost."""
    found: list[CheckpointPart] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found) < count:
        found += parts_of(fleet.news())
        assert time.monotonic() < deadline_s, f"{len(found)} of {count} parts came"
    return found
