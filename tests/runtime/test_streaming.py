"""Datasets in files at URLs: what is read is what was written, and no more than is asked for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from orchestrator import Lines, Tokens, storage
from orchestrator.errors import ConfigError
from tests.runtime.s3 import BUCKET, Fault, Server, s3_server
from workers import streaming
from workers.data import SampleSource

pytestmark = [pytest.mark.runtime, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("server").fail()
        return f"s3://{BUCKET}/{tmp_path.name}"
    return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is read of files from now on; with blocks of 64 bytes, four of which are kept."""
    found: list[tuple[int, int]] = []
    read = storage.read_ranges

    def noted(url: str, wanted: list[tuple[int, int]]) -> list[bytes]:
        found.extend(wanted)
        return read(url, wanted)

    monkeypatch.setattr(storage, "read_ranges", noted)
    monkeypatch.setattr(streaming, "BLOCK_BYTES", 64)
    monkeypatch.setattr(streaming, "CACHE_BLOCKS", 4)
    return found


def rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"i": i, "text": "ä" * (i % 50)} for i in range(first, first + count)]


def as_lines(items: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items).encode()


def test_lines_of_several_files_are_one_dataset(folder: str, ranges: list[Any]) -> None:
    storage.write_bytes(f"{folder}/b-1.jsonl", as_lines(rows(30)))
    storage.write_bytes(f"{folder}/b-2.jsonl", as_lines(rows(12, 30)).rstrip(b"\n"))
    storage.write_bytes(f"{folder}/other.txt", b"no json")
    lines = Lines(f"{folder}/b-*.jsonl", json.loads)
    assert len(lines) == 42
    wanted = rows(42)
    order = np.random.default_rng(0).permutation(42).tolist()
    assert [lines[i] for i in order] == [wanted[i] for i in order]
    assert [lines[i] for i in range(42)] == wanted
    with pytest.raises(IndexError):
        lines[42]


def test_tokens_of_several_files_are_one_dataset(folder: str, ranges: list[Any]) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    storage.write_bytes(f"{folder}/1.bin", tokens[:500].tobytes())
    storage.write_bytes(f"{folder}/2.bin", tokens[500:].tobytes())
    dataset = Tokens([f"{folder}/1.bin", f"{folder}/2.bin"], length=33)
    assert len(dataset) == 15 + 15
    assert dataset[7].tolist() == list(range(231, 264))
    assert dataset[15].tolist() == list(range(500, 533))
    assert dataset[7].dtype == torch.int64
    shared = Tokens(f"{folder}/1.bin", length=33, overlap=1)
    assert len(shared) == 15  # the last one ends with token 480
    assert torch.cat([shared[i][1:] for i in range(15)]).tolist() == list(range(1, 481))


def test_only_what_is_asked_for_is_read_and_what_is_kept_not_again(
    tmp_path: Path, ranges: list[Any]
) -> None:
    storage.write_bytes(f"{tmp_path}/t", np.arange(8000, dtype=np.uint8).tobytes())
    dataset = Tokens(f"{tmp_path}/t", length=16, dtype="uint8")
    dataset.will_read([3, 0, 100])
    assert ranges == [(0, 64), (1600, 1664)]
    for index in (0, 1, 2, 3, 100, 101):
        assert dataset[index].tolist() == [(16 * index + k) % 256 for k in range(16)]
    assert len(ranges) == 2
    for index in (200, 204, 208):  # of five blocks one is the oldest
        dataset[index]
    dataset[100]
    assert len(ranges) == 5
    dataset[0]
    assert ranges[5:] == [(0, 64)]


def test_a_batch_asks_for_all_its_samples_at_once(
    tmp_path: Path, ranges: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "CACHE_BLOCKS", 8)
    storage.write_bytes(f"{tmp_path}/t", np.arange(8000, dtype=np.uint8).tobytes())
    dataset = Tokens(f"{tmp_path}/t", length=64, dtype="uint8")
    batch = SampleSource(dataset, None, seed=1).batch(range(8))
    assert batch.shape == (8, 64)
    assert len(ranges) == 8
    firsts = [first // 64 for first, _ in ranges]
    assert batch[:, 0].tolist() == [64 * first % 256 for first in firsts]


def test_empty_lines_are_none_and_line_breaks_of_windows_are_cut(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"\n\none\r\n\ntwo\n\n\nthree")
    assert list(map(Lines(str(tmp_path / "t.txt")).__getitem__, range(3))) == [
        "one",
        "two",
        "three",
    ]
    (tmp_path / "none.txt").write_bytes(b"\n\n")
    with pytest.raises(ConfigError, match="is empty"):
        SampleSource(Lines(str(tmp_path / "none.txt")), None, 0)


@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_lines_are_found_wherever_the_parts_end_that_are_scanned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    storage.write_bytes(f"{tmp_path}/t", as_lines(rows(20)))
    monkeypatch.setattr(streaming, "SCAN_BYTES", size)
    lines = Lines(f"{tmp_path}/t", json.loads)
    assert [lines[i] for i in range(len(lines))] == rows(20)


def test_an_index_that_is_kept_spares_the_scan(folder: str, ranges: list[Any]) -> None:
    storage.write_bytes(f"{folder}/t.jsonl", as_lines(rows(30)))
    for _ in range(2):
        lines = Lines(f"{folder}/t.jsonl", json.loads, index=f"{folder}/index")
        assert lines[29] == rows(30)[29]
    size = storage.size_bytes(f"{folder}/t.jsonl")
    assert ranges.count((0, size)) == 1
    (name,) = storage.list_names(f"{folder}/index")
    storage.write_bytes(f"{folder}/index/{name}", b"damaged")
    assert len(Lines(f"{folder}/t.jsonl", index=f"{folder}/index")) == 30
    storage.write_bytes(f"{folder}/t.jsonl", as_lines(rows(31)))
    assert len(Lines(f"{folder}/t.jsonl", index=f"{folder}/index")) == 31


@pytest.mark.parametrize(
    "entry",
    [
        np.arange(3), np.array([[0.0, 3.0]]), np.array([[0, 300]]), np.array([[2, 1]]),
        np.array([[-1, 3]]),
    ],
)  # fmt: skip
def test_an_index_that_cannot_be_the_files_is_made_anew(tmp_path: Path, entry: np.ndarray) -> None:
    file, index = tmp_path / "t.txt", tmp_path / "index"
    file.write_text("one\ntwo\n")
    Lines(str(file), index=str(index))
    (kept,) = index.iterdir()
    np.save(kept, entry)
    lines = Lines(str(file), index=str(index))
    assert [lines[i] for i in range(len(lines))] == ["one", "two"]


def test_an_index_of_what_the_file_was_gives_no_wrong_line(tmp_path: Path) -> None:
    file, index = tmp_path / "t.txt", str(tmp_path / "index")
    file.write_text("aaa\nbb\n")
    Lines(str(file), index=index)
    file.write_text("a\nbbbb\n")
    with pytest.raises(ValueError, match=r"t\.txt has changed: bytes 0 to 3 .*the folder of index"):
        Lines(str(file), index=index)[0]


@pytest.mark.parametrize("dtype", ["float32", "uint17", "object"])
def test_tokens_are_whole_numbers(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "t.bin").write_bytes(bytes(64))
    with pytest.raises(ValueError, match=f"dtype is '{dtype}'; write a type of whole numbers"):
        Tokens(str(tmp_path / "t.bin"), 4, dtype)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Lines, {"urls": None}, "Lines: urls has None; give a path, an fsspec URL, or several"),
        (Lines, {"urls": ["t.txt", ""]}, "Lines: urls has ''; give a path"),
        (Lines, {"urls": "."}, r"Lines: .* is a folder; write .*/\* for the files in it"),
        (Lines, {"encoding": "utf-9"}, "Lines: encoding is 'utf-9'; write one that Python knows"),
        (Lines, {"encoding": "utf-16"}, "a line break is one byte, such as utf-8 or latin-1"),
        (Lines, {"index": ""}, "Lines: index has ''; give a path"),
        (Lines, {"parse": None}, "Lines: parse is None; give a function"),
        (Tokens, {"urls": 3, "length": 2}, "Tokens: urls has 3; give a path"),
        (Tokens, {"urls": ".", "length": 2}, "is a folder"),
        (Tokens, {"length": 2.5}, "Tokens: length is 2.5; write a whole number"),
        (Tokens, {"length": 2, "overlap": None}, "Tokens: overlap is None; write a whole number"),
    ],
)
def test_an_argument_that_is_none_of_its_kind_is_named_with_its_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, given: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.txt").write_bytes("grün\n".encode("latin-1"))
    with pytest.raises((ValueError, TypeError), match=message):
        kind(**{"urls": "t.txt", **given})


def test_text_in_another_encoding_is_told_and_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()  # no file: ``*`` does not stand for it
    (tmp_path / "t.txt").write_bytes("grün\nblau\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"t.txt, from byte 0 on: 'utf-8' codec .* encoding='lat"):
        Lines(tmp_path / "*.txt")[0]
    assert list(map(Lines(tmp_path / "*.txt", encoding="latin-1").__getitem__, range(2))) == [
        "grün",
        "blau",
    ]


def test_a_store_that_is_unwell_for_a_moment_is_asked_again(server: Server) -> None:
    url = f"s3://{BUCKET}/moody.jsonl"
    storage.write_bytes(url, as_lines(rows(10)))
    lines = Lines(url, json.loads)
    server.fail(Fault("GET", "moody", times=9, status=500, code="InternalError"))
    assert lines[3] == rows(10)[3]
    assert server.left()[0] < 9


def test_what_is_wrong_is_told_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n{"a"\n')
    message = r"t.jsonl, from byte 9 on: JSONDecodeError: Expecting ':' delimiter"
    with pytest.raises(ValueError, match=message):
        Lines(str(tmp_path / "t.jsonl"), json.loads)[1]
    with pytest.raises(ValueError, match=r"Lines: there is no file at .*/none-\*"):
        Lines(str(tmp_path / "none-*"))
    with pytest.raises(FileNotFoundError):
        Lines(str(tmp_path / "none"))
    (tmp_path / "t.gz").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"t.gz is compressed: no part can be read alone; unpack"):
        Lines(str(tmp_path / "t.gz"))
    with pytest.raises(ValueError, match=r"t.gz has 1 bytes, no whole number of uint16|compressed"):
        Tokens(str(tmp_path / "t.gz"), 4)
    (tmp_path / "t.bin").write_bytes(b"xyz")
    with pytest.raises(ValueError, match=r"t.bin has 3 bytes, no whole number of uint16 tokens"):
        Tokens(str(tmp_path / "t.bin"), 4)
    with pytest.raises(ValueError, match="length 4 with overlap 4; write 0 <= overlap < length"):
        Tokens(str(tmp_path / "t.bin"), 4, overlap=4)
    lines = Lines(str(tmp_path / "t.jsonl"))
    (tmp_path / "t.jsonl").write_text("x")
    with pytest.raises(OSError, match=r"t.jsonl ends at byte 1, before byte 14"):
        lines[0]
