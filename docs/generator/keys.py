"""The page of every key of the config file, from the schema of the options."""

from typing import Any

from docs.generator.markdown_text import code, sentence, table, unit_of
from orchestrator.config import config_schema

_HEAD = ("key", "type", "default", "unit", "meaning")


def config_page() -> str:
    """Every key of the file: type, default, unit and meaning."""
    schema: Any = config_schema()
    parts = [
        "# Keys of the config file",
        "Generated from the options of the code. How they work together is on the page "
        "[Config file](../config.md). `lyray schema` prints the same as a JSON Schema for editors.",
    ]
    sections = {n: node for n, node in schema["properties"].items() if _objects(schema, node)[0]}
    beside = {n: node for n, node in schema["properties"].items() if n not in sections}
    parts.append(table(_HEAD, [_row(schema, name, node) for name, node in beside.items()]))
    for name, node in sections.items():
        parts += _section(schema, name, node, needed=name in schema["required"])
    return "\n\n".join(parts) + "\n"


def _section(schema: Any, path: str, node: Any, *, needed: bool) -> list[str]:
    """A heading and a table of an object, then those of the objects in it."""
    cls, item = _objects(schema, node)
    definition = schema["$defs"][cls]
    text = definition.get("description", "").replace("YAML section ", "Section ")
    note = "" if needed else " May be left out."
    rows, inner = [], []
    for name, child in definition["properties"].items():
        below = f"{path}{item}.{name}"
        required = name in definition.get("required", ())
        cls_below, item_below = _objects(schema, child)
        text_below = child.get("description", "")
        if cls_below:
            inner += _section(schema, below, child, needed=required)
            text_below += f" Keys: [{below}{item_below}](#{_anchor(below + item_below)})."
        shown = {**child, "description": text_below.strip()}
        rows.append(_row(schema, name, shown, needed=required))
    level = "#" * (2 + (path.count(".") > 0))
    title = f"{level} {path}{item} {{ #{_anchor(path + item)} }}"
    return [title, f"{sentence(text)}{note}", table(_HEAD, rows), *inner]


def _row(schema: Any, name: str, node: Any, *, needed: bool = False) -> list[str]:
    default = _default(node, needed=needed)
    return [code(name), _type(schema, node), default, unit_of(name), node.get("description", "")]


def _anchor(path: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in path).strip("-")


def _objects(schema: Any, node: Any) -> tuple[str, str]:
    """The class of options that a node holds, and ``[]`` where it is a list of them."""
    for part in (node, *node.get("anyOf", ()), *node.get("allOf", ())):
        if "$ref" in part:
            name = part["$ref"].rpartition("/")[2]
            return (name, "") if "properties" in schema["$defs"][name] else ("", "")
        if part.get("type") == "array" and "$ref" in part.get("items", {}):
            return part["items"]["$ref"].rpartition("/")[2], "[]"
    return "", ""


_TYPES = {"string": "text", "number": "number", "integer": "whole number", "boolean": "true, false",
          "null": "null", "object": "keys with values"}  # fmt: skip


def _type(schema: Any, node: Any) -> str:  # noqa: PLR0911 - one form each
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_type(schema, part) for part in node["anyOf"]))
    if "enum" in node:
        return ", ".join(code(value) for value in node["enum"])
    if "const" in node:
        return code(node["const"])
    if "$ref" in node:
        return _type(schema, schema["$defs"][node["$ref"].rpartition("/")[2]])
    if node.get("type") == "array":
        if "prefixItems" in node:
            return f"list of {len(node['prefixItems'])}"
        return f"list of {_type(schema, node['items'])}" if node.get("items") else "list"
    return _TYPES.get(node.get("type", ""), "any")


def _default(node: Any, *, needed: bool) -> str:
    if needed or "default" not in node:
        return "**required**" if needed else ""
    value = node["default"]
    if isinstance(value, dict):
        return "its own"
    if isinstance(value, bool) or value is None:
        return code({True: "true", False: "false", None: "null"}[value])
    return code(f"{value:g}" if isinstance(value, float) else "[]" if value == [] else value)
