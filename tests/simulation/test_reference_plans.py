"""Plans for measured devices and models, timed and checked by a second opinion."""

import json
from itertools import count

import pytest
import yaml

from benchmarks import reference_data
from benchmarks.plan_evaluator import Evaluation, evaluate_candidate
from benchmarks.reference_data import GLOBAL_BATCH, GPT_NEO, OPT_350, Mix, Share
from orchestrator.config import RunConfig
from orchestrator.control.pools import build_cluster
from orchestrator.core.slot import Candidate, PlanningProblem, first_problem
from orchestrator.core.training import TrainingOptions
from orchestrator.strategies.registry import make_strategy
from orchestrator.whatif.plans import WhatIf, what_if

pytestmark = pytest.mark.skipif(
    bool(reference_data.missing()), reason=reference_data.missing() or "the data are there"
)

SEARCH_LOOKS = 300
"""How often a search may ask whether it is out of time: the same plan on every machine."""

MIXES = {
    "one of each": (OPT_350, (Share("A100-40", 1), Share("V100-16", 1))),
    "uneven counts": (OPT_350, (Share("A100-40", 3), Share("V100-16", 13))),
    "three kinds": (OPT_350, (Share("A100-40", 4), Share("V100-16", 8), Share("GH-96", 4))),
    "teams that do not pay": (OPT_350, (Share("RTX-3090", 8, 1.0), Share("Titan-RTX", 4, 1.0))),
    "a model too large for one": (GPT_NEO, (Share("A100-40", 4), Share("V100-16", 8))),
    "hundreds": (GPT_NEO, (Share("A100-40", 128), Share("V100-16", 64))),
}


def _problem(model: str, mix: Mix, *, overlap: bool) -> PlanningProblem:
    training = TrainingOptions(
        task="module:task",  # nobody loads it
        global_batch=GLOBAL_BATCH[model],
        microbatch=reference_data.largest_microbatch(model, mix),
        steps=1,
        overlap=overlap,
    )
    return first_problem(
        build_cluster(reference_data.cluster_options(mix, model=model)),
        reference_data.read_profile(model, [share.kind for share in mix]),
        training,
        max_team=8,
    )


def _planned(problem: PlanningProblem) -> tuple[Candidate, Evaluation]:
    looks = count()
    found = make_strategy("joint").propose(problem, out_of_time=lambda: next(looks) > SEARCH_LOOKS)[
        0
    ]
    return found, evaluate_candidate(problem, found)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", MIXES)
def test_the_chosen_plan_is_sound_and_takes_what_the_planner_says(name: str, overlap: bool) -> None:
    candidate, evaluation = _planned(_problem(*MIXES[name], overlap=overlap))
    assert evaluation.problems == ()
    assert candidate.estimate.step_s == pytest.approx(evaluation.step_s, rel=0.03)


def _what_if(limits: list[dict[str, object]]) -> WhatIf:
    """Eight of each, under limits; the stopwatch counts how often it is read."""
    mix = (Share("A100-40", 8), Share("V100-16", 8))
    data = reference_data.config_data(OPT_350, mix, "unused.json")
    looks = count()
    return what_if(
        RunConfig.parse(yaml.safe_dump(data), [f"budget.limits={json.dumps(limits)}"]),
        reference_data.read_profile(OPT_350, [share.kind for share in mix]),
        stopwatch=lambda: next(looks) / SEARCH_LOOKS,
    )


def test_the_chosen_plan_keeps_to_what_a_zone_may_cost() -> None:
    chosen = _what_if([{"zone": reference_data.ZONE, "max_per_hour_usd": 30}]).chosen
    price = {"a100-40": 3.67, "v100-16": 2.86}
    pools = [device.rpartition("-")[0] for device in chosen.plan.device_ids]
    assert 0 < sum(price[pool] for pool in pools) <= 30


def test_the_chosen_plan_reads_the_share_of_a_pool_on_its_devices() -> None:
    plan = _what_if([{"pool": "v100-16", "min_share": 0.5}]).chosen.plan
    read = sum(
        group.num_samples
        for group in plan.groups
        if group.stages[0].team.device_ids[0].startswith("v100-16-")
    )
    assert read >= 0.5 * plan.num_samples > 0
