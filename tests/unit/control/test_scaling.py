"""When one more device is asked for, when one is given back, and what never comes."""

import itertools
from dataclasses import replace
from typing import Literal

from benchmarks.builders import make_cluster, make_device
from orchestrator.control.records import Clock
from orchestrator.control.scaling import AutoscalerOptions, PoolLimits, Scaler, Scaling, Scene
from orchestrator.core.cluster import ClusterState, make_team
from orchestrator.core.plan import Group, Plan, Stage
from orchestrator.planning.margins import DeviceWorth, MarginalValues

SLOT_S = 60.0
PRICE = 1.0 / 3600.0  # of every device
OPTIONS = AutoscalerOptions(
    enabled=True, confirm_slots=3, idle_slots=4, launch_timeout_s=5 * SLOT_S
)


def values(price_of_money: float = 1.0, **samples_per_s: float) -> MarginalValues:
    """What one more of each pool would add; a device costs as much as 1/3600 samples/s."""
    devices = tuple(
        DeviceWorth(pool, PRICE, worth, None, 0.0) for pool, worth in samples_per_s.items()
    )
    return MarginalValues(price_of_money, 0.0, devices, ())


PAYS, TOO_DEAR = values(cheap=2 * PRICE), values(cheap=PRICE / 2)


class Site:
    """A pool ``cheap`` that grows and shrinks as a test says, looked at slot by slot."""

    def __init__(
        self, num_cheap: int = 1, *, node_size: int = 1, most: int = 4, least: int = 0
    ) -> None:
        self.limits = {"cheap": PoolLimits(least, most, node_size)}
        self.scaler = Scaler(OPTIONS, self.limits, slot_s=SLOT_S, clock=Clock())
        self.num_cheap, self.node_size, self.now_s = num_cheap, node_size, 0.0
        self.gone: set[str] = set()
        self.billed: Literal["while_used", "while_present"] = "while_used"
        self.limit_usd_per_s: float | None = None

    @property
    def cluster(self) -> ClusterState:
        cheap = [
            make_device(f"cheap-{i}", node_id=f"cheap-node{i // self.node_size}")
            for i in range(self.num_cheap)
        ]
        devices = [make_device("own-0"), *(d for d in cheap if d.device_id not in self.gone)]
        found = make_cluster(devices)
        offers = [replace(o, price_usd_per_s=PRICE) for o in found.offers if o.pool != "cheap"]
        cheap_offer = replace(
            offers[0], pool="cheap", billed=self.billed, max_price_usd_per_s=self.limit_usd_per_s
        )
        return replace(found, offers=(*offers, cheap_offer), now_s=self.now_s)

    def look(
        self, worth: MarginalValues | None = PAYS, *, idle: tuple[str, ...] = (), num_slots: int = 1
    ) -> Scaling:
        """So many slots in a row; what the last of them came to."""
        for _ in range(num_slots):
            used = [d.device_id for d in self.cluster.devices if d.device_id not in idle]
            groups = tuple(
                Group((Stage(make_team([self.cluster.device(d)]), 0, 4),), (1,)) for d in used
            )
            plan = Plan(0, "1f1b", groups)
            found = self.scaler.look(Scene(self.cluster, plan, 1.0, worth))
            self.now_s += SLOT_S
        return found


def test_one_more_is_asked_for_once_it_has_paid_for_some_slots() -> None:
    site = Site()
    assert [site.look().counts["cheap"] for _ in range(3)] == [1, 1, 2]
    assert "pool cheap: 1 more asked for" in Site().look(num_slots=3).reasons[0]


def test_the_first_of_a_pool_is_asked_for_as_any_other() -> None:
    site = Site(num_cheap=0)
    assert [site.look().counts["cheap"] for _ in range(3)] == [0, 0, 1]
    site.num_cheap = 1
    assert site.look().counts["cheap"] == 1


def test_a_slot_in_which_it_does_not_pay_or_nobody_knows_starts_the_count_anew() -> None:
    for other in (TOO_DEAR, None):
        site = Site()
        site.look(num_slots=2)
        site.look(other)
        assert site.look(num_slots=2).counts == {"cheap": 1}
        assert site.look().counts == {"cheap": 2}


def test_while_no_dollar_is_short_whatever_adds_samples_pays() -> None:
    assert Site().look(values(0.0, cheap=1e-9), num_slots=3).counts == {"cheap": 2}
    assert Site().look(values(0.0, cheap=0.0), num_slots=9).counts == {"cheap": 1}


def test_a_pool_above_its_maximum_price_is_not_asked_for() -> None:
    for limit, wanted in ((PRICE / 2, 1), (PRICE * 2, 2)):
        site = Site()
        site.limit_usd_per_s = limit
        assert site.look(num_slots=3).counts == {"cheap": wanted}


def test_nothing_more_is_asked_for_while_one_of_the_pool_stands_idle_or_nothing_runs() -> None:
    assert Site(2).look(idle=("cheap-1",), num_slots=3).counts == {"cheap": 2}
    assert Site().look(idle=("own-0", "cheap-0"), num_slots=9).counts == {"cheap": 1}


def test_no_pool_grows_beyond_its_most_and_nodes_come_whole() -> None:
    assert Site(4).look(num_slots=9).counts == {"cheap": 4}
    assert Site(2, node_size=2, most=4).look(num_slots=3).counts == {"cheap": 4}
    assert Site(2, node_size=2, most=3).look(num_slots=9).counts == {"cheap": 2}


def test_the_next_one_is_asked_for_only_after_the_last_one_came() -> None:
    site = Site()
    assert site.look(num_slots=5).counts == {"cheap": 2}
    site.num_cheap = 2
    assert site.look(num_slots=2).counts == {"cheap": 2}
    assert site.look().counts == {"cheap": 3}


def test_what_does_not_come_is_given_up_and_asked_for_ever_more_rarely() -> None:
    """ray-project/ray#24875, #52202, #62483: a node stays PENDING for ever."""
    site, asked = Site(), []
    for slot in range(200):
        found = site.look()
        if any("more asked for" in reason for reason in found.reasons):
            asked.append(slot)
        if any("did not come" in reason for reason in found.reasons):
            assert found.counts == {"cheap": 1}
    assert asked[0] == 2
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0]


def test_a_device_that_is_lost_may_be_replaced_until_the_time_is_up() -> None:
    site = Site(2)
    site.look(TOO_DEAR)
    site.num_cheap = 1
    assert site.look(TOO_DEAR, num_slots=5).counts == {"cheap": 2}
    assert site.look(TOO_DEAR).counts == {"cheap": 1}


def test_a_device_that_no_plan_uses_for_some_slots_is_given_back() -> None:
    site = Site(2)
    found = site.look(TOO_DEAR, idle=("cheap-1",), num_slots=4)
    assert (found.counts, found.released) == ({"cheap": 1}, frozenset({"cheap-1"}))
    assert site.look(TOO_DEAR, idle=("cheap-1",)).released == frozenset(), "told once"
    site.gone = {"cheap-1"}
    assert site.look(TOO_DEAR).counts == {"cheap": 1}


def test_a_device_that_works_now_and_then_stays() -> None:
    site = Site(2)
    for _ in range(10):
        assert not site.look(TOO_DEAR, idle=("cheap-1",), num_slots=3).released
        site.look(TOO_DEAR)


def test_a_node_is_given_back_whole_and_never_below_the_least() -> None:
    site = Site(4, node_size=2, least=1)
    idle = ("cheap-1", "cheap-2", "cheap-3")
    assert site.look(TOO_DEAR, idle=idle, num_slots=4).released == {"cheap-2", "cheap-3"}
    site.gone = {"cheap-2", "cheap-3"}
    every = ("cheap-0", "cheap-1")
    assert site.look(TOO_DEAR, idle=every, num_slots=9).released == frozenset()


def test_a_pool_that_was_given_back_whole_is_asked_for_at_what_it_was_worth() -> None:
    """Of a pool without a device no slot knows the worth: that of the last one counts."""
    site = Site(1)
    site.look(PAYS)
    site.look(TOO_DEAR, idle=("cheap-0",), num_slots=4)
    site.gone = {"cheap-0"}
    dear, cheap = values(4.0), values(0.1)  # dollars are short; they are not
    assert site.look(dear, num_slots=9).counts == {"cheap": 0}
    assert site.look(cheap, num_slots=3).counts == {"cheap": 1}


def test_a_worth_that_swings_around_the_price_does_not_make_devices_come_and_go() -> None:
    """It is asked for, comes, and is idle again: each time the pool rests for twice as long."""
    site, changes = Site(1), 0
    for _ in range(600):
        alone = site.num_cheap == 1
        found = site.look(PAYS if alone else TOO_DEAR, idle=() if alone else ("cheap-1",))
        changes += len(found.reasons)
        site.num_cheap = found.counts["cheap"]
    assert changes <= 18  # of 150 without rests: 600 slots hold those of 0, 4, 8, ... 256 slots


def test_what_is_billed_while_present_goes_when_its_dollars_would_bring_more_elsewhere() -> None:
    """Each of two groups makes a sample a second for 1 $/h: 3,600 samples per dollar."""
    for price_of_money, released in ((3500.0, set[str]()), (3700.0, {"cheap-0"})):
        site = Site(1)
        site.billed = "while_present"
        assert site.look(values(price_of_money, cheap=0.0), num_slots=4).released == released
        site = Site(1)  # else the plan itself leaves it idle
        assert not site.look(values(price_of_money, cheap=0.0), num_slots=9).released


def test_a_run_that_waits_for_money_goes_by_the_plan_that_ran_and_spares_its_best_group() -> None:
    site = Site(2)
    site.billed = "while_present"
    site.look(values(3500.0, cheap=0.0))
    every = ("own-0", "cheap-0", "cheap-1")
    found = site.look(values(3700.0, cheap=0.0), idle=every, num_slots=4)
    assert found.released == {"cheap-1"}
    site.gone = {"cheap-1"}
    assert site.look(values(3700.0, cheap=0.0), idle=every).released == {"cheap-0"}
