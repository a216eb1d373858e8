"""Every file that a newcomer is shown is one that the command takes."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import jsonschema
import pytest
import typer

from benchmarks.builders import make_profile
from orchestrator import cli, storage
from orchestrator.config import RunConfig, config_schema
from orchestrator.control.pools import build_cluster
from orchestrator.core.cluster import known_kinds, pool_of
from orchestrator.core.model import ModelProfile, profile_from_json
from orchestrator.document import read_document
from orchestrator.support import find_task
from orchestrator.whatif.plans import what_if
from orchestrator.whatif.rehearsal import rehearse
from orchestrator.whatif.scenario import load_scenario
from tests.markdown import blocks_of

ROOT = Path(__file__).parents[2]
BUDGETS = ("laptop", "mixed_lab", "spot_cloud", "two_zones", "weekend")
EXAMPLES = [
    *sorted(ROOT.glob("examples/*.yaml")),
    *(ROOT / "examples" / "budgets" / f"{name}.yaml" for name in BUDGETS),
]
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
    texts = [block for page in PAGES for block in blocks_of({"json"}, page.read_text())]
    shown = [text for text in texts if "lyray.profile" in text]
    assert shown, "docs/config.md shows a profile"
    for text in [*shown, *(path.read_text() for path in ROOT.glob("examples/*_profile.json"))]:
        profile_from_json(json.loads(text))


def commands() -> list[str]:
    """Lines of the pages' shell blocks that call lyray."""
    found = []
    for page in PAGES:
        for block in blocks_of({"bash", "sh", "console"}, page.read_text()):
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
    shown = [block for page in PAGES for block in blocks_of({"yaml"}, page.read_text())]
    whole = [block for block in shown if "\ntraining:" in block and "\nbudget:" in block]
    assert whole, "README.md shows a whole run file"
    for block in whole:
        build_cluster(RunConfig.parse(block).cluster)


def test_the_schema_for_editors_is_in_step() -> None:
    """`lyray schema > docs/config.schema.json` after a change of the options."""
    text = storage.read_bytes(str(ROOT / "docs" / "config.schema.json")).decode()
    assert json.loads(text) == json.loads(json.dumps(config_schema()))
    part = (ROOT / "docs" / "config.part.schema.json").read_text("utf-8")
    assert json.loads(part) == json.loads(json.dumps(config_schema(part=True)))


def budget_file(name: str, *overrides: str) -> RunConfig:
    return RunConfig.load(ROOT / "examples" / "budgets" / f"{name}.yaml", overrides)


def some_profile(config: RunConfig) -> ModelProfile:
    """Layers whose times go by the data sheets of the kinds."""
    kinds = {k: known_kinds()[k] for k in {o.kind for o in config.cluster.offers}}
    times = {name: [2e12 / kind.fp16_flop_per_s] * 6 for name, kind in kinds.items()}
    return make_profile(times, microbatches=(1, 2, 4, 8))


def a_few_searches() -> Callable[[], float]:
    """A stopwatch that goes by how often it is looked at: plans are cut short alike everywhere."""
    return partial(next, count(0.0, 0.02))


@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_file_is_planned_within_what_it_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # paths in it begin there, as that of its task does
    file = ["cluster.source=file"] if name == "mixed_lab" else []  # its devices are Ray's
    config = budget_file(name, *file)
    found = what_if(config, some_profile(config), stopwatch=a_few_searches())
    assert not found.chosen.plan.is_idle
    most = {o.pool: o.max_price_per_hour for o in config.cluster.offers}
    for device in found.chosen.plan.device_ids:
        pool = pool_of(device)
        offer = found.problem.cluster.offer(pool)
        listed_usd_per_s = offer.price_usd_per_s / offer.discount_ratio
        listed = 3600 * listed_usd_per_s / config.emulation.billing_speedup
        assert listed <= (most[pool] or listed)


@pytest.mark.parametrize("name", ["two_zones", "weekend"])
def test_a_budget_file_is_simulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = budget_file(name)
    result = rehearse(config, some_profile(config), days=0.1, strategy="cheapest")
    assert result.samples > 0
    assert result.spent_usd <= (config.budget.total_usd or result.spent_usd)


def test_the_price_list_is_a_part_that_two_of_the_files_take_in() -> None:
    folder = ROOT / "examples" / "budgets"
    part = read_document((folder / "prices.yaml").read_text("utf-8"), "prices.yaml")
    jsonschema.validate(part, config_schema(part=True))
    texts = [(folder / f"{name}.yaml").read_text("utf-8") for name in BUDGETS]
    assert sum("\ninclude: prices.yaml" in text for text in texts) >= 2
    for text in texts:
        schema = "config.part.schema.json" if "\ninclude:" in text else "config.schema.json"
        assert text.startswith(f"# yaml-language-server: $schema=../../docs/{schema}\n")
        assert (ROOT / "docs" / schema).is_file()


def test_the_hook_for_pre_commit_does_as_it_says(tmp_path: Path) -> None:
    """Its entry, given files as pre-commit gives them: at the end, several at once."""
    (hook,) = read_document((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"), "hooks")  # type: ignore[misc]
    assert set(hook) >= {"id", "name", "entry", "language", "files"}
    assert hook["language"] == "system"
    chosen = re.compile(hook["files"])
    assert chosen.search("lyray.yaml")
    assert chosen.search("jobs/night.lyray.yml")
    assert not chosen.search("deploy/kuberay.yaml")
    command, *arguments = shlex.split(hook["entry"])
    lyray = Path(sys.executable).with_name(command)
    bad = tmp_path / "bad.lyray.yaml"
    bad.write_text("run: {name: Bad Name}\n")
    good = str(ROOT / "examples" / "byte_gpt.yaml")
    for files, code in (([good], 0), ([good, str(bad)], 2)):
        done = subprocess.run(
            [lyray, *arguments, *files], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert done.returncode == code, done.stderr
    assert "Bad Name" in done.stderr
    assert good not in done.stderr
