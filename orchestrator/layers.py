"""A run file, what it includes and what is laid over it: one document that knows its sources."""

import posixpath
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator import storage
from orchestrator.document import apply_override, read_document
from orchestrator.errors import ConfigError
from orchestrator.inputs import MAX_TEXT_BYTES, read_text

INCLUDE = "include"
"""Key at the top of a file: a path or a list of paths of files that lie below it."""

MAX_DEPTH = 8
"""How deep files may include each other."""

MAX_FILES = 50
"""How many files a run may be written in."""

_OFFERS = "cluster.offers"
_MEND = "give the path of a YAML file"


@dataclass(slots=True)
class Layers:
    """Documents laid over each other; the last word on a value counts.

    Mappings are merged key by key, and ``cluster.offers`` pool by pool: a pool that is known
    already takes the keys that are given anew. Any other value, a list as well, is replaced.
    """

    source: str
    """The run file, which is named where no other file can be."""

    data: dict[str, object] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    """Where the documents came from, in the order in which they were laid."""

    _places: dict[str, tuple[str, str]] = field(default_factory=dict)  # path: file, path in it

    def lay(self, data: Mapping[str, object], source: str) -> None:
        """Lay the document of a file over what is there."""
        self.files.append(source)
        self._merge(self.data, data, source, "", "")

    def set(self, override: str) -> None:
        """Write one ``--set`` over what is there.

        Raises:
            ConfigError: If it names no place of the data, or the value is no YAML.
        """
        path = apply_override(self.data, override)
        if INCLUDE in self.data:
            raise ConfigError(
                f"--set {override!r}: {INCLUDE} is for files; write --overlay FILE instead"
            )
        self._place(path, self.source, path)

    def drop_offers(self, indices: Collection[int]) -> None:
        """Leave out entries of ``cluster.offers``; messages keep the numbers that files have."""
        cluster = self.data["cluster"]
        assert isinstance(cluster, dict)
        kept = [index for index in range(len(cluster["offers"])) if index not in indices]
        places = {p: place for p, place in self._places.items() if not p.startswith(f"{_OFFERS}[")}
        for new, old in enumerate(kept):
            before, after = f"{_OFFERS}[{old}]", f"{_OFFERS}[{new}]"
            places[after] = self.told(before)
            places |= {
                after + path.removeprefix(before): place
                for path, place in self._places.items()
                if path.startswith(f"{before}.")
            }
        self._places = places
        cluster["offers"] = [cluster["offers"][index] for index in kept]

    def told(self, problem: str) -> tuple[str, str]:
        """The file that a message is about, which begins with a dotted path, and it as of there."""
        path = re.split(r"[\s:;]", problem, maxsplit=1)[0]
        above = path
        while above and above not in self._places:
            above = re.sub(r"(^|\.)[^.\[\]]*$|\[\d+\]$", "", above)
        source, own = self._places.get(above, (self.source, above))
        return source, own + problem[len(above) :]

    def _merge(
        self,
        into: dict[str, object],
        data: Mapping[str, object],
        source: str,
        path: str,
        own: str,
    ) -> None:
        for key, value in data.items():
            below, own_below = (f"{p}.{key}" if p else str(key) for p in (path, own))
            known = into.get(key)
            if isinstance(known, dict) and isinstance(value, dict):
                self._merge(known, value, source, below, own_below)
            elif below == _OFFERS and isinstance(known, list) and isinstance(value, list):
                self._merge_offers(known, value, source)
            else:
                into[key] = _unshared(value)
                self._place(below, source, own_below)

    def _merge_offers(self, known: list[object], offers: list[object], source: str) -> None:
        """Each pool of a file over the one of its name; a pool twice in one file stays twice."""
        indices: dict[str, int] = {}
        for index, offer in enumerate(known):
            indices.setdefault(_pool(offer), index)
        for own_index, offer in enumerate(offers):
            own, pool = f"{_OFFERS}[{own_index}]", _pool(offer)
            merged = known[indices[pool]] if pool and pool in indices else None
            if isinstance(merged, dict) and isinstance(offer, dict):
                self._merge(merged, offer, source, f"{_OFFERS}[{indices.pop(pool)}]", own)
            else:
                known.append(_unshared(offer))
                self._place(f"{_OFFERS}[{len(known) - 1}]", source, own)

    def _place(self, path: str, source: str, own: str) -> None:
        """A value and all below it stand in a file."""
        for known in [p for p in self._places if p.startswith((f"{path}.", f"{path}["))]:
            del self._places[known]
        self._places[path] = (source, own)


def read_layers(url: str, overlays: Sequence[str] = ()) -> Layers:
    """Read a run file with all that it includes, and overlays over it, each with its own.

    Args:
        url: A local path or an fsspec URL.
        overlays: The same; the last one counts most.

    Raises:
        ConfigError: If a file is missing, is no YAML, or includes itself; it names the file,
            and the one that includes it.
    """
    layers, reader = Layers(url), _Reader()
    reader.lay(layers, url, read_text(url, url, _MEND, max_bytes=MAX_TEXT_BYTES))
    for overlay in overlays:
        text = read_text(overlay, f"--overlay {overlay}", _MEND, max_bytes=MAX_TEXT_BYTES)
        reader.lay(layers, overlay, text)
    return layers


def parse_layers(text: str, source: str) -> Layers:
    """Read the text of a run file as ``read_layers`` does; paths begin beside ``source``."""
    layers = Layers(source)
    _Reader().lay(layers, source, text)
    return layers


@dataclass(slots=True)
class _Reader:
    """Lays files over each other, the included ones first."""

    num_files: int = 0

    def lay(self, layers: Layers, url: str, text: str) -> None:
        """Lay one file and all that it includes, each once, over what is there."""
        self._lay(layers, url, text, (_identity(url),), set())

    def _lay(
        self, layers: Layers, url: str, text: str, chain: tuple[str, ...], seen: set[str]
    ) -> None:
        self.num_files += 1
        if self.num_files > MAX_FILES:
            raise ConfigError(f"{url}: a run in more than {MAX_FILES} files; write fewer")
        data = read_document(text, url)
        if not isinstance(data, dict):
            kind = "is empty" if data is None else "holds no keys"
            raise ConfigError(f"{url} {kind}; write the sections run, training, cluster and budget")
        for entry in _included(data.pop(INCLUDE, None), url):
            name, place = f"{url}: {INCLUDE} {entry!r}", _beside(url, entry)
            identity = _identity(place)
            if identity in chain:
                raise ConfigError(f"{name} leads back to a file that includes it; remove one")
            if len(chain) > MAX_DEPTH:
                raise ConfigError(f"{name} lies more than {MAX_DEPTH} files deep; include fewer")
            if identity in seen:
                continue
            included = read_text(place, name, _MEND, max_bytes=MAX_TEXT_BYTES)
            self._lay(layers, place, included, (*chain, identity), seen)
        seen.add(chain[-1])
        layers.lay(data, url)


def _included(value: object, url: str) -> list[str]:
    if value is None:
        return []
    entries = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, str) or not entry.strip():
            raise ConfigError(
                f"{url}: {INCLUDE} is {entry!r}; write the path of a file, or a list of paths"
            )
        entries.append(entry)
    return entries


def _pool(offer: object) -> str:
    """The name of an offer's pool, empty where it has none."""
    pool = offer.get("pool") if isinstance(offer, dict) else None
    return pool if isinstance(pool, str) else ""


def _beside(url: str, entry: str) -> str:
    """Where a path leads that stands in a file: from the folder of that file."""
    if "://" in entry or "://" not in url:
        whole = "://" in entry or entry.startswith("~")
        return entry if whole else str(Path(url).parent / entry)
    scheme, _, path = url.partition("://")
    return f"{scheme}://{posixpath.normpath(posixpath.join(posixpath.dirname(path), entry))}"


def _identity(url: str) -> str:
    try:
        return storage.absolute(url)
    except (OSError, ValueError):  # reading it says what is wrong with it
        return url


def _unshared(value: object) -> object:
    """The value written out: what two aliases name is two values from now on."""
    if isinstance(value, dict):
        return {key: _unshared(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_unshared(part) for part in value]
    return value
