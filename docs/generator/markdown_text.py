"""Pieces of Markdown, and the units that names tell."""

import inspect
from collections.abc import Iterable, Sequence

UNITS = {
    "_gbytes_per_s": "GB/s", "_samples_per_s": "samples/s", "_samples_per_usd": "samples/$",
    "_bytes_per_s": "bytes/s", "_usd_per_gb": "$/GB", "_per_hour_usd": "$/h", "_per_hour": "$/h",
    "_usd_per_hour": "$/h", "_per_second": "1/s", "_hours": "h", "_usd": "$", "_usd_total": "$",
    "_gib": "GiB", "_bytes": "bytes", "_bytes_total": "bytes", "_ratio": "ratio",
    "_share": "0 to 1",
    "_seconds": "s", "_seconds_total": "s", "_steps": "steps", "_slots": "slots",
    "_samples": "samples", "_s": "s",
}  # fmt: skip
"""Ends of names, the longer first where one is part of another, to units."""


def unit_of(name: str) -> str:
    """The unit that a name ends with, empty where it has none."""
    found = [end for end in UNITS if name.endswith(end)]
    return UNITS[max(found, key=len)] if found else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table without its empty columns; a bar in a cell does not end it."""
    rows = list(rows)
    shown = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[line[i] for i in shown] for line in (head, ["---"] * len(head), *rows)]
    cells = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def code(text: object) -> str:
    """Text as code, whatever is in it."""
    shown = str(text)
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`" if shown else ""


def first_line(text: str | None) -> str:
    """The first paragraph of a docstring, as one line."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def sentence(text: str) -> str:
    """The text, with a full stop."""
    return text if not text or text.endswith(".") else f"{text}."
