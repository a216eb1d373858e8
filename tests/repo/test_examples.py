"""Every file that a newcomer is shown is one that the command takes."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from orchestrator import cli, storage
from orchestrator.config import RunConfig, config_schema
from orchestrator.control.pools import build_cluster
from orchestrator.core.model import profile_from_json
from orchestrator.support import find_task
from orchestrator.whatif.scenario import load_scenario

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"))
SCENARIOS = sorted(ROOT.glob("examples/scenarios/*.yaml"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_valid(path: Path) -> None:
    config = RunConfig.load(path)
    build_cluster(config.cluster)
    find_task(config.training.task, config.training.task_args, ROOT)
    assert RunConfig.parse(config.to_yaml()) == config


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.name)
def test_a_scenario_is_valid_for_the_example_of_its_name(path: Path) -> None:
    config = RunConfig.load(ROOT / "examples" / path.name)
    assert load_scenario(str(path), pools=[o.pool for o in config.cluster.offers]).streams


def test_the_profiles_shown_on_the_pages_and_beside_the_examples_are_read() -> None:
    texts = [b for page in PAGES for b in re.findall(r"```json\n(.*?)```", page.read_text(), re.S)]
    shown = [text for text in texts if "lyray.profile" in text]
    assert shown, "docs/config.md shows a profile"
    for text in [*shown, *(path.read_text() for path in ROOT.glob("examples/*_profile.json"))]:
        profile_from_json(json.loads(text))


def commands() -> list[str]:
    """Lines of the pages' shell blocks that call lyray."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", page.read_text(), re.S):
            lines = (line.strip().removeprefix("$ ") for line in block.splitlines())
            found += [line for line in lines if line.startswith(("lyray ", "ray job submit"))]
    return found


def test_the_commands_of_the_pages_parse() -> None:
    group = typer.main.get_command(cli.app)
    assert len(commands()) > 5, "README.md shows the commands"
    for line in commands():
        words = shlex.split(line, comments=True)
        assert "lyray" in words, f"{line!r} runs no lyray command"
        name, *arguments = words[words.index("lyray") + 1 :]
        command = group.commands[name]  # type: ignore[attr-defined]  # typer's own click
        command.make_context(name, list(arguments))


def test_the_run_files_shown_on_the_pages_are_valid() -> None:
    blocks = [b for page in PAGES for b in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)]
    whole = [block for block in blocks if "\ntraining:" in block and "\nbudget:" in block]
    assert whole, "README.md shows a whole run file"
    for block in whole:
        build_cluster(RunConfig.parse(block).cluster)


def test_the_schema_for_editors_is_in_step() -> None:
    """`lyray schema > docs/config.schema.json` after a change of the options."""
    text = storage.read_bytes(str(ROOT / "docs" / "config.schema.json")).decode()
    assert json.loads(text) == json.loads(json.dumps(config_schema()))
