from dataclasses import replace

import pytest

from benchmarks.builders import (
    make_cluster,
    make_device,
    make_group,
    make_plan,
    make_problem,
    make_profile,
)
from orchestrator.core.budget import LimitOptions
from orchestrator.core.plan import Plan
from orchestrator.core.slot import IDLE_ESTIMATE, Candidate
from orchestrator.planning.alike import alike_sets
from orchestrator.planning.constraints import Row, broken, make_rows, row_use, sums_usd
from orchestrator.planning.cost import CostModel

FIRST, SECOND = make_device("a-0", zone="z1"), make_device("b-0", zone="z2")
CLUSTER = make_cluster(
    [FIRST, SECOND], price_usd_per_s={"a": 1e-3, "b": 2e-3}, egress_usd_per_byte=1e-9
)
COST = CostModel(make_problem(CLUSTER, make_profile(boundary_bytes=1000.0)))
CHAIN = make_plan(make_group([FIRST, SECOND], (0, 2, 4), (1,) * 8))


def priced(plan: Plan) -> Candidate:
    return Candidate(plan, COST.evaluate(plan.groups, "1f1b"))


def test_limits_become_dollars_of_the_run_clock() -> None:
    limits = (
        LimitOptions(zone="z2", max_per_hour_usd=7.2),
        LimitOptions(egress=True, max_per_hour_usd=3.6),
        LimitOptions(pool="a", min_share=0.25),
    )
    assert make_rows(limits, billing_speedup=60.0) == (
        Row("zone", "z2", pytest.approx(0.12)),
        Row("egress", "", pytest.approx(0.06)),
        Row("share", "a", 0.25),
    )


def test_zone_pays_for_its_devices_and_for_what_leaves_it() -> None:
    sets = alike_sets(COST, CHAIN.groups)
    use = row_use(COST, Row("zone", "z2", 1.0), sets, sums_usd(COST, sets, priced(CHAIN).estimate))
    assert use.usd_per_s == 2e-3
    assert use.usd_per_sample == (pytest.approx(1000.0 * 1e-9),)  # gradients back to z1


def test_egress_row_pays_both_ways_and_adds_up_to_the_estimate() -> None:
    estimate = priced(CHAIN).estimate
    sets = alike_sets(COST, CHAIN.groups)
    use = row_use(COST, Row("egress", "", 1.0), sets, sums_usd(COST, sets, estimate))
    assert use.usd_per_s == 0.0
    total = 8 * use.usd_per_sample[0] + use.step_usd
    assert total / estimate.step_s == pytest.approx(estimate.egress_usd_per_s)


def test_device_billed_while_present_spends_in_its_zone_unused() -> None:
    offers = tuple(replace(o, billed="while_present") for o in CLUSTER.offers)
    cost = CostModel(make_problem(replace(CLUSTER, offers=offers)))
    alone = make_plan(make_group([FIRST], (0, 4), (1,) * 8))
    estimate = cost.evaluate(alone.groups, "1f1b")
    sets = alike_sets(cost, alone.groups)
    use = row_use(cost, Row("zone", "z2", 1.0), sets, sums_usd(cost, sets, estimate))
    assert use.usd_per_s == 2e-3


def test_plan_at_its_limit_obeys_and_above_it_does_not() -> None:
    chain = priced(CHAIN)
    spent = 2e-3 + 8 * 1e-6 / chain.estimate.step_s
    at, below = Row("zone", "z2", spent), Row("zone", "z2", spent * 0.999)
    assert broken(COST, [at], chain) is None
    assert broken(COST, [at, below], chain) is below


def test_share_counts_the_groups_that_read_on_the_pool() -> None:
    chain = priced(CHAIN)
    assert broken(COST, [Row("share", "a", 1.0)], chain) is None
    row = Row("share", "b", 0.25)
    assert broken(COST, [row], chain) is row


def test_idle_obeys_every_share_and_breaks_a_limit_only_by_standing_costs() -> None:
    idle = Candidate(Plan(0, "1f1b"), IDLE_ESTIMATE)
    assert broken(COST, [Row("share", "a", 1.0), Row("zone", "z1", 0.0)], idle) is None
