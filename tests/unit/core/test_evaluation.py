"""Which evaluation is the best, and when a run ends early."""

import math

import pytest

from orchestrator.core.evaluation import Criterion, EarlyStop, Evaluation


def at(*losses: float | None) -> list[Evaluation]:
    return [Evaluation(10 * i, 1, 8, loss) for i, loss in enumerate(losses, start=1)]


def test_less_loss_is_better_and_the_first_of_equal_ones_is_the_best() -> None:
    best = Criterion().best_of(at(3.0, 1.0, 2.0, 1.0))
    assert best is not None
    assert best.step == 20


def test_more_of_a_metric_is_better_where_that_is_said() -> None:
    told = [Evaluation(s, 1, 8, 1.0, {"accuracy": a}) for s, a in ((10, 0.5), (20, 0.9), (30, 0.8))]
    best = Criterion(metric="accuracy", mode="max").best_of(told)
    assert best is told[1]
    least = Criterion(metric="accuracy", mode="min").best_of(told)
    assert least is told[0]


def test_what_is_no_number_is_never_the_best() -> None:
    best = Criterion().best_of(at(math.nan, None, 5.0, math.inf))
    assert best is not None
    assert best.step == 30
    assert Criterion().best_of(at(math.nan)) is None
    assert Criterion().best_of(()) is None


def test_of_a_metric_it_has_to_be_said_which_way_is_better() -> None:
    with pytest.raises(ValueError, match="mode is missing; write mode: max if more accuracy"):
        Criterion(metric="accuracy")


def test_so_many_evaluations_that_are_no_better_end_the_run() -> None:
    stop = EarlyStop(patience=2)
    assert stop.reason(at(3.0, 2.0, 2.5)) is None
    assert stop.reason(at(3.0, 2.0, 2.5, 1.0, 1.5)) is None  # better once: counted anew
    assert stop.reason(at(3.0, 2.0, 2.5, 2.0)) == (
        "early stop: loss was no better in 2 evaluations in a row than 2 at step 20"
    )


def test_a_little_better_does_not_count_where_more_is_asked_for() -> None:
    assert "no better by more than 0.5 in 2" in str(
        EarlyStop(patience=2, min_delta=0.5).reason(at(3.0, 2.9, 2.6))
    )
    assert EarlyStop(patience=2, min_delta=0.5).reason(at(3.0, 2.9, 2.4)) is None


def test_a_loss_that_is_never_a_number_is_no_early_stop_and_one_that_was_can_be() -> None:
    stop = EarlyStop(patience=2)
    assert [stop.is_blind(at(*[math.nan] * n)) for n in (1, 2)] == [False, True]
    assert stop.reason(at(math.nan, math.nan)) is None
    assert not stop.is_blind(at(3.0, math.nan, math.nan))
    assert (stop.reason(at(3.0, math.nan, math.nan)) or "").endswith("than 3 at step 10")


@pytest.mark.parametrize(("name", "value"), [("patience", 0), ("min_delta", -0.1)])
def test_a_rule_that_makes_no_sense_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        EarlyStop(**{name: value})  # type: ignore[arg-type]
