import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.builders import make_cluster, make_device, make_group, make_plan
from orchestrator import storage
from orchestrator.control.ledger import Ledger
from orchestrator.control.ledger_file import ledger_entry, ledger_lines
from orchestrator.control.persistence import CheckpointStore, RunStore
from orchestrator.core.durable import (
    AlarmMark,
    CheckpointFile,
    CheckpointManifest,
    ControlState,
    Estimates,
    Hold,
    LedgerEntry,
    PriceMemory,
    Trend,
)
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import CommittedStep, RunEvent, SlotJournal, Usage
from orchestrator.errors import ConfigError

PLAN = make_plan(make_group([make_device("a-0"), make_device("b-0")], [0, 2, 4], [2, 2, 1]))
STATE = ControlState(
    slot=3,
    generation=1,
    plan=PLAN,
    time_s=180.0,
    backlog_usd=0.25,
    penalty_weight=1e-4,
    best_ratio_samples_per_usd=1e4,
    spent_usd=0.5,
    num_ledger_entries=1,
    next_step=40,
    samples_committed=200,
    checkpoint_step=None,
    slowdowns=(("a-0", 2.5),),
    holds=(Hold("a-0", 180.0, 181.0),),
)
ENTRY = LedgerEntry(0.0, 60.0, "a-0", "a", 30.0, 0.5)


def manifest(step: int, num_layers: int = 2) -> CheckpointManifest:
    files = tuple(CheckpointFile(x, f"layer-{x:03d}.safetensors", 1, "0") for x in range(2))
    return CheckpointManifest(
        step=step, generation=1, files=files, num_layers=num_layers, samples_committed=8, seed=0
    )


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore(str(tmp_path / "run"))


def test_a_control_state_comes_back_as_it_was_saved(store: RunStore) -> None:
    store.write_journal(SlotJournal(ledger=(ENTRY,)))
    store.save_state(STATE)
    assert store.load_state(60.0) == STATE


def test_every_line_of_the_ledger_says_what_its_entry_says_however_alike_they_are() -> None:
    entries = [
        replace(ENTRY, device=device, **other)
        for other in ({}, {"usd": 0.25}, {"cause": "block"}, {"pool": '"device": ""'}, {})
        for device in ("a-0", 'a "1"', "", "\u00fc")
    ]
    written = list(ledger_lines(entries))
    assert written == [storage.json_text(entry) for entry in entries]
    assert [ledger_entry(line) for line in written] == entries


def test_a_state_is_written_as_if_none_had_been_before_it(tmp_path: Path) -> None:
    """What two states share is put into text once; what differs never stays behind."""
    other = make_plan(make_group([make_device("b-0")], [0, 4], [5]), generation=2)
    held = (*STATE.holds, Hold("b-0", 180.0, 200.0))
    store = RunStore(str(tmp_path / "run"))
    states = (
        STATE,
        replace(STATE, holds=held, saved_unix_s=1.0),
        replace(STATE, plan=other, granted=(STATE.plan,), slowdowns=()),
        replace(STATE, holds=(), slot=4, alarm_marks=(AlarmMark(0.0, 1.0, 0.0, 1.0, 0.5, 8),)),
        STATE,
    )
    for number, state in enumerate(states):
        first = RunStore(str(tmp_path / f"first-{number}"))
        for writer in (store, first):
            writer.save_state(state)
        storage.write_json(str(tmp_path / "plain.json"), state)
        files = (store.url("control.json"), first.url("control.json"), tmp_path / "plain.json")
        assert len({Path(file).read_bytes() for file in files}) == 1


def test_what_was_learned_is_at_most_half_a_minute_old_and_prices_are_never(
    store: RunStore,
) -> None:
    """A thousand devices would take half a megabyte in every slot, twice."""
    offer = make_cluster([make_device("a-0")]).offers[0]

    def state(written_s: float | None, level: float) -> ControlState:
        learned = Estimates(speeds=(("a-0", Trend(level)),), prices=(PriceMemory(offer, level),))
        return replace(STATE, num_ledger_entries=0, saved_unix_s=written_s, estimates=learned)

    def known() -> tuple[float, float]:
        found = store.load_state(60.0)
        assert found is not None
        return found.estimates.speeds[0][1].level, found.estimates.prices[0].read_s

    seen = []
    for written_s, level in ((100.0, 0.1), (129.0, 0.2), (130.0, 0.3), (131.0, 0.4), (None, 0.5)):
        store.save_state(state(written_s, level))
        seen.append(known())
    assert seen == [(0.1, 0.1), (0.1, 0.2), (0.3, 0.3), (0.3, 0.4), (0.5, 0.5)]


def test_what_a_killed_process_was_writing_is_removed(store: RunStore) -> None:
    store.save_state(STATE)
    folder = Path(store.run_url)
    (folder / f"control.json{storage.TEMPORARY}1234").write_text("{")
    store.delete_unfinished()
    assert sorted(path.name for path in folder.iterdir()) == ["control.json", "trends.json"]


def test_a_run_that_never_saved_has_no_state(store: RunStore) -> None:
    assert store.load_state(60.0) is None


def test_dollars_booked_after_the_state_was_saved_are_not_forgotten(store: RunStore) -> None:
    store.write_journal(SlotJournal(ledger=(ENTRY,)))
    store.save_state(STATE)
    store.write_journal(SlotJournal(ledger=(replace(ENTRY, usd=0.125, egress_usd=0.125),)))
    state = store.load_state(60.0)
    assert state is not None
    assert (state.spent_usd, state.backlog_usd, state.num_ledger_entries) == (0.75, 0.5, 2)


def test_what_was_overspent_before_a_cut_of_the_budget_grows_by_dollars_booked_late(
    store: RunStore,
) -> None:
    for inherited_usd, expected_usd in ((2.0, 2.5), (0.0, 0.0)):
        store.save_state(replace(STATE, num_ledger_entries=0, inherited_usd=inherited_usd))
        if inherited_usd:
            store.write_journal(SlotJournal(ledger=(replace(ENTRY, usd=0.5),)))
        state = store.load_state(60.0)
        assert state is not None
        assert state.inherited_usd == expected_usd


def test_what_was_billed_after_the_state_was_saved_is_not_billed_again(store: RunStore) -> None:
    """Killed between the two: the next life bills the same seconds of the run anew."""
    cluster = make_cluster([make_device("a-0")], now_s=10.0)
    state = replace(STATE, time_s=10.0, holds=(Hold("a-0", 10.0, 10.0),), num_ledger_entries=0)
    store.save_state(state)
    late = replace(ENTRY, device="a-0", from_s=600.0, to_s=900.0)
    store.write_journal(SlotJournal(ledger=(late, replace(late, to_s=1e6, cause="egress"))))
    loaded = store.load_state(60.0)
    assert loaded is not None
    assert loaded.holds == (Hold("a-0", 10.0, 15.0),)
    ledger = Ledger(billing_speedup=60.0, holds=loaded.holds)
    later = replace(cluster, now_s=18.0)
    (entry,) = ledger.close([Usage("a-0", 10.0, 18.0)], cluster, later)
    assert (entry.from_s, entry.to_s) == (900.0, 1080.0)


def test_a_ledger_that_lost_lines_is_refused(store: RunStore) -> None:
    store.save_state(STATE)
    with pytest.raises(ConfigError, match="has 0 lines, but the run had written 1"):
        store.load_state(60.0)


def test_a_ledger_without_its_state_is_refused(store: RunStore) -> None:
    store.write_journal(SlotJournal(ledger=(ENTRY,)))
    with pytest.raises(ConfigError, match=r"control.json is missing, but the ledger has 1 lines"):
        store.load_state(60.0)


def test_a_line_of_steps_has_the_documented_keys(store: RunStore) -> None:
    store.write_journal(
        SlotJournal(steps=(CommittedStep(7, 2, 35, 40, 0.5, 3.5, 1.25, 0.7, 1e-3),))
    )
    assert store.read("steps") == (
        {
            "step": 7, "loss": 1.25, "grad_norm": 0.7, "lr": 1e-3, "samples": 5, "step_s": 0.5,
            "generation": 2, "first_sample": 35, "end_sample": 40,
        },
    )  # fmt: skip


def test_a_loss_that_is_not_finite_is_null_in_the_file(store: RunStore) -> None:
    store.write_journal(SlotJournal(steps=(CommittedStep(0, 1, 0, 5, 0.5, 0.5, float("nan")),)))
    assert store.read("steps")[0]["loss"] is None


def test_journals_append_and_never_rewrite(store: RunStore) -> None:
    store.write_journal(SlotJournal(ledger=(ENTRY,)))
    before = storage.read_bytes(store.url("ledger.jsonl"))
    event = RunEvent(60.0, 1, "replan", "reassign: faster", duration_s=0.1)
    store.write_journal(SlotJournal(ledger=(replace(ENTRY, from_s=60.0),), events=(event,)))
    assert storage.read_bytes(store.url("ledger.jsonl")).startswith(before)
    assert store.read("events")[0]["kind"] == "replan"


def test_steps_undone_by_a_restored_checkpoint_leave_the_file(store: RunStore) -> None:
    steps = tuple(CommittedStep(k, 1, 5 * k, 5 * k + 5, 0.5, k + 1.0) for k in range(6))
    store.write_journal(SlotJournal(steps=steps))
    store.rewind_steps(4)
    store.write_journal(SlotJournal(steps=(replace(steps[4], generation=2),)))
    rows = store.read("steps")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["first_sample"] for row in rows][1:] == [row["end_sample"] for row in rows][:-1]


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ((0, 1, 2), "it has not every step before 4"),  # its end was lost
        ((0, 1, 3), "it has not every step before 4"),
        ((0, 1, 2, 3, 3), "it has not every step before 4"),
        ((0, 1, 2, 3, None), "the line {'step': None} is of no step"),
    ],
)
def test_steps_that_a_checkpoint_builds_on_must_be_on_file(
    store: RunStore, steps: tuple[int | None, ...], problem: str
) -> None:
    for step in steps:
        store.append("steps", {"step": step})
    with pytest.raises(ConfigError, match=f"steps.jsonl is damaged: {problem}"):
        store.rewind_steps(4)
    assert [row["step"] for row in store.read("steps")] == [*steps]


def test_a_run_that_began_with_the_checkpoint_of_another_has_no_earlier_steps(
    store: RunStore,
) -> None:
    store.rewind_steps(4)
    for step in (4, 5, 6):
        store.append("steps", {"step": step})
    store.rewind_steps(6)
    assert [row["step"] for row in store.read("steps")] == [4, 5]


def test_a_result_comes_back(store: RunStore) -> None:
    assert store.read_result() is None
    store.write_result({"status": "finished", "spent_usd": 1.5})
    assert store.read_result() == {"status": "finished", "spent_usd": 1.5}


def test_a_checkpoint_exists_once_its_manifest_does(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(str(tmp_path))
    storage.write_bytes(checkpoints.url(100, "layer-000.safetensors"), b"x")
    assert checkpoints.latest() is None
    checkpoints.write_manifest(manifest(100))
    assert checkpoints.latest() == manifest(100)
    assert (tmp_path / "checkpoints" / "step-000100" / "manifest.json").exists()


def test_a_checkpoint_without_all_layers_is_refused(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(str(tmp_path))
    with pytest.raises(ValueError, match=r"step 100 lacks the layers \[2\]"):
        checkpoints.write_manifest(manifest(100, num_layers=3))
    assert checkpoints.latest() is None


def test_the_oldest_checkpoints_go_after_the_new_one_is_whole(tmp_path: Path) -> None:
    """ray-project/ray#6226: never delete before the commit."""
    checkpoints = CheckpointStore(str(tmp_path), keep_checkpoints=2)
    for step in (100, 200):
        checkpoints.write_manifest(manifest(step))
    storage.write_bytes(checkpoints.url(300, "layer-000.safetensors"), b"x")
    checkpoints.prune()
    assert checkpoints.steps() == (100, 200)
    assert storage.exists(checkpoints.url(300))
    checkpoints.write_manifest(manifest(300))
    assert checkpoints.steps() == (200, 300)
    assert not storage.exists(checkpoints.url(100))


def test_a_checkpoint_that_was_cut_short_is_cleared_once_a_later_one_is_whole(
    tmp_path: Path,
) -> None:
    checkpoints = CheckpointStore(str(tmp_path))
    storage.write_bytes(checkpoints.url(50, "layer-000.safetensors"), b"x")
    checkpoints.write_manifest(manifest(100))
    assert not storage.exists(checkpoints.url(50))


def test_the_state_is_readable_json(store: RunStore) -> None:
    store.save_state(STATE)
    data = json.loads(storage.read_bytes(store.url("control.json")))
    assert data["plan"]["groups"][0]["microbatches"] == [2, 2, 1]


UNWRITABLE = (
    b'{"usd": NaN}', b'{"usd": -Infinity}', b'{"usd": 1e999}', b'{"usd": 1' + 400 * b"0" + b"}",
    b'{"cause": "\\ud800"}',
)  # fmt: skip
"""What no number or text comes to that could be written down again."""


@pytest.mark.parametrize("row", UNWRITABLE)
def test_a_record_that_holds_what_cannot_be_written_is_named_with_its_line(
    store: RunStore, row: bytes
) -> None:
    storage.write_bytes(store.url("slots.jsonl"), b"{}\n" + row + b"\n")
    with pytest.raises(ConfigError, match=r"^line 2 of .*slots.jsonl is damaged: .*; put a copy"):
        store.read("slots")


def test_large_numbers_and_whole_characters_of_a_record_are_none_of_these(store: RunStore) -> None:
    rows = ({"a": 1e308, "b": 10**40, "c": 5e-324, "d": "\U0001f600"},)
    store.append("slots", rows[0])
    assert store.read("slots") == rows


@pytest.mark.parametrize("line", [b"nonsense", b"3", b"\xff", b"{}", 100_000 * b"["])
def test_a_damaged_ledger_is_named_with_the_mend(store: RunStore, line: bytes) -> None:
    storage.write_bytes(store.url("ledger.jsonl"), line + b"\n")
    with pytest.raises(ConfigError, match=r"ledger.jsonl is damaged: .*; put a copy back"):
        store.read_ledger()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", 100_000 * b"["])
def test_a_damaged_result_or_manifest_is_named(store: RunStore, content: bytes) -> None:
    storage.write_bytes(store.url("result.json"), content)
    with pytest.raises(ConfigError, match=r"result.json is damaged"):
        store.read_result()
    checkpoints = CheckpointStore(store.run_url)
    storage.write_bytes(checkpoints.url(3, "manifest.json"), content)
    with pytest.raises(ConfigError, match=r"manifest.json is damaged"):
        checkpoints.latest()


def test_evaluations_come_back_as_written_and_those_of_undone_steps_are_forgotten(
    store: RunStore,
) -> None:
    told = [
        Evaluation(10, 1, 64, 0.5, {"accuracy": 0.25}, eval_s=1.5, best=True),
        Evaluation(20, 1, 64, math.nan, {"accuracy": None}),
        Evaluation(30, 2, 64, 0.25, best=True),
    ]
    for evaluation in told:
        store.write_evaluation(evaluation)
    assert store.read_evaluations() == (told[0], replace(told[1], loss=None), told[2])
    assert store.best_step() == 30
    store.rewind_evaluations(20)
    assert [e.step for e in store.read_evaluations()] == [10, 20]
    assert store.best_step() == 10


def test_a_checkpoint_that_is_named_stays_beside_the_newest(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(str(tmp_path), keep_checkpoints=1)
    for step in (10, 20, 30):
        checkpoints.write_manifest(manifest(step), also=(10,))
    assert checkpoints.steps() == (10, 30)
    checkpoints.write_manifest(manifest(40), also=(30,))
    assert checkpoints.steps() == (30, 40)
