"""Against published planners: A100-40 + V100-16, OPT-350M in fp32 with Adam, batch 1024.

The best published plans score 0.0445 steps a second on 8+8 devices and 0.1444 on 32+32 in a
simulator without overlap. Plans are timed by the second opinion of tests/, not by the planner's
own model. Seconds are CPU time, one core.
"""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace

from benchmarks import reference_data
from benchmarks.reference_data import GLOBAL_BATCH, OPT_350, Mix, Share
from benchmarks.result import Figure, Result, main
from orchestrator.control.pools import build_cluster
from orchestrator.core.model import TrainingOptions, profile_to_json
from orchestrator.core.slot import Candidate, PlanningProblem, first_problem
from orchestrator.reports.records import plan_data
from orchestrator.strategies.registry import make_strategy
from tests.unit.benchmarks.plan_evaluator import Evaluation, evaluate

SIZES, QUICK_SIZES = (4, 8, 16, 32, 64, 128, 256, 512), (8, 32)
NARROW_SIZES = (8, 32)
"""Also with the paths between nodes of one GPU, the narrowest that were measured."""

BEST_PUBLISHED = {8: 0.0445, 32: 0.1444}
WANTED = {8: 0.0455, 32: 0.152}
DEADLINE_S, QUICK_DEADLINE_S = 1.8, 0.8
"""Of one search; what is begun then is still finished."""

TRIED_DEADLINES_S = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2, 1.8)


@dataclass(frozen=True, slots=True)
class Timed:
    """A plan, how long it took to find, and what the second opinion says of it."""

    candidate: Candidate
    search_s: float
    evaluation: Evaluation

    @property
    def steps_per_s(self) -> float:
        """As evaluated, not as planned."""
        return 1.0 / self.evaluation.step_s

    @property
    def error_pct(self) -> float:
        """Planner's own step time over the evaluated one."""
        return 100 * abs(self.candidate.estimate.step_s / self.evaluation.step_s - 1)


def make_problem(mix: Mix, *, seed: int, node_link_gpus: int = 4) -> PlanningProblem:
    """The first slot of a mix: nothing runs, money does not count."""
    training = TrainingOptions(
        task="",
        global_batch=GLOBAL_BATCH[OPT_350],
        microbatch=reference_data.largest_microbatch(OPT_350, mix),
        steps=1,
    )
    return first_problem(
        build_cluster(reference_data.cluster_options(mix, node_link_gpus=node_link_gpus)),
        reference_data.read_profile(OPT_350, [share.kind for share in mix]),
        training,
        max_team=8,
        seed=seed,
    )


def search(problem: PlanningProblem, deadline_s: float) -> Timed:
    """Plan once from scratch."""
    start_s = time.process_time()

    def out_of_time() -> bool:
        return time.process_time() > start_s + deadline_s

    found = make_strategy("joint").propose(problem, out_of_time=out_of_time)
    search_s = time.process_time() - start_s
    candidate = next(c for c in found if not c.plan.is_idle)
    evaluation = evaluate(
        plan_data(candidate.plan, [d.device_id for d in problem.cluster.devices]),
        [[stage.inflight for stage in group.stages] for group in candidate.plan.groups],
        json.loads(json.dumps(profile_to_json(problem.model))),
        problem.cluster,
        batch_samples=problem.batch_samples,
        overlap=problem.overlap,
    )
    return Timed(candidate, search_s, evaluation)


def first_better_s(problem: PlanningProblem, least_steps_per_s: float) -> float:
    """CPU seconds of the shortest search whose plan beats a rate; infinite: none does."""
    for deadline_s in TRIED_DEADLINES_S:
        found = search(problem, deadline_s)
        if found.steps_per_s > least_steps_per_s:
            return found.search_s
    return float("inf")


def measure(each: int, options: argparse.Namespace, node_link_gpus: int = 4) -> dict[str, object]:
    """One size: overlap off and on, the A100s alone, what is idle."""
    deadline_s = QUICK_DEADLINE_S if options.quick else DEADLINE_S
    mix = (Share("A100-40", each), Share("V100-16", each))
    problem = make_problem(mix, seed=options.seed, node_link_gpus=node_link_gpus)
    found = search(problem, deadline_s)
    overlapped = search(replace(problem, overlap=True), deadline_s)
    alone = search(
        make_problem(mix[:1], seed=options.seed, node_link_gpus=node_link_gpus), deadline_s
    )
    used = set(found.candidate.plan.device_ids)
    idle = Counter(d.kind for d in problem.cluster.devices if d.device_id not in used)
    ideal = reference_data.ideal_steps_per_s(OPT_350, mix)
    published = BEST_PUBLISHED.get(each)
    return {
        "each": each,
        "links_of": node_link_gpus,
        "it_per_s": found.steps_per_s,
        "overlap_it_per_s": overlapped.steps_per_s,
        "ideal_pct": 100 * found.steps_per_s / ideal,
        "a100_alone_it_per_s": alone.steps_per_s,
        "search_s": max(found.search_s, overlapped.search_s, alone.search_s),
        "first_better_s": None if published is None else first_better_s(problem, published),
        "groups": len(found.candidate.plan.groups),
        "idle": dict(idle),
        "error_pct": max(timed.error_pct for timed in (found, overlapped, alone)),
        "problems": [*found.evaluation.problems, *overlapped.evaluation.problems],
    }


def run(options: argparse.Namespace) -> Result:
    """All sizes, and two of them over narrow links."""
    sizes = QUICK_SIZES if options.quick else SIZES
    rows = [measure(each, options) for each in sizes]
    by_size = {row["each"]: row for row in rows}
    figures = []
    for each, wanted in WANTED.items():
        row = by_size[each]
        figures += [
            Figure(f"it_per_s_{each}", _number(row["it_per_s"]), "1/s", f">= {wanted}"),
            Figure(f"overlap_it_per_s_{each}", _number(row["overlap_it_per_s"]), "1/s"),
            Figure(f"ideal_pct_{each}", _number(row["ideal_pct"]), "%"),
            Figure(f"search_s_{each}", _number(row["search_s"]), "s", "<= 2"),
            Figure(f"first_better_s_{each}", _number(row["first_better_s"]), "s"),
        ]
    if not options.quick:
        narrow = [measure(each, options, node_link_gpus=1) for each in NARROW_SIZES]
        rows += narrow
        figures += [
            Figure(f"narrow_it_per_s_{row['each']}", _number(row["it_per_s"]), "1/s")
            for row in narrow
        ]
    over_alone = [_number(r["it_per_s"]) / _number(r["a100_alone_it_per_s"]) for r in rows]
    problems = [problem for row in rows for problem in _list(row["problems"])]
    figures += [
        Figure("search_s_max", max(_number(row["search_s"]) for row in rows), "s", "<= 5"),
        Figure("over_a100_alone_min", min(over_alone), "1", ">= 1"),
        Figure("estimate_error_pct_max", max(_number(r["error_pct"]) for r in rows), "%", "<= 3"),
        Figure("broken_plans", len(problems), "plans", "== 0"),
    ]
    return Result(tuple(figures), tuple(rows))


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _list(value: object) -> list[object]:
    assert isinstance(value, list)
    return value


if __name__ == "__main__":
    if reason := reference_data.missing():
        sys.stdout.write(json.dumps({"benchmark": "published", "skipped": reason}) + "\n")
        sys.exit(0)
    main("published", run)
