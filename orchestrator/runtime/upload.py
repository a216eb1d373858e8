"""What ``ray job submit --working-dir`` sends of a folder: how much, and what of it is large."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray._private.ray_constants import (
    RAY_RUNTIME_ENV_IGNORE_GITIGNORE,
    get_runtime_env_default_excludes,
)
from ray._private.runtime_env.packaging import _get_excludes, get_excludes_from_ignore_files

from orchestrator.errors import ConfigError
from orchestrator.reports import figures

# Ray has no public way to ask what it would send; these are its own, so that no pattern is read
# otherwise than it does (tests/runtime/test_upload.py compares with what it packs).
_Matcher = Callable[[Path], bool]

LIMIT_BYTES = 100 * 2**20
"""More than this Ray's job server answers with status 413; nothing is compressed."""

SHOWN = 3
"""So many of the largest are named."""

_silent = logging.getLogger(f"{__name__}.silent")
_silent.disabled = True


@dataclass(frozen=True, slots=True)
class Upload:
    """The files that would be sent, by their path in the folder."""

    folder: Path
    size_bytes: int
    files: frozenset[Path]
    largest: tuple[tuple[str, int], ...]
    """Files and folders at the top, with their bytes, the largest first."""

    def __str__(self) -> str:
        """For example: upload of .: 3.2 MiB in 120 files; largest: data/ 2.9 MiB, a.py 3.1 KiB."""
        told = ", ".join(f"{name} {figures.size(size)}" for name, size in self.largest[:SHOWN])
        return (
            f"upload of {self.folder}: {figures.size(self.size_bytes)} in {len(self.files)} "
            f"file{'s' * (len(self.files) != 1)}; largest: {told}"
        )


def look_at_upload(folder: Path, needed: Sequence[Path] = ()) -> Upload:
    """Look at what would be sent.

    Args:
        folder: What ``--working-dir`` names.
        needed: Files that the job needs; of these, those outside the folder are not looked at.

    Raises:
        ConfigError: If it is no folder, is empty, is more than Ray takes, holds a link to a folder
            around it, or a pattern of ``.rayignore`` or ``.gitignore`` excludes all of it, or a
            needed file.
    """
    if not folder.is_dir():
        raise ConfigError(f"--upload {folder}: no such folder; write what --working-dir names")
    sizes = {path.relative_to(folder): path.stat().st_size for path in _sent(folder)}
    if not sizes:
        if not any(path.is_file() for path in folder.rglob("*")):
            raise ConfigError(
                f"--upload {folder}: there is no file in it; write what --working-dir names, the "
                "folder of the task"
            )
        raise ConfigError(
            f"--upload {folder}: nothing of it is sent; a pattern such as *, /* or ** in its "
            ".rayignore or .gitignore means the folder itself, and no later line with ! brings "
            "anything back: name what is to stay behind"
        )
    inside = (file.resolve() for file in needed if file.resolve().is_relative_to(folder.resolve()))
    for file in inside:
        relative = file.relative_to(folder.resolve())
        if relative not in sizes:
            raise ConfigError(
                f"--upload {folder}: {relative} is not sent, and the job needs it; a line of "
                ".rayignore or .gitignore excludes it"
            )
    at_top: Counter[str] = Counter()
    for relative, size in sizes.items():
        at_top[relative.parts[0] + "/" * (len(relative.parts) > 1)] += size
    found = Upload(folder, sum(sizes.values()), frozenset(sizes), tuple(at_top.most_common()))
    if found.size_bytes > LIMIT_BYTES:
        raise ConfigError(
            f"{found}. Ray's job server takes {figures.size(LIMIT_BYTES)}; name in "
            f"{folder / '.rayignore'} what the job does not need, a pattern a line as in .gitignore"
        )
    return found


def _sent(folder: Path) -> Iterator[Path]:
    """The files that are sent."""
    always = _get_excludes(folder, get_runtime_env_default_excludes())
    yield from _walk(folder, [always], ())


def _walk(path: Path, excludes: Sequence[_Matcher], around: tuple[Path, ...]) -> Iterator[Path]:
    excludes = [
        *excludes,
        *get_excludes_from_ignore_files(path, include_gitignore=_obeys_gitignore(), logger=_silent),
    ]
    if any(exclude(path) for exclude in excludes):
        return
    if (place := path.resolve()) in around:
        raise ConfigError(
            f"--upload {around[0]}: {path} is a link to a folder that holds it, which Ray "
            "follows again and again; name it in .rayignore"
        )
    for entry in path.iterdir():
        if entry.is_dir():
            yield from _walk(entry, excludes, (*around, place))
        elif entry.is_file() and not any(exclude(entry) for exclude in excludes):
            yield entry


def _obeys_gitignore() -> bool:
    return os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
