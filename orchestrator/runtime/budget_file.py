"""The section ``budget`` of a run's ``config.yaml``, which is followed while the run goes on."""

import fcntl
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.core.budget import BudgetOptions
from orchestrator.core.edits import BudgetNews
from orchestrator.document import read_document
from orchestrator.errors import ConfigError
from orchestrator.inputs import MAX_TEXT_BYTES
from orchestrator.retries import may_pass

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
"""The configuration that a run goes by; of what is written there meanwhile, the budget."""

LOOKS_PER_SLOT = 4
MIN_LOOK_S, MAX_LOOK_S = 0.2, 10.0
"""Between two looks, of which an edit takes two: it is followed at the slot's end, or the next."""

READ_S = 5.0
"""Longest wait for a store; who waits is a thread of its own."""


Found = bytes | str | None
"""What stands in a run's file; text: why it cannot be read; None: the file is gone."""


class BudgetFile:
    """Looks at the file on a thread of its own: a store that hangs holds up no slot."""

    def __init__(self, config: RunConfig) -> None:
        """``config``: What the run goes by."""
        self._config = config
        self._url = storage.join(config.run.run_url, CONFIG_FILE)
        self._lock = threading.Lock()
        self._wanted: BudgetOptions | None = None
        self._warnings: list[str] = []
        self._seen: Found = None  # at the last look
        self._judged: Found = b""

    def at_start(self, known: BudgetOptions) -> BudgetOptions:
        """What the file says before the run starts; ``known`` where it cannot be followed.

        Raises:
            OSError: If the storage does not answer.
        """
        found = find_config(self._url)
        if found is not None:
            self._judge(found)
        wanted, self._wanted = self._wanted, None
        return wanted or known

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look again and again inside the block."""
        closed = threading.Event()
        look_s = self._config.control.slot_s / LOOKS_PER_SLOT
        wait_s = min(MAX_LOOK_S, max(MIN_LOOK_S, look_s))

        def watch() -> None:
            while not closed.wait(wait_s):
                try:
                    self.look()
                except Exception:  # the shell: the run goes by the budget that it has
                    logger.exception("%s could not be looked at", self._url)

        threading.Thread(target=watch, name="budget", daemon=True).start()
        try:
            yield
        finally:
            closed.set()

    def look(self) -> None:
        """Read the file; what stands there twice in a row is whole, and is judged once."""
        try:
            found = find_config(self._url, timeout_s=READ_S)
        except OSError as error:
            logger.info("%s was not read: %s", self._url, error)
            return
        seen, self._seen = self._seen, found
        if found == seen and found != self._judged:
            self._judge(found)

    def news(self) -> BudgetNews:
        """What was found since the last call."""
        with self._lock:
            news = BudgetNews(self._wanted, CONFIG_FILE, tuple(self._warnings))
            self._wanted = None
            self._warnings.clear()
        return news

    def _judge(self, found: Found) -> None:
        self._seen = self._judged = found
        wanted, warnings = None, []
        try:
            document = read_config(found, self._url, self._config)
            wanted = self._config.with_budget(document.get("budget"), self._url).budget
            others = _differences(document, self._config.to_data())
        except ConfigError as error:
            warnings.append(f"budget_refused: {error}; the budget in force stays")
        else:
            if others:
                warnings.append(
                    f"config_ignored: {self._url}: {', '.join(others)}: only the section budget is "
                    "followed while a run goes on; start it again with the other values"
                )
        with self._lock:
            self._wanted = wanted
            self._warnings += warnings


def find_config(url: str, *, timeout_s: float | None = None) -> Found:
    """Read a run's file.

    Raises:
        OSError: If the storage does not answer, which may pass.
    """
    try:
        return storage.read_bytes(url, timeout_s=timeout_s, max_bytes=MAX_TEXT_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        if may_pass(error):
            raise
        return f"{error.strerror or error}"


def read_config(found: Found, url: str, known: RunConfig) -> dict[str, object]:
    """The document in a run's file, of which ``known`` was written there.

    Raises:
        ConfigError: If it is none, or not whole: half a budget may lack its cap.
    """
    if found is None:
        raise ConfigError(f"{url} is gone; put it back")
    if isinstance(found, str):
        raise ConfigError(f"{url} cannot be read: {found}; write a file with the keys of a run")
    try:
        document = read_document(found.decode("utf-8-sig"), url)
    except UnicodeDecodeError:
        raise ConfigError(f"{url} is not a text file; write YAML") from None
    if not isinstance(document, dict):
        kind = "is empty" if document is None else "holds no keys"
        raise ConfigError(f"{url} {kind}; write the section budget")
    if "budget" in document and (missing := known.to_data().keys() - document.keys()):
        raise ConfigError(
            f"{url} lacks {', '.join(sorted(missing))}: it is not whole, and its budget may not be "
            "either; write every section of it"
        )
    return document


@contextmanager
def one_editor(run_url: str) -> Iterator[None]:
    """Hold off others who read the file to write it anew, where the disk knows locks."""
    folder = storage.local_path(run_url)
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # as in alone_in: some disks know none
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _differences(found: Mapping[str, object], known: Mapping[str, object]) -> list[str]:
    """Dotted names of what differs outside of the budget."""
    names, found = [], {str(key): value for key, value in found.items()}
    for section in sorted({*found, *known} - {"budget"}):
        one, other = found.get(section), known.get(section)
        if isinstance(one, dict) and isinstance(other, dict):
            keys = (key for key in {**other, **one} if one.get(key) != other.get(key))
            names += [f"{section}.{key}" for key in keys]
        elif one != other:
            names.append(section)
    return names
