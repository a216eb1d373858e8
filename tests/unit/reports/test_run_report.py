"""The report of a run, from its files alone."""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.builders import make_group, make_plan
from orchestrator.control.persistence import RunStore
from orchestrator.core.budget import LimitOptions
from orchestrator.core.durable import LedgerEntry
from orchestrator.core.edits import BudgetChanged
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, RunEvent, SlotJournal
from orchestrator.core.view import DeviceView, Rates, Spread, StepSpreads
from orchestrator.errors import ConfigError
from orchestrator.reports.bill import BillLine, bill_columns, compare_bill, read_bill
from orchestrator.reports.records import slot_data
from orchestrator.reports.run_page import run_page
from orchestrator.reports.run_report import read_run, report_data
from orchestrator.reports.run_text import head_figures, print_report
from tests.unit.reports.long_run import write_run
from tests.unit.reports.samples import FAST, PLAN, a_record, read_page

OTHER = make_plan(make_group([FAST], [0, 10], [11]), generation=4)


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    """Four slots of an hour, ten steps each; the plan changes after the second."""
    store = RunStore(str(tmp_path / "byte-gpt"))
    (tmp_path / "byte-gpt").mkdir()
    (tmp_path / "byte-gpt" / "config.yaml").write_text("run: {name: byte-gpt}\n")
    for slot in range(4):
        early = slot < 2
        store.append(
            "slots",
            slot_data(
                a_record(
                    slot=slot, time_s=3600.0 * (slot + 1), step=10 * (slot + 1),
                    generation=3 if early else 4, plan=PLAN if early else OTHER,
                    decision="switch" if slot == 1 else "keep",
                    reason="fast-0 is 2.4 times slower" if slot == 1 else "best",
                    predicted=Rates(0.5, 22.0, 3.5),
                    measured=Rates(0.55 if early else 0.6, 20.0, 3.5),
                    spent_usd=2.0 * (slot + 1), budget_usd=1.8 * (slot + 1),
                    overspend_bound_usd=1.0, control_cpu_s=0.1, forgiven_usd=0.1 * slot,
                    time_constant_s=1800.0, coherence_s=None if early else 600.0,
                )
            ),
        )  # fmt: skip
        store.write_journal(
            SlotJournal(
                steps=tuple(
                    CommittedStep(k, 3 if early else 4, 11 * k, 11 * k + 11,
                                  0.55 if early else 0.6, 0.55 * k, loss=5.0 - 0.1 * k)
                    for k in range(10 * slot, 10 * slot + 10)
                ),
                ledger=(
                    LedgerEntry(3600 * slot, 3600 * slot + 3600, "fast-0", "fast", 1.5, 1.5),
                    LedgerEntry(3600 * slot, 3600 * slot + 3600, "slow-0", "slow", 0.3, 0.3,
                                cause="standing"),
                    LedgerEntry(3600 * slot, 3600 * slot + 3600, "slow-0", "slow", 0.0, 0.0,
                                2e9, 0.2, cause="egress"),
                ),
                events=(RunEvent(3600.0 * slot, slot, "straggler", "2.4 times slower", "fast-0"),)
                if slot == 1 else (),
            )
        )  # fmt: skip
    return store.run_url


def test_the_report_adds_up_what_the_files_say(run_dir: str) -> None:
    found = read_run(run_dir)
    assert (found.num_steps, found.num_samples) == (40, 440)
    assert found.spent_usd == pytest.approx(4 * 2.0)
    assert found.billed_hours == 4.0
    assert found.average_per_hour_usd == pytest.approx(2.0)
    assert found.usd_per_million_samples == pytest.approx(1e6 * 8.0 / 440)
    assert found.first_loss == pytest.approx(5.0 - 0.45)  # mean of the first ten
    assert found.last_loss == pytest.approx(5.0 - 3.45)
    assert found.error_ratio == pytest.approx(0.15)  # median of 10, 10, 20, 20 %
    assert found.standing_usd == pytest.approx(1.2)
    assert found.forgiven_usd == pytest.approx(0.3)
    assert (found.time_constant_s, found.coherence_s) == (1800.0, 600.0)
    figures = head_figures(found)
    assert figures["price of money"] == "follows within 30.0 min; prices and speeds last 10.0 min"
    assert figures["forgiven"] == "$0.3000 above the average, by budget.queue_cap"


def test_plans_are_cut_where_another_one_ran_and_say_why(run_dir: str) -> None:
    first, second = read_run(run_dir).plans
    assert (first.first_slot, first.last_slot, first.end_step) == (0, 1, 20)
    assert (second.first_slot, second.last_slot, second.reason) == (
        2, 3, "fast-0 is 2.4 times slower",
    )  # fmt: skip
    assert (first.measured_step_s, second.measured_step_s) == (0.55, 0.6)


def test_the_bill_is_split_by_pool_and_compared_with_a_providers(run_dir: str) -> None:
    """skypilot-org/skypilot#4914: billed 0.49 where the page says 0.28."""
    found = read_run(run_dir)
    fast, slow = found.pools
    assert (fast.pool, fast.device_hours, fast.usd) == ("fast", 4.0, 6.0)
    assert (slow.device_hours, slow.usd, slow.egress_usd) == (
        4.0, pytest.approx(1.2), pytest.approx(0.8),
    )  # fmt: skip
    billed = read_bill("pool,usd\nfast,4.00\nfast,2.50\ndisk,1\n", bill_columns(()))
    compared = {line.pool: line for line in compare_bill(found.pools, billed)}
    assert [(p, line.ledger_usd, line.bill_usd) for p, line in compared.items()] == [
        ("disk", 0.0, 1.0), ("fast", 6.0, 6.5), ("slow", pytest.approx(2.0), 0.0),
    ]  # fmt: skip
    assert not any(line.agrees for line in compared.values())


def test_a_ledger_that_lost_lines_is_told_with_file_and_line(tmp_path: Path) -> None:
    """However long a run is: the first line that is not there any more, to the slot."""
    folder = tmp_path / "long"
    run_dir = write_run(folder, num_slots=12, num_devices=6)
    file = folder / "ledger.jsonl"
    lines = file.read_text("utf-8").splitlines(keepends=True)
    assert read_run(run_dir).warnings == ()
    per_slot = [[n for n, line in enumerate(lines) if json.loads(line)["to_s"] == 60.0 * (slot + 1)]
                for slot in range(12)]  # fmt: skip
    for first, end, slot in ((per_slot[5][1], per_slot[5][2], 5), (per_slot[9][0], len(lines), 9),
                             (0, len(lines), 0)):  # fmt: skip
        file.write_text("".join(lines[:first] + lines[end:]), "utf-8")
        found = read_run(run_dir)
        (said,) = found.warnings
        assert said.startswith(f"{file}: lines are missing at or before line ")
        named = int(
            said.removeprefix(f"{file}: lines are missing at or before line ").split(":")[0]
        )
        assert first < named <= first + len(per_slot[slot]) + 1
        assert f"up to the end of slot {slot} they add up to" in said
        assert report_data(found)["warnings"] == [said]
        assert f"Warning: {said}" in read_page(run_page(found)).text


def test_spending_above_the_promise_is_called_broken(run_dir: str) -> None:
    assert read_run(run_dir).bound_held
    RunStore(run_dir).append("slots", slot_data(a_record(slot=4, spent_usd=12.0, budget_usd=9.0)))
    found = read_run(run_dir)
    assert not found.bound_held
    worst = found.worst_slot
    assert worst is not None
    assert worst.slot == 4


def a_view(device_id: str, times_s: tuple[float, float, float], *, slow: bool) -> DeviceView:
    compute, rest = Spread(*times_s), Spread(0.0, 0.1, 0.2)
    steps = StepSpreads(compute=compute, wait=rest, input=Spread(0.0, 0.0, 0.0))
    return DeviceView(device_id, "t4", "pool", "used", 1.0, slow, 0.35, steps)


def test_who_was_slow_stands_first_and_once_is_told_apart_from_all_the_time(tmp_path: Path) -> None:
    """marin-community/marin#7681, #4236: step time was logged, and never attributed."""
    store = RunStore(str(tmp_path))
    for slot in range(8):
        store.append("slots", slot_data(a_record(slot=slot, time_s=60.0 * slot, devices=(
            a_view("even-0", (0.9, 1.0, 1.1), slow=False),
            a_view("odd-0", (0.9, 1.0, 9.0 if slot == 5 else 1.1), slow=slot == 5),
            a_view("weak-0", (2.0, 2.0 + slot / 10, 3.0), slow=slot >= 2),
            DeviceView("idle-0", "t4", "pool", "idle", 1.0, False, 0.35),
        ))))  # fmt: skip
    found = read_run(str(tmp_path))
    weak, odd, even = found.devices
    assert (weak.device, weak.slow_slots, weak.num_slots) == ("weak-0", (2, 3, 4, 5, 6, 7), 8)
    assert weak.phases["compute_s"] == (2.0, pytest.approx(2.35), 3.0)
    assert (odd.device, odd.slow_slots, odd.worst_slot) == ("odd-0", (5,), 5)
    assert odd.worst_ratio == pytest.approx(9.0)
    assert (even.device, even.slow_slots) == ("even-0", ())
    screen = StringIO()
    print_report(Console(file=screen, width=200), found)
    text, page = screen.getvalue(), "".join(read_page(run_page(found)).text)
    for said in ("6 of 8 slots", "1 of 8 slots (slot 5)", "9.00x (slot 5)",
                 "2.00 / 2.35 / 3.00 s"):  # fmt: skip
        assert said in text
        assert said in page
    rows = json.loads(json.dumps(report_data(found), allow_nan=False))["devices"]
    assert [row["device"] for row in rows] == ["weak-0", "odd-0", "even-0"]
    assert rows[0]["phases"]["wait_s"] == [0.0, 0.1, 0.2]


def test_a_run_still_going_on_is_reported(run_dir: str, tmp_path: Path) -> None:
    assert read_run(run_dir).status == "running, or ended without a result"
    with (tmp_path / "byte-gpt" / "slots.jsonl").open("a") as file:
        file.write('{"slot": 5, "torn')  # the writer died here
    assert len(read_run(run_dir).slots) == 4
    RunStore(run_dir).write_result({"status": "finished", "reason": "all steps done"})
    assert read_run(run_dir).status == "finished"


def test_a_run_that_did_nothing_yet_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run: {name: x}\n")
    found = read_run(str(tmp_path))
    assert found.average_per_hour_usd is None
    assert found.plans == ()
    json.dumps(report_data(found), allow_nan=False)
    read_page(run_page(found))
    print_report(Console(file=StringIO()), found)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        read_run(str(tmp_path))


def test_json_text_and_page_tell_the_same(run_dir: str) -> None:
    RunStore(run_dir).write_result({"status": "finished", "reason": "all 40 steps done"})
    (Path(run_dir) / "compare.json").write_text(json.dumps([
        {"strategy": "joint", "predicted_step_s": 0.5, "measured_step_s": 0.5,
         "samples_per_s": 128.0, "cost_per_hour_usd": 4.0, "at_cost_of": ""},
        {"strategy": "even-split", "predicted_step_s": 1.0, "measured_step_s": 1.0,
         "samples_per_s": 64.0, "cost_per_hour_usd": 4.0, "at_cost_of": ""},
        {"strategy": "joint", "predicted_step_s": 0.8, "measured_step_s": 0.8,
         "samples_per_s": 80.0, "cost_per_hour_usd": 3.0, "at_cost_of": "even-split"},
    ]))  # fmt: skip
    found = read_run(run_dir)
    data = json.loads(json.dumps(report_data(found), allow_nan=False))
    assert data["steps"] == 40
    assert data["marginal_values"] == {"device_samples_per_s.fast": 0.3}
    assert data["most_over_budget"]["slot"] == 3
    assert data["curves"]["spent_usd"] == [2.0, 4.0, 6.0, 8.0]
    assert [life["device"] for life in data["timeline"]] == ["fast-0", "gone-0", "slow-0"]
    screen = StringIO()
    line = BillLine("fast", 6.0, 6.5, 0.06, agrees=False, why="at another price")
    print_report(Console(file=screen, width=200), found, (line,))
    text = screen.getvalue()
    for said in ("finished", "4.55 -> 1.55 (fell by 3.00; means of 10 steps)", "kept in every slot",
                 "2.4 times slower", "releasing those devices", "-50.0 % step",
                 "joint at even-split's cost", "+25.0 % samples/s", "$0.5000", "at another price",
                 "They agree within 1.0 %"):  # fmt: skip
        assert said in text
    page = read_page(run_page(found, (line,)))
    assert not page.outside
    assert "at another price" in page.text
    for title in ("Loss", "Throughput", "Step time", "Money", "Plan over time"):
        assert title in page.text
    assert run_page(found).count('role="img"') == 5
    assert "byte-gpt: finished" in page.text


def test_no_figure_of_a_report_is_cut_on_a_narrow_terminal(run_dir: str) -> None:
    RunStore(run_dir).append("slots", slot_data(a_record(slot=4, devices=(
        a_view("a-device-of-some-pool-0", (0.9, 1.0, 1.1), slow=True),
    ))))  # fmt: skip
    screen = StringIO()
    print_report(Console(file=screen, width=80), read_run(run_dir))
    text = screen.getvalue()
    assert "\u2026" not in text
    assert "a-device-of-some-pool-0" in text


def test_the_end_leaves_no_device_idle_that_was_used_in_most_slots(run_dir: str) -> None:
    view = DeviceView("fast-0", "a100-40", "fast", "idle", 1.0, False, 3.67)
    ended = a_record(slot=4, decision="idle", marginal_values=(), devices=(view,))
    RunStore(run_dir).append("slots", slot_data(ended))
    worth = read_run(run_dir).worth
    assert worth is not None
    assert worth.idle == ()
    for slot in range(5, 10):
        RunStore(run_dir).append("slots", slot_data(a_record(slot=slot, devices=(view,))))
    worth = read_run(run_dir).worth
    assert worth is not None
    assert worth.idle == ("fast",)


def test_a_loss_that_rose_is_said_to_have_risen(run_dir: str) -> None:
    found = read_run(run_dir)
    backwards = replace(found, steps=tuple(reversed(found.steps)))
    assert head_figures(backwards)["loss"] == "1.55 -> 4.55 (rose by 3.00; means of 10 steps)"


@pytest.mark.parametrize(("bound_usd", "drawn"), [(1.0, True), (100.0, False)])
def test_an_allowance_that_would_flatten_the_curves_is_not_drawn(
    run_dir: str, bound_usd: float, drawn: bool
) -> None:
    found = read_run(run_dir)
    slots = tuple(replace(slot, overspend_bound_usd=bound_usd) for slot in found.slots)
    text = read_page(run_page(replace(found, slots=slots))).text
    assert ("most that was allowed" in text) is drawn
    assert {"spent", "average budget"} <= set(text)


def test_a_page_of_many_slots_stays_small(run_dir: str) -> None:
    found = read_run(run_dir)
    many = replace(found, slots=found.slots * 5000)
    assert len(run_page(many)) < 400_000


def test_of_many_plans_the_last_ones_are_printed(tmp_path: Path) -> None:
    found = read_run(write_run(tmp_path / "long", num_slots=60, num_devices=3, plan_every=1))
    screen = StringIO()
    print_report(Console(file=screen, width=200), found)
    assert f"(the last 20 of {len(found.plans)})" in screen.getvalue()
    first, last = found.plans[0], found.plans[-1]
    lines = [line.split(" ")[0] for line in screen.getvalue().splitlines()]
    assert f"{last.first_slot}-{last.last_slot}" in lines
    assert f"{first.first_slot}-{first.last_slot}" not in lines


def test_the_curve_of_evaluations_has_a_colour_of_its_own(run_dir: str) -> None:
    judged = (Evaluation(10, 0, 8, 0.5), Evaluation(20, 0, 8, 0.4))
    shown = run_page(replace(read_run(run_dir), evaluations=judged))
    assert '<i style="background:var(--c0)"></i>loss' in shown
    assert '<i style="background:var(--c2)"></i>evaluation' in shown


def test_a_page_has_a_table_of_evaluations_in_which_the_best_one_stands_out(run_dir: str) -> None:
    judged = (
        Evaluation(10, 0, 8, 0.5, {"accuracy": 0.25}, best=True),
        Evaluation(20, 0, 8, 0.4, {"accuracy": 0.75}, best=True),
        Evaluation(30, 0, 8, 0.45, {"accuracy": None}, eval_s=2.0),
    )
    page = run_page(replace(read_run(run_dir), evaluations=judged))
    head, *rows = (
        page.partition("<h2>Evaluations</h2>")[2].partition("</table>")[0].split("<tr")[1:]
    )
    assert re.findall("<th.*?>(.*?)</th>", head) == ["step", "loss", "accuracy", "samples", "took"]
    assert [re.findall("<td.*?>(.*?)</td>", row) for row in rows] == [
        ["10", "0.500", "0.250", "8", "0 s"],
        ["20, the best", "0.400", "0.750", "8", "0 s"],
        ["30", "0.450", "-", "8", "2.00 s"],
    ]
    assert [" class=chosen>" in row for row in rows] == [False, True, False]
    assert "loss of the best evaluation, step 20" in page
    assert "<h2>Evaluations" not in run_page(read_run(run_dir))


def test_changes_of_the_budget_are_a_table_of_their_own_in_text_page_and_json(
    run_dir: str,
) -> None:
    told = ("start", "config.yaml")
    store, changes = RunStore(run_dir), [
        ("budget.total_usd", None, 50.0),
        ("budget.limits", (), (LimitOptions(zone="z1", max_per_hour_usd=1.0),)),
    ]  # fmt: skip
    events = tuple(
        BudgetChanged(7200.0, 2, "budget_changed", "", key=key, old=old, new=new, source=source)
        for (key, old, new), source in zip(changes, told, strict=True)
    )
    store.write_journal(SlotJournal(events=events))
    found = read_run(run_dir)
    data = report_data(found)["budget_changes"]
    assert isinstance(data, list)
    assert data[0] == {
        "slot": 2, "time_s": 7200.0, "key": "budget.total_usd", "old": None, "new": 50.0,
        "source": "start",
    }  # fmt: skip
    screen = StringIO()
    print_report(Console(file=screen, width=160), found)
    lines = [" ".join(line.split()) for line in screen.getvalue().splitlines()]
    at = lines.index("Budget changes")
    assert lines[at + 1 : at + 4] == [
        "slot billed hours key old new from",
        "2 2.00 budget.total_usd none 50 start",
        "2 2.00 budget.limits none zone z1 at most 1 $/h config.yaml",
    ]
    text = read_page(run_page(found)).text
    assert {"Budget changes", "budget.total_usd", "zone z1 at most 1 $/h"} <= set(text)


def test_a_run_whose_budget_never_changed_shows_no_table_of_changes(run_dir: str) -> None:
    found = read_run(run_dir)
    assert report_data(found)["budget_changes"] == []
    assert "Budget changes" not in run_page(found)
