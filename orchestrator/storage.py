"""Bytes and frozen dataclasses to and from fsspec URLs: atomic, whole or not at all."""

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast
from uuid import uuid4

import fsspec
from fsspec.implementations.local import LocalFileSystem

from orchestrator.credentials import MEND, masked
from orchestrator.decoding import decode, plain_members
from orchestrator.errors import ConfigError
from orchestrator.retries import patiently

T = TypeVar("T")
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

TEMPORARY = ".tmp-"  # marks a file that is still being written; never listed
_SIGNED = ("http://", "https://")  # have no other way to let somebody in
_NO_FOLDERS = {"abfs", "abfss", "az", "gcs", "gs", "oss", "s3", "s3a"}  # their drivers make buckets


def absolute(url: str) -> str:
    """Return the URL, or for a local path the same path independent of the working directory.

    Raises:
        OSError: If it begins with the home of a user that does not exist.
    """
    if "://" in url:
        return url
    try:
        return str(Path(url).expanduser().resolve())
    except RuntimeError:
        raise OSError(f"{url} begins with the home of an unknown user") from None


def join(url: str, *parts: str) -> str:
    """Return the URL of a file or folder below ``url``."""
    base = url if url.endswith("://") else url.rstrip("/") + "/"
    return base + "/".join(part.strip("/") for part in parts)


def local_path(url: str) -> Path | None:
    """Where a URL's file lies on this machine, None when it does not.

    Raises:
        OSError: If the URL's driver is unknown or not installed.
    """
    filesystem, path = _open(url)
    return Path(path) if isinstance(filesystem, LocalFileSystem) else None


def write_bytes(url: str, data: bytes) -> None:
    """Write a whole file so that a reader, or a crash at any byte, sees the old one or the new one.

    Locally: temporary name, fsync, rename. An object store publishes an upload at its end.

    Raises:
        OSError: If the storage refuses; what was there before is untouched.
    """

    def write(filesystem: fsspec.AbstractFileSystem, path: str) -> None:
        if isinstance(filesystem, LocalFileSystem):
            _write_local(Path(path), data)
            return
        if url.partition("://")[0] not in _NO_FOLDERS:
            filesystem.makedirs(filesystem._parent(path), exist_ok=True)
        filesystem.pipe_file(path, data)

    _use(url, write)


def read_bytes(url: str, *, timeout_s: float | None = None, max_bytes: int | None = None) -> bytes:
    """Return a whole file.

    Args:
        url: Where it is.
        timeout_s: Ask once, and where the driver can break off (http, object stores), for so
            long at most; no local pipe or device. None: try again where an error may pass.
        max_bytes: Refuse more; a local file is read no further.

    Raises:
        FileNotFoundError: If there is none.
        OSError: If the storage refuses, or does not answer in time (TimeoutError).
    """

    def read(filesystem: fsspec.AbstractFileSystem, path: str) -> bytes:
        if isinstance(filesystem, LocalFileSystem):
            data = _read_local(Path(path), max_bytes, at_once=timeout_s is not None)
        else:
            options = {"timeout": timeout_s} if timeout_s and filesystem.async_impl else {}
            data = cast("bytes", filesystem.cat_file(path, **options))
        if max_bytes is not None and len(data) > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", masked(url))
        return data

    return _use(url, read, patient=timeout_s is None)


def read_ranges(url: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return parts of a file, (first byte, end) each, asked for at the same time where that helps.

    Raises:
        FileNotFoundError: If there is none.
        OSError: If the storage refuses, or the file ends before one of them.
    """

    def read(filesystem: fsspec.AbstractFileSystem, path: str) -> list[bytes]:
        starts, ends = zip(*ranges, strict=True)
        paths = [path] * len(ranges)
        found = filesystem.cat_ranges(paths, list(starts), list(ends), on_error="raise")
        return cast("list[bytes]", found)

    found = _use(url, read) if ranges else []
    for (first, end), data in zip(ranges, found, strict=True):
        if len(data) != end - first:
            raise OSError(f"{masked(url)} ends at byte {first + len(data)}, before byte {end}")
    return found


def matching(url: str) -> tuple[str, ...]:
    """URLs of the files that a URL with ``*``, ``?`` or ``[`` stands for, sorted; else itself."""
    if not any(sign in url for sign in "*?["):
        return (url,)

    def find(filesystem: fsspec.AbstractFileSystem, path: str) -> list[str]:
        infos = filesystem.glob(path, detail=True)
        found = sorted(str(n) for n, info in infos.items() if info.get("type") != "directory")
        is_local = isinstance(filesystem, LocalFileSystem)
        return found if is_local else [filesystem.unstrip_protocol(name) for name in found]

    return tuple(_use(url, find))


def exists(url: str) -> bool:
    """Whether a file or folder is there."""
    return _use(url, lambda filesystem, path: bool(filesystem.exists(path)))


def is_file(url: str) -> bool:
    """Whether a file, and no folder or device, is there."""
    return _use(url, lambda filesystem, path: bool(filesystem.isfile(path)))


def size_bytes(url: str) -> int:
    """Size of a file, 0 where the storage does not tell.

    Raises:
        FileNotFoundError: If there is none.
        IsADirectoryError: If it is a folder.
    """

    def size(filesystem: fsspec.AbstractFileSystem, path: str) -> int:
        info = filesystem.info(path)
        if info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), masked(url))
        return int(info.get("size") or 0)

    return _use(url, size)


def obstacle(url: str) -> str:
    """Why no file could be made below a folder that may not exist yet; empty when nothing says so.

    Raises:
        OSError: If the URL's driver is unknown or not installed.
    """
    filesystem, path = _open(url)
    if not isinstance(filesystem, LocalFileSystem):
        return ""  # only writing can tell
    place = next(p for p in (Path(path), *Path(path).parents) if p.exists())
    if not place.is_dir():
        return f"{place} is no folder"
    return "" if os.access(place, os.W_OK | os.X_OK) else f"{place} is read-only"


def list_names(url: str) -> tuple[str, ...]:
    """Names of the files and folders directly below ``url``, sorted; none when it is absent."""
    try:
        found = _use(url, lambda filesystem, path: filesystem.ls(path, detail=False))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    names = {str(name).rstrip("/").rsplit("/", 1)[-1] for name in found}
    return tuple(sorted(name for name in names if TEMPORARY not in name))


def delete(url: str) -> None:
    """Remove a file, or a folder with all it holds; nothing happens when it is absent."""

    def remove(filesystem: fsspec.AbstractFileSystem, path: str) -> None:
        if filesystem.exists(path):
            filesystem.rm(path, recursive=True)

    _use(url, remove)


def write_json(url: str, value: object) -> None:
    """Write a dataclass (or plain data) as one JSON file, atomically: a line for each of its parts.

    Lines within them would take Python's own encoder, which needs ten times as long.
    """
    plain = plain_members(value)
    if isinstance(plain, dict):
        rows, (begin, end) = [f"{json.dumps(k)}: {json_text(plain[k])}" for k in plain], "{}"
    else:
        rows, (begin, end) = [json_text(item) for item in plain], "[]"
    write_bytes(url, (begin + "\n" + ",\n".join(rows) + "\n" + end + "\n").encode())


def json_text(value: object) -> str:
    """Return a dataclass (or plain data) as JSON in one line, as ``to_json`` would have it.

    Raises:
        TypeError: On a value that JSON has no form for.
    """
    try:
        return _ENCODER.encode(value)
    except ValueError:  # an infinite number somewhere
        return json.dumps(to_json(value), allow_nan=False)


def read_json(cls: type[T], url: str) -> T:
    """Read what ``write_json`` wrote. Raises FileNotFoundError, or ValueError naming the key."""
    return from_json(cls, parse_json(read_bytes(url)))


def parse_json(text: str | bytes) -> object:
    """Return what JSON text says.

    Raises:
        ValueError: If it is none, is nested without end, or holds what could not be written again.
    """
    text = text.decode() if isinstance(text, bytes) else text
    try:
        long = _TWO_DIGITS.search(text[::_APART])
        data = (_CAREFUL if long else _DECODER).decode(text)
        if _HALF.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half a character") from None
    return cast("object", data)


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:_SHOWN]} is beyond all floats")
    return value


def _int(digits: str) -> int:
    if len(digits) > _SHOWN:
        _float(digits)
    return int(digits)


_SHOWN = 40  # digits of a number that is none
_APART = 150  # characters; of a whole number beyond floats, 309 digits, two lie so
_TWO_DIGITS = re.compile("[0-9]{2}")
_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_float)
_CAREFUL = json.JSONDecoder(parse_constant=_no_number, parse_float=_float, parse_int=_int)
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # maybe half a character


def to_json(value: object) -> Json:
    """Return a dataclass as plain JSON data: nested, tuples as lists, infinite numbers as text.

    Raises:
        TypeError: On a value that JSON has no form for.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    plain = plain_members(value)
    if isinstance(plain, dict):
        return {key: to_json(item) for key, item in plain.items()}
    return [to_json(item) for item in plain]


_ENCODER = json.JSONEncoder(default=plain_members, allow_nan=False)  # json.dumps makes one a call


def from_json(cls: type[T], data: object) -> T:
    """Build a dataclass from what ``to_json`` returned.

    Raises:
        ValueError: On a missing or unknown key or a value of the wrong type, with its path.
    """
    return cast("T", decode(cls, data, cls.__name__))


def finite(value: float | None) -> float | None:
    """The number, None where JSON has no form for it: for files that other programs read."""
    return value if value is not None and math.isfinite(value) else None


def _open(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    if masked(url) != url and not url.startswith(_SIGNED):
        raise ConfigError(f"{masked(url)!r} is a URL with a credential in it; {MEND}")
    with _as_os_error(url):
        filesystem, path = fsspec.core.url_to_fs(url)
    if "\0" in path:
        raise OSError(f"{url!r} is no path")
    return filesystem, path


def _use(
    url: str, use: Callable[[fsspec.AbstractFileSystem, str], T], *, patient: bool = True
) -> T:
    """Do something to a URL's file, again where an error may pass."""
    filesystem, path = _open(url)

    def once() -> T:
        filesystem.invalidate_cache()  # drivers keep listings: another process may have written
        with _as_os_error(url):
            return use(filesystem, path)

    return patiently(once) if patient else once()


@contextmanager
def _as_os_error(url: str) -> Iterator[None]:
    """Let a driver fail as the local file system does: its own errors are of any class.

    Each names the URL, which a full disk or an object store does not, without its credentials.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        known = (number for kind, number in _NUMBERS.items() if isinstance(error, kind))
        number = error.errno or next(known, None)
        if number is None:
            raise OSError(masked(f"{url}: {error}")) from error
        reason = masked(error.strerror or str(error)) or os.strerror(number)
        raise OSError(number, reason, masked(url)) from error
    except ImportError as error:
        extra = "; pip install s3fs" if url.startswith("s3") else ""
        raise OSError(masked(f"{url}: {error}{extra}")) from error
    except Exception as error:
        raise OSError(masked(f"{url}: {error or type(error).__name__}")) from error


_NUMBERS = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    TimeoutError: errno.ETIMEDOUT,
    ConnectionRefusedError: errno.ECONNREFUSED,
    ConnectionResetError: errno.ECONNRESET,
}


def _read_local(path: Path, max_bytes: int | None, *, at_once: bool) -> bytes:
    """No more than a byte beyond ``max_bytes``: a device such as /dev/zero has no end."""
    if at_once and not (path.is_file() or path.is_dir()) and path.exists():
        raise OSError(errno.EINVAL, "it is no file, but a pipe or a device", str(path))
    with path.open("rb") as file:
        return file.read(-1 if max_bytes is None else max_bytes + 1)


def _write_local(path: Path, data: bytes) -> None:
    if path.is_char_device() or path.is_fifo():
        path.write_bytes(data)  # /dev/stdout, /dev/null: a rename would replace the device
        return
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}{TEMPORARY}{uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
