"""A plan as a table, a page and a trace."""

import json
from dataclasses import replace
from io import StringIO

from rich.console import Console

from benchmarks.builders import (
    GIB,
    make_cluster,
    make_device,
    make_group,
    make_plan,
    make_problem,
)
from orchestrator.core.slot import IDLE_ESTIMATE
from orchestrator.planning.cost import CostModel
from orchestrator.planning.event import retime, timeline
from orchestrator.reports.plan_page import plan_page, trace_json
from orchestrator.reports.tables import PlanRow, make_row, plan_table, row_data
from orchestrator.reports.worth import Worth
from tests.unit.reports.samples import read_page

A, B, C = (make_device(f"{p}-0", memory_bytes=16 * GIB) for p in ("fast", "mid", "slow"))
CLUSTER = make_cluster([A, B, C], price_usd_per_s=0.001)
COST = CostModel(make_problem(CLUSTER, batch_samples=6))
GROUPS = (make_group([A, B], [0, 2, 4], [1, 1, 1, 1]), make_group([C], [0, 4], [1, 1]))
PLAN = make_plan(*GROUPS)
ESTIMATE = retime(COST, GROUPS, "1f1b")
ROW = make_row("joint", PLAN, ESTIMATE, CLUSTER, billing_speedup=60.0)
REFUSED = PlanRow("even-split", make_plan(), IDLE_ESTIMATE, 0.0, None, problem="too <large>")
TIMELINES = [timeline(COST, group, "1f1b") for group in GROUPS]
WORTH = Worth("the <best> plan", (("device_samples_per_s.fast", 4.0),), (("fast", 3.67),))


def test_a_row_turns_run_seconds_into_billed_hours() -> None:
    assert ROW.cost_per_hour_usd == 3 * 0.001 * 3600 / 60
    expected = 1e6 * ESTIMATE.cost_usd_per_s / ESTIMATE.samples_per_s
    assert ROW.usd_per_million_samples == expected
    assert ROW.tightest_device == "slow-0"  # it holds all layers
    assert ROW.tightest_memory_bytes == 16 * GIB


def test_an_idle_row_has_no_price_of_samples_and_no_tight_device() -> None:
    row = make_row("do-nothing", make_plan(), IDLE_ESTIMATE, CLUSTER, 1.0)
    assert row.usd_per_million_samples is None
    assert row.memory_ratio is None


def test_the_table_ticks_the_chosen_plan_and_says_why_another_is_refused() -> None:
    screen = StringIO()
    table = plan_table([replace(ROW, chosen=True), REFUSED], batch_samples=6)
    Console(width=80, file=screen).print(table)
    text = screen.getvalue()
    figures, who = (line for line in text.splitlines() if "joint" in line)
    assert "✔" in figures
    assert "4: fast-0[0:2] > mid-0[2:4]" in who
    assert "2: slow-0[0:4]" in text
    assert "too <large>" in text


def test_a_long_name_of_a_device_cuts_no_figure_off_on_a_narrow_terminal() -> None:
    long = replace(ROW, strategy="balanced-pipeline", tightest_device="a100-80-spot-west-0")
    screen = StringIO()
    Console(width=80, file=screen).print(plan_table([long], batch_samples=6))
    assert "…" not in screen.getvalue()
    assert "CHOSEN" in screen.getvalue()


def test_the_page_stands_alone_and_draws_every_instruction() -> None:
    page = plan_page(
        "a<b", [replace(ROW, chosen=True), REFUSED], CLUSTER, TIMELINES, ["a <note>"], WORTH
    )
    found = read_page(page)
    assert not found.outside  # no resource from anywhere else
    assert "script" not in found.tags
    assert "http" not in page
    assert "prefers-color-scheme: dark" in page
    assert "a<b: what would run" in found.text
    assert "device of fast" in found.text
    titles = [t for t in found.text if "of microbatch" in t]
    assert len(titles) == 2 * (2 * 4 + 2)  # forward and backward on each stage


def test_an_idle_plan_makes_a_page_too() -> None:
    idle = make_row("do-nothing", make_plan(), IDLE_ESTIMATE, CLUSTER, 1.0)
    found = read_page(plan_page("x", [idle], CLUSTER, []))
    assert "Nothing runs: every device is idle." in found.text


def test_the_trace_holds_every_instruction_at_its_time() -> None:
    trace = json.loads(trace_json(PLAN, TIMELINES, ESTIMATE))
    named = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    assert [e["args"]["name"] for e in named if e["name"] == "process_name"] == [
        "group 0 (4 samples)",
        "group 1 (2 samples)",
    ]
    work = [e for e in trace["traceEvents"] if e.get("cat") in ("forward", "backward")]
    assert len(work) == 20
    first = next(e for e in work if e["pid"] == 1 and e["name"] == "F0")
    assert (first["ts"], round(first["dur"])) == (0.0, 40_000)  # 4 layers of 10 ms, in microseconds
    for event in (e for e in trace["traceEvents"] if e["ph"] == "X"):
        assert 0 <= event["ts"] <= event["ts"] + event["dur"] <= 1e6 * ESTIMATE.step_s * (1 + 1e-9)


def test_a_row_as_json_has_what_the_table_shows() -> None:
    data = json.loads(json.dumps(row_data(ROW, CLUSTER)))
    assert data["plan"]["groups"][1]["stages"][0]["devices"] == ["slow-0"]
    assert data["step_s"] == ESTIMATE.step_s
    assert data["tightest"]["device"] == "slow-0"
    assert row_data(REFUSED, CLUSTER) == {
        "strategy": "even-split", "chosen": False, "problem": "too <large>",
    }  # fmt: skip
