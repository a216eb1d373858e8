"""Rounds that devices report become whole evaluations, each once."""

import math

import pytest

from orchestrator.core.evaluation import Criterion, EarlyStop, Evaluated, Evaluation, RoundReport
from orchestrator.core.training import TrainingOptions
from orchestrator.errors import ConfigError, UserCodeError
from orchestrator.runtime.evaluations import Evaluations


def told_of(told: list[Evaluation], **options: object) -> Evaluations:
    """Two rounds (12 samples in batches of 8) every ten steps of 25."""
    training = TrainingOptions(
        task="m:t", global_batch=8, steps=25, eval_every_steps=10,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    made = Evaluations(training, num_steps=25, num_samples=12, tell=told.append)
    made.expect(("a", "b"), 1)
    return made


def a_round(
    step: int, index: int, device_id: str, *, generation: int = 1, **sums: float
) -> RoundReport:
    """Device b takes the loss."""
    if device_id == "b":
        sums = {"loss_sum": 6.0, "weight_sum": 4.0, **sums}
    return RoundReport(generation, step, index, device_id, round_s=0.5, **sums)  # type: ignore[arg-type]


def test_an_evaluation_is_whole_once_every_device_has_told_of_every_round() -> None:
    told: list[Evaluation] = []
    made = told_of(told)
    assert [step for step in range(26) if made.owes(step)] == [10, 20, 25]
    for index in (0, 1):  # one device is ahead, as reports come in bulk
        made.take(a_round(10, index, "a"))
    assert made.done == Evaluated()
    made.take(a_round(10, 0, "b"))
    assert (made.done, made.owes(10)) == (Evaluated(10, 1), True)
    made.take(a_round(10, 1, "b", loss_sum=2.0))
    made.follow()
    assert told == [Evaluation(10, 1, 12, 1.0, {}, eval_s=1.0, best=True)]
    assert not made.owes(10)
    made.follow()
    assert len(told) == 1


def test_rounds_of_two_plans_make_one_evaluation_and_those_of_half_a_plan_none() -> None:
    told: list[Evaluation] = []
    made = told_of(told)
    for device_id in ("a", "b"):
        made.take(a_round(10, 0, device_id))
    made.take(a_round(10, 1, "a"))  # b goes before it has told
    made.expect(("b",), 2)
    assert made.done == Evaluated(10, 1)
    made.take(a_round(10, 1, "a"))  # late, and of the plan before
    made.take(a_round(10, 1, "b", generation=2, loss_sum=2.0))
    made.follow()
    assert [(e.loss, e.generation) for e in told] == [(1.0, 2)]


def test_what_a_restored_checkpoint_undoes_is_evaluated_again() -> None:
    told: list[Evaluation] = []
    made = told_of(told)
    for step in (10, 20):
        for index in (0, 1):
            for device_id in ("a", "b"):
                made.take(a_round(step, index, device_id))
    made.rewind(10)
    assert (made.done, made.owes(10), made.owes(20)) == (Evaluated(10, 2), False, True)
    made.take(a_round(20, 0, "a"))
    made.take(a_round(20, 0, "b"))
    assert made.done == Evaluated(10, 2)  # that was before
    made.rewind(9)
    assert (made.done, made.whole) == (Evaluated(), [])


def test_metrics_are_sums_over_weights_and_one_without_any_has_no_value() -> None:
    told: list[Evaluation] = []
    made = told_of(told, keep_best=Criterion(metric="hits", mode="max"))
    for index in (0, 1):
        made.take(a_round(10, index, "a"))
        made.take(a_round(10, index, "b", metrics=(("hits", 3.0, 4.0), ("none", 0.0, 0.0))))  # type: ignore[arg-type]
    made.follow()
    assert told[0].metrics == {"hits": 0.75, "none": None}
    assert made.kept_steps == (10,)
    assert made.owes_checkpoint(20)


@pytest.mark.parametrize(
    ("key", "asked"),
    [("keep_best", Criterion(metric="hit", mode="max")),
     ("early_stop", EarlyStop(metric="hit", mode="max"))],
)  # fmt: skip
def test_a_metric_that_the_task_does_not_return_is_named_with_those_it_does(
    key: str, asked: Criterion
) -> None:
    made = told_of([], **{"keep_best": Criterion(), key: asked})
    for index in (0, 1):
        made.take(a_round(10, index, "a"))
        made.take(a_round(10, index, "b", metrics=(("hits", 3.0, 4.0),)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"{key}.metric is 'hit'.* write one of loss, hits"):
        made.follow()


def test_early_stop_on_a_number_that_never_comes_is_an_error_once_patience_is_over() -> None:
    told: list[Evaluation] = []
    made = told_of(told, early_stop=EarlyStop(patience=2))
    for step in (10, 20):
        made.follow()  # one evaluation without a number may be bad luck
        for index in (0, 1):
            made.take(a_round(step, index, "a"))
            made.take(a_round(step, index, "b", loss_sum=math.nan))
    with pytest.raises(UserCodeError, match=r"early_stop: loss .* \(2 by step 20\).*Task\.loss"):
        made.follow()
    assert (len(told), made.end_reason) == (2, None)


def test_a_run_that_evaluates_nothing_owes_nothing() -> None:
    made = Evaluations()
    made.expect(("a",), 1)
    assert not any(map(made.owes, range(100)))
    assert (made.end_reason, made.kept_steps) == (None, ())
