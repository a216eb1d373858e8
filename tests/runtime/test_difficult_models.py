"""Models made to be difficult: each trains as one process would, or is refused in one message."""

import math
from pathlib import Path

import pytest

from benchmarks.fleet import Fleet, make_plan
from orchestrator.errors import ConfigError, UserCodeError
from tests.runtime.difficult_models import REFUSED, TRAINS
from tests.runtime.harness import make_spec
from tests.runtime.reference import largest_difference, saved_parameters, train_alone
from workers.splitting import load_task, split
from workers.worker import Worker

pytestmark = pytest.mark.runtime

TASK = "tests.runtime.difficult_models:difficult"
NUM_STEPS = 5


@pytest.mark.parametrize("name", [function.__name__ for function in TRAINS])
def test_a_difficult_model_equals_one_process_on_unlike_plans(
    fleet: Fleet, tmp_path: Path, name: str
) -> None:
    spec = make_spec(TASK, str(tmp_path), task_args={"name": name}, global_batch=9)
    count = len(split(load_task(TASK, {"name": name}, 0)).layers)
    alone, losses = train_alone(spec, NUM_STEPS)
    one = ([("a", 1), ("b", count - 1)], (2, 2, 1)) if count > 1 else ([("a", 1)], (5,))
    plans = (
        make_plan([one, ([("c", count)], (1, 3))]),
        make_plan([([("c", count)], (4, 3, 2))], generation=2),
    )
    fleet.start(spec)
    for plan, first, end in zip(plans, (0, 2), (2, NUM_STEPS), strict=True):
        fleet.install(plan, first_step=first, end_step=end)
        fleet.run_apart(plan, first, end)
    fleet.save(NUM_STEPS, num_layers=count)
    reports = [report for news in fleet.news() for report in news]
    assert [r.loss for r in reports] == pytest.approx(
        [losses[r.step] for r in reports], abs=1e-6, nan_ok=True
    )
    assert any(map(math.isnan, losses)) == any(r.skipped for r in reports)
    tolerance = 1e-6 if name in ("mixed_widths", "complex_numbers") else 1e-12
    saved = saved_parameters(str(tmp_path), NUM_STEPS, count)
    assert largest_difference(alone, saved) <= tolerance


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_wrong_is_refused_before_anything_trains(
    tmp_path: Path, name: str
) -> None:
    spec = make_spec(TASK, str(tmp_path), task_args={"name": name}, global_batch=9)
    with pytest.raises((ConfigError, UserCodeError), match=f"(?s){REFUSED[name][1]}"):
        Worker(spec, "a").load()
