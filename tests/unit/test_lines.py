"""Record files: every line once, in order, whatever the storage and whatever breaks."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import lines, retries, storage


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PART_BYTES", 12)


def test_lines_come_back_in_order(folder: str) -> None:
    url = storage.join(folder, "deep", "lines.jsonl")
    assert lines.read_lines(url) == ()
    lines.append_lines(url, ["a"])
    lines.append_lines(url, ["b", "c"])
    lines.append_lines(url, [])
    assert lines.read_lines(url) == ("a", "b", "c")


def test_only_a_line_feed_ends_a_line(folder: str) -> None:
    url, rows = storage.join(folder, "f.jsonl"), ("a\x0bb\u2028c", "d\re")
    lines.append_lines(url, rows)
    assert lines.read_lines(url) == rows


def test_a_line_that_is_finished_while_it_is_read_is_not_taken_for_its_second_half() -> None:
    assert list(lines.whole_lines([b"a\n", b'{"b', b'": 1}\n', b"c\n"])) == ["a"]


@settings(deadline=None)  # a disk may take its time
@given(torn=st.binary(max_size=40).filter(lambda b: b"\n" not in b))
def test_a_line_torn_by_a_crash_is_dropped_and_earlier_lines_stay(
    tmp_path_factory: pytest.TempPathFactory, torn: bytes
) -> None:
    path = tmp_path_factory.mktemp("torn") / "ledger.jsonl"
    path.write_bytes(b"first\n" + torn)
    assert lines.read_lines(str(path)) == ("first",)
    lines.append_lines(str(path), ["second"])
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_torn_line_longer_than_a_block_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"first\n" + b"x" * 10_000)
    lines.append_lines(str(path), ["second"])
    assert lines.read_lines(str(path)) == ("first", "second")


def test_a_line_break_inside_a_line_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line break"):
        lines.append_lines(str(tmp_path / "x"), ["a\nb"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_reported_with_the_file() -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        lines.append_lines("/dev/full", ["x"])


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("sizes", [(1,) * 20, (7, 7, 6), (20,)])
def test_a_store_that_cannot_append_gets_parts_of_bounded_size(sizes: tuple[int, ...]) -> None:
    url = f"memory://parts-{len(sizes)}/ledger.jsonl"
    storage.write_bytes(f"{url}.bak", b"no part\n")
    rows = [f"{i:03d}" for i in range(sum(sizes))]
    for at, size in zip(range(0, 20, sizes[0]), sizes, strict=True):
        lines.append_lines(url, rows[at : at + size])
    assert lines.read_lines(url) == tuple(rows)
    names = [n for n in storage.list_names(f"memory://parts-{len(sizes)}") if "bak" not in n]
    assert names[0] == "ledger.jsonl"
    for name in names:
        assert storage.size_bytes(f"memory://parts-{len(sizes)}/{name}") < 12 + 4 * sizes[0]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("count", range(11))
def test_a_file_is_cut_after_a_line_wherever_its_parts_end(folder: str, count: int) -> None:
    url = storage.join(folder, f"cut-{count}.jsonl")
    rows = [f"{i:03d}" for i in range(10)]
    for row in rows:
        lines.append_lines(url, [row])
    lines.keep_lines(url, count)
    assert lines.read_lines(url) == tuple(rows[:count])
    lines.append_lines(url, ["next"])
    assert lines.read_lines(url) == (*rows[:count], "next")


def test_a_copy_of_parts_on_this_machine_is_read_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1\n")
    (tmp_path / "a.jsonl.00001").write_text("2\n")
    lines.append_lines(str(tmp_path / "a.jsonl"), ["3"])
    assert lines.read_lines(str(tmp_path / "a.jsonl")) == ("1", "2", "3")


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_no_line_is_there_twice_when_a_call_had_to_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A dollar booked twice is as wrong as one that is lost."""
    path = tmp_path / "ledger.jsonl"
    lines.append_lines(str(path), ["old"])
    real, failures = getattr(os, fails), [1, 2]

    def flaky(descriptor: int, *data: memoryview) -> int | None:
        if failures:
            failures.pop()
            if data:
                real(descriptor, data[0][:7])  # a whole line and a bit
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, *data)

    monkeypatch.setattr(os, fails, flaky)
    monkeypatch.setattr(retries.time, "sleep", lambda _: None)
    lines.append_lines(str(path), ["one", "two"])
    assert path.read_text() == "old\none\ntwo\n"
