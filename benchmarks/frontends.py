"""Which front end takes which model, and what it costs to take a large one.

The table is of ``hub_models``; a model is accepted when it is split and passes the rehearsal. The
large one is a GPT-2 of 24 layers and width 1024 at length 128: split, compared with the whole one,
rehearsed and profiled, in a process of its own, whose memory is counted. One of 10 billion
parameters is described and planned (``described``).
"""

import argparse
import multiprocessing
import resource
import time
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.described import described
from benchmarks.hub_models import (
    FRONT_ENDS,
    MODELS,
    Texts,
    cross_entropy,
    gpt2,
    hub,
    without_labels,
)
from benchmarks.result import Figure, Result, main
from orchestrator.core.training import Task, TrainingOptions
from orchestrator.errors import ConfigError, UserCodeError
from workers.data import SampleSource
from workers.profiler import profile_model
from workers.rehearsal import rehearse
from workers.splitting import SplitModel, split

LENGTH, WORDS = 128, 50257


def take(task: Task) -> SplitModel:
    """What a worker does with a task before anything trains."""
    model = split(task)
    rehearse(model, task, SampleSource(task.dataset, task.collate, 0, task.inputs), 0)
    return model


def tried() -> list[dict[str, object]]:
    """Every model by every front end: in how many parts, or why not."""
    rows: list[dict[str, object]] = []
    for name in MODELS:
        for front_end in FRONT_ENDS:
            try:
                parts, why = len(take(hub(name, front_end)).layers), ""
            except (ConfigError, UserCodeError) as error:
                parts, why = 0, str(error).partition("\n")[0]
            rows.append({"model": name, "front_end": front_end, "parts": parts, "why": why})
    return rows


@dataclass(frozen=True, slots=True)
class Cost:
    """Of taking a large model."""

    num_parts: int
    split_s: float
    rehearse_s: float
    profile_s: float
    extra_bytes: int
    """Most memory at any time, above what stood before and one set of gradients."""


def _large(num_layers: int, pipe: Connection) -> None:
    model = gpt2(n_layer=num_layers, n_embd=1024, n_head=16, vocab_size=WORDS, n_positions=1024)
    gradient_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0).step()  # loads torch's compiler
    before_bytes = _resident_bytes()
    data = Texts(LENGTH, vocabulary=WORDS)
    task = Task(layers=model, loss=cross_entropy, dataset=data, inputs=without_labels)
    starts_s = [time.perf_counter()]
    parts = split(task)
    starts_s.append(time.perf_counter())
    rehearse(parts, task, SampleSource(data, None, 0, without_labels), 0)
    starts_s.append(time.perf_counter())
    profile_model(parts, task, TrainingOptions(task="a:b", global_batch=1, steps=1))
    starts_s.append(time.perf_counter())
    taken_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    split_s, rehearse_s, profile_s = (b - a for a, b in pairwise(starts_s))
    extra_bytes = taken_bytes - before_bytes - gradient_bytes
    pipe.send(Cost(len(parts.layers), split_s, rehearse_s, profile_s, extra_bytes))


def _resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def take_large(num_layers: int) -> Cost:
    """Take a GPT-2 of that many layers in a process of its own.

    Raises:
        EOFError: If the process ends early: it was refused, or memory ran out.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_large, args=(num_layers, theirs))
    process.start()
    theirs.close()
    cost: Cost = ours.recv()
    process.join()
    return cost


def run(options: argparse.Namespace) -> Result:
    """The table, and the large model (of 4 layers instead of 24 in the short form)."""
    rows = tried()
    cost = take_large(4 if options.quick else 24)
    figures = (
        Figure("accepted", float(sum(not row["why"] for row in rows)), "ways"),
        Figure("large_parts", float(cost.num_parts), "parts"),
        Figure("large_split_s", cost.split_s, "s"),
        Figure("large_rehearse_s", cost.rehearse_s, "s"),
        Figure("large_profile_s", cost.profile_s, "s"),
        Figure("large_split_profile_s", cost.split_s + cost.profile_s, "s", "<= 60"),
        Figure("large_extra_gib", cost.extra_bytes / 2**30, "GiB", "<= 2"),
        *described(options.seed),
    )
    table: Any = tuple(rows)
    return Result(figures, table)


if __name__ == "__main__":
    main("frontends", run)
