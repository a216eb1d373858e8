"""What README.md tells a newcomer to type, the files it shows, and what it shows as output."""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.markdown import blocks

_NAMED = re.compile(r"# (\S+\.(?:py|yaml))\n")
_COMMENT = re.compile(r"\s+# .*$")
_SCRIPT = "script.py"
_END = "## The tree"


@dataclass(frozen=True)
class Readme:
    """Its blocks, in order."""

    commands: tuple[str, ...]
    """Lines of shells; what stands in no file of its own is run as a script where it stands."""

    files: dict[str, str]
    """By name: what to write before anything is run."""

    shown: frozenset[str]
    """How the lines begin that it shows as output, up to the first figure or column."""


def read(path: Path) -> Readme:
    """What a README says."""
    commands: list[str] = []
    files: dict[str, str] = {}
    shown: set[str] = set()
    for kind, text in blocks(path.read_text("utf-8").split(_END)[0]):
        if kind == "bash":
            commands += [_COMMENT.sub("", line) for line in text.splitlines() if line]
        elif named := _NAMED.match(text):
            files[named[1]] = text
        elif kind == "python":
            files[_SCRIPT] = text
            commands.append(f"python {_SCRIPT}")
        elif not kind:
            shown |= {_beginning(line) for line in text.splitlines()}
    return Readme(tuple(commands), files, frozenset(shown - {"", "..."}))


def _beginning(line: str) -> str:
    return re.split(r"\s{2,}|\d", line)[0].strip()
