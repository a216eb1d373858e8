"""Lives of devices from the lines of slots, and their picture."""

import re
from html import unescape
from typing import get_args

import pytest

from orchestrator.core.slot import RunEventKind
from orchestrator.reports.band_chart import LANES, MAX_STRETCHES, band_chart
from orchestrator.reports.lives import Life, Lives, Place, Stretch
from orchestrator.reports.time_axis import LEFT, RIGHT, WIDTH, TimeAxis


def a_slot(slot: int, used: dict[str, int], *, idle: str = "", lost: str = "", slow: str = "") -> (
    dict[str, object]
):  # fmt: skip
    """A line of an hour: ``used`` devices each are a group of so many samples."""
    states = {**dict.fromkeys(used, "used"), **dict.fromkeys(idle.split(), "idle")}
    states |= dict.fromkeys(lost.split(), "lost")
    return {
        "slot": slot,
        "time_s": 3600.0 * (slot + 1),
        "plan": {"groups": [
            {"microbatches": [samples],
             "stages": [{"devices": [device], "first_layer": 0, "end_layer": 4}]}
            for device, samples in used.items()
        ]},
        "devices": {
            device: {"kind": "t4", "pool": device.rsplit("-", 1)[0], "state": state,
                     "straggler": device in slow.split()}
            for device, state in states.items()
        },
    }  # fmt: skip


def lives_of(*slots: dict[str, object]) -> dict[str, Life]:
    lives = Lives()
    for row in slots:
        lives.add(row, int(str(row["slot"])))
    return {life.device: life for life in lives.lives()}


def test_slots_in_which_a_device_does_the_same_are_one_stretch() -> None:
    found = lives_of(
        a_slot(0, {"a-0": 4}, idle="b-0"),
        a_slot(1, {"a-0": 4}, idle="b-0"),
        a_slot(2, {"a-0": 3, "b-0": 1}),
    )
    whole, parts = Place(0, 0, 0, 4, 4, 4), (Place(0, 0, 0, 4, 3, 4), Place(1, 0, 0, 4, 1, 4))
    assert found["a-0"].stretches == (
        Stretch(0.0, 7200.0, whole, False), Stretch(7200.0, 10800.0, parts[0], False),
    )  # fmt: skip
    assert found["b-0"].stretches == (
        Stretch(0.0, 7200.0, None, False), Stretch(7200.0, 10800.0, parts[1], False),
    )  # fmt: skip
    assert (found["b-0"].idle_s, found["b-0"].used_s) == (7200.0, 3600.0)


def test_a_device_that_is_gone_leaves_a_gap_and_one_that_joins_begins_with_the_next_slot() -> None:
    found = lives_of(
        a_slot(0, {"a-0": 4, "b-0": 4}, lost="b-0"),  # taken at its end
        a_slot(1, {"a-0": 8}),
        a_slot(2, {"a-0": 8}, idle="b-0 c-0"),  # there at its end
        a_slot(3, {"a-0": 8}, idle="b-0 c-0"),
    )
    spans = [(s.from_s, s.to_s) for s in found["b-0"].stretches]
    assert spans == [(0.0, 3600.0), (10800.0, 14400.0)]
    assert [s.from_s for s in found["c-0"].stretches] == [10800.0]


def test_a_straggler_is_a_stretch_of_its_own() -> None:
    found = lives_of(
        a_slot(0, {"a-0": 4}), a_slot(1, {"a-0": 4}, slow="a-0"), a_slot(2, {"a-0": 4})
    )
    assert [s.slow for s in found["a-0"].stretches] == [False, True, False]
    assert found["a-0"].slow_s == 3600.0


def test_devices_stand_by_pool_and_number() -> None:
    assert list(lives_of(a_slot(0, {"b-10": 1, "b-9": 1, "a-0": 1}))) == ["a-0", "b-9", "b-10"]


def test_bands_are_as_long_as_their_time_and_say_what_they_are() -> None:
    lives = tuple(lives_of(a_slot(0, {"a-0": 4}, idle="b-0"), a_slot(1, {"b-0": 4})).values())
    drawn = band_chart(lives, (), TimeAxis(7200.0))
    half = (WIDTH - LEFT - RIGHT) / 2
    assert f'width="{half - 0.5:g}" height="18" class="b0 s0"' in drawn
    assert (
        "a-0, 0 to 60 billed minutes: group 0, stage 0, layers 0-3, 4 samples a step (100 %)"
        in drawn
    )
    assert "b-0, 0 to 60 billed minutes: there and idle" in drawn
    assert 'aria-label="plan over time: 2 devices over 120 billed minutes"' in drawn


def test_events_are_marked_in_lanes_with_their_reason_and_a_loss_on_its_band_too() -> None:
    lives = tuple(lives_of(a_slot(0, {"a-0": 4}), a_slot(1, {"a-0": 4})).values())
    events = (
        {"time_s": 3600.0, "kind": "replan", "detail": "<b> 4 % faster", "device": ""},
        {"time_s": 3600.0, "kind": "budget_changed", "detail": "average 4 -> 6", "device": ""},
        {"time_s": 7200.0, "kind": "lost", "detail": "no answer", "device": "a-0"},
        *({"time_s": 10.0 * k, "kind": "price", "detail": str(k)} for k in range(5)),
    )
    drawn = band_chart(lives, events, TimeAxis(7200.0))
    assert "<b>" not in drawn
    text = unescape(drawn)
    assert "at 60 billed minutes, replan: <b> 4 % faster" in text
    assert "budget_changed: average 4 -> 6" in text
    assert text.count("lost a-0: no answer") == 2
    assert "and 2 more" in text
    for lane in ("re-plans", "budget", "losses", "prices"):
        assert f">{lane}<" in drawn
    assert ">checkpoints<" not in drawn


def test_every_kind_of_event_has_a_lane_but_those_that_begin_or_end_a_run() -> None:
    shown = {kind for lane in LANES for kind in lane.kinds}
    assert set(get_args(RunEventKind)) - shown == {"started", "code", "finished", "stopped"}


@pytest.mark.parametrize("num_devices", [20, 200])
def test_a_picture_of_stretches_without_end_stays_small_and_says_that_it_is_coarse(
    num_devices: int,
) -> None:
    places = [Place(g, g % 4, 0, 4, 8, 64) for g in range(8)]
    num = 600
    lives = tuple(
        Life(f"d-{d}", "d", "t4", tuple(
            Stretch(60.0 * k, 60.0 * k + 60.0, places[(k // 97 + d) % 8], k % 500 == 0)
            for k in range(num)
        ))
        for d in range(num_devices)
    )  # fmt: skip
    drawn = band_chart(lives[:20] * (num_devices // 20), (), TimeAxis(60.0 * num))
    assert len(drawn) < 2_000_000
    assert f"{num * num_devices:,} stretches are too many to draw" in drawn
    assert num * num_devices > MAX_STRETCHES


def test_a_coarse_picture_shows_what_lasted_longest() -> None:
    place = Place(3, 0, 0, 4, 8, 8)
    pieces = []
    for k in range(MAX_STRETCHES):
        pieces += [Stretch(100.0 * k, 100.0 * k + 90, place, False),
                   Stretch(100.0 * k + 90, 100.0 * k + 100, None, False)]  # fmt: skip
    life = Life("d-0", "d", "t4", tuple(pieces))
    drawn = band_chart((life,), (), TimeAxis(100.0 * MAX_STRETCHES))
    assert re.findall(r'class="(b\d s\d many|idle)"', drawn.partition("<desc>")[2]) == [
        "b3 s0 many"
    ]


def test_what_came_after_the_last_slot_stands_at_the_end() -> None:
    lives = tuple(lives_of(a_slot(0, {"a-0": 4})).values())
    event = {"time_s": 9000.0, "kind": "checkpoint", "detail": "whole", "device": ""}
    drawn = band_chart(lives, (event,), TimeAxis(3600.0))
    assert f"translate({WIDTH - RIGHT:.1f} " in drawn
    assert "at 150 billed minutes, checkpoint: whole" in drawn


def test_without_a_device_there_is_no_picture() -> None:
    assert band_chart((), (), TimeAxis(0.0)) == ""
