"""Code blocks of Markdown pages."""

import re

_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[str, str]]:
    """Kind (empty where none is said) and content of each, in order."""
    return _BLOCK.findall(text)


def blocks_of(kinds: set[str], text: str) -> list[str]:
    """The contents of blocks of some kinds."""
    return [content for kind, content in blocks(text) if kind in kinds]
