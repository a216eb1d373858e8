"""What a run shows while it goes on."""

from collections import deque
from io import StringIO

import pytest
from rich.console import Console

from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, RunEvent
from orchestrator.core.view import Rates
from orchestrator.reports.live import LiveView, PlainView, sparkline
from tests.unit.reports.samples import PLAN, a_record

NOTHING = Rates(None, None, None)


def picture(view: LiveView) -> str:
    screen = StringIO()
    Console(file=screen, width=110).print(view.render())
    return screen.getvalue()


@pytest.fixture
def view() -> LiveView:
    made = LiveView(
        Console(file=StringIO(), force_terminal=True), name="byte-gpt", num_steps=40,
    )  # fmt: skip
    made.close()
    return made


def test_before_the_first_slot_the_phase_is_shown(view: LiveView) -> None:
    view.phase("measuring the model")
    assert "measuring the model ..." in picture(view)


def test_progress_money_plan_and_events_are_shown(view: LiveView) -> None:
    view.step(CommittedStep(16, 3, 0, 64, 0.5, 8.0, loss=2.5))
    view.slot(a_record(decision="switch", next_plan=PLAN, spent_usd=1.5))
    view.event(RunEvent(1.0, 4, "straggler", "2.5 times slower", "slow-0"))
    shown = picture(view)
    for said in ("step 17 of 40", "loss 2.50", "550 ms", "predicted 500 ms", "$3.50/h",
                 "budget $4.00/h", "$0.3000 over", "bound $0.4000", "fast-0", "0-6", "7-9",
                 "straggler slow-0: 2.5 times slower"):  # fmt: skip
        assert said in shown


def test_step_time_is_shown_before_the_first_slot_is_over(view: LiveView) -> None:
    view.step(CommittedStep(16, 3, 0, 64, 0.5, 8.0))
    view.slot(a_record(slot=0, predicted=NOTHING, measured=NOTHING, next_plan=PLAN))
    shown = picture(view)
    assert "500 ms" in shown
    assert "speed and money follow at the end of this slot" in shown
    assert "-/h" not in shown


def test_a_slot_in_which_no_step_ended_is_not_called_a_slow_one(view: LiveView) -> None:
    view.slot(a_record(measured=Rates(None, 0.0, 0.0)))
    assert "-100" not in picture(view)


def test_an_idle_plan_lists_its_devices(view: LiveView) -> None:
    view.slot(a_record())
    assert "fast-0, slow-0" in picture(view)


def test_a_curve_keeps_its_shape_in_few_blocks() -> None:
    assert sparkline(deque([3.0])) == ""
    assert sparkline(deque([0.0, 1.0])) == "▁█"
    falling = sparkline(deque(float(100 - i) for i in range(100)), width=10)
    assert len(falling) == 10
    assert list(falling) == sorted(falling, reverse=True)
    assert sparkline(deque([1.0, 1.0])) == "▁▁"


def test_a_log_gets_a_line_that_says_what_code_runs_and_one_a_slot() -> None:
    """ray-project/ray#20553, #23564: logs came at the end only, or not at all."""
    lines: list[str] = []
    plain = PlainView(lines.append)
    plain.phase("starting")
    plain.event(RunEvent(0.0, 0, "code", "1f3a9c20 (mytask), lyray 8e1c22aa"))
    plain.step(CommittedStep(16, 3, 0, 64, 0.5, 8.0))
    plain.slot(a_record())
    plain.event(RunEvent(1.0, 4, "straggler", "slow", "slow-0"))
    plain.close()
    assert len(lines) == 2
    assert lines[0] == "code 1f3a9c20 (mytask), lyray 8e1c22aa"
    assert lines[1].startswith("slot 4 · step 17")


def test_an_evaluation_is_shown_with_the_best_one(view: LiveView) -> None:
    view.evaluation(Evaluation(10, 1, 64, 0.5, {"accuracy": 0.75}, best=True))
    shown = picture(view)
    assert "evaluation at step 10: loss 0.500, accuracy 0.750 (the best so far)" in shown
    view.evaluation(Evaluation(20, 1, 64, 0.6, {"accuracy": None}))
    shown = picture(view)
    assert "step 20: loss 0.600, accuracy - (the best was that of step 10: " in shown


def test_a_log_tells_of_an_evaluation_once_with_the_slot_that_it_was_in() -> None:
    lines: list[str] = []
    plain = PlainView(lines.append)
    plain.evaluation(Evaluation(10, 1, 64, 0.5))
    plain.slot(a_record())
    plain.slot(a_record())
    assert [line.endswith(" · evaluation at step 10: loss 0.500") for line in lines] == [
        True,
        False,
    ]
