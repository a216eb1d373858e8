"""Closed-form pipeline times against the event simulation, of random groups and of chosen plans.

A class is what a message takes, on average, over the work of a stage. Errors are signed in
the table: negative where the closed form promises too much. The ``inflight`` figures are what the
microbatches in flight that planning gives save against 2 (S - s) - 1, capped stage by stage by
the same memory: mean change of the event time of uneven pipelines.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from benchmarks.builders import make_cluster, make_device, make_group, make_problem
from benchmarks.builders import make_profile as profile_of
from benchmarks.result import Figure, Result, main
from orchestrator.core.cluster import Link
from orchestrator.core.plan import Group
from orchestrator.core.slot import PlanningProblem
from orchestrator.errors import InfeasibleError
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import group_makespan
from orchestrator.planning.pipeline import Chain, best_inflight, make_chain
from orchestrator.strategies.explorer import Explorer, candidates_of

P2P_RATIOS = (0.01, 0.05, 0.1, 0.2, 0.5, 0.8)
COUNTS = (2, 4, 8, 16, 32, 64)
MICROBATCH = 4


def random_links(
    rng: np.random.Generator, mean_s: float, num_borders: int, message_bytes: float
) -> list[Link]:
    """Links between zones in a row, each direction its own, up to twice the mean time."""
    links = []
    for border in range(num_borders):
        for source, target in ((border, border + 1), (border + 1, border)):
            seconds = rng.uniform(0.0, 2.0) * mean_s
            latency_s = rng.uniform(0.0, 0.3) * seconds
            rate = message_bytes / max(seconds - latency_s, 1e-12)
            links.append(Link(f"z{source}", f"z{target}", latency_s, rate))
    return links


def random_group(
    rng: np.random.Generator, p2p_ratio: float, *, extended: bool, short: bool
) -> tuple[CostModel, Group]:
    """A pipeline of uneven stages; ``extended`` keeps more microbatches in flight."""
    num_stages, count = int(rng.integers(2, 9)), int(rng.choice(COUNTS))
    forward_s, backward_ratio = rng.uniform(0.2, 1.8, num_stages), rng.uniform(1.5, 2.5)
    mean_s = p2p_ratio * (1 + backward_ratio) * forward_s.mean()
    devices = [make_device(f"d-{s}", zone=f"z{s}") for s in range(num_stages)]
    profile = profile_of(
        {"gpu": list(forward_s / MICROBATCH)},
        microbatches=range(1, MICROBATCH + 1),
        backward_ratio=backward_ratio,
        boundary_bytes=1e6 / MICROBATCH,
    )
    cluster = make_cluster(devices, links=random_links(rng, mean_s, num_stages - 1, 1e6))
    cost = CostModel(make_problem(cluster, profile))
    last = [int(rng.integers(1, MICROBATCH))] if short else []
    group = make_group(devices, range(num_stages + 1), [MICROBATCH] * count + last)
    if extended:
        group = _holding(group, range(2 * num_stages - 1, 0, -2))
    return cost, group


def error_pct(cost: CostModel, group: Group) -> float:
    """The closed form's error."""
    exact_s = group_makespan(cost, group, "1f1b")
    return 100 * (cost.evaluate([group], "1f1b").group_s[0] / exact_s - 1)


def class_row(rng: np.random.Generator, p2p_ratio: float, runs: int) -> dict[str, object]:
    """Errors of one class: plain and extended K_s, with and without a short last microbatch."""
    errors = [
        error_pct(*random_group(rng, p2p_ratio, extended=extended, short=short))
        for _ in range(runs)
        for extended in (False, True)
        for short in (False, True)
    ]
    size = np.abs(errors)
    return {
        "p2p_pct": 100 * p2p_ratio,
        "groups": len(errors),
        "bias_pct": float(np.mean(errors)),
        "median_pct": float(np.median(size)),
        "p95_pct": float(np.percentile(size, 95)),
        "worst_pct": float(size.max()),
        "above_pct": float(max(errors)),
    }


def chain_of(cost: CostModel, group: Group) -> Chain:
    """Times of a group's full microbatch."""
    stages, size = group.stages, group.microbatches[0]
    seconds = [cost.stage_seconds(s.team, s.first_layer, s.end_layer, size) for s in stages]
    message = [cost.tables.boundary_bytes(s.end_layer - 1, size) for s in stages]
    links = [(cost.link(a.team, b.team), cost.link(b.team, a.team)) for a, b in pairwise(stages)]
    pairs = list(zip(links, message, strict=False))
    return make_chain(
        seconds,
        [(down.transfer_s(size), up.transfer_s(size)) for (down, up), size in pairs],
        [(down.occupied_s(size), up.occupied_s(size)) for (down, up), size in pairs],
    )


def inflight_change_pct(
    rng: np.random.Generator, p2p_ratio: float, num_microbatches: int, *, tight: bool
) -> float:
    """Event time with ``best_inflight`` over that of the capped rule, less one.

    Memory holds four times what plain 1F1B holds; tight: once to twice, stage by stage.
    """
    cost, group = random_group(rng, p2p_ratio, extended=False, short=False)
    group = Group(group.stages, (MICROBATCH,) * num_microbatches)
    plain = range(len(group.stages), 0, -1)
    wanted = [2 * k - 1 for k in plain]
    room = [int(k * rng.uniform(1, 2)) if tight else 4 * k for k in plain]
    capped = accumulate(map(min, wanted, room), min)
    ours_s, capped_s = (
        group_makespan(cost, _holding(group, inflight), "1f1b")
        for inflight in (best_inflight(chain_of(cost, group), wanted, room), capped)
    )
    return 100 * (ours_s / capped_s - 1)


def _holding(group: Group, inflight: Iterable[int]) -> Group:
    stages = zip(group.stages, inflight, strict=True)
    return Group(tuple(replace(stage, inflight=k) for stage, k in stages), group.microbatches)


def random_problem(rng: np.random.Generator, p2p_ratio: float) -> PlanningProblem:
    """Unlike devices in two zones, of which a few together hold the model."""
    num_devices, num_layers = int(rng.integers(3, 8)), int(rng.integers(8, 13))
    forward_s = rng.uniform(0.2, 1.8, num_layers) / MICROBATCH
    held = int(rng.integers(1, min(4, num_devices) + 1))  # about how many devices hold the model
    param_bytes = 1e6
    devices = [
        make_device(
            f"{'abc'[i % 3]}-{i}",
            zone=f"z{int(rng.integers(0, 2))}",
            slowdown=(1.0, 1.7, 3.0)[i % 3] * rng.uniform(0.9, 1.2),
            memory_bytes=int(4.0 * param_bytes * num_layers / held * rng.uniform(1.1, 1.5)),
        )
        for i in range(num_devices)
    ]
    mean_s = p2p_ratio * 3 * MICROBATCH * forward_s.sum() * 1.7 / held
    rate = 1e6 / mean_s
    links = [
        Link(a, b, 0.1 * mean_s, rate * (3.0 if a == b else 1.0) * rng.uniform(0.7, 1.4))
        for a in ("z0", "z1")
        for b in ("z0", "z1")
    ]
    profile = profile_of(
        {"gpu": list(forward_s)},
        microbatches=(1, 2, MICROBATCH),
        param_bytes=param_bytes,
        boundary_bytes=1e6 / MICROBATCH,
        stash_bytes=1e3,
    )
    prices = {"a": 3e-3, "b": 1.5e-3, "c": 0.5e-3}
    return make_problem(
        make_cluster(devices, links=links, price_usd_per_s=prices),
        profile,
        batch_samples=int(rng.integers(24, 161)),
        microbatch_samples=MICROBATCH,
        backlog_usd=float(rng.choice([0.0, 20.0])),
        seed=int(rng.integers(1 << 30)),
    )


def chosen_row(problem: PlanningProblem, p2p_ratio: float) -> dict[str, object]:
    """The slowest pipeline of the plan that is best in closed form, and of the one chosen."""
    explorer, cost = Explorer(), CostModel(problem)
    found = explorer.search(problem, lambda: False)
    closed = max(explorer.seen(problem), key=lambda trial: cost.score(trial.estimate))
    chosen = candidates_of(problem, found)[0]
    promised_s = [max(closed.estimate.group_s), max(chosen.estimate.group_s)]
    exact_s = [
        max(group_makespan(cost, group, schedule) for group in groups)
        for groups, schedule in (
            (closed.groups, closed.schedule),
            (chosen.plan.groups, chosen.plan.schedule),
        )
    ]
    errors = [100 * (p / e - 1) for p, e in zip(promised_s, exact_s, strict=True)]
    return {
        "p2p_pct": 100 * p2p_ratio,
        "devices": len(problem.cluster.devices),
        "groups": len(closed.groups),
        "longest": max(len(group.stages) for group in closed.groups),
        "chosen_pct": errors[0],
        "reranked_pct": errors[1],
    }


def run(options: argparse.Namespace) -> Result:
    """Figures 1 and 2 of the model: the worst class each, and the worst plan."""
    rng = np.random.default_rng(options.seed)
    table = [class_row(rng, p2p, 50 if options.quick else 400) for p2p in P2P_RATIOS]
    plans: list[dict[str, object]] = []
    while len(plans) < (6 if options.quick else 60):
        p2p_ratio = P2P_RATIOS[len(plans) % len(P2P_RATIOS)]
        try:
            plans.append(chosen_row(random_problem(rng, p2p_ratio), p2p_ratio))
        except InfeasibleError:  # no combination of the drawn devices holds the model
            continue

    def worst(rows: list[dict[str, object]], key: str) -> float:
        return max(abs(float(str(row[key]))) for row in rows)

    runs = 10 if options.quick else 60
    few, many = (
        float(
            np.mean(
                [
                    inflight_change_pct(rng, p, count, tight=True)
                    for p in (0.2, 0.5, 0.8)
                    for _ in range(runs)
                ]
            )
        )
        for count in (8, 64)
    )
    roomy = float(np.mean([inflight_change_pct(rng, 0.8, 32, tight=False) for _ in range(runs)]))
    chosen_pct = [float(str(row["chosen_pct"])) for row in plans]
    figures = (
        Figure("bias_mean_pct", worst(table, "bias_pct"), "%", "<= 4"),
        Figure("abs_median_pct", worst(table, "median_pct"), "%", "<= 3"),
        Figure("abs_p95_pct", worst(table, "p95_pct"), "%", "<= 12"),
        Figure("abs_worst_pct", worst(table, "worst_pct"), "%", "<= 25"),
        Figure("chosen_mean_pct", abs(float(np.mean(chosen_pct))), "%", "<= 5"),
        Figure("chosen_worst_pct", worst(plans, "chosen_pct"), "%", "<= 18"),
        Figure("reranked_worst_pct", worst(plans, "reranked_pct"), "%", "== 0"),
        Figure("inflight_roomy_pct", roomy, "%"),
        Figure("inflight_tight_few_pct", few, "%"),
        Figure("inflight_tight_many_pct", many, "%"),
    )
    return Result(figures, tuple(table), {"plans": plans})


if __name__ == "__main__":
    main("time_model", run)
