"""Training on a plan equals training in one process."""

from pathlib import Path

from benchmarks.fleet import Fleet, make_plan
from tests.runtime.harness import make_spec
from tests.runtime.reference import largest_difference, saved_parameters, train_alone


def test_one_step_on_two_stages_equals_one_process(tmp_path: Path) -> None:
    spec = make_spec(
        "mlp", str(tmp_path), task_args={"num_layers": 4}, global_batch=8, microbatch=4
    )
    plan = make_plan([([("a", 1), ("b", 3)], (4, 4))])
    with Fleet(("a", "b")) as fleet:
        fleet.start(spec)
        fleet.install(plan, first_step=0, end_step=1)
        end = fleet.run(plan)
        reports = [report for news in fleet.news() for report in news]
        fleet.save(1, num_layers=4)
    alone, losses = train_alone(spec, 1)
    assert (end.next_step, end.reason) == (1, "window")
    assert largest_difference(alone, saved_parameters(str(tmp_path), 1, 4)) <= 1e-6
    assert [abs(report.loss - losses[0]) < 1e-6 for report in reports] == [True, True]


def test_peak_memory_grows_with_the_microbatches_in_flight(tmp_path: Path) -> None:
    spec = make_spec("mlp", str(tmp_path), task_args={"num_layers": 4}, global_batch=12)
    peaks = {}
    with Fleet(("a", "b")) as fleet:
        for schedule in ("1f1b", "gpipe"):
            plan = make_plan([([("a", 2), ("b", 2)], (3, 3, 3, 3))], schedule=schedule)
            fleet.start(spec)
            fleet.install(plan, first_step=0, end_step=3)
            fleet.run(plan)
            reports = [report for news in fleet.news() for report in news]
            peaks[schedule] = {r.device_id: r.peak_memory_bytes for r in reports if r.step == 2}
    # K is 2 and 1 under 1F1B, 4 under GPipe; the last stage also keeps its loss
    first_bytes = (peaks["gpipe"]["a"] - peaks["1f1b"]["a"]) / 2
    last_bytes = (peaks["gpipe"]["b"] - peaks["1f1b"]["b"]) / 3
    assert last_bytes >= first_bytes > 0
