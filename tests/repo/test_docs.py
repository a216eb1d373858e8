"""The documentation says what the code says: its generated pages, its tables, its navigation."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from docs.generator.errors import source
from docs.generator.fields import keys_in
from docs.generator.pages import PAGES
from docs.generator.records import RESULT
from orchestrator import cli
from orchestrator.config import RunConfig, config_schema
from orchestrator.errors import ConfigError
from orchestrator.strategies.registry import STRATEGIES
from orchestrator.telemetry.metrics import METRICS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {path.split("/")[-1]: write() for path, write in PAGES.items()}


def test_every_metric_is_on_its_page(pages: dict[str, str]) -> None:
    shown = re.findall(r"^\| `lyray_(\w+)` \|", pages["metrics.md"], re.MULTILINE)
    assert shown == list(METRICS)


def test_every_alert_is_in_the_reference(pages: dict[str, str]) -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text("utf-8"))
    alerts = [r["alert"] for g in rules["groups"] for r in g["rules"] if "alert" in r]
    assert alerts
    assert all(f"## {alert}\n" in pages["alerts.md"] for alert in alerts)


def test_every_command_and_option_is_in_the_reference(pages: dict[str, str]) -> None:
    group: Any = typer.main.get_command(cli.app)
    sections = dict(re.findall(r"^## lyray (\w+)\n(.*?)(?=^## |\Z)", pages["cli.md"], re.M | re.S))
    assert set(sections) == set(group.commands)
    for name, command in group.commands.items():
        for option in (opt for p in command.params for opt in p.opts if opt.startswith("-")):
            assert re.search(rf"`{option}[ `]", sections[name]), (name, option)


def test_every_key_of_the_file_is_in_the_reference(pages: dict[str, str]) -> None:
    definitions: Any = config_schema()["$defs"]
    options = [d for d in definitions.values() if "properties" in d]
    for name in {key for d in options for key in d["properties"]}:
        assert f"| `{name}` |" in pages["config-keys.md"], name


def test_every_key_of_the_file_has_a_meaning(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| (`\w+`) \|(.*)\|$", pages["config-keys.md"], re.MULTILINE)
    assert len(rows) > 100
    silent = [name for name, cells in rows if not cells.rpartition("|")[2].strip()]
    assert not silent, "write a docstring under the field of the options"


def test_every_strategy_is_in_the_reference_with_what_it_does(pages: dict[str, str]) -> None:
    shown = dict(re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", pages["strategies.md"], re.MULTILINE))
    assert list(shown) == list(STRATEGIES)
    assert all(text.strip() for text in shown.values())


def test_the_reference_of_result_json_has_the_keys_that_are_written() -> None:
    tree = ast.parse((ROOT / "orchestrator/runtime/result.py").read_text("utf-8"))
    keys: set[str] = set()
    for name in ("result_ending", "result_figures"):
        (write,) = (n for n in ast.walk(tree) if getattr(n, "name", "") == name)
        keys |= set(keys_in(write))
    assert set(RESULT) == keys


def test_every_field_of_the_files_is_told(pages: dict[str, str]) -> None:
    rows = re.findall(r"^\| (`\w+`) \|(.*)\|$", pages["files.md"], re.MULTILINE)
    assert len(rows) > 80
    silent = [name for name, cells in rows if not cells.rpartition("|")[2].strip()]
    assert not silent, "a comment beside the field, or a line in docs/generator/records.py"


# ---- error messages


@pytest.fixture(scope="module")
def error_page() -> str:
    return PAGES["reference/errors.md"]()


def test_every_place_that_makes_an_error_of_ours_is_on_the_page_of_errors(error_page: str) -> None:
    silent = [site for site in source().sites() if site.error in source().exit_codes
              and not any(text in error_page for text in site.texts)]  # fmt: skip
    assert not silent


def matches(message: str, page: str) -> bool:
    """Whether the page has a text that becomes the message when its values are put in."""
    texts = re.findall(r"^- `+ ?(.*?) ?`+", page, re.MULTILINE)
    spoken = [text for text in texts if sum(c.isalpha() for c in text) > 12]
    forms = (".+".join(re.escape(part) for part in text.split("…")) for text in spoken)
    section = r"(?:[\w\[\].]+[.:] ?)?"  # of what an option's own check says
    return any(re.fullmatch(section + form, message, re.DOTALL) for form in forms)


GOOD = """
run: {name: x}
training: {task: "mytask:task", global_batch: 64, steps: 10}
cluster: {source: emulated, offers: [{pool: a, kind: t4, price_per_hour: 1.0}]}
budget: {average_per_hour_usd: 4.0}
"""


@pytest.mark.parametrize(
    "change",
    ["budget.averge=1", "training.optimizer.name=sdg", "run.name=../x", "control.strategy=jont",
     "training.learning_rate=1", "budget.limits=[{zone: z9, max_per_hour_usd: 1}]",
     "cluster.offers=[]", "failure.timeout_s=-1", "training.overlap=true"],
)  # fmt: skip
def test_a_message_that_a_user_meets_is_on_the_page_of_errors(change: str, error_page: str) -> None:
    with pytest.raises(ConfigError) as met:
        RunConfig.parse(GOOD, [change])
    message = str(met.value).removeprefix("config: ")
    assert matches(message, error_page) or matches(str(met.value), error_page), message


# ---- pages


def nav_paths(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from nav_paths(item)


def test_every_page_is_in_the_navigation_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    shown = sorted(nav_paths(nav))
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    wanted = {path for path in written if not path.startswith("adr/")} | set(PAGES)
    assert shown == sorted(wanted | {"adr/*.md", "contributing.md", "changelog.md"}), (
        "list the page in `nav` of mkdocs.yml"
    )


def anchors(path: Path) -> set[str]:
    """What headings of a page are called in links, as GitHub does it."""
    found = re.findall(r"^#+ (.*?)(?: \{ ?#.*)?$", path.read_text("utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found)
    return set(plain)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_pages_at_the_root_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)\s:]+)\)", (ROOT / page).read_text("utf-8"))
    for link in links:
        path, _, anchor = link.partition("#")
        target = ROOT / (path or page)
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def environment_names() -> set[str]:
    """Names of variables that the two packages read or set."""
    paths = [
        path for folder in ("orchestrator", "workers") for path in (ROOT / folder).rglob("*.py")
    ]
    texts = [text for text in (path.read_text("utf-8") for path in paths) if "environ" in text]
    found = [
        re.findall(r"(?:environ[\w.]*[\[(]|^ENVIRONMENT = )\"(\w+)\"", text, re.M) for text in texts
    ]
    return {name for names in found for name in names}


def test_every_environment_variable_that_is_read_or_set_is_on_its_page() -> None:
    page = (DOCS / "reference" / "environment.md").read_text("utf-8")
    assert len(environment_names()) > 5
    assert {name for name in environment_names() if f"`{name}`" not in page} == set()


def test_every_test_that_the_security_page_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", (DOCS / "security.md").read_text("utf-8"))
    assert named
    for path, test in named:
        assert f"def {test}" in (ROOT / path).read_text("utf-8"), (path, test)
