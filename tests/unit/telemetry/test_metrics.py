import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from typing import get_args
from urllib.request import urlopen

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.builders import make_device, make_group, make_plan
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.durable import CheckpointFile, CheckpointManifest, LedgerEntry
from orchestrator.core.evaluation import Evaluation
from orchestrator.core.slot import (
    CommittedStep,
    DecisionKind,
    RunEvent,
    SlotJournal,
    SlotRecord,
    StepReport,
)
from orchestrator.core.view import DeviceView, Rates, ZonePath
from orchestrator.errors import ConfigError
from orchestrator.telemetry.exporter import Exporter, RunFacts
from orchestrator.telemetry.gauges import Gauges
from orchestrator.telemetry.metrics import METRICS, REASONS, MetricsOptions

UNITS = ("_seconds", "_bytes", "_ratio", "_usd", "_per_second", "_per_hour", "_per_usd")
COUNTS_AND_STATES = {
    "loss", "grad_norm", "learning_rate", "devices", "device_straggler", "worker_up", "generation",
    "groups", "stages", "num_microbatches", "plan_info", "penalty_weight", "lease_samples",
    "build_info", "evaluation", "evaluation_step", "best_evaluation_step",
    "requested_devices",
}  # fmt: skip
BOUNDED_LABELS = {
    "group", "phase", "device", "kind", "pool", "state", "zone", "reason", "decision", "schedule",
    "strategy", "status", "version", "of", "where", "source", "source_zone", "target_zone",
    "metric"}  # fmt: skip
FACTS = RunFacts(
    strategy="joint", zone_of_pool={"gpu": "z1"}, num_samples=1000,
    billing_speedup=60.0, unix_time=lambda: 1e9,
)  # fmt: skip
CHECKPOINT = CheckpointManifest(
    step=40, generation=1, num_layers=2, samples_committed=320, seed=0, write_s=2.0, unix_s=9e8,
    files=(CheckpointFile(0, "layer-0", 100, "x"), CheckpointFile(1, "layer-1", 28, "x")),
)  # fmt: skip
DEVICES = [make_device(f"gpu-{i}") for i in range(3)]


def view(device_id: str, state: str = "used") -> DeviceView:
    return DeviceView(
        device_id, "gpu", "gpu", state, 1.5, straggler=True, price_per_hour=3.6,  # type: ignore[arg-type]
        memory_bytes=2**30, utilization_ratio=0.75,
    )  # fmt: skip


def make_record(num_devices: int = 3) -> SlotRecord:
    """The end of a slot in which the plan of all devices changed to a pipeline."""
    plan = make_plan(make_group(DEVICES[:num_devices], range(num_devices + 1), [1, 1]))
    rates = Rates(0.5, 16.0, 3.5, (("gpu-0", 1000),))
    return SlotRecord(
        slot=3,
        time_s=180.0,
        step=40,
        generation=1,
        decision="switch",
        reason="switch: gpu-0 runs slower",
        plan=plan,
        next_plan=plan,
        predicted=rates,
        measured=replace(rates, step_s=0.6),
        backlog_usd=0.1,
        penalty_weight=1e-5,
        price_of_money_samples_per_usd=1e4,
        marginal_values=(
            ("budget_samples_per_s", 0.5),
            ("device_samples_per_s.gpu", 4.0),
            ("device_break_even_per_hour_usd.gpu", 8.0),
            ("device_same_cost_per_hour_usd.gpu", 6.0),
            ("share_samples_per_s.gpu", -0.1),
        ),
        spent_usd=2.0,
        budget_usd=2.5,
        overspend_bound_usd=0.5,
        solve_s=0.2,
        migration_s=0.3,
        moved_bytes=10**6,
        control_cpu_s=0.25,
        devices=tuple(view(d.device_id) for d in DEVICES[:num_devices]),
        loss=2.5,
        grad_norm=1.0,
        lr=1e-3,
        samples=320,
        num_late=1,
        num_operations=100,
        stragglers=("gpu-0",),
        fallbacks=("assignment: time limit",),
        price_age_s=(("gpu", 0.0),),
        progress_backlog_usd=0.3,
        forgiven_usd=0.2,
        time_constant_s=7200.0,
        coherence_s=1800.0,
        overhead_ratio=0.04,
        budget=BudgetOptions(average_per_hour_usd=4.0, horizon_hours=2.0),
        requested=(("gpu", 3),),
        paths=(ZonePath("z1", "z2", 1e8, 0.02),),
    )


def make_journal() -> SlotJournal:
    report = StepReport(1, 39, "gpu-0", 0, 8, 0.0, 0.5, 0.5, 0.4, reduce_s=0.05)
    return SlotJournal(
        reports=(report, replace(report, device_id="gpu-1", compute_s=0.2)),
        steps=(CommittedStep(39, 1, 312, 320, 0.5, 0.5, 2.5, skipped=True),),
        ledger=(
            LedgerEntry(0.0, 60.0, "gpu-0", "gpu", 3.6, 0.06),
            LedgerEntry(0.0, 60.0, "gpu-0", "gpu", 0.0, 0.0, 1e6, 0.01, "egress"),
        ),
        events=(
            RunEvent(180.0, 3, "lost", "gone", "gpu-2"),
            RunEvent(180.0, 3, "lost", "taken", "gpu-3", cause="preemption"),
            RunEvent(180.0, 3, "recovered", "runs as predicted again", "gpu-4"),
            RunEvent(180.0, 3, "recovered", "at step 5", duration_s=0.1, cause="replica"),
            RunEvent(180.0, 3, "alarm", "budget_infeasible: no plan keeps both"),
        ),
        checkpoints=(replace(CHECKPOINT, step=20, write_s=1.0, unix_s=8e8), CHECKPOINT),
    )


@pytest.fixture(scope="module")
def opened() -> Iterator[list[Exporter]]:
    """Exporters of this module, closed together: each takes half a second to stop listening."""
    exporters: list[Exporter] = []
    yield exporters
    with ThreadPoolExecutor(len(exporters)) as pool:
        list(pool.map(Exporter.close, exporters))


@pytest.fixture
def exporter(opened: list[Exporter]) -> Exporter:
    opened.append(Exporter(0, "127.0.0.1", "demo", FACTS))
    return opened[-1]


def scrape(exporter: Exporter) -> str:
    host, port = exporter.address
    with urlopen(f"http://{host}:{port}/metrics") as answer:
        return str(answer.read().decode())


def value(exporter: Exporter, name: str, **labels: str) -> float | None:
    wanted = f"lyray_{name}", {"run": "demo", **labels}
    families = text_string_to_metric_families(exporter.page())
    found = (s.value for family in families for s in family.samples if (s.name, s.labels) == wanted)
    return next(found, None)


def test_every_name_carries_its_unit() -> None:
    for name, metric in METRICS.items():
        base = name.removesuffix("_total")
        assert (metric.kind == "counter") == name.endswith("_total"), name
        if metric.kind == "counter":
            continue
        assert base.endswith(UNITS) or base in COUNTS_AND_STATES, name


def test_labels_come_from_bounded_sets() -> None:
    """ray-project/ray#47289: names and ids blow up the number of series."""
    for name, metric in METRICS.items():
        assert set(metric.labels) <= BOUNDED_LABELS, name


def test_what_happens_between_two_scrapes_is_counted(exporter: Exporter) -> None:
    """ray-project/ray#47522: a state that is a gauge loses the changes that nobody scraped."""
    for decision in ("switch", "idle", "switch", "keep"):
        exporter.slot(replace(make_record(), decision=decision, reason=decision))
    assert value(exporter, "replans_total", decision="switch", reason="switch") == 2
    assert value(exporter, "decisions_total", decision="idle", reason="other") == 1
    assert value(exporter, "decisions_total", decision="keep", reason="keep") == 1
    for _ in range(2):
        exporter.journal(make_journal())
    assert value(exporter, "losses_total", reason="preemption") == 2
    assert value(exporter, "cost_usd_total", pool="gpu") == pytest.approx(0.12)


def test_five_hundred_events_of_any_text_leave_as_many_series_as_a_hundred(
    exporter: Exporter,
) -> None:
    """ray-project/ray#47289: names and ids blow up the number of series."""
    rng = np.random.default_rng(0)
    counts = []
    for event in range(1, 501):
        came = view(f"gpu-{event}")  # another one in every slot
        texts = (f"text {event}", *sorted(REASONS))
        reason, cause = rng.choice(texts), rng.choice(texts)
        decision = rng.choice(get_args(DecisionKind))
        record = replace(make_record(2), decision=decision, reason=f"{reason}: {event}")
        rates = replace(record.measured, peak_memory_bytes=((came.device_id, event),))
        exporter.slot(replace(record, devices=(came,), measured=rates, fallbacks=(f"{cause}: x",)))
        lost = RunEvent(180.0, event, "lost", f"gone {event}", f"gpu-{event - 1}", cause=cause)
        alarm = RunEvent(180.0, event, "alarm", f"{cause}: {event}")
        exporter.journal(replace(make_journal(), events=(lost, alarm)))
        if event in (100, 500):
            counts.append([x for x in scrape(exporter).splitlines() if not x.startswith("#")])
    few, many = counts
    pairs = len(get_args(DecisionKind)) * (len(REASONS) + 1)
    assert len(many) <= len(few) + pairs  # combinations that had not been drawn yet
    assert {d for line in many for d in re.findall(r'device="(.*?)"', line)} == {"gpu-500", "gpu-0"}
    assert not any("text" in line for line in many)


def test_no_metric_is_declared_and_never_shown(exporter: Exporter) -> None:
    """ray-project/kuberay#1493: panels stay empty."""
    exporter.journal(make_journal())
    exporter.slot(replace(make_record(), time_s=120.0, spent_usd=1.0))
    exporter.slot(make_record())
    exporter.evaluation(Evaluation(40, 2, 64, 0.5, {"accuracy": 0.9}, eval_s=2.0, best=True))
    page = scrape(exporter)
    for name in METRICS:
        assert any(
            line.startswith((f"lyray_{name}{{", f"lyray_{name}_bucket{{"))
            for line in page.splitlines()
        ), name
    assert "_created" not in page


def test_money_is_counted_by_pool_and_zone(exporter: Exporter) -> None:
    exporter.journal(make_journal())
    exporter.journal(make_journal())
    assert value(exporter, "cost_usd_total", pool="gpu") == pytest.approx(0.12)
    assert value(exporter, "egress_usd_total", zone="z1") == pytest.approx(0.02)


def test_money_is_used_up_at_a_time_of_the_wall_clock_unless_none_is_spent(
    exporter: Exporter,
) -> None:
    until = "budget_exhaustion_timestamp_seconds"
    exporter.slot(make_record())
    assert value(exporter, until) is None  # no rate is known yet
    exporter.slot(replace(make_record(), time_s=240.0, spent_usd=4.0))
    # 4 of 8 $ are left at 2 $ a billed minute, of which the run has 60 in a minute.
    assert value(exporter, until) == 1e9 + 2.0
    exporter.slot(replace(make_record(), time_s=4e3, spent_usd=4.0))
    exporter.slot(replace(make_record(), time_s=8e3, spent_usd=4.0))
    assert value(exporter, until) is None


def test_the_newest_checkpoint_is_shown_and_how_long_each_took(exporter: Exporter) -> None:
    exporter.checkpoint(replace(CHECKPOINT, unix_s=None))  # restored, of an older version
    assert value(exporter, "checkpoint_timestamp_seconds") is None
    assert value(exporter, "checkpoint_bytes") == 128
    assert value(exporter, "checkpoint_duration_seconds_count") is None
    exporter.journal(make_journal())
    assert value(exporter, "checkpoint_timestamp_seconds") == 9e8
    assert value(exporter, "checkpoint_duration_seconds_count") == 2
    assert value(exporter, "checkpoint_duration_seconds_sum") == 3.0


def test_paths_are_shown_by_the_zones_that_they_join(exporter: Exporter) -> None:
    exporter.slot(make_record())
    zones = {"source_zone": "z1", "target_zone": "z2"}
    assert value(exporter, "link_bandwidth_bytes_per_second", **zones) == 1e8
    assert value(exporter, "link_latency_seconds", **zones) == 0.02
    exporter.slot(replace(make_record(), paths=()))
    assert value(exporter, "link_latency_seconds", **zones) is None


def test_worth_of_one_more_is_shown_by_what_it_is_and_where(exporter: Exporter) -> None:
    exporter.slot(make_record())
    worth = "marginal_value_samples_per_second"
    assert value(exporter, worth, of="budget", where="") == 0.5
    assert value(exporter, worth, of="device", where="gpu") == 4.0
    assert value(exporter, worth, of="share", where="gpu") == -0.1
    assert value(exporter, "break_even_usd_per_hour", pool="gpu") == 8.0
    assert value(exporter, "same_cost_usd_per_hour", pool="gpu") == 6.0
    exporter.slot(replace(make_record(), marginal_values=()))
    assert value(exporter, worth, of="device", where="gpu") is None


def test_alarms_are_counted_by_their_first_word_and_what_was_forgiven_is_shown(
    exporter: Exporter,
) -> None:
    exporter.journal(make_journal())
    exporter.slot(make_record())
    assert value(exporter, "warnings_total", reason="budget_infeasible") == 1
    assert value(exporter, "forgiven_usd") == 0.2
    assert value(exporter, "progress_backlog_usd") == 0.3


def test_predicted_and_measured_stand_side_by_side(exporter: Exporter) -> None:
    """Their rates are both less what the overhead takes."""
    exporter.slot(make_record())
    assert value(exporter, "overhead_ratio") == 0.04
    assert value(exporter, "predicted_step_seconds") == 0.5
    assert value(exporter, "measured_step_seconds") == 0.6
    assert value(exporter, "prediction_error_ratio") == pytest.approx(0.2)


def test_the_phases_of_a_group_are_those_of_its_busiest_device(exporter: Exporter) -> None:
    exporter.journal(make_journal())
    assert value(exporter, "step_phase_seconds", group="0", phase="compute") == pytest.approx(0.4)
    assert value(exporter, "bubble_ratio", group="0") == pytest.approx(1 - 0.6 / 1.0)


def test_series_of_a_departed_device_vanish(exporter: Exporter) -> None:
    exporter.slot(make_record(3))
    assert 'device="gpu-2"' in scrape(exporter)
    gone = replace(view("gpu-2"), state="lost")
    exporter.slot(replace(make_record(2), devices=(*make_record(2).devices, gone)))
    assert value(exporter, "worker_up", device="gpu-2") == 0.0
    for name in ("device_memory_bytes", "device_utilization_ratio"):
        assert value(exporter, name, device="gpu-2") is None
        assert value(exporter, name, device="gpu-1") is not None
    exporter.slot(make_record(2))
    assert 'device="gpu-2"' not in scrape(exporter)


def test_whatever_a_label_or_a_value_is_a_reader_of_the_page_finds_it() -> None:
    gauges = Gauges('a "run"')
    values = {("a\\b\n",): 0.1, ("plus",): inf, ("minus",): -inf, ("large",): 10**20}
    gauges.show("price_age_seconds", values)
    (family,) = (f for f in text_string_to_metric_families(gauges.text({})) if f.samples)
    found = {(s.labels["pool"],): s.value for s in family.samples}
    assert found == values
    assert {s.labels["run"] for s in family.samples} == {'a "run"'}


def test_a_page_that_was_asked_for_before_shows_the_slot_of_now(exporter: Exporter) -> None:
    for slowdown, state in ((1.5, "used"), (2.0, "idle"), (1.5, "used")):
        now = replace(view("gpu-0", state), slowdown=slowdown)
        exporter.slot(replace(make_record(), devices=(now,)))
        assert value(exporter, "device_slowdown_ratio", device="gpu-0") == slowdown
        assert value(exporter, "devices", kind="gpu", pool="gpu", state=state) == 1
        assert value(exporter, "device_slowdown_ratio", device="gpu-1") is None


def test_series_of_a_group_that_no_longer_exists_vanish(exporter: Exporter) -> None:
    record = make_record()
    exporter.slot(record)
    assert value(exporter, "stages", group="0") == 3
    exporter.slot(replace(record, next_plan=make_plan()))
    assert value(exporter, "stages", group="0") is None
    assert value(exporter, "groups") == 0


def test_a_free_text_reason_becomes_one_of_a_few(exporter: Exporter) -> None:
    exporter.slot(replace(make_record(), reason="gpu-17 exploded at step 12345"))
    assert value(exporter, "decisions_total", decision="switch", reason="other") == 1


def test_a_taken_port_gives_the_next_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        exporter = Exporter(port, "127.0.0.1", "demo")
        assert exporter.address[1] > port
        assert "lyray_build_info" in scrape(exporter)
        exporter.close()
        exporter.close()


@pytest.mark.parametrize(("name", "bad"), [("port", -1), ("port", 70000), ("host", "")])
def test_impossible_options_are_refused_by_name(name: str, bad: int | str) -> None:
    with pytest.raises(ValueError, match=name):
        MetricsOptions(**{name: bad})  # type: ignore[arg-type]


def test_importing_the_options_does_not_load_the_client() -> None:
    code = "import sys, orchestrator.telemetry.exporter; print('prometheus_client' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


@pytest.mark.parametrize("host", ["192.0.2.1", "no host at all"])
def test_an_address_of_another_machine_is_named_with_its_key(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"metrics.host '{host}', port 0: .*; write an address"):
        Exporter(0, host, "run")


def test_losses_are_told_apart_by_cause_and_recoveries_by_where_layers_came_from(
    exporter: Exporter,
) -> None:
    exporter.journal(make_journal())
    assert value(exporter, "losses_total", reason="worker") == 1
    assert value(exporter, "losses_total", reason="preemption") == 1
    assert value(exporter, "recoveries_total", source="replica") == 1  # no device's own recovery
    assert value(exporter, "recovery_duration_seconds_count") == 1
    assert value(exporter, "recovery_duration_seconds_sum") == 0.1
