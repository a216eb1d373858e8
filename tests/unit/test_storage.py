"""Files and the JSON form of the nouns."""

import errno
import json
import os
import pickle
import re
import socket
import sys
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from orchestrator import retries, storage
from orchestrator.core.cluster import Team
from orchestrator.core.durable import CheckpointFile, CheckpointManifest, ControlState, LedgerEntry
from orchestrator.core.plan import Group, LayerSplit, Plan, Stage
from orchestrator.core.slot import SlotRecord
from orchestrator.core.view import DeviceView, Rates
from orchestrator.errors import as_told
from orchestrator.run_options import RunOptions


def a_plan() -> Plan:
    team = Team("fast-0", "n0", "a100-40", ("fast-0",))
    stage = Stage(team, 0, 4, inflight=2, splits=(LayerSplit(("batch",), (1,)),) * 4)
    return Plan(3, "1f1b", (Group((stage,), (4, 4, 3)),))


def a_record() -> SlotRecord:
    rates = Rates(0.5, 128.0, 3.5, (("fast-0", 1000),))
    return SlotRecord(
        slot=4, time_s=240.0, step=17, generation=3, decision="keep", reason="best by far",
        plan=a_plan(), next_plan=a_plan(), predicted=rates, measured=Rates(None, None, None),
        backlog_usd=0.1, penalty_weight=2.0, price_of_money_samples_per_usd=0.05,
        marginal_values=(("z2", 0.3),), spent_usd=1.0, budget_usd=1.2, overspend_bound_usd=0.4,
        solve_s=0.01, migration_s=0.0, moved_bytes=0, control_cpu_s=0.02,
        devices=(DeviceView("fast-0", "a100-40", "fast", "used", 1.0, False, 3.67),),
    )  # fmt: skip


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"


def test_what_was_written_is_read(folder: str) -> None:
    url = storage.join(folder, "a", "b.bin")
    assert not storage.exists(url)
    storage.write_bytes(url, b"one")
    storage.write_bytes(url, b"two")
    assert storage.read_bytes(url) == b"two"
    assert storage.list_names(folder) == ("a",)
    assert storage.list_names(storage.join(folder, "a")) == ("b.bin",)


def test_a_missing_file_is_not_found_and_a_missing_folder_is_empty(folder: str) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(storage.join(folder, "none"))
    assert storage.list_names(storage.join(folder, "none")) == ()
    storage.delete(storage.join(folder, "none"))


def test_delete_removes_a_folder_with_all_it_holds(folder: str) -> None:
    storage.write_bytes(storage.join(folder, "c", "x"), b"1")
    storage.write_bytes(storage.join(folder, "c", "y"), b"2")
    storage.delete(storage.join(folder, "c"))
    assert not storage.exists(storage.join(folder, "c", "x"))


def test_a_file_still_being_written_is_not_listed(tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#19970: killed while saving, the newest file is truncated.

    petuum/adaptdl#70, PrimeIntellect-ai/prime-rl#2992, vllm-project/speculators#739: likewise.
    """
    storage.write_bytes(str(tmp_path / "whole"), b"1")
    (tmp_path / "half.tmp-123").write_bytes(b"")
    assert storage.list_names(str(tmp_path)) == ("whole",)


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_the_size_of_a_folder_is_no_size(scheme: str, tmp_path: Path) -> None:
    storage.write_bytes(f"{scheme}{tmp_path}/inside", b"123")
    assert storage.size_bytes(f"{scheme}{tmp_path}/inside") == 3
    with pytest.raises(IsADirectoryError):
        storage.size_bytes(f"{scheme}{tmp_path}")


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "inside").write_bytes(b"old")
    with pytest.raises(OSError, match="taken"):
        storage.write_bytes(str(tmp_path / "taken"), b"new")
    assert (tmp_path / "taken" / "inside").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    "value",
    [
        a_plan(),
        a_record(),
        LedgerEntry(0, 60, "fast-0", "fast", 3.67, 0.06),
        CheckpointManifest(100, 3, (CheckpointFile(0, "layer-0", 10, "ab"),), 1, 6400, 0),
        ControlState(
            3, 2, a_plan(), 180.0, 0.1, float("inf"), 0.0, 1.0, 5, 100, 6400, None, (("a", 1.5),)
        ),
    ],
)
def test_every_noun_survives_json(value: object) -> None:
    text = json.dumps(storage.to_json(value), allow_nan=False)
    assert storage.from_json(type(value), json.loads(text)) == value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "x"}, r"CheckpointManifest\.step is 'x'"),
        ({"step": True}, r"CheckpointManifest\.step is True"),
        ({"stp": 1}, r"unknown key 'stp'"),
        ({"files": [{"layer": 0}]}, r"CheckpointManifest\.files\[0\]: .*path"),
        ({"files": 3}, r"files is 3; it must be a list"),
    ],
)
def test_wrong_data_names_the_place(change: dict[str, object], message: str) -> None:
    good = storage.to_json(CheckpointManifest(1, 1, (), 1, 64, 0))
    assert isinstance(good, dict)
    with pytest.raises(ValueError, match=message):
        storage.from_json(CheckpointManifest, {**good, **change})


def test_json_files_are_read_as_written(folder: str) -> None:
    url = storage.join(folder, "control.json")
    storage.write_json(url, a_plan())
    assert storage.read_json(Plan, url) == a_plan()


@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_a_list_is_a_file_too_with_a_line_for_each_row(folder: str, num_rows: int) -> None:
    url = storage.join(folder, "compare.json")
    storage.write_json(url, num_rows * (a_plan(),))
    assert storage.parse_json(storage.read_bytes(url)) == num_rows * [storage.to_json(a_plan())]


def test_a_local_run_folder_does_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunOptions(name="a-1").run_url == str(tmp_path / "runs" / "a-1")
    assert RunOptions(name="a", storage_path="s3://bucket/p/").run_url == "s3://bucket/p/a"
    assert RunOptions(name="a", storage_path="/").run_url == "/a"


@pytest.mark.parametrize("name", ["", "Big", "a b", "../x", "-a", "a-", "a_b"])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="lower-case"):
        RunOptions(name=name)


def test_whatever_a_driver_raises_is_an_os_error() -> None:
    for use in (storage.read_bytes, storage.exists, storage.list_names, storage.obstacle):
        with pytest.raises(OSError, match="Protocol not known: nonsense"):
            use("nonsense://a/b")
    with pytest.raises(OSError, match="is no path"):
        storage.read_bytes("a\0b")
    with pytest.raises(OSError, match="unknown user"):
        storage.absolute("~nobody-of-that-name/x")


def test_a_special_file_or_a_link_is_written_through(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    storage.write_bytes(str(pipe), b"data")
    assert os.read(reader, 10) == b"data"
    os.close(reader)
    assert pipe.is_fifo()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    storage.write_bytes(str(tmp_path / "link"), b"data")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"data"


def test_a_folder_below_a_file_has_an_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert storage.obstacle(str(tmp_path / "not" / "yet")) == ""
    assert storage.obstacle(str(tmp_path / "file" / "runs")) == f"{tmp_path / 'file'} is no folder"
    assert storage.obstacle("memory://anything") == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_reported_with_the_file() -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        storage.write_bytes("/dev/full", b"x")


class Flaky(MemoryFileSystem):
    """Fails as often as it is told to, as drivers fail: each with errors of its own."""

    protocol = "flaky"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    errors: ClassVar[list[Exception]] = []

    def pipe_file(self, path: str, value: bytes, **options: object) -> None:
        super().pipe_file(path, value, **options)
        if self.errors:
            raise self.errors.pop(0)  # it was stored all the same: who knows?

    def cat_file(self, path: str, **options: int | None) -> bytes:
        if self.errors:
            raise self.errors.pop(0)
        return bytes(super().cat_file(path, **options))


fsspec.register_implementation("flaky", Flaky, clobber=True)


class DriverError(Exception):
    """Of no class that we know."""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(retries.time, "sleep", waited.append)
    Flaky.errors.clear()
    return waited


HICCUPS = (
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.EBUSY, "Please reduce your request rate."),
    ConnectionResetError("reset"),
    TimeoutError("no answer"),
    DriverError("503"),
)


@pytest.mark.parametrize("hiccup", HICCUPS, ids=repr)
def test_a_hiccup_of_the_store_is_tried_again(waits: list[float], hiccup: Exception) -> None:
    """ray-project/ray#47939, #55350: one hiccup of the object store ends training."""
    Flaky.errors += [hiccup, hiccup]
    storage.write_bytes("flaky://a/b", b"x")
    assert storage.read_bytes("flaky://a/b") == b"x"
    assert waits == list(retries.WAITS_S[:2])


def test_whoever_asks_again_anyway_need_not_wait_for_a_store(waits: list[float]) -> None:
    storage.write_bytes("flaky://a/b", b"x")
    Flaky.errors.append(TimeoutError("no answer"))
    with pytest.raises(TimeoutError):
        storage.read_bytes("flaky://a/b", timeout_s=5.0)
    assert waits == []


def test_a_server_that_hangs_is_not_waited_for_longer_than_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/notices"
        with pytest.raises(TimeoutError, match=url):
            storage.read_bytes(url, timeout_s=0.2)


@pytest.mark.parametrize("hiccup", HICCUPS, ids=repr)
def test_a_store_that_fails_every_time_is_named(waits: list[float], hiccup: Exception) -> None:
    Flaky.errors += [hiccup] * 9
    with pytest.raises(OSError, match=re.escape("flaky://a/b")) as raised:
        storage.write_bytes("flaky://a/b", b"x")
    assert waits == list(retries.WAITS_S)
    if not isinstance(hiccup, DriverError):
        told = as_told(pickle.loads(pickle.dumps(raised.value)))
        assert "flaky://a/b" in str(told)
        assert "start again when that is mended" in str(told)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        FileNotFoundError("The specified bucket does not exist"),
        PermissionError("Access Denied"),
        ValueError("no such option"),
        ImportError("Install it"),
    ],
    ids=repr,
)
def test_what_does_not_pass_is_told_at_once(waits: list[float], error: Exception) -> None:
    Flaky.errors.append(error)
    with pytest.raises(OSError, match=re.escape("flaky://a/b")) as raised:
        storage.write_bytes("flaky://a/b", b"x")
    assert waits == []
    if isinstance(error, OSError):
        assert type(raised.value) is type(error)


def test_a_driver_that_is_missing_comes_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(OSError, match=r"s3://b/x: Install s3fs .*pip install s3fs"):
        storage.read_bytes("s3://b/x")
