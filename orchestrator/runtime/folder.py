"""What is in a run's folder before a run starts: nothing, a finished run, or one to go on with."""

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Literal

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.control.persistence import MANIFEST_FILE, CheckpointStore, RunStore
from orchestrator.core.durable import CheckpointManifest
from orchestrator.core.edits import budget_changes
from orchestrator.core.slot import Outcome
from orchestrator.core.training import OptimizerOptions
from orchestrator.errors import ConfigError
from orchestrator.runtime.budget_file import CONFIG_FILE, find_config, one_editor, read_config

logger = logging.getLogger(__name__)

LOCK_FILE = "lock"
SUBMITTED_FILE = "submitted.yaml"
"""The configuration as it was submitted; ``config.yaml`` may have another budget by now."""

BOUND = (
    "run.seed", "training.task", "training.task_args", "training.global_batch",
    "training.optimizer", "training.precision",
)  # fmt: skip
"""Keys that a checkpoint and the order of samples depend on: a resumed run keeps them."""


@contextmanager
def alone_in(run_url: str) -> Iterator[None]:
    """Keep other jobs out of a run's folder: two heads would write two truths into one ledger.

    The system lets go when this process ends, however it ends. Buckets are not guarded, and disks
    that know no locks with a warning only.

    Raises:
        ConfigError: If another job is at work there.
        OSError: If the folder cannot be written.
    """
    path = storage.local_path(storage.join(run_url, LOCK_FILE))
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        _lock(file, run_url)
        yield


def _lock(file: IO[str], run_url: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            file.seek(0)
            raise ConfigError(
                f"another job ({file.read().strip() or 'unknown'}) is at work in {run_url}; "
                "wait for it or stop it, or give run.name another value"
            ) from None
        logger.warning(
            "%s cannot be locked (%s): see to it that no other job is at work there", run_url, error
        )
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()


def open_folder(config: RunConfig, resume: str) -> Outcome | None:
    """Make the run's folder ready and write the resolved file into it.

    A budget that was edited since the file was submitted last stays, but for those of its keys
    that the file says otherwise now.

    Args:
        config: The whole file.
        resume: ``auto``, ``never``, or the path of a checkpoint or of a run to start from.

    Returns:
        None when there is something to run; the old outcome when the run is done.

    Raises:
        ConfigError: If the folder holds something that this file cannot go on with.
    """
    store = RunStore(config.run.run_url)
    old = submitted(store)
    if old is not None and resume == "never":
        raise ConfigError(
            f"--resume never, but {store.run_url} holds a run; give run.name another value, "
            "or remove the folder"
        )
    if old is not None:
        _check_same(config, old, store.run_url)
    if resume not in ("auto", "never"):
        _take_checkpoint(config, resume, fresh=old is None)
    elif (done := done_before(store)) is not None:
        return done
    with one_editor(store.run_url):
        edited = _with_edits(config, old, store.url(CONFIG_FILE)) if old else config
        storage.write_bytes(store.url(SUBMITTED_FILE), config.to_yaml().encode())
        storage.write_bytes(store.url(CONFIG_FILE), edited.to_yaml().encode())
    if store.read_result() is not None:
        storage.delete(store.url("result.json"))  # it is going on
    return None


def submitted(store: RunStore) -> RunConfig | None:
    """What was submitted last, None where the folder holds no run; older ones have one file."""
    for name in (SUBMITTED_FILE, CONFIG_FILE):
        if storage.exists(store.url(name)):
            return RunConfig.load(store.url(name))
    return None


def _with_edits(config: RunConfig, old: RunConfig, url: str) -> RunConfig:
    """The file that is submitted now, with what was edited of the budget of the one before.

    Raises:
        ConfigError: If what stands at ``url`` cannot be followed.
    """
    found = find_config(url)
    if found is None:
        return config
    section = read_config(found, url, old).get("budget")
    edited, budget = old.with_budget(section, url).budget, storage.to_json(config.budget)
    assert isinstance(budget, dict)
    for change in budget_changes(old.budget, edited):
        name = change.key.removeprefix("budget.")
        if getattr(config.budget, name) == change.old:
            budget[name] = storage.to_json(change.new)
            logger.warning(
                "%s, as it was edited in %s: the submitted file says what it said before",
                change.text, url,
            )  # fmt: skip
    return config.with_budget(budget, url)


def done_before(store: RunStore) -> Outcome | None:
    """The outcome of a run that cannot or need not go on."""
    result = store.read_result()
    if result is None or (result["status"] != "finished" and result["resumable"]):
        return None
    status: Literal["finished", "budget"] = (
        "finished" if result["status"] == "finished" else "budget"
    )
    return Outcome(status, f"was done before: {result['reason']}", resumable=False)


def _check_same(config: RunConfig, old: RunConfig, run_url: str) -> None:
    for key in BOUND:
        was, now = _value(old, key), _value(config, key)
        if was != now:
            raise ConfigError(
                f"{key} is {json.dumps(now)}, but the run in {run_url} has {json.dumps(was)}; "
                "write the old value to go on with it, or give run.name another value"
            )


def _value(config: RunConfig, key: str) -> object:
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    if isinstance(value, OptimizerOptions):
        value = replace(value, groups=())  # what is frozen, and rates, may change on the way
    return storage.to_json(value)


def _take_checkpoint(config: RunConfig, path: str, *, fresh: bool) -> None:
    """Make the checkpoint at ``path`` the newest one of this run."""
    source, manifest = _find_checkpoint(path)
    own = CheckpointStore(config.run.run_url, keep_checkpoints=10**9)
    if storage.absolute(source) == own.url(manifest.step):
        for step in own.steps():  # later ones are given up: the user asked for this one
            if step > manifest.step:
                storage.delete(own.url(step, MANIFEST_FILE))
        return
    if not fresh:
        raise ConfigError(
            f"--resume {path}: {config.run.run_url} holds a run of its own; "
            "leave --resume away to go on with it, or give run.name another value to start from "
            "another run's checkpoint"
        )
    for file in manifest.files:
        url = storage.join(source, file.path)
        data = storage.read_bytes(url)
        if hashlib.sha256(data).hexdigest() != file.checksum:
            raise ConfigError(
                f"--resume {path}: {url} is damaged: its checksum is not that of the manifest; "
                "give the path of another checkpoint"
            )
        storage.write_bytes(own.url(manifest.step, file.path), data)
    own.write_manifest(manifest)


def _find_checkpoint(path: str) -> tuple[str, CheckpointManifest]:
    """Folder and manifest of the checkpoint at a path: its own folder, or a run's newest."""
    for folder in _candidates(path):
        url = storage.join(folder, MANIFEST_FILE)
        if storage.exists(url):
            try:
                return folder, storage.read_json(CheckpointManifest, url)
            except ValueError as error:
                raise ConfigError(
                    f"--resume {path}: {url} is damaged: {error}; give the path of another "
                    "checkpoint"
                ) from None
    raise ConfigError(
        f"--resume {path}: there is no whole checkpoint (a folder with {MANIFEST_FILE}) and no run "
        "with one; write auto, never, or the path of a checkpoint folder"
    )


def _candidates(path: str) -> Iterator[str]:
    root = storage.absolute(path)
    yield root
    checkpoints = CheckpointStore(root)
    for step in reversed(checkpoints.steps()):
        yield checkpoints.url(step)
