"""What MkDocs asks while it builds the site: pages from the code, links out of docs/, formulas."""

import html
import os.path
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs.generator.pages import PAGES

ROOT = Path(__file__).parents[2]

ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages at the root of the tree, and where they lie on the site."""

_LINK = re.compile(r"(?<=\]\()([^()\s#]+)((?:#[^()\s]*)?)(?=\))")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write out what the navigation says with a star."""
    config.nav = _spread(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are written from the code, those at the root, and what pages link to."""
    for path, write in PAGES.items():
        files.append(File.generated(config, path, content=write()))
    for source, path in ROOT_PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, path, content=_from_root(text)))
    for page in list(files.documentation_pages()):
        for path in _outside(page):
            if files.get_file_from_path(path) is None:
                content = (ROOT / path).read_bytes()
                files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Links to files of the tree lead to their copies on the site."""
    above = "../" * page.file.src_uri.count("/")
    found = _outside(page.file)
    return _LINK.sub(
        lambda link: (
            f"{above}{path}{link[2]}" if (path := _in_tree(page.file.src_uri, link[1])) in found
            else link[0]
        ),
        markdown,
    )  # fmt: skip


def on_page_content(content: str, **_: object) -> str:
    """Formulas become MathML here, so that no script has to draw them."""
    return _FORMULA.sub(
        lambda found: convert(
            html.unescape(found[3]), display="block" if found[2] == "[" else "inline"
        ),
        content,
    )


def _spread(nav: Any, folder: Path) -> Any:
    if isinstance(nav, list):
        return [_spread(item, folder) for item in nav]
    if isinstance(nav, dict):
        return {title: _spread(item, folder) for title, item in nav.items()}
    if "*" in nav:
        return sorted(path.relative_to(folder).as_posix() for path in folder.glob(nav))
    return nav


def _outside(page: File) -> set[str]:
    """Files of the tree, outside docs/, that a page of docs/ links to."""
    if page.abs_src_path is None:
        return set()
    text = Path(page.abs_src_path).read_text("utf-8")
    paths = {_in_tree(page.src_uri, link[1]) for link in _LINK.finditer(text)}
    return {
        path for path in paths if path and not path.startswith("docs/") and (ROOT / path).is_file()
    }


def _in_tree(page: str, link: str) -> str:
    """The path of a link from the root of the tree; empty where it leads elsewhere."""
    if ":" in link:
        return ""
    path = os.path.normpath(Path("docs", page).parent / link)
    return "" if path.startswith("..") else Path(path).as_posix()


def _from_root(text: str) -> str:
    """A page of the root as one of docs/."""
    return _LINK.sub(lambda link: link[1].removeprefix("docs/") + link[2], text)
