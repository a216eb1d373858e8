"""The exported file, read by a second reader of the format."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from orchestrator.control.persistence import CheckpointStore, RunStore
from orchestrator.core.durable import STATE_DICT_KEY, CheckpointFile, CheckpointManifest
from orchestrator.core.evaluation import Evaluation
from orchestrator.errors import ConfigError
from orchestrator.export import export_weights
from orchestrator.storage import write_bytes

WEIGHT, BIAS = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([7, 8], dtype=np.int64)
FLAG = np.array([True])


def write_checkpoint(run_dir: Path, step: int, scale: float = 1.0) -> CheckpointStore:
    """Two layers whose weight is shared; optimizer state beside it."""
    store = CheckpointStore(str(run_dir))
    files = []
    for layer, names in enumerate(
        (
            {"embed.weight": "param/weight", "embed.flag": "buffer/flag"},
            {"head.weight": "param/weight", "head.bias": "param/bias"},
        )
    ):
        arrays = {"param/weight": WEIGHT * np.float32(scale), "optim/weight/exp_avg": WEIGHT}
        arrays |= {"buffer/flag": FLAG} if layer == 0 else {"param/bias": BIAS}
        data = save(arrays, metadata={STATE_DICT_KEY: json.dumps(names)})
        path = f"layer-{layer:03d}.safetensors"
        write_bytes(store.url(step, path), data)
        files.append(CheckpointFile(layer, path, len(data), hashlib.sha256(data).hexdigest()))
    store.write_manifest(CheckpointManifest(step, 1, tuple(files), 2, 64 * step, 0))
    return store


def test_the_file_has_the_users_names_and_no_optimizer_state(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", 100)
    target = tmp_path / "out.safetensors"
    exported = export_weights(str(tmp_path / "run"), str(target))
    found = load_file(target)
    assert set(found) == {"embed.weight", "embed.flag", "head.weight", "head.bias"}
    np.testing.assert_array_equal(found["head.weight"], WEIGHT)
    np.testing.assert_array_equal(found["head.bias"], BIAS)
    np.testing.assert_array_equal(found["embed.flag"], FLAG)
    assert (exported.step, exported.num_tensors) == (100, 4)
    assert exported.size_bytes == target.stat().st_size


def test_a_manifest_cannot_name_a_file_outside_of_its_checkpoint(tmp_path: Path) -> None:
    store = write_checkpoint(tmp_path / "run", 100)
    (tmp_path / "key").write_bytes(b"secret")
    manifest = Path(store.url(100, "manifest.json"))
    for path in ("../../../key", str(tmp_path / "key"), "file:///etc/passwd", "sub/../../key"):
        manifest.write_text(manifest.read_text().replace("layer-000.safetensors", path))
        with pytest.raises(ConfigError, match=r"does not lie in the checkpoint"):
            export_weights(str(tmp_path / "run"), str(tmp_path / "out"))
        manifest.write_text(manifest.read_text().replace(path, "layer-000.safetensors"))
    assert export_weights(str(tmp_path / "run"), str(tmp_path / "out")).step == 100


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", 100)
    store = write_checkpoint(tmp_path / "run", 200, scale=2.0)
    write_bytes(store.url(300, "layer-000.safetensors"), b"half a checkpoint")
    target = tmp_path / "out.safetensors"
    assert export_weights(str(tmp_path / "run"), str(target)).step == 200
    np.testing.assert_array_equal(load_file(target)["embed.weight"], 2 * WEIGHT)


def test_a_damaged_file_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    store = write_checkpoint(tmp_path / "run", 100)
    damaged = Path(store.url(100, "layer-001.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    target = tmp_path / "out.safetensors"
    with pytest.raises(ConfigError, match=r"layer-001.safetensors is damaged"):
        export_weights(str(tmp_path / "run"), str(target))
    assert not target.exists()


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        export_weights(str(tmp_path), str(tmp_path / "out"))


def test_the_best_is_that_of_the_best_evaluation(tmp_path: Path) -> None:
    run, target = tmp_path / "run", str(tmp_path / "best.safetensors")
    for step in (100, 200):
        write_checkpoint(run, step, scale=step)
    with pytest.raises(ConfigError, match=r"has no evaluation; set training.eval_every_steps"):
        export_weights(str(run), target, best=True)
    store = RunStore(str(run))
    store.write_evaluation(Evaluation(50, 1, 8, None, best=False))
    with pytest.raises(ConfigError, match=r"none of the 1 evaluations in .* never a number"):
        export_weights(str(run), target, best=True)
    for step, best in ((100, True), (200, False)):
        store.write_evaluation(Evaluation(step, 1, 8, 1.0, best=best))
    assert export_weights(str(run), target, best=True).step == 100
    np.testing.assert_array_equal(load_file(target)["head.weight"], 100 * WEIGHT)
    store.write_evaluation(Evaluation(250, 1, 8, 0.5, best=True))
    with pytest.raises(ConfigError, match="that of step 250, whose checkpoint is not there"):
        export_weights(str(run), target, best=True)
