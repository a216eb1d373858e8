"""What metrics cost: a scrape of 1,000 devices, and the head's processor time beside planning.

The loop, files and exporter of a head go through slots of a cluster that only reports: all
devices work under one plan, a spare one is exchanged in every slot, and now and then one in use
is lost. Slots of one second hold one step. Another process scrapes every fifth slot, as
deploy/prometheus does, and in the end two do so at once while slots are written.
"""

import argparse
import gc
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.builders import make_cluster, make_device, make_profile, make_stages
from benchmarks.result import Figure, Result, main
from orchestrator import lines
from orchestrator.control.backend import Capabilities
from orchestrator.control.books import LoopOptions
from orchestrator.control.loop import ControlLoop
from orchestrator.control.persistence import RunStore
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.cluster import ClusterState, Device
from orchestrator.core.durable import ControlState
from orchestrator.core.plan import Group
from orchestrator.core.slot import (
    Candidate,
    ClusterEvent,
    Decision,
    DeviceJoined,
    DeviceLost,
    Observation,
    PlanningProblem,
    Recovered,
    SlotJournal,
    SlotRecord,
    StepReport,
    Transfer,
    Usage,
)
from orchestrator.core.training import TrainingOptions
from orchestrator.planning.assignment import SlotAssignment
from orchestrator.planning.cost import CostModel
from orchestrator.planning.lyapunov import ControlOptions
from orchestrator.reports.records import slot_json
from orchestrator.runtime.garbage import collect_rarely
from orchestrator.runtime.progress import Progress
from orchestrator.strategies.explorer import candidate_of, idle_candidate
from orchestrator.telemetry.exporter import Exporter, RunFacts

SIZES = (10, 100, 1000)
"""Devices."""

POOLS, ZONES, STAGES, LAYERS = 8, 4, 4, 8
SPARE = 0.02
"""Of the devices: more than the plan holds; one of them goes and another comes in every slot."""

LOSS_SLOTS = 20
"""A device in use is lost every so many slots."""

SLOT_S, SCRAPE_SLOTS = 1.0, 5
WARM_SLOTS = 3
NOISE = 0.03

_SCRAPER = """
import sys, time, urllib.request
for line in sys.stdin:
    started_s = time.perf_counter()
    page = urllib.request.urlopen(sys.argv[1]).read()
    print(time.perf_counter() - started_s, len(page), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Scrape:
    """How long Prometheus waits for a page, and how large it is."""

    waited_s: float
    size_bytes: int


class Scraper:
    """Asks for the page from a process of its own: what it costs there is not the head's."""

    def __init__(self, address: tuple[str, int]) -> None:
        command = [sys.executable, "-c", _SCRAPER, f"http://{address[0]}:{address[1]}/metrics"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self) -> None:
        """Begin a scrape."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def answer(self) -> Scrape:
        """Wait for the oldest scrape that was begun."""
        assert self._process.stdout is not None
        waited_s, size_bytes = self._process.stdout.readline().split()
        return Scrape(float(waited_s), int(size_bytes))

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


class Everybody:
    """Proposes one plan: chains of like devices, as many as there are whole ones, and idle."""

    deals_shares = False

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups

    def propose(
        self, problem: PlanningProblem, *, out_of_time: Callable[[], bool]
    ) -> tuple[Candidate, ...]:
        """Keep the chains that are whole, and fill up with devices that have none."""
        cost, cluster = CostModel(problem), problem.cluster
        before = problem.incumbent.groups if problem.incumbent else ()
        kept = [group for group in before if all(map(cluster.has, group.device_ids))]
        taken = {device for group in kept for device in group.device_ids}
        by_kind: dict[str, list[Device]] = {}
        for device in cluster.devices:
            if device.device_id not in taken:
                by_kind.setdefault(device.kind, []).append(device)
        for devices in by_kind.values():
            for first in range(0, len(devices) - STAGES + 1, STAGES):
                if len(kept) < self._num_groups:
                    kept.append(_chain(devices[first : first + STAGES]))
        found = candidate_of(cost, tuple(kept), "1f1b")
        return found, idle_candidate(cost)


def _chain(devices: list[Device]) -> Group:
    cuts = [LAYERS * s // STAGES for s in range(STAGES + 1)]
    return Group(make_stages(devices, cuts), (1, 1))


class Reporting:
    """A Backend whose devices do what was predicted, give or take, and come and go.

    What it takes to make up the reports is counted apart, as workers would bear it; what the
    head does to gather them is not.
    """

    def __init__(self, cluster: ClusterState, rng: np.random.Generator) -> None:
        self.devices = list(cluster.devices)
        self.made_up_cpu_s = 0.0
        self._offers, self._rng = cluster.offers, rng
        self._progress = Progress(0)
        self._decision: Decision | None = None
        self._now_s, self._num_slots, self._num_devices = 0.0, 0, len(self.devices)

    @property
    def capabilities(self) -> Capabilities:
        """What ``Everybody`` asks for."""
        return Capabilities(max_team=1, schedules=("1f1b",), overlap=False)

    def apply(self, decision: Decision) -> None:
        """Run a plan from now on."""
        self._decision = decision
        self._progress.expect(decision.plan.device_ids, decision.plan.generation)

    def observe(self) -> Observation:
        """One step of every device, then who came and went."""
        started_s = time.process_time()
        used = self._decision.plan.device_ids if self._decision else ()
        from_s, self._now_s = self._now_s, self._now_s + SLOT_S * bool(used)
        reports = tuple(self._reports(from_s))
        usage = tuple(Usage(device_id, from_s, self._now_s) for device_id in used)
        events = tuple(self._come_and_go(used)) if used else ()
        self.made_up_cpu_s += time.process_time() - started_s
        for report in reports:
            self._progress.report(report)
        return Observation(
            now_s=self._now_s,
            usage=usage,
            reports=self._progress.take(),
            events=events,
            offers=self._offers,
            next_step=self._progress.next_step,
            devices=tuple(self.devices),
        )

    def checkpoint(self) -> None:
        """Nothing is worth keeping."""

    def close(self) -> None:
        """Nothing to release."""

    def _reports(self, from_s: float) -> Iterator[StepReport]:
        if self._decision is None:
            return
        plan, predicted = self._decision.plan, dict(self._decision.predicted.compute_s)
        for group_index, group in enumerate(plan.groups):
            chain = group.device_ids
            for stage, device_id in enumerate(chain):
                noise = float(np.exp(NOISE * self._rng.standard_normal()))
                neighbours = (*chain[max(0, stage - 1) : stage], *chain[stage + 1 : stage + 2])
                yield StepReport(
                    generation=plan.generation,
                    step=self._progress.next_step,
                    device_id=device_id,
                    group_index=group_index,
                    num_samples=group.num_samples,
                    started_s=from_s,
                    ended_s=self._now_s,
                    step_s=SLOT_S,
                    compute_s=noise * predicted[device_id],
                    receive_s=0.1,
                    reduce_s=0.05,
                    data_s=0.0 if 0 < stage < len(chain) - 1 else 1e-4 * noise,
                    wall_step_s=SLOT_S,
                    peak_memory_bytes=2**30,
                    loss=2.0,
                    grad_norm=1.0,
                    lr=0.1,
                    transfers=tuple(
                        Transfer(other, device_id, 2, 20_000, 2e-5 * noise) for other in neighbours
                    ),
                )

    def _come_and_go(self, used: tuple[str, ...]) -> Iterator[ClusterEvent]:
        """A spare device leaves, or one in use, and a new one like it comes."""
        self._num_slots += 1
        in_use, is_loss = set(used), self._num_slots % LOSS_SLOTS == 0
        index = next(i for i, d in enumerate(self.devices) if (d.device_id in in_use) == is_loss)
        gone = self.devices.pop(index)
        name = f"{gone.pool}-{self._num_devices}"
        new = replace(gone, device_id=name, node_id=f"{name}-node")
        self._num_devices += 1
        self.devices.append(new)
        yield DeviceLost(gone.device_id, "taken away", preempted=True)
        if is_loss:
            yield Recovered(self._progress.next_step, "replica", duration_s=0.1)
        yield DeviceJoined(new)


def _cluster(num_devices: int) -> ClusterState:
    """Devices in pools of one kind each, in several zones."""
    return make_cluster(
        [
            make_device(
                f"pool{i % POOLS}-{i}", pool=f"pool{i % POOLS}", kind=f"kind{i % POOLS}",
                zone=f"z{i % ZONES}",
            )
            for i in range(num_devices)
        ],
        latency_s=1e-4,
        bandwidth_bytes_per_s=1e9,
        egress_usd_per_byte=1e-11,
    )  # fmt: skip


class Head:
    """Loop, files and exporter as the head of a run joins them, and their processor time."""

    def __init__(self, num_devices: int, folder: str, seed: int) -> None:
        cluster = _cluster(num_devices)
        self.backend = Reporting(cluster, np.random.default_rng(seed))
        groups = max(1, int(num_devices * (1 - SPARE)) // STAGES - POOLS)
        store = RunStore(folder)
        self.records: list[SlotRecord] = []  # the newest
        zones = {offer.pool: offer.zone for offer in cluster.offers}
        facts = RunFacts(strategy="everybody", zone_of_pool=zones)
        self.exporter = Exporter(0, "127.0.0.1", "load", facts)
        self.exporter_cpu_s = self.files_cpu_s = 0.0

        def book(journal: SlotJournal) -> None:
            with self._files():
                store.write_journal(journal)
            with self._metrics():
                self.exporter.journal(journal)

        def record(found: SlotRecord) -> None:
            self.records[:] = [found]
            with self._files():
                lines.append_lines(store.url("slots.jsonl"), (slot_json(found),))
            with self._metrics():
                self.exporter.slot(found)

        def save(state: ControlState) -> None:
            with self._files():
                store.save_state(
                    replace(state, saved_unix_s=state.time_s)
                )  # as if slots took their time

        self.loop = ControlLoop(
            backend=self.backend,
            strategy=Everybody(groups),
            assignment=SlotAssignment(1.0),
            options=LoopOptions(
                training=TrainingOptions(
                    task="none:none", global_batch=2 * groups, microbatch=1, steps=10**6
                ),
                budget=BudgetOptions(average_per_hour_usd=1e5),
                control=ControlOptions(slot_s=SLOT_S),
                num_steps=10**6,
                num_samples=2 * groups * 10**6,
            ),
            cluster=cluster,
            model=make_profile(
                {f"kind{k}": [0.01 * (k + 1)] * LAYERS for k in range(POOLS)},
                boundary_bytes=1e4,
            ),
            sinks=(record,),
            save=save,
            book=book,
            stopwatch=time.process_time,
            cpu_clock=time.process_time,
        )

    def slot_cpu_s(self) -> float:
        """Go through a slot; processor time of all threads without planning and making up."""
        started_s, made_up_s = time.process_time(), self.backend.made_up_cpu_s
        found = self.loop.tick()
        made_up_s = self.backend.made_up_cpu_s - made_up_s
        return time.process_time() - started_s - made_up_s - found.solve_s

    @contextmanager
    def _files(self) -> Iterator[None]:
        started_s = time.process_time()
        yield
        self.files_cpu_s += time.process_time() - started_s

    @contextmanager
    def _metrics(self) -> Iterator[None]:
        started_s = time.process_time()
        yield
        self.exporter_cpu_s += time.process_time() - started_s


@contextmanager
def _head(num_devices: int, seed: int) -> Iterator[tuple[Head, tuple[Scraper, Scraper]]]:
    with tempfile.TemporaryDirectory() as folder:
        head = Head(num_devices, folder, seed)
        scrapers = (Scraper(head.exporter.address), Scraper(head.exporter.address))
        for _ in range(WARM_SLOTS):
            head.slot_cpu_s()
        thresholds = gc.get_threshold()
        gc.collect()
        collect_rarely()  # as the head does
        try:
            yield head, scrapers
        finally:
            gc.unfreeze()
            gc.set_threshold(*thresholds)
            for scraper in scrapers:
                scraper.close()
            head.exporter.close()


def share(num_devices: int, num_slots: int, seed: int) -> tuple[dict[str, float], list[Scrape]]:
    """Of a core, by what takes it; and scrapes, the last ones two at once in mid-slot."""
    with _head(num_devices, seed) as (head, (scraper, other)):
        head.files_cpu_s = head.exporter_cpu_s = scraping_s = slots_s = 0.0
        scrapes: list[Scrape] = []
        for slot in range(num_slots):
            slots_s += head.slot_cpu_s()
            if slot % SCRAPE_SLOTS == 0:
                started_s = time.process_time()
                scraper.ask()
                scrapes.append(scraper.answer())
                scraping_s += time.process_time() - started_s
        alone, spent_s = list(scrapes), (head.files_cpu_s, head.exporter_cpu_s)
        for _ in range(num_slots // SCRAPE_SLOTS):
            scraper.ask()
            other.ask()
            head.slot_cpu_s()
            scrapes += [scraper.answer(), other.answer()]
    per_slot, (files_s, series_s) = 100.0 / num_slots / SLOT_S, spent_s
    row = {
        "devices": num_devices,
        "core_pct": per_slot * (slots_s + scraping_s),
        "loop_pct": per_slot * (slots_s - files_s - series_s),
        "files_pct": per_slot * files_s,
        "series_pct": per_slot * series_s,
        "scraping_pct": per_slot * scraping_s,
        "scrape_s": statistics.median(s.waited_s for s in alone),
        "two_at_once_s": statistics.median(s.waited_s for s in scrapes[len(alone) :]),
        "scrape_s_max": max(s.waited_s for s in scrapes),
        "page_kb": max(s.size_bytes for s in scrapes) / 1e3,
    }
    return row, scrapes


def growth(num_devices: int, num_slots: int, seed: int) -> tuple[Figure, ...]:
    """What is left of devices that are gone, after many slots with one of them in each."""
    with _head(num_devices, seed) as (head, _):
        sizes: list[tuple[int, float]] = []
        for slot in range(num_slots):
            head.slot_cpu_s()
            if slot % (num_slots // 10) == 0:
                gc.collect()
                sizes.append((len(_series(head.exporter)), _resident_mib()))
        gc.collect()
        present = {device.device_id for device in head.backend.devices}
        shown = {label for label in map(_device_of, _series(head.exporter)) if label}
        lost = {view.device_id for view in head.records[-1].devices if view.state == "lost"}
    return (
        Figure("churn_slots", float(num_slots), ""),
        Figure("departed_devices_shown", float(len(shown - present - lost)), "", "== 0"),
        Figure("series_max", float(max(number for number, _ in sizes[2:])), ""),
        Figure("series_after_a_fifth", float(sizes[2][0]), ""),
        Figure("memory_growth", _resident_mib() - sizes[2][1], "MiB"),
    )


def _series(exporter: Exporter) -> list[str]:
    return [line for line in exporter.page().splitlines() if not line.startswith("#")]


def _device_of(series: str) -> str | None:
    found = re.search(r'device="([^"]+)"', series)
    return found.group(1) if found else None


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def run(options: argparse.Namespace) -> Result:
    """Shares of three sizes, scrapes of the largest, and memory over many slots."""
    num_slots = 20 if options.quick else 100
    measured = {n: share(n, num_slots, options.seed) for n in SIZES}
    scrapes = measured[SIZES[-1]][1]
    figures = (
        Figure("scrape_s_max", max(s.waited_s for s in scrapes), "s", "<= 1"),
        Figure("scrape_s_median", statistics.median(s.waited_s for s in scrapes), "s"),
        Figure("page", max(s.size_bytes for s in scrapes) / 1e6, "MB", "<= 5"),
        *(
            Figure(f"core_pct_{n}", row["core_pct"], "%", "<= 5")
            for n, (row, _) in measured.items()
        ),
    )
    churn = growth(100, 200 if options.quick else 1000, options.seed)
    return Result((*figures, *churn), tuple(row for row, _ in measured.values()))


if __name__ == "__main__":
    main("telemetry_load", run)
