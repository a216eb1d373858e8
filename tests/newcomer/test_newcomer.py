"""A newcomer types what README.md says, in its order, on a fresh machine: all of it works."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.newcomer.readme import Readme, read
from tests.newcomer.root import TREE, Root, Said, fresh_root, why_not

pytestmark = pytest.mark.timeout(3600)

logger = logging.getLogger(__name__)

PAGE = read(TREE / "README.md")
PLACEHOLDER = "/path/to/the/clone"
LIMIT_S = 1800.0  # of one command: the first one installs

NOT_HERE = {
    "make test": "would run the suite inside of itself",
    "ray job submit": "wants a cluster of several nodes: tests/jobs has one",
}
"""How commands begin that are not typed here, and why."""


@dataclass(frozen=True)
class Journey:
    """What became of each command, up to the first that failed."""

    root: Root
    folder: Path
    """Where the newcomer's own files are."""

    said: Mapping[str, Said]


@pytest.fixture(scope="module")
def journey() -> Iterator[Journey]:
    if reason := why_not():
        pytest.skip(reason)
    with fresh_root() as root:
        folder = root.home / "work"
        folder.mkdir()
        for name, text in PAGE.files.items():
            (folder / name).write_text(text)
        yield Journey(root, folder, travel(root, folder, PAGE))


def travel(root: Root, folder: Path, page: Readme) -> dict[str, Said]:
    """Type one command after the other; what is sourced once holds for all that come after."""
    sourced, found = "", dict[str, Said]()
    for command in page.commands:
        if command.startswith(tuple(NOT_HERE)):
            continue
        line = command.replace(PLACEHOLDER, str(root.clone))
        in_clone = line.startswith("make ") or "examples/" in line
        said = root.run(f"{sourced}{line}", root.clone if in_clone else folder, timeout_s=LIMIT_S)
        logger.info("%.0f s: %s", said.wall_s, command)
        found[command] = said
        if said.code:
            break
        if line.startswith(". "):
            sourced += f"{line} && "
    return found


def test_every_command_works_as_written(journey: Journey) -> None:
    failed = {c: said.output[-3000:] for c, said in journey.said.items() if said.code}
    assert failed == {}
    typed = [c for c in PAGE.commands if not c.startswith(tuple(NOT_HERE))]
    assert list(journey.said) == typed


def test_the_readme_still_says_what_this_test_is_about() -> None:
    for beginning in (*NOT_HERE, "make demo", "lyray validate", "lyray run", "lyray simulate"):
        assert any(command.startswith(beginning) for command in PAGE.commands), beginning
    assert {"mytask.py", "mytask.yaml", "script.py"} <= PAGE.files.keys()


def test_what_the_readme_shows_as_output_is_printed(journey: Journey) -> None:
    lines = [line for said in journey.said.values() for line in said.output.splitlines()]
    begun = {shown for shown in PAGE.shown if any(line.startswith(shown) for line in lines)}
    assert PAGE.shown - begun == set()


def test_the_files_it_speaks_of_are_there(journey: Journey) -> None:
    (demo,) = journey.root.clone.glob("runs/demo-*/result.json")
    own = journey.folder / "runs" / "mytask" / "result.json"
    for result in (demo, own):
        assert json.loads(result.read_text())["status"] == "finished"
    assert (journey.folder / "mytask.safetensors").stat().st_size > 0
    for page in ("teams.html", "simulated.html"):
        assert "</html>" in (journey.root.clone / page).read_text()


def test_nothing_is_left_behind(journey: Journey) -> None:
    """Every other place was read-only: who wrote there has failed."""
    assert {c: said.left for c, said in journey.said.items() if said.left} == {}
    left = [p.name for p in journey.root.temporary.iterdir() if p.name.startswith("lyray-")]
    assert left == []
