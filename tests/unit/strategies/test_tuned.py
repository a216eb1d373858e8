from dataclasses import replace

import pytest

from orchestrator.core.slot import Candidate, PlanningProblem
from orchestrator.strategies.registry import TUNED, Strategy, make_strategy
from tests.unit.planning.demo_cluster import demo_cluster, demo_devices, demo_problem

SMALL = demo_cluster(demo_devices((1, 1, 1)))
PROBLEM = demo_problem(SMALL)  # 4 $/h


def ran(strategy: Strategy, problem: PlanningProblem = PROBLEM) -> Candidate | None:
    found = strategy.propose(problem, out_of_time=lambda: False)
    return next((c for c in found if not c.plan.is_idle), None)


def test_a_rate_cap_is_obeyed_whatever_the_budget() -> None:
    cap = 1.5 / 60  # one middling or two slow devices
    best = ran(make_strategy("tuned-rate-cap", setting=cap))
    assert best is not None
    assert 0.5 * cap < best.estimate.cost_usd_per_s <= cap


def test_a_price_cap_takes_the_fastest_plan_whose_samples_are_cheap_enough() -> None:
    cheapest = ran(make_strategy("cheapest"))
    assert cheapest is not None
    least = 1 / cheapest.estimate.samples_per_usd
    tight = ran(make_strategy("tuned-price-cap", setting=1.001 * least))
    loose = ran(make_strategy("tuned-price-cap", setting=3 * least))
    fastest = ran(make_strategy("greedy"))
    assert tight is not None
    assert loose is not None
    assert fastest is not None
    assert tight.estimate.samples_per_usd >= 1 / (1.001 * least)
    assert tight.estimate.samples_per_s < loose.estimate.samples_per_s
    assert loose.estimate.samples_per_s == pytest.approx(fastest.estimate.samples_per_s, rel=0.02)
    assert ran(make_strategy("tuned-price-cap", setting=0.9 * least)) is None


def test_a_price_cap_idles_while_samples_are_dear_and_runs_again_afterwards() -> None:
    strategy = make_strategy("tuned-price-cap")
    assert ran(strategy) is not None
    offers = tuple(replace(o, price_usd_per_s=9 * o.price_usd_per_s) for o in SMALL.offers)
    assert ran(strategy, demo_problem(replace(SMALL, offers=offers))) is None
    assert ran(strategy) is not None


def test_a_frozen_price_does_not_follow_the_backlog() -> None:
    strategy = make_strategy("frozen-price", setting=100.0)
    cheap, dear = (replace(PROBLEM, backlog_usd=usd) for usd in (0.0, 1e9))
    first, later = (ran(strategy, problem) for problem in (cheap, dear))
    assert first is not None
    assert later is not None
    assert later.plan == first.plan


def test_a_frozen_price_runs_faster_plans_the_lower_it_is() -> None:
    rates = [
        found.estimate.samples_per_s
        if (found := ran(make_strategy("frozen-price", setting=p)))
        else 0
        for p in (1.0, 600.0, 1e6)
    ]
    assert rates[0] > rates[1] > rates[2] == 0


def test_a_frozen_price_runs_devices_that_are_billed_even_when_nothing_does() -> None:
    offers = tuple(replace(o, billed="while_present") for o in SMALL.offers)
    problem = demo_problem(replace(SMALL, offers=offers))
    assert ran(make_strategy("frozen-price", setting=1e6), problem) is not None


@pytest.mark.parametrize("name", TUNED)
def test_without_a_setting_the_first_state_gives_one_that_stays(name: str) -> None:
    strategy = make_strategy(name)
    first = ran(strategy)
    poorer = replace(PROBLEM, budget_usd_per_s=PROBLEM.budget_usd_per_s / 3)
    if name != "tuned-rate-cap":  # whose setting is the budget itself
        again = ran(strategy, poorer)
        assert first is not None
        assert again is not None
        assert again.plan == first.plan


@pytest.mark.parametrize(("name", "setting"), [("greedy", 1.0), ("frozen-price", 0.0)])
def test_a_setting_that_nobody_takes_is_refused(name: str, setting: float) -> None:
    with pytest.raises(ValueError, match="tuned-rate-cap, tuned-price-cap, frozen-price"):
        make_strategy(name, setting=setting)
