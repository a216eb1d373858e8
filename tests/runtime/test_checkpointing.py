"""Checkpoints are written while training goes on; every one that exists is whole and right."""

import multiprocessing
import resource
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.fleet import Fleet, make_plan
from orchestrator.control.persistence import CheckpointStore
from orchestrator.core.durable import CheckpointManifest, CheckpointPart
from orchestrator.errors import DamagedCheckpointError
from tests.runtime.harness import make_spec, parts_of, wait_for_parts
from tests.runtime.reference import largest_difference, saved_parameters, train_alone
from tests.runtime.stores import mood
from workers import checkpointing
from workers.checkpointing import CheckpointWriter, LayerState
from workers.device import machine_bytes
from workers.state import ModelState, host_copy, load_layer, save_layer

NUM_LAYERS = 3
ADAMW = {"name": "adamw", "lr": 0.003}
# Device c owns no layer first: it has nothing to write.
PLAN = make_plan([([("a", 1), ("b", 2)], (2, 2)), ([("c", 3)], (2,))])
OTHER = make_plan([([("c", 2), ("a", 1)], (3, 3))], generation=2)
PATIENCE_S = 30.0


def spec_of(url: str, **changes: object) -> object:
    return make_spec(
        "mlp", url, task_args={"num_layers": NUM_LAYERS, "double": True}, global_batch=6,
        optimizer=ADAMW, steps=1000, **changes,
    )  # fmt: skip


def commit(url: str, parts: list[CheckpointPart]) -> CheckpointManifest:
    files = sorted((f for part in parts for f in part.files), key=lambda f: f.layer)
    manifest = CheckpointManifest(parts[0].step, 1, tuple(files), NUM_LAYERS, 0, 0)
    CheckpointStore(url).write_manifest(manifest)
    return manifest


def checksums(parts: list[CheckpointPart], step: int) -> dict[int, str]:
    return {f.layer: f.checksum for part in parts if part.step == step for f in part.files}


def test_what_is_written_while_training_goes_on_is_the_state_of_its_step(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.start(spec_of(str(tmp_path / "still"), checkpoint_every_steps=1000))
    wanted = {}
    for first, step in ((0, 4), (4, 10)):
        fleet.install(PLAN, first_step=first, end_step=step)
        fleet.run(PLAN)
        wanted[step] = {f.layer: f.checksum for f in fleet.save(step, num_layers=3).files}

    fleet.start(spec_of(f"moody://{tmp_path}/run", checkpoint_every_steps=4))
    with mood(tmp_path, "shut"):
        fleet.install(PLAN, first_step=0, end_step=9)
        assert fleet.run(PLAN).next_step == 9  # five steps, and nobody waited for the store
        assert parts_of(fleet.news()) == []
        assert not list(tmp_path.glob("run/checkpoints/*/layer*"))
    parts = wait_for_parts(fleet, 2)
    assert {(part.step, part.generation, part.problem) for part in parts} == {(4, 1, "")}
    assert checksums(parts, 4) == wanted[4]
    # The one of step 8 came due while that was under way: all write it after the next step.
    fleet.all("extend", 11)
    assert fleet.run(PLAN).next_step == 11
    parts = wait_for_parts(fleet, 2)
    assert {part.step for part in parts} == {10}
    assert checksums(parts, 10) == wanted[10]


def test_layers_that_move_while_their_checkpoint_is_written_are_in_it_as_they_were(
    fleet: Fleet, tmp_path: Path
) -> None:
    url = f"moody://{tmp_path}/run"
    spec = spec_of(url, checkpoint_every_steps=4)
    fleet.start(spec)
    with mood(tmp_path, "shut"):
        fleet.install(PLAN, first_step=0, end_step=6)
        fleet.run(PLAN)
        fleet.install(OTHER, first_step=6, end_step=9)
        fleet.run(OTHER)
    parts = wait_for_parts(fleet, 2)
    assert {part.step for part in parts} == {4}
    manifest = commit(url, parts)
    fleet.start(spec)
    fleet.install(OTHER, first_step=4, end_step=7, restore=manifest)
    fleet.run(OTHER)
    fleet.save(7, num_layers=NUM_LAYERS)
    alone, _ = train_alone(spec, 7)
    assert largest_difference(alone, saved_parameters(f"{tmp_path}/run", 7, 3)) <= 1e-12


def test_a_save_at_a_stand_waits_for_the_checkpoint_under_way(fleet: Fleet, tmp_path: Path) -> None:
    fleet.start(spec_of(f"moody://{tmp_path}/run", checkpoint_every_steps=4))
    with mood(tmp_path, "shut"):
        fleet.install(PLAN, first_step=0, end_step=6)
        fleet.run(PLAN)
        order = fleet.send("save", (6,))
    parts = fleet.receive(order)
    assert [part.step for part in parts] == [6, 6, 6]
    assert sorted(f.layer for part in parts for f in part.files) == [0, 1, 2]
    told = wait_for_parts(fleet, 2)  # the one at the stand is the answer, and told to nobody else
    assert sorted(part.step for part in told) == [4, 4]


def test_a_worker_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """ray-project/ray#6226: an interruption while moving files deletes the only copy."""
    url = f"moody://{tmp_path}/run"
    spec = spec_of(url, checkpoint_every_steps=4)
    with Fleet(tuple("abc")) as doomed:
        doomed.start(spec)
        doomed.install(PLAN, first_step=0, end_step=6)
        doomed.run(PLAN)
        commit(url, wait_for_parts(doomed, 2))
        with mood(tmp_path, "shut"):
            doomed.all("extend", 9)
            doomed.run(PLAN)
            for process in doomed.processes:
                process.kill()
    manifest = CheckpointStore(url).latest()
    assert manifest is not None
    assert manifest.step == 4
    with Fleet(tuple("abc")) as fleet:
        fleet.start(spec)
        fleet.install(OTHER, first_step=4, end_step=9, restore=manifest)
        fleet.run(OTHER)
        fleet.save(9, num_layers=NUM_LAYERS)
    alone, _ = train_alone(spec, 9)
    assert largest_difference(alone, saved_parameters(f"{tmp_path}/run", 9, 3)) <= 1e-12


def test_a_full_store_stops_no_training_and_the_next_checkpoint_tries_again(
    fleet: Fleet, tmp_path: Path
) -> None:
    """ray-project/ray#47939, #55350: one hiccup of the object store ends training."""
    fleet.start(spec_of(f"moody://{tmp_path}/run", checkpoint_every_steps=4))
    with mood(tmp_path, "full"):
        fleet.install(PLAN, first_step=0, end_step=6)
        assert fleet.run(PLAN).reason == "window"
        parts = wait_for_parts(fleet, 2)
    for part in parts:
        assert f"moody://{tmp_path}/run/checkpoints/step-000004/layer-" in part.problem
        assert "No space left on device" in part.problem
    fleet.all("extend", 9)
    fleet.run(PLAN)
    parts = wait_for_parts(fleet, 2)
    assert {(part.step, part.problem) for part in parts} == {(8, "")}


def test_steps_that_are_undone_give_their_checkpoint_up(fleet: Fleet, tmp_path: Path) -> None:
    url = f"moody://{tmp_path}/run"
    fleet.start(spec_of(url, checkpoint_every_steps=4))
    fleet.install(PLAN, first_step=0, end_step=6)
    fleet.run(PLAN)
    manifest = commit(url, wait_for_parts(fleet, 2))
    with mood(tmp_path, "shut"):
        fleet.all("extend", 9)
        fleet.run(PLAN)
        order = fleet.send(
            "install", (fleet.assignment(OTHER, first_step=4, end_step=9, restore=manifest),)
        )
        time.sleep(0.05)
    fleet.receive(order)
    fleet.run(OTHER)
    parts = wait_for_parts(fleet, 2)
    assert {(part.step, part.generation) for part in parts} == {(8, 2)}


# One worker's writer -------------------------------------------------------------------


def layers(count: int, size: int = 1000) -> tuple[ModelState, list[LayerState]]:
    torch.manual_seed(0)
    state = ModelState(
        [nn.Linear(1, size * (index + 1)) for index in range(count)], torch.device("cpu")
    )
    for index in range(count):
        state.begin(index)
    return state, [LayerState(index, state.tensors(index), {}) for index in range(count)]


@pytest.mark.parametrize("available_bytes", [0.0, float("inf")])
def test_copies_take_at_most_one_layer_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available_bytes: float
) -> None:
    _, states = layers(5)
    living: list[int] = []
    most: list[int] = []
    gate = threading.Event()

    def copy(tensors: dict) -> dict:
        living.append(1)
        most.append(len(living))
        return host_copy(tensors)

    def save(*arguments: object) -> object:
        assert gate.wait(PATIENCE_S)
        file = save_layer(*arguments)
        living.pop()
        return file

    monkeypatch.setattr(checkpointing, "host_copy", copy)
    monkeypatch.setattr(checkpointing, "save_layer", save)
    told: list[CheckpointPart] = []
    writer = CheckpointWriter(
        str(tmp_path), 1, told.append, available_bytes=lambda: available_bytes
    )
    training = threading.Thread(target=writer.begin, args=(1, 1, states))
    started_s = time.monotonic()
    training.start()
    if available_bytes:
        training.join(PATIENCE_S)  # all is copied, though nothing can be written yet
        assert (len(most), told) == (5, [])
    gate.set()
    training.join(PATIENCE_S)
    part = writer.wait()
    assert told == [part]
    assert part is not None
    assert len(part.files) == 5
    assert 0.0 < part.write_s <= time.monotonic() - started_s
    assert max(most) == (5 if available_bytes else 1)


def test_a_checkpoint_that_is_given_up_is_not_told_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, states = layers(3)
    gate, begun = threading.Event(), threading.Event()

    def save(*arguments: object) -> object:
        begun.set()
        assert gate.wait(PATIENCE_S)
        return save_layer(*arguments)

    monkeypatch.setattr(checkpointing, "save_layer", save)
    told: list[CheckpointPart] = []
    writer = CheckpointWriter(str(tmp_path), 1, told.append)
    writer.begin(1, 1, states)
    assert writer.busy
    assert begun.wait(PATIENCE_S)
    with pytest.raises(TimeoutError, match="is still being written"):
        writer.cancel(0.01)
    gate.set()
    writer.cancel(PATIENCE_S)
    assert (writer.busy, told) == (False, [])
    assert [path.name for path in tmp_path.rglob("*.*")] == ["layer-000.safetensors"]
    writer.begin(2, 1, states)
    assert len(writer.wait().files) == 3
    assert [part.step for part in told] == [2]


def test_a_file_that_may_grow_no_further_is_a_problem_and_no_half_file(tmp_path: Path) -> None:
    _, states = layers(3, size=50_000)
    told: list[CheckpointPart] = []
    writer = CheckpointWriter(str(tmp_path), 1, told.append)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, old[1]))
    try:
        writer.begin(1, 1, states)
        writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert "layer-001.safetensors" in told[0].problem
    assert "File too large" in told[0].problem
    assert [path.name for path in tmp_path.rglob("*.*")] == ["layer-000.safetensors"]
    writer.begin(1, 1, states)
    assert len(writer.wait().files) == 3


def test_the_machine_says_what_memory_it_has_left() -> None:
    assert 2**20 < machine_bytes() < 2**50


# Killed at a byte ----------------------------------------------------------------------


def _die_while_saving(run_url: str, file_index: int, at_byte: int) -> None:
    """Write the checkpoint of step 2; die when that file reaches that byte."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    store, (state, _) = CheckpointStore(run_url, keep_checkpoints=1), layers(4)
    files = []
    for index in range(4):
        if index == file_index:
            resource.setrlimit(resource.RLIMIT_FSIZE, (at_byte, at_byte))
        files.append(save_layer(store.url(2), index, state.tensors(index)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_byte, at_byte))
    store.write_manifest(CheckpointManifest(2, 1, tuple(files), 4, 0, 0))


@pytest.mark.parametrize("seed", range(8))
def test_killed_at_any_byte_of_a_save_the_newest_whole_checkpoint_is_there(
    tmp_path: Path, seed: int
) -> None:
    """Lightning-AI/pytorch-lightning#19970: killed while saving, the newest file is truncated.

    petuum/adaptdl#70, PrimeIntellect-ai/prime-rl#2992, vllm-project/speculators#739: likewise.
    """
    store, (state, _) = CheckpointStore(str(tmp_path), keep_checkpoints=1), layers(4)
    files = [save_layer(store.url(1), index, state.tensors(index)) for index in range(4)]
    store.write_manifest(CheckpointManifest(1, 1, tuple(files), 4, 0, 0))
    rng = np.random.default_rng(seed)
    file_index = seed % 5  # a layer, or the manifest
    size = files[file_index].size_bytes if file_index < 4 else 500
    context = multiprocessing.get_context("forkserver")
    child = context.Process(
        target=_die_while_saving, args=(str(tmp_path), file_index, int(rng.integers(size)))
    )
    child.start()
    child.join(PATIENCE_S)
    assert child.exitcode == -signal.SIGXFSZ
    manifest = store.latest()
    assert manifest is not None
    assert manifest.step == 1
    for index in range(4):
        found = load_layer(store.url(1), manifest, index)
        assert found.keys() == state.tensors(index).keys()


@pytest.mark.parametrize("harm", ["truncated", "a bit", "gone", "pickle"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, harm: str) -> None:
    state, _ = layers(1)
    file = save_layer(str(tmp_path), 0, state.tensors(0))
    manifest = CheckpointManifest(7, 1, (file,), 1, 0, 0)
    path = tmp_path / file.path
    data = path.read_bytes()
    if harm == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif harm == "a bit":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif harm == "pickle":
        torch.save({"weight": torch.zeros(1)}, path)  # whatever it would run is not run
    else:
        path.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"layer-000\.safetensors is") as raised:
        load_layer(str(tmp_path), manifest, 0)
    assert raised.value.step == 7
