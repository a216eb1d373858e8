"""Forked workers that know the models of these tests, and specs that name one of them."""

from typing import Any

from benchmarks import fleet
from workers.worker import WorkerSpec

fleet.preload("tests.runtime.models")


def make_spec(task: str, run_url: str, **changes: Any) -> WorkerSpec:
    """The spec of a run of one of our models, or of ``module:function``."""
    name = task if ":" in task else f"tests.runtime.models:{task}"
    return fleet.make_spec(name, run_url, **changes)
