from dataclasses import replace

from benchmarks.builders import make_cluster, make_device
from orchestrator.control.alarms import Alarms
from orchestrator.control.records import Clock
from orchestrator.control.treasury import Treasury
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.slot import StepEstimate
from orchestrator.planning.frontier import BudgetValue
from orchestrator.planning.lyapunov import ControlOptions

BUDGET = BudgetOptions(average_per_hour_usd=3.6, horizon_hours=10.0)
CONTROL = ControlOptions(slot_s=60.0, kappa=0.2)
CLUSTER = make_cluster([make_device("gpu-0")], price_usd_per_s=0.01)


def opened(
    budget: BudgetOptions, price_of_money_samples_per_usd: float = 400.0
) -> tuple[Treasury, Alarms]:
    """A treasury whose price of money follows within an hour, of at most 1,000 samples/$."""
    treasury = Treasury(budget, CONTROL)
    treasury.learn([StepEstimate(1.0, 10.0, 0.01)])
    treasury.open(BudgetValue(price_of_money_samples_per_usd, 3.0))
    return treasury, Alarms(budget, CONTROL, treasury, Clock())


def warnings(alarms: Alarms, dear_slots: int, num_slots: int) -> list[str]:
    """Prices that go up and down every so many slots."""
    found = []
    for slot in range(num_slots):
        factor = 1.0 + (slot // dear_slots) % 2
        offer = replace(CLUSTER.offers[0], price_usd_per_s=0.01 * factor)
        state = replace(CLUSTER, now_s=60.0 * slot, offers=(offer,))
        found += [text for kind, text in alarms.look(state, 0.0, 0) if kind == "warning"]
    return found


def test_a_price_of_money_faster_than_the_states_is_warned_of_once() -> None:
    _, alarms = opened(BUDGET)
    (text,) = warnings(alarms, dear_slots=60, num_slots=1200)  # correlation lasts half an hour
    assert text.startswith("tau_v: the price of money follows within 1 h, less than 3 times the 0.")
    assert alarms.coherence_s is not None
    assert 900 < alarms.coherence_s < 3600


def test_states_that_pass_quickly_need_no_warning() -> None:
    _, alarms = opened(BUDGET)
    assert warnings(alarms, dear_slots=2, num_slots=600) == []


def test_a_price_of_money_of_next_to_nothing_need_not_follow_anything() -> None:
    """The budget does not bind; what is left of a backlog decides nothing."""
    _, alarms = opened(BUDGET, price_of_money_samples_per_usd=0.5)
    assert warnings(alarms, dear_slots=60, num_slots=1200) == []


def test_nothing_is_warned_of_while_the_coherence_time_is_not_known() -> None:
    _, alarms = opened(BUDGET)
    assert warnings(alarms, dear_slots=500, num_slots=1200) == []
    assert alarms.coherence_s is None


def test_a_cap_that_gives_up_the_average_is_warned_of_once() -> None:
    _, alarms = opened(replace(BUDGET, queue_cap=0.5))
    (text,) = warnings(alarms, dear_slots=500, num_slots=3)
    assert text.startswith("queue_cap: 0.5 $ lies below the backlog of 3.6 $")
    _, alarms = opened(replace(BUDGET, queue_cap="auto"))
    assert warnings(alarms, dear_slots=500, num_slots=3) == []
