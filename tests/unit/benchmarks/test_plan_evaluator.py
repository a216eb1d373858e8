"""The second opinion itself, on plans whose time can be worked out by hand."""

import json

import pytest

from benchmarks.builders import make_cluster, make_device, make_profile
from benchmarks.plan_evaluator import Evaluation, evaluate
from orchestrator.core.cluster import ClusterState, Device
from orchestrator.core.model import profile_to_json

FORWARD_S, BACKWARD_S, UPDATE_S = 0.1, 0.2, 0.05  # of a layer and a sample
PROFILE = json.loads(
    json.dumps(
        profile_to_json(
            make_profile({"gpu": [FORWARD_S] * 4}, update_s=UPDATE_S / 4, param_bytes=1e6)
        )
    )
)


def _devices(count: int) -> list[Device]:
    return [make_device(f"d-{i}") for i in range(count)]


def _evaluate(
    cluster: ClusterState,
    *groups: tuple[int, list[tuple[str, int, int]]],
    idle: tuple[str, ...] = (),
    batch_samples: int,
    overlap: bool = False,
) -> Evaluation:
    plan = {
        "groups": [
            {
                "microbatches": [1] * count,
                "stages": [
                    {"devices": [device], "first_layer": first, "end_layer": end}
                    for device, first, end in stages
                ],
            }
            for count, stages in groups
        ],
        "idle": list(idle),
    }
    inflight = [range(len(stages), 0, -1) for _, stages in groups]
    return evaluate(
        plan, [list(k) for k in inflight], PROFILE, cluster,
        batch_samples=batch_samples, overlap=overlap,
    )  # fmt: skip


def test_one_device_takes_all_microbatches_one_after_another() -> None:
    found = _evaluate(make_cluster(_devices(1)), (5, [("d-0", 0, 4)]), batch_samples=5)
    assert found.step_s == pytest.approx(5 * 4 * (FORWARD_S + BACKWARD_S) + UPDATE_S)
    assert found.problems == ()


def test_an_even_pipeline_fills_and_drains_once() -> None:
    chain = [("d-0", 0, 2), ("d-1", 2, 4)]
    found = _evaluate(make_cluster(_devices(2)), (5, chain), batch_samples=5)
    assert found.pipelines_s == pytest.approx((5 + 2 - 1) * 2 * (FORWARD_S + BACKWARD_S))


def test_two_groups_sum_their_gradients_in_a_ring_after_the_slower_one() -> None:
    cluster = make_cluster(_devices(2), latency_s=0.01, bandwidth_bytes_per_s=1e7)
    groups = [(3, [("d-0", 0, 4)]), (2, [("d-1", 0, 4)])]
    found = _evaluate(cluster, *groups, batch_samples=5)
    assert found.pipelines_s == pytest.approx(3 * 4 * (FORWARD_S + BACKWARD_S))
    assert found.sums_s == pytest.approx(2 * (1 / 2 * 4e6 / 1e7 + 0.01))


def test_overlap_starts_the_sum_of_the_last_stage_first() -> None:
    cluster = make_cluster(_devices(4), bandwidth_bytes_per_s=1e7)
    groups = [
        (2, [("d-0", 0, 2), ("d-1", 2, 4)]),
        (2, [("d-2", 0, 2), ("d-3", 2, 4)]),
    ]
    apart = _evaluate(cluster, *groups, batch_samples=4)
    overlapped = _evaluate(cluster, *groups, batch_samples=4, overlap=True)
    segment_s = 2 * 1 / 2 * 2e6 / 1e7
    assert apart.sums_s == pytest.approx(segment_s)  # both segments at once: unlike owners
    assert overlapped.sums_s == pytest.approx(segment_s)  # the first stage's remains


def test_what_is_wrong_with_a_plan_is_found() -> None:
    small = [make_device("d-0", memory_bytes=10_000_000), make_device("d-1")]
    found = _evaluate(make_cluster(small), (2, [("d-0", 0, 3)]), batch_samples=3)
    assert [problem.split(" ")[0] for problem in found.problems] == [
        "devices", "the", "stages", "d-0",
    ]  # fmt: skip
