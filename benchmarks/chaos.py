"""Random fault plans on the emulated cluster: every run must end as if nothing had happened.

``--quick`` runs a few plans with the head in this process and forked workers. Without it head
and workers are Ray's, as in ``lyray run --chaos FILE``.
"""

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import ray

from benchmarks.builders import make_profile
from benchmarks.forked import ForkedActors
from benchmarks.forked_run import run_forked
from benchmarks.invariants import QUANTUM_S, alive, breaches, hits
from benchmarks.result import Figure, Result, main
from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.control.faults import DRAWN, Draw, FaultPlan, draw
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.model import profile_to_json
from orchestrator.core.slot import CommittedStep, Outcome, RunEvent, SlotRecord
from orchestrator.errors import OrchestratorError, as_told
from orchestrator.reports.live import View
from orchestrator.runtime.chaos import with_faults
from orchestrator.runtime.driver import run_job
from orchestrator.runtime.session import ray_session
from orchestrator.telemetry.discovery import discovery_file

NUM_STEPS, NUM_LAYERS = 40, 6
PRICES = {"fast": 3.0, "slow": 1.0}
DEVICES = ("fast-0", "fast-1", "slow-0", "slow-1")
SAMPLE_S = 0.0005  # forward of a layer: a step takes some 60 ms
QUICK_RUNS = 8
PATIENCE_S = 10.0  # for what was ended to be gone

_TEXT = """
run: {{name: {name}, storage_path: "{folder}"}}
training:
  task: "benchmarks.tasks:chain"
  task_args: {{num_layers: {layers}, width: 8, num_samples: 64, double: true}}
  global_batch: 8
  microbatch: 2
  steps: {steps}
  optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}
  checkpoint_every_steps: 6
cluster:
  source: emulated
  profile: "{folder}/profile.json"
  offers:
    - {{pool: fast, kind: a100-40, count: 2, price_per_hour: 3, billed: while_used,
       quantum_s: {quantum_s}}}
    - {{pool: slow, kind: t4, count: 2, price_per_hour: 1, billed: while_used,
       quantum_s: {quantum_s}, zone: z2}}
  links:
    - {{within: zone, latency_s: 0.0001, bandwidth_gbytes_per_s: 1}}
    - {{between: [z1, z2], latency_s: 0.0001, bandwidth_gbytes_per_s: 1}}
budget: {{average_per_hour_usd: 10, horizon_hours: 4}}
control: {{slot_s: 0.4}}
failure: {{timeout_s: 12, max_failures: -1}}
metrics: {{port: 0}}
emulation: {{time_scale: 1, billing_speedup: 60}}
"""


def make_config(folder: Path, name: str, *overrides: str) -> RunConfig:
    """Two fast devices and two slow ones, 40 short steps in fp64; the profile is known."""
    profile = make_profile({"cpu": [SAMPLE_S] * NUM_LAYERS}, microbatches=(1, 2))
    storage.write_json(str(folder / "profile.json"), profile_to_json(profile))
    text = _TEXT.format(
        name=name, folder=folder, layers=NUM_LAYERS, steps=NUM_STEPS, quantum_s=QUANTUM_S
    )
    return RunConfig.parse(text, overrides)


class Pages:
    """A view that reads the run's page of metrics after every slot."""

    def __init__(self, config: RunConfig) -> None:
        self._file = discovery_file(config.run.run_url)
        self._known: list[frozenset[str]] = []  # devices of each record
        self._shown: list[tuple[int, frozenset[str]]] = []
        self.events: list[RunEvent] = []

    def phase(self, text: str) -> None:
        """Nobody asked."""

    def step(self, step: CommittedStep) -> None:
        """Nobody asked."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Nobody asked."""

    def event(self, event: RunEvent) -> None:
        """Something happened."""
        self.events.append(event)

    def slot(self, record: SlotRecord) -> None:
        """A slot ended: its page may be shown, or that of one of the next."""
        self._known.append(frozenset(view.device_id for view in record.devices))
        with suppress(OSError):  # between two lives nobody listens
            (target,) = json.loads(self._file.read_text("utf-8"))[0]["targets"]
            with urlopen(f"http://{target}/metrics", timeout=PATIENCE_S) as page:
                text = page.read().decode()
            devices = frozenset(re.findall(r'device="([^"]+)"', text))
            self._shown.append((len(self._known) - 1, devices))

    def close(self) -> None:
        """Nothing to take down."""

    def breaches(self) -> Iterator[str]:
        """Pages with series of devices that were gone."""
        for at, devices in self._shown:
            if not any(devices <= known for known in self._known[at : at + 4]):
                yield f"metrics: after slot {at} the page shows {sorted(devices)}"


@dataclass(frozen=True, slots=True)
class Case:
    """One run that is over."""

    config: RunConfig
    plan: FaultPlan
    outcome: Outcome | None
    num_restarts: int
    wall_s: float
    breaches: tuple[str, ...]
    events: tuple[RunEvent, ...] = field(repr=False)

    @property
    def recoveries(self) -> int:
        """How often the run recovered by itself, with whoever was left or with new workers."""
        found = sum(
            e.kind == "resumed" or (e.kind, e.device) == ("recovered", "") for e in self.events
        )
        return found - self.num_restarts

    def row(self, seed: int) -> dict[str, object]:
        """A line of the table."""
        return {
            "seed": seed,
            "faults": len(self.plan.faults),
            "hit": len(hits(self.config)),
            "recoveries": self.recoveries,
            "restarts": self.num_restarts,
            "wall_s": self.wall_s,
            "breaches": "; ".join(self.breaches),
        }


class Forked:
    """Runs with the head in this process, which is not to be killed."""

    kinds = tuple(kind for kind in DRAWN if kind != "kill_head")

    def __init__(self) -> None:
        self._actors = ForkedActors()

    def run(self, config: RunConfig, view: View) -> Outcome:
        """Run to an end."""
        return run_forked(config, view=view, actors=self._actors)

    def breaches(self, config: RunConfig) -> Iterator[str]:
        """Processes that are left."""
        if left := _wait_until_none(lambda: alive(self._actors.pids())):
            yield f"processes: {left} are left"


class OnRay:
    """Runs as ``lyray run`` does them; Ray itself stays up in between."""

    kinds = DRAWN

    def run(self, config: RunConfig, view: View) -> Outcome:
        """Run to an end."""
        return run_job(config, view=view)

    def breaches(self, config: RunConfig) -> Iterator[str]:
        """Processes that are left, and resources that were not given back."""
        log = (Path(config.run.run_url) / "logs" / "head.log").read_text("utf-8")
        pids = tuple(int(pid) for pid in re.findall(r"process (\d+)", log))
        if left := _wait_until_none(lambda: alive(pids)):
            yield f"processes: {left} are left"
        if missing := _wait_until_none(_missing_resources):
            yield f"resources: {missing} were not given back"


def run_case(
    folder: Path,
    name: str,
    plan: FaultPlan,
    cluster: Forked | OnRay,
    reference: RunConfig | None,
    *overrides: str,
) -> Case:
    """Run with these faults to the end, again where one ends the run resumable, and look.

    Args:
        folder: For the runs' folders.
        name: Of the run.
        plan: What breaks.
        cluster: How to run.
        reference: The run without faults; None for that run itself.
        overrides: ``key=value`` of the configuration.
    """
    config = with_faults(make_config(folder, name, *overrides), plan)
    pages, outcome, num_restarts, found = Pages(config), None, 0, []
    started_s = time.monotonic()
    while outcome is None:
        try:
            outcome = cluster.run(config, pages)
        except (OrchestratorError, OSError) as error:
            if num_restarts == plan.num_restarts:
                found.append(f"the run ended: {as_told(error)}")
                break
            num_restarts += 1
    wall_s = time.monotonic() - started_s
    if outcome is not None:
        found += breaches(config, reference or config)
    found += [*pages.breaches(), *cluster.breaches(config)]
    numbers = [hit["number"] for hit in hits(config)]
    if len(set(numbers)) < len(numbers):
        found.append(f"faults: some hit twice: {numbers}")
    return Case(config, plan, outcome, num_restarts, wall_s, tuple(found), tuple(pages.events))


def drawn(seed: int, cluster: Forked | OnRay) -> FaultPlan:
    """Three to six faults of the kinds that the cluster takes."""
    asked = Draw(seed=seed, faults=3 + seed % 4, kinds=cluster.kinds)
    return draw(asked, DEVICES, PRICES, NUM_STEPS)


def _wait_until_none(look: Callable[[], object]) -> object:
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := look()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return found


def _missing_resources() -> dict[str, float]:
    there, free = ray.cluster_resources(), ray.available_resources()
    return {
        name: there[name] - free.get(name, 0.0) for name in there if free.get(name) != there[name]
    }


@contextmanager
def _cluster(*, quick: bool) -> Iterator[Forked | OnRay]:
    if quick:
        yield Forked()
        return
    with ray_session(len(DEVICES)):
        yield OnRay()


def run(options: argparse.Namespace) -> Result:
    """One run without faults, then one a seed."""
    num_runs = QUICK_RUNS if options.quick else options.runs
    with tempfile.TemporaryDirectory() as name, _cluster(quick=options.quick) as cluster:
        folder = Path(name)
        undisturbed = run_case(folder, "undisturbed", FaultPlan(), cluster, None)
        cases, table = [], []
        for seed in range(options.seed, options.seed + num_runs):
            case = run_case(
                folder, f"seed-{seed}", drawn(seed, cluster), cluster, undisturbed.config
            )
            cases.append(case)
            table.append(case.row(seed))
    whole = [case for case in cases if not case.breaches]
    figures = (
        Figure("runs", float(num_runs), ""),
        Figure("undisturbed_breaches", float(len(undisturbed.breaches)), "", "== 0"),
        Figure("held", float(len(whole)), "", f"== {num_runs}"),
        Figure("faults", float(sum(len(case.plan.faults) for case in cases)), ""),
        Figure("hits", float(sum(int(str(row["hit"])) for row in table)), "", f">= {num_runs}"),
        Figure("recoveries", float(sum(case.recoveries for case in cases)), ""),
        Figure("wall_s_undisturbed", undisturbed.wall_s, "s"),
        Figure("wall_s_median", statistics.median(case.wall_s for case in cases), "s"),
    )
    return Result(figures, tuple(table))


if __name__ == "__main__":
    main("chaos", run, [("runs", 50, "fault plans, by seed")])
