"""Opens pages in Chromium without a network, light and dark, narrow and wide; measures them."""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any

from tests.chromium import console, opened

SCHEMES = {"dark": 0, "light": 1}  # as Chromium numbers them
WIDTHS = {"phone": 390, "desktop": 1100}  # pixels


@dataclass(frozen=True, slots=True)
class Seen:
    """What was measured of one page at one width; each list names the places."""

    page: str
    width: str
    dark: bool
    overflows_px: int
    faint: tuple[str, ...]  # text, contrast and colours where the contrast is below 4.5
    num_texts: int  # whose contrast was measured
    empty_drawings: tuple[str, ...]
    odd: tuple[str, ...]  # words that no reader should see
    overlaps: tuple[str, ...]  # texts of a drawing over each other, or outside of it
    wide: tuple[str, ...]  # drawings of which a part is scrolled out of sight
    requests: tuple[str, ...]


def look(pages: Mapping[str, str], scheme: str, out: Path) -> tuple[tuple[Seen, ...], str]:
    """Each page at each width in a frame of its own, and what the console said.

    Args:
        pages: Name to HTML text.
        scheme: Of ``SCHEMES``.
        out: Folder for the file that holds them all.
    """
    frames = "".join(
        f'<iframe data-page="{name}" data-width="{width}" srcdoc="{escape(text)}" '
        f'style="width: {pixels}px; height: 800px; border: 0; display: block"></iframe>'
        for name, text in pages.items()
        for width, pixels in WIDTHS.items()
    )
    harness = out / f"all-{scheme}.html"
    script = (Path(__file__).parent / "measure.js").read_text("utf-8")
    harness.write_text(
        '<!doctype html><meta charset="utf-8"><style>:root { color-scheme: light dark }</style>'
        f'<body>{frames}<pre id="found"></pre><script>{script}</script>',
        "utf-8",
    )
    done = _open(harness, scheme, ["--dump-dom", "--virtual-time-budget=20000"])
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    rows: list[dict[str, Any]] = json.loads(unescape(found[1]))
    seen = tuple(
        Seen(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows
    )
    return seen, console(done)


def picture(path: Path, text: str, scheme: str, width: str) -> None:
    """Write a picture of a page, for people to look at.

    In a frame, too: Chromium's own windows are no narrower than 500 pixels.
    """
    page, width_px = path.with_suffix(".html"), WIDTHS[width]
    page.write_text(
        '<!doctype html><meta charset="utf-8"><style>:root { color-scheme: light dark } '
        f'body {{ margin: 0 }}</style><iframe srcdoc="{escape(text)}" '
        f'style="width: {width_px}px; height: 3200px; border: 0"></iframe>',
        "utf-8",
    )
    size = f"--window-size={max(500, width_px)},3200"
    _open(page, scheme, [size, "--hide-scrollbars", f"--screenshot={path.with_suffix('.png')}"])


def _open(page: Path, scheme: str, options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    scheme_option = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    return opened(page.as_uri(), scheme_option, *options)
