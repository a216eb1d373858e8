"""A store as moody as real ones: files beside the run say when it is slow, full or unwell."""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

_ERRORS = {
    "full": OSError(errno.ENOSPC, "No space left on device"),
    "unwell": OSError(errno.EIO, "Input/output error"),
}


class MoodyFileSystem(AbstractFileSystem):
    """``moody:///folder/...`` keeps its objects below a folder of this machine.

    Like an object store it publishes whole files only. Layers are not written while ``shut``
    lies in any folder above them, and fail while ``full`` or ``unwell`` does.
    """

    protocol = "moody"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._local = LocalFileSystem(auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("moody://")

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        while "layer" in path and (mood := _mood(path)):
            if mood in _ERRORS:
                raise _ERRORS[mood]
            time.sleep(0.005)
        self._local.pipe_file(f"{path}.part", value)
        Path(f"{path}.part").replace(path)

    def cat_file(self, path: str, **options: Any) -> bytes:
        return self._local.cat_file(path)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return self._local.info(path)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        found = self._local.ls(path, detail=True)
        return found if detail else [entry["name"] for entry in found]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._local.makedirs(path, exist_ok=exist_ok)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._local.rm(path, recursive=recursive)


def _mood(path: str) -> str | None:
    for folder in Path(path).parents:
        for mood in ("shut", *_ERRORS):
            if (folder / mood).is_file():
                return mood
    return None


@contextmanager
def mood(folder: Path, name: str) -> Iterator[None]:
    """Have the store below a folder be in a mood."""
    (folder / name).touch()
    try:
        yield
    finally:
        (folder / name).unlink()


fsspec.register_implementation("moody", MoodyFileSystem, clobber=True)
