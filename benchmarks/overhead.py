"""A homogeneous two-worker job against plain DistributedDataParallel: ratio of step times.

The job is the demo's GPT. A wide perceptron, whose gradient sums take about as long as its
compute, is measured beside it without a bar: this version starts the sums after backward.
Both sides train the same model on the same two cores, in processes that stay up; a pair is some
steps of one, then some of the other while the first waits. Each side is judged by the
median of its steps within the pair, the whole by the median over the pairs.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stub
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.fleet import Fleet, make_plan, make_spec
from benchmarks.result import Figure, Result, main
from workers.meeting import Meeting
from workers.splitting import load_task

WORLD, STEPS_A_TURN = 2, 8


@dataclass(frozen=True, slots=True)
class Workload:
    """What both sides train: a task, its number of layers, and each worker's batch."""

    name: str
    task: str
    num_layers: int
    local_batch: int
    task_args: dict[str, int] = field(default_factory=dict)


WORKLOADS = (
    Workload("byte_gpt", "examples.byte_gpt:task", 10, 32),
    Workload("perceptron", "benchmarks.tasks:perceptron", 6, 128),
)


def _ddp_process(rank: int, port: int, pipe: Connection, work: Workload) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    task = load_task(work.task, work.task_args, 0)
    model = DistributedDataParallel(torch.nn.Sequential(*task.layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler: DistributedSampler[Any] = DistributedSampler(task.dataset, WORLD, rank)
    loader = DataLoader(task.dataset, work.local_batch, sampler=sampler, drop_last=True)
    batches = iter(loader)
    while (num_steps := pipe.recv()) is not None:
        ends_s = [time.monotonic()]
        for _ in range(num_steps):
            batch = next(batches, None)
            if batch is None:
                batches = iter(loader)
                batch = next(batches)
            optimizer.zero_grad()
            loss, weight = task.loss(model(batch[0]), batch)
            (loss / weight).backward()
            optimizer.step()
            ends_s.append(time.monotonic())
        pipe.send(statistics.median(b - a for a, b in pairwise(ends_s)))
    dist.destroy_process_group()


class DdpPair:
    """Two processes of plain DistributedDataParallel that run when told to."""

    def __init__(self, work: Workload) -> None:
        context = get_context("spawn")
        self._meeting = Meeting("127.0.0.1")
        self._pipes, self._processes = [], []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            args = (rank, self._meeting.invitation.port, theirs, work)
            process = context.Process(target=_ddp_process, args=args)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def step_s(self, num_steps: int) -> float:
        """Median step time of a turn, of the slower process."""
        for pipe in self._pipes:
            pipe.send(num_steps)
        return max(pipe.recv() for pipe in self._pipes)

    def close(self) -> None:
        """End both processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


class OwnPair:
    """Two of our workers, one group each, an even share; nothing is emulated."""

    def __init__(self, fleet: Fleet, folder: str, work: Workload, num_steps: int) -> None:
        self._fleet, self._next_step = fleet, 0
        groups = [([(device, work.num_layers)], [work.local_batch]) for device in fleet.devices]
        self._plan = make_plan(groups)
        spec = make_spec(
            work.task,
            folder,
            task_args=work.task_args,
            global_batch=WORLD * work.local_batch,
            microbatch=work.local_batch,
            steps=num_steps,
        )
        fleet.start(spec)
        fleet.install(self._plan, first_step=0, end_step=0, checkpoint=False)

    def step_s(self, num_steps: int) -> float:
        """Median step time of a turn, of the slower process."""
        self._next_step += num_steps
        self._fleet.all("extend", self._next_step)
        self._fleet.run(self._plan)
        news = self._fleet.news()
        return max(statistics.median(r.wall_step_s for r in items) for items in news)


def compare(work: Workload, num_pairs: int) -> list[dict[str, object]]:
    """Interleaved pairs of one workload; who goes first alternates."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, Fleet(("a", "b")) as fleet:
        own = OwnPair(fleet, folder, work, (num_pairs + 1) * STEPS_A_TURN)
        ddp = DdpPair(work)
        own.step_s(STEPS_A_TURN), ddp.step_s(STEPS_A_TURN)  # warm up both
        for pair in range(num_pairs):
            if pair % 2:
                ddp_s, own_s = ddp.step_s(STEPS_A_TURN), own.step_s(STEPS_A_TURN)
            else:
                own_s, ddp_s = own.step_s(STEPS_A_TURN), ddp.step_s(STEPS_A_TURN)
            rows.append(
                {"model": work.name, "own_s": own_s, "ddp_s": ddp_s, "ratio": own_s / ddp_s}
            )
        ddp.close()
    return rows


def run(options: argparse.Namespace) -> Result:
    """Both workloads; the bar holds the first."""
    num_pairs = 6 if options.quick else max(20, options.pairs)
    figures, table = [Figure("pairs", float(num_pairs), "")], []
    for work in WORKLOADS:
        rows = compare(work, num_pairs)
        ratios = [float(str(row["ratio"])) for row in rows]
        low, _, high = statistics.quantiles(ratios, n=4)
        bar = "<= 1.10" if work is WORKLOADS[0] else ""
        figures += [
            Figure(f"{work.name}_ratio_median", statistics.median(ratios), "1", bar),
            Figure(f"{work.name}_ratio_p25", low, "1"),
            Figure(f"{work.name}_ratio_p75", high, "1"),
        ]
        table += rows
    return Result(tuple(figures), tuple(table))


if __name__ == "__main__":
    main("overhead", run, [("pairs", 24, "interleaved pairs, at least 20")])
