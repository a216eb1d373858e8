"""The documentation site builds without a warning, and asks nobody for anything."""

import html
import json
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import console, opened, why_not

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a broken link, anchor or include is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site: Path) -> dict[str, str]:
    return {str(p.relative_to(site)): p.read_text("utf-8") for p in site.rglob("*.html")}


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=\"?((?:https?:)?//)"
    )
    assert {name for name, text in pages(site).items() if loads.search(text)} == set()
    styles = "".join(path.read_text("utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"url\(['\"]?(?:https?:)?//", styles)
    assert "@import" not in styles


def test_formulas_are_drawn_by_the_browser_itself(site: Path) -> None:
    shown = pages(site)
    assert shown["concepts/drift-plus-penalty.html"].count("<math") > 20
    for name, text in shown.items():
        assert "arithmatex" not in text, name
        assert "<mi>\\" not in text, f"{name}: a command that the converter does not know"


def test_every_page_of_the_navigation_and_the_generated_ones_are_there(site: Path) -> None:
    names = set(pages(site))
    assert {"index.html", "tutorial.html", "reference/errors.html", "contributing.html"} <= names
    assert not [name for name in names if "generator" in name]


def test_the_search_finds_a_message(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text("utf-8")
    assert "start nodes with --labels" in index


# ---- in a browser

MEASURE = """
<!doctype html><meta charset="utf-8"><body><pre id="found"></pre><script>
const pages = %s, found = {};
let left = pages.length;
for (const page of pages) {
  const frame = document.createElement("iframe");
  frame.style = "width: 390px; height: 800px; border: 0";
  frame.onload = () => setTimeout(() => {
    const inner = frame.contentWindow, root = inner.document.documentElement;
    const asked = inner.performance.getEntriesByType("resource").map(entry => entry.name);
    found[page] = {
      overflow_px: root.scrollWidth - root.clientWidth,
      elsewhere: asked.filter(name => !name.startsWith(location.origin)),
      num_asked: asked.length,
      formulas_px: [...inner.document.querySelectorAll("math")]
        .map(formula => formula.getBoundingClientRect().height),
    };
    left -= 1;
    if (left === 0) document.getElementById("found").textContent = JSON.stringify(found);
  }, 500);
  frame.src = page;
  document.body.append(frame);
}
</script>
"""
OPENED = (
    "index.html", "tutorial.html", "concepts/drift-plus-penalty.html", "operations.html",
    "reference/errors.html", "reference/config-keys.html", "reference/python.html",
)  # fmt: skip


@pytest.fixture(scope="module")
def seen(site: Path) -> tuple[dict[str, Any], str]:
    """Some pages as a phone shows them, with every other host out of reach; the console."""
    if reason := why_not():
        pytest.skip(reason)
    (site / "measure.html").write_text(MEASURE % json.dumps(OPENED), "utf-8")
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/measure.html"
        done = opened(address, "--dump-dom", "--virtual-time-budget=60000")
        server.shutdown()
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), console(done)


def test_pages_fit_a_phone_and_ask_this_host_alone(seen: tuple[dict[str, Any], str]) -> None:
    pages, said = seen
    assert set(pages) == set(OPENED)
    for name, page in pages.items():
        assert page["overflow_px"] <= 0, name
        assert page["elsewhere"] == [], name
        assert page["num_asked"] > 2, name
    assert said == ""


def test_formulas_have_a_height(seen: tuple[dict[str, Any], str]) -> None:
    heights = seen[0]["concepts/drift-plus-penalty.html"]["formulas_px"]
    assert len(heights) > 20
    assert min(heights) > 5
