"""What the source says of the fields of a dataclass: type, and the comment or docstring."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Field:
    """One field as it stands in the source."""

    name: str
    type: str
    text: str


def fields_of(cls: type) -> dict[str, Field]:
    """The fields of a dataclass, those of its bases first; no text where nothing is said."""
    found: dict[str, Field] = {}
    for base in filter(dataclasses.is_dataclass, cls.__bases__):
        found |= fields_of(base)
    source = textwrap.dedent(inspect.getsource(cls))
    lines, body = source.splitlines(), ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = lines[node.end_lineno - 1].partition("  # ")[2] if node.end_lineno else ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = " ".join(str(after.value.value).split())
            found[node.target.id] = Field(node.target.id, ast.unparse(node.annotation), text)
    return found


def written_keys(function: Callable[..., object]) -> list[str]:
    """Keys of the largest dict that a function writes out, in order."""
    return keys_in(ast.parse(textwrap.dedent(inspect.getsource(function))))


def keys_in(tree: ast.AST) -> list[str]:
    """Keys of the largest dict below, those among them that are there only sometimes."""
    dicts = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    largest = max(dicts, key=lambda node: len(node.keys))
    keys = []
    for key, value in zip(largest.keys, largest.values, strict=True):
        if isinstance(key, ast.Constant):
            keys.append(str(key.value))
        elif key is None:  # **({"loss_scale": ...} if ... else {})
            keys += keys_in(value)
    return keys
