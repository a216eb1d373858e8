"""What the tutorial adds to the commands of the README works as written, in its order."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.markdown import blocks, blocks_of

ROOT = Path(__file__).parents[2]


def included(name: str) -> str:
    """The code of a section of the README."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.partition(f"[start:{name}] -->")[2].partition("<!-- --8<-- [end")[0]
    return blocks(section)[0][1]


def commands() -> list[str]:
    page = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
    lines = [line for block in blocks_of({"bash"}, page) for line in block.split("\n")]
    return [line for line in lines if line.startswith("lyray ")]


@pytest.mark.timeout(600)
def test_the_commands_of_the_tutorial_work_on_the_task_of_the_readme(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
    for name, file in (("task", "mytask.py"), ("config", "mytask.yaml")):
        assert f'"README.md:{name}"' in page
        (tmp_path / file).write_text(included(name))
    assert len(commands()) >= 2
    for line in commands():
        command = [sys.executable, "-m", "orchestrator", *shlex.split(line)[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-2000:])
