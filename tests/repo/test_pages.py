"""What the pages say of the tree is what the tree says of itself."""

import ast
from pathlib import Path

from orchestrator.core.cluster import known_kinds
from orchestrator.reports.device_table import device_page

ROOT = Path(__file__).parents[2]


def shown() -> dict[str, str]:
    """Modules of docs/architecture.md, section 3, with what it says of each."""
    tree = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("## 3. The tree")[1]
    found, folder = {}, ""
    for line in tree.split("```")[1].strip().splitlines():
        name, _, text = line.strip().partition(" ")
        if name.endswith("/"):
            folder = name
        else:
            found[folder + name] = text.strip()
    return found


def test_the_page_lists_every_module_with_its_first_line() -> None:
    modules = [p for folder in ("orchestrator", "workers") for p in ROOT.glob(f"{folder}/**/*.py")]
    docstrings = {p: ast.get_docstring(ast.parse(p.read_text("utf-8"))) for p in modules}
    assert shown() == {
        str(p.relative_to(ROOT)): text.splitlines()[0] for p, text in docstrings.items() if text
    }


def test_every_decision_is_a_page_of_its_own() -> None:
    for number, path in enumerate(sorted(ROOT.glob("docs/adr/*.md")), start=1):
        assert path.name.startswith(f"{number:04}-")
        text = path.read_text("utf-8")
        assert text.startswith(f"# {number}. ")
        assert len(text.splitlines()) <= 40


def test_the_page_of_device_kinds_is_that_of_the_catalogue() -> None:
    page = (ROOT / "docs" / "devices.md").read_text("utf-8")
    assert page == device_page(known_kinds().values()), "lyray devices --markdown > docs/devices.md"
