"""Models as people bring them: cut, and trained on unlike plans, they equal one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.fleet import Fleet, make_plan
from tests.runtime.harness import make_spec
from tests.runtime.test_exact_traits import difference
from workers.splitting import load_task, split

pytest.importorskip("transformers", reason="the extra dev brings transformers")

TASK = "tests.runtime.hub_models:hub"
NAMES = ("gpt2", "llama", "bert", "t5")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(tuple("abcde")) as fleet:
        yield fleet


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_the_hub_equals_its_own_forward_on_unlike_plans(
    fleet: Fleet, tmp_path: Path, name: str
) -> None:
    spec = make_spec(
        TASK, str(tmp_path), task_args={"name": name}, global_batch=9,
        optimizer={"name": "adamw", "lr": 0.003},
    )  # fmt: skip
    count = len(split(load_task(TASK, {"name": name}, 0)).layers)
    for first, second in ((1, 2), (count // 2, count - 2)):
        plan = make_plan(
            [
                ([("a", first), ("b", count - first)], (2, 2, 1)),
                ([("c", 1), ("d", second - 1), ("e", count - second)], (1, 3)),
            ]
        )
        assert difference(fleet, spec, plan, num_steps=5) <= 1e-12
