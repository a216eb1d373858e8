"""constraints.txt pins everything that is installed, and its versions satisfy pyproject.toml."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def wanted() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for text in chain(PROJECT["dependencies"], *extras)]


def needed(requirement: Requirement, seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """Names of a requirement and of all that it pulls in on this machine."""
    key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
    if key in seen:
        return
    seen.add(key)
    yield key[0]
    try:
        texts = metadata.requires(requirement.name) or []
    except metadata.PackageNotFoundError:
        return  # another platform's build leaves it out
    for text in texts:
        inner = Requirement(text)
        extras = requirement.extras or {""}
        if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in extras):
            yield from needed(inner, seen)


def test_every_direct_and_transitive_dependency_is_pinned() -> None:
    seen: set[tuple[str, frozenset[str]]] = set()
    found = {name for requirement in wanted() for name in needed(requirement, seen)}
    bundled = {n for n in found if n.startswith(("nvidia-", "cuda-", "triton"))}  # torch pins them
    assert sorted(found - bundled - set(pins())) == []


def test_every_run_time_dependency_is_imported_somewhere() -> None:
    files = chain.from_iterable(
        (ROOT / folder).rglob("*.py") for folder in ("orchestrator", "workers", "benchmarks")
    )
    text = "\n".join(file.read_text("utf-8") for file in files)
    modules = {"pyyaml": "yaml"}  # named otherwise than their distribution
    unused = [
        name
        for name in (canonicalize_name(Requirement(t).name) for t in PROJECT["dependencies"])
        if not re.search(
            rf"^\s*(from|import) {modules.get(name, name.replace('-', '_'))}\b", text, re.MULTILINE
        )
    ]
    assert unused == []


def test_pinned_versions_lie_in_the_ranges_and_serve_a_machine_without_gpu() -> None:
    for requirement in wanted():
        assert Version(pins()[canonicalize_name(requirement.name)]) in requirement.specifier
    assert pins()["torch"] == "2.13.0"
    assert not [name for name, version in pins().items() if "+" in version]
