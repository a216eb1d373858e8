"""A homogeneous two-worker job against plain DistributedDataParallel: ratio of step times.

Both train the same model on the same two cores, in processes that stay up; a pair is some
steps of one, then some of the other while the first waits. Each side is judged by the
median of its steps within the pair, the whole by the median over the pairs.
"""

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.result import Figure, Result, main
from benchmarks.tasks import perceptron
from tests.runtime.harness import Fleet, make_plan, make_spec

WORLD, LOCAL_BATCH, STEPS_A_TURN = 2, 128, 8
WIDTH = 512


def _ddp_process(rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    task = perceptron(width=WIDTH)
    model = DistributedDataParallel(torch.nn.Sequential(*task.layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(task.dataset, WORLD, rank)
    loader = DataLoader(task.dataset, LOCAL_BATCH, sampler=sampler, drop_last=True)
    batches = iter(())
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

    def __init__(self) -> None:
        context = get_context("spawn")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self._processes = [], []
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_ddp_process, args=(rank, self._store.port, theirs))
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

    def __init__(self, fleet: Fleet, folder: str, num_steps: int) -> None:
        self._fleet, self._next_step = fleet, 0
        self._plan = make_plan([([(device, 6)], [LOCAL_BATCH]) for device in fleet.devices])
        spec = make_spec(
            "benchmarks.tasks:perceptron",
            folder,
            task_args={"width": WIDTH},
            global_batch=WORLD * LOCAL_BATCH,
            microbatch=LOCAL_BATCH,
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


def run(options: argparse.Namespace) -> Result:
    """Interleaved pairs; who goes first alternates."""
    num_pairs = 6 if options.quick else max(20, options.pairs)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, Fleet(("a", "b")) as fleet:
        own = OwnPair(fleet, folder, (num_pairs + 1) * STEPS_A_TURN)
        ddp = DdpPair()
        own.step_s(STEPS_A_TURN), ddp.step_s(STEPS_A_TURN)  # warm up both
        ratios = []
        for pair in range(num_pairs):
            if pair % 2:
                ddp_s, own_s = ddp.step_s(STEPS_A_TURN), own.step_s(STEPS_A_TURN)
            else:
                own_s, ddp_s = own.step_s(STEPS_A_TURN), ddp.step_s(STEPS_A_TURN)
            ratios.append(own_s / ddp_s)
            rows.append({"pair": pair, "own_s": own_s, "ddp_s": ddp_s, "ratio": own_s / ddp_s})
        ddp.close()
    quartiles = statistics.quantiles(ratios, n=4)
    return Result(
        (
            Figure("ratio_median", statistics.median(ratios), "1", "<= 1.10"),
            Figure("ratio_p25", quartiles[0], "1"),
            Figure("ratio_p75", quartiles[2], "1"),
            Figure("pairs", float(num_pairs), ""),
        ),
        tuple(rows),
    )


if __name__ == "__main__":
    main("overhead", run, [("pairs", 24, "interleaved pairs, at least 20")])
