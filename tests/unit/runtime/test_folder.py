"""What a run's folder allows: start, go on, or leave alone."""

import errno
import fcntl
import hashlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.control.persistence import CheckpointStore, RunStore
from orchestrator.core.durable import CheckpointFile, CheckpointManifest
from orchestrator.errors import ConfigError
from orchestrator.runtime.folder import alone_in, open_folder

TEXT = """
run: {{name: {name}, storage_path: {folder}}}
training: {{task: "m:t", global_batch: {batch}, steps: 10}}
cluster:
  source: emulated
  offers: [{{pool: p, kind: t4, price_per_hour: 1.0}}]
budget: {{average_per_hour_usd: 1.0, total_usd: {total}}}
"""


WEIGHTS_SHA256 = hashlib.sha256(b"weights").hexdigest()


def config(folder: Path, *, name: str = "r", batch: int = 8, total: float = 5.0) -> RunConfig:
    return RunConfig.parse(TEXT.format(folder=folder, name=name, batch=batch, total=total))


def write_result(run: RunConfig, status: str, *, resumable: bool) -> None:
    RunStore(run.run.run_url).write_result(
        {"status": status, "reason": "because", "resumable": resumable}
    )


def write_checkpoint(run: RunConfig, step: int) -> str:
    store = CheckpointStore(run.run.run_url, keep_checkpoints=9)
    storage.write_bytes(store.url(step, "layer-000.safetensors"), b"weights")
    store.write_manifest(
        CheckpointManifest(
            step=step,
            generation=1,
            files=(CheckpointFile(0, "layer-000.safetensors", 7, WEIGHTS_SHA256),),
            num_layers=1,
            samples_committed=8 * step,
            seed=0,
        )
    )
    return store.url(step)


def test_an_empty_folder_starts_a_run_and_keeps_its_file(tmp_path: Path) -> None:
    run = config(tmp_path)
    assert open_folder(run, "never") is None
    assert RunConfig.load(f"{run.run.run_url}/config.yaml") == run


def test_never_refuses_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    open_folder(config(tmp_path), "auto")
    with pytest.raises(ConfigError, match=r"--resume never, but .*/r holds a run"):
        open_folder(config(tmp_path), "never")


def test_auto_goes_on_with_a_stopped_run_and_forgets_its_result(tmp_path: Path) -> None:
    run = config(tmp_path)
    open_folder(run, "auto")
    write_result(run, "stopped", resumable=True)
    assert open_folder(run, "auto") is None
    assert RunStore(run.run.run_url).read_result() is None


def test_a_finished_run_is_left_alone(tmp_path: Path) -> None:
    run = config(tmp_path)
    open_folder(run, "auto")
    write_result(run, "finished", resumable=False)
    outcome = open_folder(run, "auto")
    assert outcome is not None
    assert (outcome.status, outcome.resumable) == ("finished", False)
    assert RunStore(run.run.run_url).read_result() is not None


def test_a_run_stopped_for_good_by_its_budget_stays_stopped(tmp_path: Path) -> None:
    run = config(tmp_path)
    open_folder(run, "auto")
    write_result(run, "budget", resumable=False)
    outcome = open_folder(run, "auto")
    assert outcome is not None
    assert outcome.status == "budget"


def test_more_money_is_no_reason_to_refuse_but_another_batch_is(tmp_path: Path) -> None:
    open_folder(config(tmp_path), "auto")
    assert open_folder(config(tmp_path, total=50.0), "auto") is None
    with pytest.raises(ConfigError, match=r"training\.global_batch is 16, but the run .* has 8"):
        open_folder(config(tmp_path, batch=16), "auto")


def test_a_foreign_checkpoint_cannot_name_a_file_outside_of_itself(tmp_path: Path) -> None:
    folder = Path(write_checkpoint(config(tmp_path, name="other"), 2))
    (tmp_path / "key").write_bytes(b"weights")  # of the right checksum
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace("layer-000.safetensors", "../../../key"))
    with pytest.raises(ConfigError, match=r"damaged: .*'\.\./\.\./\.\./key', which does not lie"):
        open_folder(config(tmp_path), str(folder))
    assert not (tmp_path / "r" / "checkpoints").exists()


def test_an_own_older_checkpoint_gives_up_the_later_ones(tmp_path: Path) -> None:
    run = config(tmp_path)
    open_folder(run, "auto")
    older = write_checkpoint(run, 2)
    write_checkpoint(run, 4)
    assert open_folder(run, older) is None
    latest = CheckpointStore(run.run.run_url).latest()
    assert latest is not None
    assert latest.step == 2


def test_another_runs_newest_checkpoint_starts_a_new_run(tmp_path: Path) -> None:
    first, second = config(tmp_path), config(tmp_path, name="s")
    open_folder(first, "auto")
    write_checkpoint(first, 2)
    write_checkpoint(first, 4)
    assert open_folder(second, first.run.run_url) is None
    latest = CheckpointStore(second.run.run_url).latest()
    assert latest is not None
    assert latest.step == 4
    copied = CheckpointStore(second.run.run_url).url(4, "layer-000.safetensors")
    assert storage.read_bytes(copied) == b"weights"


def test_another_runs_damaged_checkpoint_is_not_taken(tmp_path: Path) -> None:
    first, second = config(tmp_path), config(tmp_path, name="s")
    open_folder(first, "auto")
    folder = write_checkpoint(first, 2)
    storage.write_bytes(storage.join(folder, "layer-000.safetensors"), b"weighty")
    with pytest.raises(ConfigError, match=r"layer-000\.safetensors is damaged: its checksum"):
        open_folder(second, first.run.run_url)
    assert CheckpointStore(second.run.run_url).latest() is None


def test_a_run_does_not_take_over_anothers_checkpoint(tmp_path: Path) -> None:
    first, second = config(tmp_path), config(tmp_path, name="s")
    open_folder(first, "auto")
    checkpoint = write_checkpoint(first, 2)
    open_folder(second, "auto")
    with pytest.raises(ConfigError, match="a run of its own; leave --resume away to go on"):
        open_folder(second, checkpoint)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no whole checkpoint"):
        open_folder(config(tmp_path), str(tmp_path / "nothing"))


def test_a_checkpoint_with_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text("{")
    message = r"--resume .*other: .*manifest.json is damaged: .*; give the path of another"
    with pytest.raises(ConfigError, match=message):
        open_folder(config(tmp_path), str(tmp_path / "other"))


_HOLD = """
import sys, time
from orchestrator.runtime.folder import alone_in
with alone_in(sys.argv[1]):
    print("in", flush=True)
    time.sleep(60)
"""


def test_a_second_job_in_the_same_folder_is_refused_until_the_first_has_ended(
    tmp_path: Path,
) -> None:
    """learning-at-home/hivemind#624: two swarms, each with its own truth."""
    first = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "in\n"
    who = f"another job \\(process {first.pid} on .*\\) is at work in .*{tmp_path}; wait for it"
    for folder in (str(tmp_path), f"file://{tmp_path}"):  # one place, two spellings
        with pytest.raises(ConfigError, match=who), alone_in(folder):
            pass
    first.kill()  # without a chance to tidy up
    first.wait()
    first.stdout.close()
    with alone_in(str(tmp_path)):
        pass
    with alone_in("memory://bucket/run"), alone_in("memory://bucket/run"):
        pass  # not guarded


def test_a_folder_is_guarded_however_its_path_is_written(tmp_path: Path) -> None:
    with (
        alone_in(str(tmp_path)),
        pytest.raises(ConfigError, match="another job"),
        alone_in(f"file://{tmp_path}"),
    ):
        pass


def test_a_disk_that_knows_no_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), alone_in(str(tmp_path)):
        pass
    assert f"{tmp_path} cannot be locked ([Errno {errno.ENOLCK}]" in caplog.text


def test_a_resumed_run_may_change_groups_but_not_the_optimizer(tmp_path: Path) -> None:
    optimizer = 'optimizer: {{name: adamw, groups: [{{match: "{}", frozen: true}}]}}'
    runs = []
    for name, match in (("adamw", "a.*"), ("adamw", "b.*"), ("sgd", "b.*")):
        text = TEXT.format(folder=tmp_path, name="r", batch=8, total=5.0)
        told = optimizer.format(match).replace("adamw", name)
        runs.append(RunConfig.parse(text.replace("steps: 10", f"steps: 10, {told}")))
    for run in runs[:2]:
        open_folder(run, "auto")
    with pytest.raises(ConfigError, match=r"training\.optimizer is .*; write the old value"):
        open_folder(runs[2], "auto")


def edit_budget(run: RunConfig, **keys: object) -> None:
    budget = {**run.to_data()["budget"], **keys}  # type: ignore[dict-item]
    path = Path(run.run.run_url) / "config.yaml"
    path.write_text(run.with_budget(budget, "edit").to_yaml())


def test_an_edited_budget_stays_when_the_unchanged_file_is_submitted_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = config(tmp_path)
    open_folder(run, "auto")
    edit_budget(run, total_usd=9.0, horizon_hours=7)
    assert open_folder(run, "auto") is None
    kept = RunConfig.load(f"{run.run.run_url}/config.yaml").budget
    assert (kept.total_usd, kept.horizon_hours) == (9.0, 7.0)
    assert "budget.total_usd: 5 -> 9, as it was edited in" in caplog.text
    assert RunConfig.load(f"{run.run.run_url}/submitted.yaml") == run


def test_what_the_submitted_file_says_otherwise_than_before_wins_key_by_key(
    tmp_path: Path,
) -> None:
    run = config(tmp_path)
    open_folder(run, "auto")
    edit_budget(run, total_usd=9.0, horizon_hours=7)
    open_folder(config(tmp_path, total=6.0), "auto")
    kept = RunConfig.load(f"{run.run.run_url}/config.yaml").budget
    assert (kept.total_usd, kept.horizon_hours) == (6.0, 7.0)
    open_folder(config(tmp_path, total=6.0), "auto")
    assert RunConfig.load(f"{run.run.run_url}/config.yaml").budget == kept


def test_other_sections_edited_in_the_folder_do_not_bind_a_resumed_run(tmp_path: Path) -> None:
    run = config(tmp_path)
    open_folder(run, "auto")
    path = Path(run.run.run_url) / "config.yaml"
    path.write_text(config(tmp_path, batch=16).to_yaml())
    assert open_folder(run, "auto") is None
    assert RunConfig.load(path) == run


def test_a_budget_in_the_folder_that_cannot_be_followed_is_told_before_the_run_starts(
    tmp_path: Path,
) -> None:
    run = config(tmp_path)
    open_folder(run, "auto")
    path = Path(run.run.run_url) / "config.yaml"
    path.write_text(path.read_text().replace("total_usd: 5.0", "total_usd: -5"))
    with pytest.raises(ConfigError, match=r"config\.yaml: budget.total_usd is -5"):
        open_folder(run, "auto")


def test_a_folder_of_a_version_that_knew_no_submitted_file_goes_on(tmp_path: Path) -> None:
    run = config(tmp_path)
    open_folder(run, "auto")
    (Path(run.run.run_url) / "submitted.yaml").unlink()
    assert open_folder(config(tmp_path, total=7.0), "auto") is None
    assert RunConfig.load(f"{run.run.run_url}/config.yaml").budget.total_usd == 7.0
