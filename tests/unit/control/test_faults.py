"""Fault plans: what may be said, and what is drawn."""

from collections import Counter
from itertools import pairwise

import pytest

from orchestrator.control.backend import EmulatedEvent, EmulationOptions
from orchestrator.control.faults import DRAWN, PHASES, Draw, Fault, FaultPlan, draw

DEVICES = ("fast-0", "fast-1", "slow-0")
PRICES = {"fast": 3.0, "slow": 1.0}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kind": "fail"}, "device is missing; fail needs device"),
        ({"kind": "slow", "device": "a"}, "delay_s is missing; slow needs device and delay_s"),
        ({"kind": "fail", "device": "a", "phase": "loader"}, "phase is loader; fail hits in for"),
        ({"kind": "slow", "device": "a", "phase": "vote", "delay_s": 1.0}, "phase is vote; slow"),
        ({"kind": "price", "pool": "p", "price_per_hour": -1.0}, "price_per_hour is -1.0; it must"),
        ({"kind": "price", "pool": "p", "price_per_hour": 1.0, "device": "a"}, "device means noth"),
        ({"kind": "disk_full", "phase": "save"}, "phase means nothing to disk_full, which takes"),
        ({"kind": "cut_link", "device": "a", "peer": "a"}, "peer is a, the device itself"),
        ({"kind": "slow_link", "device": "a", "peer": "b"}, "bandwidth_ratio is missing; slow_li"),
        (
            {"kind": "slow_link", "device": "a", "peer": "b", "bandwidth_ratio": 0.0},
            "bandwidth_ratio is 0.0; it must be positive",
        ),
        (
            {"kind": "slow_link", "device": "a", "peer": "b", "bandwidth_ratio": 1.5},
            "bandwidth_ratio is 1.5; it must not exceed 1",
        ),
        ({"kind": "kill_head", "at_step": -1}, "at_step is -1; it must not be negative"),
    ],
)
def test_a_fault_that_says_nonsense_is_refused(fault: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fault(**{"at_step": 3, **fault})  # type: ignore[arg-type]


def test_a_plan_is_put_together_method_by_method() -> None:
    plan = (
        FaultPlan()
        .fail_at(3, "a", "vote")
        .hang_at(4, "b")
        .slow_at(5, "a", "loader", 0.2, num_steps=3)
        .price_at(6, "p", 2.5)
        .disk_full_at(7)
        .disk_full_at(8, "a")
        .cut_link_at(9, "a", "b")
        .notice_at(10, "a", 30.0)
        .join_at(11, "p")
        .kill_head_at(12)
        .kill_driver_at(13)
        .slow_link_at(14, "a", "b", 0.5, num_steps=4)
    )
    assert [fault.at_step for fault in plan.faults] == list(range(3, 15))
    assert plan.faults[-1].end_step == 18
    assert {fault.kind for fault in plan.faults} == {
        "fail", "hang", "slow", "price", "disk_full", "cut_link", "notice", "join", "kill_head",
        "kill_driver", "slow_link",
    }  # fmt: skip
    assert [fault.where for fault in plan.faults[:2]] == ["vote", "forward"]
    assert plan.num_restarts == 2  # whoever gives the command has to make room


def test_what_happens_to_the_cluster_is_an_event_like_those_of_the_file() -> None:
    given = EmulatedEvent(at_step=1, device="slow-0", lost=True)
    plan = (
        FaultPlan()
        .price_at(5, "slow", 7.2)
        .notice_at(6, "fast-1", 30.0)
        .join_at(7, "slow")
        .fail_at(8, "fast-0")
        .slow_at(9, "fast-0", "forward", 0.1)
    )
    assert EmulationOptions(events=(given,), faults=plan.faults).happenings == (
        given,
        EmulatedEvent(at_step=5, pool="slow", price_per_hour=7.2),
        EmulatedEvent(at_step=6, device="fast-1", notice_s=30.0),
        EmulatedEvent(at_step=7, pool="slow", joined=1),
    )


@pytest.mark.parametrize("seed", range(40))
def test_what_is_drawn_leaves_a_device_alone_and_hits_at_steps_of_its_own(seed: int) -> None:
    asked = Draw(seed=seed, faults=6)
    plan = draw(asked, DEVICES, PRICES, 20)
    assert plan == draw(asked, DEVICES, PRICES, 20)
    steps = [fault.at_step for fault in plan.faults]
    assert all(a < b for a, b in pairwise(steps))
    assert steps[0] >= 2
    assert steps[-1] < 18
    broken = {f.device for f in plan.faults if f.kind in ("fail", "hang", "notice", "disk_full")}
    assert set(DEVICES) - broken
    for fault in plan.faults:
        if fault.kind == "price":
            base = PRICES[str(fault.pool)]
            assert base / 2 - 1e-4 <= (fault.price_per_hour or 0.0) <= 2 * base + 1e-4


def test_many_draws_use_every_kind_and_every_phase() -> None:
    drawn = [
        fault
        for seed in range(200)
        for fault in draw(Draw(seed=seed, faults=5), DEVICES, PRICES, 40).faults
    ]
    counts = Counter(fault.kind for fault in drawn)
    assert set(counts) == set(DRAWN)
    assert counts["fail"] > counts["hang"] > counts["disk_full"]
    for kind, phases in PHASES.items():
        assert {fault.phase for fault in drawn if fault.kind == kind} == set(phases)


def test_whom_a_draw_spares_is_never_broken() -> None:
    for seed in range(50):
        plan = draw(Draw(seed=seed, faults=5, spare=("fast-1",)), DEVICES, PRICES, 40)
        assert "fast-1" not in {
            f.device for f in plan.faults if f.kind in ("fail", "hang", "notice")
        }


@pytest.mark.parametrize(
    ("asked", "num_steps", "message"),
    [
        (Draw(faults=5), 8, "faults is 5, but a run of 8 steps has room for 4"),
        (Draw(spare=("fast-7",)), 40, "spare names 'fast-7'; known: fast-0"),
        (Draw(spare=DEVICES), 40, "spare names every device"),
    ],
)
def test_a_draw_that_cannot_be_is_refused(asked: Draw, num_steps: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(asked, DEVICES, PRICES, num_steps)
