"""Where listed prices are read: a CSV file, or a server that answers with JSON."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from orchestrator import storage
from orchestrator.control.backend import PriceFeedOptions
from orchestrator.errors import ConfigError
from orchestrator.fetching import fetch_text
from orchestrator.telemetry.price_rows import Reading, csv_reading, json_reading

ANSWER_S = 10.0
"""When a reading is given up."""

MAX_BYTES = 4 * 2**20
"""Of a feed; longer ones are something else."""

MAX_TOKEN_BYTES = 8192


class PriceSource(Protocol):
    """A place to read prices from, again and again."""

    @property
    def name(self) -> str:
        """What messages call it: key and value of the run file."""

    def read(self) -> Reading:
        """What it says now, read once.

        Raises:
            OSError: If it cannot be read; without any token.
            ValueError: If it says nothing that prices are.
        """


class CsvPrices:
    """A CSV file, which may grow while the run goes on."""

    def __init__(self, path: str, pools: Collection[str]) -> None:
        """``path``: local, or any URL that fsspec opens; ``pools``: those on offer."""
        self.name = f"cluster.price_feed.path {path!r}"
        self._path, self._pools = path, pools

    def read(self) -> Reading:
        """All rows, in the order of the file."""
        if (size := storage.size_bytes(self._path)) > MAX_BYTES:
            raise OSError(f"it has {size:,} bytes")
        data = storage.read_bytes(self._path, timeout_s=ANSWER_S, max_bytes=MAX_BYTES)
        try:
            return csv_reading(data.decode("utf-8-sig").splitlines(), self._pools)
        except UnicodeDecodeError:
            raise ValueError("it is not a text file") from None


class HttpPrices:
    """A server that answers with the prices of the moment."""

    def __init__(self, url: str, token_file: str | None, pools: Collection[str]) -> None:
        """``token_file`` is read anew each time: tokens change."""
        self.name = f"cluster.price_feed.url {url!r}"
        self._url, self._token_file, self._pools = url, token_file, pools

    def read(self) -> Reading:
        """The newest row of each pool; what the server says of itself is not repeated."""
        token = read_token(self._token_file) if self._token_file else ""
        text = fetch_text(self._url, token=token, timeout_s=ANSWER_S, max_bytes=MAX_BYTES)
        reading = json_reading(text, self._pools)
        shown = tuple(_without(token, line) for line in reading.passed_over)
        return Reading(reading.rows, shown)


PRICE_SOURCES: Mapping[str, Callable[[PriceFeedOptions, Collection[str]], PriceSource]] = {
    "path": lambda options, pools: CsvPrices(options.path or "", pools),
    "url": lambda options, pools: HttpPrices(options.url or "", options.token_file, pools),
}
"""Key of ``cluster.price_feed`` to what reads there."""


def make_source(options: PriceFeedOptions, pools: Collection[str]) -> PriceSource:
    """The source that the options name; reads nothing yet."""
    key = next(key for key in PRICE_SOURCES if getattr(options, key) is not None)
    return PRICE_SOURCES[key](options, pools)


def read_token(path: str) -> str:
    """The token that a file holds.

    Raises:
        OSError: If there is none; the message does not show what the file holds.
    """
    name = f"token_file {path!r}"
    try:
        data = storage.read_bytes(path, timeout_s=ANSWER_S, max_bytes=MAX_TOKEN_BYTES)
    except FileNotFoundError:
        raise OSError(f"{name} does not exist") from None
    except OSError as error:
        raise OSError(f"{name} cannot be read: {error.strerror or error}") from None
    text = data.decode("ascii", "replace").strip()
    if not re.fullmatch(r"[!-~]+", text):
        raise OSError(f"{name} does not hold one token of letters, digits and signs in one line")
    return text


def check_token(options: PriceFeedOptions | None) -> None:
    """Check before a run starts that its token can be read.

    Raises:
        ConfigError: If it cannot.
    """
    if options is not None and options.token_file is not None:
        try:
            read_token(options.token_file)
        except OSError as error:
            raise ConfigError(f"cluster.price_feed.{error}; write the token to it") from None


def _without(token: str, text: str) -> str:
    return text.replace(token, "***") if token else text
