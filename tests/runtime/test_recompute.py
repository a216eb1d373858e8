"""Layers that run again in backward train bit by bit as those that do not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.fleet import Fleet, make_plan
from orchestrator.core.plan import Plan
from tests.runtime.harness import make_spec
from tests.runtime.reference import saved_parameters


def recomputing(plan: Plan) -> Plan:
    """The same plan, every stage of which keeps nothing but inputs."""
    groups = (
        replace(group, stages=tuple(replace(stage, recompute=True) for stage in group.stages))
        for group in plan.groups
    )
    return replace(plan, groups=tuple(groups))


def trained(
    fleet: Fleet, plan: Plan, url: str, task: str, **changes: object
) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Parameters after three steps, and what the first worker held at most."""
    spec = make_spec(task, url, global_batch=plan.num_samples, steps=3, **changes)
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=3)
    fleet.run(plan)
    peak_bytes = max(report.peak_memory_bytes for report in fleet.news()[0])
    fleet.save(3, num_layers=plan.num_layers)
    return saved_parameters(url, 3, plan.num_layers), peak_bytes


@pytest.mark.parametrize(
    ("task", "num_layers", "args"),
    [
        ("language", 7, {"dropout": 0.3, "double": False}),  # tied
        ("language", 7, {"dropout": 0.3, "ragged": True, "tied": False, "double": False}),
        ("mlp", 6, {}),
        ("odd", 9, {"double": False}),  # frozen ones, tuples, one that works in place
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_bits_are_the_same(
    fleet: Fleet, tmp_path: Path, task: str, num_layers: int, args: dict, precision: str
) -> None:
    plan = make_plan(
        [
            ([("a", num_layers // 2), ("b", num_layers - num_layers // 2)], [2, 2, 1]),
            ([("c", num_layers)], [3]),
        ]
    )
    plain, again = (
        trained(fleet, p, str(tmp_path / name), task, task_args=args, precision=precision)
        for name, p in (("plain", plan), ("again", recomputing(plan)))
    )
    assert plain[1] != again[1], "the first stage keeps other tensors"
    for mine, other in zip(plain[0], again[0], strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in mine.items())
