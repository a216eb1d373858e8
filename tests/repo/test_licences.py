"""What lyray is installed with may be used beside Apache-2.0, as each package says of itself."""

import re
from importlib import metadata

from packaging.requirements import Requirement

from tests.repo.test_pins import PROJECT, needed, wanted

PERMISSIVE = re.compile(
    r"Apache|MIT|BSD|ISC|Python Software Foundation|PSF|Zlib|CC0|BSL-1\.0|CNRI-Python|LLVM", re.I
)
COPYLEFT = re.compile(r"GPL|General Public|SSPL|Commons Clause", re.I)
FOR_THEIR_OWN_FILES = re.compile(r"MPL|Mozilla", re.I)
"""Holds for changes to its own files alone; lyray ships none of them."""


def licences(name: str) -> list[str]:
    """What a distribution says of its licence, in parts that all hold."""
    told = metadata.metadata(name)
    classifiers = [c for c in told.get_all("Classifier") or [] if c.startswith("License :: OSI")]
    text = told.get("License-Expression") or " AND ".join(classifiers)
    text = text or next(iter((told.get("License") or "").splitlines()), "")
    return [part for part in re.split(r"\s+AND\s+", text) if part] or ["none"]


def may_be_used(part: str) -> bool:
    """Whether one of the licences between which a part leaves the choice will do."""
    return any(
        (PERMISSIVE.search(choice) or FOR_THEIR_OWN_FILES.search(choice))
        and not COPYLEFT.search(choice)
        for choice in part.split(" OR ")
    )


def test_what_a_licence_asks_for_is_told_apart() -> None:
    assert may_be_used("MIT")
    assert may_be_used("GPL-3.0-only OR BSD-3-Clause")
    assert may_be_used("OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)")
    for refused in ("GPL-2.0-only", "OSI Approved :: GNU Affero General Public License v3", "none",
                    "Apache-2.0 with Commons Clause"):  # fmt: skip
        assert not may_be_used(refused)


def installed(requirements: list[Requirement]) -> set[str]:
    seen: set[tuple[str, frozenset[str]]] = set()
    names = {name for requirement in requirements for name in needed(requirement, seen)}
    there = {str(d.metadata["Name"]).lower().replace("_", "-") for d in metadata.distributions()}
    return {name for name in names if name in there}  # others are of other platforms


def test_every_licence_in_the_closure_is_permissive_or_holds_for_its_own_files_alone() -> None:
    names = installed(wanted())
    assert len(names) > len(PROJECT["dependencies"])
    strange = {name: part for name in names for part in licences(name) if not may_be_used(part)}
    assert strange == {}
