"""The files that a run file or the command line names, read and checked."""

import json
from pathlib import Path

from orchestrator import storage
from orchestrator.core.model import ModelProfile, profile_from_json
from orchestrator.errors import ConfigError

MAX_TEXT_BYTES = 2**20
"""Of a run file: longer ones are something else."""

MAX_DATA_BYTES = 2**28
"""Of a profile, a bill or a trace: a device such as /dev/zero has no end."""


def read_text(url: str, name: str, mend: str, *, max_bytes: int = MAX_DATA_BYTES) -> str:
    """Return a text file.

    Args:
        url: A local path or an fsspec URL.
        name: What the message calls the file, for example its key and value.
        mend: What to do about it.
        max_bytes: Refuse a longer one, unread.

    Raises:
        ConfigError: If it cannot be read, or is no text.
    """
    try:
        if (size := storage.size_bytes(url)) <= max_bytes:
            return storage.read_bytes(url, max_bytes=max_bytes).decode("utf-8-sig")
        problem = f"has {size:,} bytes"
    except FileNotFoundError as error:
        cause = _cause(error)
        problem = f"cannot be read: {cause}" if cause else "does not exist"
    except IsADirectoryError:
        problem = "is a folder"
    except UnicodeDecodeError:
        problem = "is not a text file"
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    raise ConfigError(f"{name} {problem}; {mend}")


def _cause(error: BaseException) -> str:
    """What kept a driver from looking that says "not found" of a server that does not answer."""
    while error.__cause__ is not None:
        error = error.__cause__
    away = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return (error.strerror or str(error)) if away and isinstance(error, OSError) else ""


def read_profile(url: str, *, key: str = "cluster.profile", mend: str = "") -> ModelProfile:
    """The profile file that ``key`` names.

    Args:
        url: Where it is.
        key: What the user knows it by.
        mend: What to do when it cannot be used.

    Raises:
        ConfigError: If it cannot be read, is no JSON, or says something impossible.
    """
    name = f"{key} {url!r}"
    text = read_text(url, name, mend or "give the path of a profile file, or leave the key out")
    try:
        return profile_from_json(json.loads(text))
    except json.JSONDecodeError as error:
        problem = f"is no JSON: line {error.lineno}, {error.msg}"
    except RecursionError:
        problem = "is no profile: it holds lists too deep to read"
    except ValueError as error:
        problem = f"is wrong: {error}"
    raise ConfigError(f"{name} {problem}" + (f"; {mend}" if mend else ""))


def check_file(url: str, key: str) -> None:
    """Check that a key of the run file names a file.

    Raises:
        ConfigError: If there is none, or the storage cannot be asked.
    """
    try:
        if storage.is_file(url):
            return
        problem = "is no file" if storage.exists(url) else "does not exist"
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    raise ConfigError(f"{key} is {url!r}, which {problem}; give a file")


def check_folder(url: str, key: str) -> None:
    """Check that a folder can be made at a URL, and make nothing.

    Raises:
        ConfigError: If a file stands in its way, it is read-only, or the URL's driver is not
            installed.
    """
    try:
        problem = storage.obstacle(url)
    except OSError as error:
        problem = str(error.strerror or error)
    if problem:
        raise ConfigError(f"{key} is {url!r}: {problem}; give a folder that can be written to")


def check_output(path: str | None, option: str) -> None:
    """Check the name of a file that will be written; None names none.

    Raises:
        ConfigError: If it is empty or names a folder.
    """
    if path is not None and (not path or ("://" not in path and Path(path).is_dir())):
        raise ConfigError(f"{option} {path!r} names no file; give the path of a file to write")
