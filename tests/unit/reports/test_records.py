"""A slot as a line: of JSON and of text."""

import json

from benchmarks.builders import make_plan
from orchestrator.core.view import Rates
from orchestrator.reports.records import (
    MAX_LINES,
    plan_data,
    plan_words,
    slot_data,
    slot_json,
    slot_line,
)
from tests.unit.reports.samples import PLAN, a_record


def test_a_plan_has_the_form_of_the_users_files() -> None:
    assert plan_data(PLAN, ["fast-0", "slow-0", "slow-1"]) == {
        "groups": [
            {
                "microbatches": [4, 4, 3],
                "stages": [
                    {"devices": ["fast-0"], "first_layer": 0, "end_layer": 7},
                    {"devices": ["slow-0"], "first_layer": 7, "end_layer": 10},
                ],
            }
        ],
        "idle": ["slow-1"],
        "schedule": "1f1b",
    }


def test_a_plan_in_words_has_a_line_a_group() -> None:
    assert plan_words(plan_data(PLAN, ()), {}) == "11: fast-0[0:7] > slow-0[7:10]"
    assert plan_words(plan_data(make_plan(), ["fast-0"]), {}) == "idle"


def test_a_slot_line_of_json_holds_every_promised_key() -> None:
    data = json.loads(slot_json(a_record()))
    assert set(data) >= {
        "slot", "time_s", "step", "generation", "decision", "reason", "plan", "predicted",
        "measured", "backlog_usd", "penalty_weight", "price_of_money_samples_per_usd",
        "marginal_values", "spent_usd", "budget_usd", "overspend_bound_usd", "solve_s",
        "migration_s", "devices",
    }  # fmt: skip
    for rates in ("predicted", "measured"):
        assert set(data[rates]) == {
            "step_s", "samples_per_s", "cost_per_hour_usd", "peak_memory_bytes",
        }  # fmt: skip
    assert data["predicted"]["peak_memory_bytes"] == {"fast-0": 1000}
    assert set(data["devices"]["fast-0"]) >= {"kind", "pool", "state", "slowdown", "price_per_hour"}
    assert data["next_plan"]["idle"] == ["fast-0", "slow-0"]  # a lost device is not idle


def test_a_slot_line_says_what_its_data_say_whether_the_plan_stays_or_changes() -> None:
    other = make_plan(*PLAN.groups, generation=2, schedule="gpipe")
    for record in (a_record(), a_record(next_plan=other), a_record(next_plan=make_plan())):
        assert json.loads(slot_json(record)) == json.loads(json.dumps(slot_data(record)))
        assert "\n" not in slot_json(record)


def test_a_number_that_json_lacks_becomes_null() -> None:
    data = slot_data(a_record(loss=float("nan"), measured=Rates(None, float("inf"), None)))
    assert data["loss"] is None
    assert json.loads(json.dumps(data))["measured"]["samples_per_s"] is None


def test_a_plain_line_says_progress_speed_money_and_why() -> None:
    assert slot_line(a_record()) == (
        "slot 4 · step 17 · loss 2.50 · step time 550 ms (predicted 500 ms) · 116 samples/s · "
        "$3.50/h · spent $1.00 of $1.20 · straggler slow-0 · keep: best by far"
    )


def test_an_idle_slot_shows_no_speed() -> None:
    line = slot_line(a_record(loss=None, measured=Rates(None, None, 0.0), stragglers=()))
    assert line == "slot 4 · step 17 · $0.00/h · spent $1.00 of $1.20 · keep: best by far"


def test_alike_groups_of_a_large_plan_share_a_line_that_counts_them():
    stages = [(f"a-{2 * i}", f"a-{2 * i + 1}") for i in range(40)]
    groups: list[dict[str, object]] = [
        {
            "microbatches": [4, 4] if i < 39 else [4, 3],
            "stages": [{"devices": list(pair), "first_layer": 0, "end_layer": 9}],
        }
        for i, pair in enumerate(stages)
    ]
    pools = {device: "spot" for pair in stages for device in pair}
    assert plan_words({"groups": groups}, pools) == "39 x 8: spot x2[0:9]\n7: a-78+a-79[0:9]"
    assert plan_words({"groups": groups[:2]}, pools) == "8: a-0+a-1[0:9]\n8: a-2+a-3[0:9]"
    pools["a-0"] = pools["a-1"] = "on-demand"
    assert plan_words({"groups": groups}, pools).splitlines()[:2] == [
        "8: a-0+a-1[0:9]",
        "38 x 8: spot x2[0:9]",
    ]


def test_a_plan_of_many_unlike_groups_is_cut_short():
    groups: list[dict[str, object]] = [
        {
            "microbatches": [i + 1],
            "stages": [{"devices": [f"a-{i}"], "first_layer": 0, "end_layer": 9}],
        }
        for i in range(30)
    ]
    assert plan_words({"groups": groups}, {}).splitlines()[-1] == f"and {30 - MAX_LINES} more"
