"""Workers on one GPU: two processes share it, so messages and sums go through the machine's memory.

With two GPUs the same plans run with sums by NCCL.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.builders import make_cluster, make_device, make_problem
from benchmarks.fleet import Fleet, make_plan
from orchestrator.core.plan import Plan
from orchestrator.core.slot import StepReport, WorkerFailed
from orchestrator.planning.memory import MemoryModel
from orchestrator.planning.tables import LayerTables
from tests.gpu.needs import DEVICE, gpu_tests
from tests.runtime.harness import make_spec
from tests.runtime.reference import largest_difference, saved_parameters, train_alone

pytestmark = gpu_tests()

ADAMW = {"name": "adamw", "lr": 0.003}
PIPELINE = make_plan([([("a", 3), ("b", 4)], (3, 3, 2))])
OTHER_CUT = make_plan([([("b", 5), ("a", 2)], (4, 4))], generation=2, schedule="gpipe")
REPLICAS = make_plan([([("a", 7)], (3,)), ([("b", 7)], (3, 2))], generation=3)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(("a", "b")) as fleet:
        yield fleet


def spec_of(folder: Path, task: str = "language", **changes: Any) -> Any:
    return make_spec(
        task, str(folder), **{"global_batch": 8, "optimizer": ADAMW, "device": DEVICE, **changes}
    )


def trained(fleet: Fleet, spec: Any, plans: list[tuple[Plan, int]], num_layers: int = 7) -> float:
    """Largest difference of a parameter from one process on a processor, after all plans."""
    fleet.start(spec)
    first = 0
    for plan, end in plans:
        fleet.install(plan, first_step=first, end_step=end)
        fleet.run_apart(plan, first, end)
        first = end
    fleet.save(first, num_layers=num_layers)
    alone, losses = train_alone(spec, first)
    reports = [r for news in fleet.news() for r in news if isinstance(r, StepReport)]
    assert max(abs(r.loss - losses[r.step]) for r in reports) <= 1e-5
    assert all(r.compute_s > 0 and r.peak_memory_bytes > 0 for r in reports)
    return largest_difference(alone, saved_parameters(spec.run_url, first, num_layers))


@pytest.mark.parametrize("plan", [PIPELINE, REPLICAS], ids=["pipeline", "replicas"])
def test_training_on_a_gpu_equals_one_process_on_a_processor(
    fleet: Fleet, tmp_path: Path, plan: Plan
) -> None:
    """With tied embeddings and dropout, in fp64: the masks are the same, too."""
    spec = spec_of(tmp_path, task_args={"tied": True, "dropout": 0.3})
    assert trained(fleet, spec, [(plan, 10)]) <= 1e-10


def test_layers_and_optimizer_state_move_between_plans(fleet: Fleet, tmp_path: Path) -> None:
    spec = spec_of(tmp_path, task_args={"tied": True})
    assert trained(fleet, spec, [(PIPELINE, 4), (OTHER_CUT, 8), (REPLICAS, 12)]) <= 1e-10


def test_a_checkpoint_is_written_and_another_plan_goes_on_from_it(
    fleet: Fleet, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path)
    fleet.start(spec)
    fleet.install(PIPELINE, first_step=0, end_step=5)
    fleet.run(PIPELINE)
    manifest = fleet.save(5, num_layers=7)
    fleet.start(spec)
    fleet.install(OTHER_CUT, first_step=5, end_step=10, restore=manifest)
    fleet.run(OTHER_CUT)
    fleet.save(10, num_layers=7)
    alone, _ = train_alone(spec, 10)
    assert largest_difference(alone, saved_parameters(str(tmp_path), 10, 7)) <= 1e-10


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "nadam", "adagrad"])
def test_every_optimizer_goes_on_from_its_own_state(
    fleet: Fleet, tmp_path: Path, optimizer: str
) -> None:
    """Some keep numbers on the processor, some do not: both survive a move."""
    arguments = {"momentum": 0.9} if optimizer == "sgd" else {}
    spec = spec_of(tmp_path, optimizer={"name": optimizer, "lr": 0.003, **arguments})
    losses = []
    for plans in ([(PIPELINE, 8)], [(PIPELINE, 4), (OTHER_CUT, 8)]):
        fleet.start(spec)
        first = 0
        for plan, end in plans:
            fleet.install(plan, first_step=first, end_step=end)
            fleet.run(plan)
            first = end
        reports = [r for news in fleet.news() for r in news if isinstance(r, StepReport)]
        losses.append(sorted({r.step: r.loss for r in reports}.items()))
    for (step, loss), (same, other) in zip(*losses, strict=True):
        assert step == same
        assert loss == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("mixed", ["bf16", "fp16"])
def test_mixed_precision_trains_and_is_near_full_precision(
    fleet: Fleet, tmp_path: Path, mixed: str
) -> None:
    if DEVICE == "cuda" and mixed == "bf16" and not torch.cuda.is_bf16_supported():
        pytest.skip("this GPU has no bf16 units")
    found = {}
    for precision in ("fp32", mixed):
        spec = spec_of(tmp_path, task_args={"double": False}, precision=precision)
        fleet.start(spec)
        fleet.install(PIPELINE, first_step=0, end_step=10)
        fleet.run(PIPELINE)
        reports = [r for news in fleet.news() for r in news if isinstance(r, StepReport)]
        found[precision] = {r.step: r.loss for r in reports}
    assert found[mixed][9] < found[mixed][0]
    assert found[mixed][9] == pytest.approx(found["fp32"][9], rel=0.02)


def test_the_predicted_peak_covers_the_measured_one_and_little_more(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Of the heaviest device. Large layers: torch's own work space is small beside them."""
    spec = spec_of(
        tmp_path, "mlp", task_args={"num_layers": 7, "width": 1024}, global_batch=64, microbatch=16
    )
    plan = make_plan([([("a", 3), ("b", 4)], (16,) * 4)])
    fleet.start(spec)
    (profile,) = fleet.all("profile", True, True, ranks=[0])
    fleet.install(plan, first_step=0, end_step=4)
    fleet.run(plan)
    measured: dict[str, int] = {}
    for report in (r for news in fleet.news() for r in news if isinstance(r, StepReport)):
        if report.step:  # the optimizer has its state from the first step on
            measured[report.device_id] = report.peak_memory_bytes
    cluster = make_cluster([make_device(d, kind=DEVICE, node_id=d) for d in "ab"])
    memory = MemoryModel(make_problem(cluster, profile), LayerTables(profile))
    alone, _ = memory.peaks_bytes(plan.groups[0], plan.schedule)
    predicted = dict(zip("ab", alone, strict=True))
    heaviest = max(measured, key=lambda d: measured[d])
    ratio = predicted[heaviest] / measured[heaviest]
    assert 1.0 <= ratio <= 1.15, (predicted, measured)


def test_memory_that_runs_out_names_the_layer_and_the_device(fleet: Fleet, tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path, "failing", optimizer={"name": "sgd", "lr": 0.1}, timeout_s=10.0,
        task_args={"place": "memory", "calls": 1},
    )  # fmt: skip
    plan = make_plan([([("a", 2), ("b", 2)], (4, 4))])
    fleet.start(spec)
    fleet.install(plan, first_step=0, end_step=4)
    fleet.all("run")
    told = [i for news in fleet.news() for i in news if isinstance(i, WorkerFailed)]
    (full,) = [f for f in told if f.out_of_memory]
    assert full.device_id == "b"
    assert "layer 2 (2): " in full.message


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants a GPU for each worker")
@pytest.mark.parametrize(
    ("plan", "transport"),
    [(REPLICAS, "tcp"), (PIPELINE, "tcp"), (PIPELINE, "nccl")],
    ids=["sums", "messages-tcp", "messages-nccl"],
)
def test_two_gpus_equal_one_process(
    fleet: Fleet, tmp_path: Path, plan: Plan, transport: str
) -> None:
    """Their sums are made by NCCL, their messages as said."""
    specs = [spec_of(tmp_path, device=f"{DEVICE}:{i}", transport=transport) for i in range(2)]
    fleet.each("start", list(zip(specs, fleet.devices, strict=True)))
    fleet.meet()
    fleet.install(plan, first_step=0, end_step=10)
    fleet.run_apart(plan, 0, 10)
    fleet.save(10, num_layers=7)
    alone, _ = train_alone(specs[0], 10)
    assert largest_difference(alone, saved_parameters(str(tmp_path), 10, 7)) <= 1e-10
