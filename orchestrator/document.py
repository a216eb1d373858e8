"""The text of a run file to plain data: YAML 1.2's scalars, each key once, and ``--set``."""

import re
from collections.abc import Callable, Hashable

import yaml

from orchestrator.errors import ConfigError

MAX_VALUES = 100_000
"""Values a file may come to once its aliases are written out."""

MAX_DEPTH = 50
"""How deep lists and mappings may stand in each other."""

_SHOWN = 100  # letters of what was typed, and more digits than any index has
_KNOWN_TAGS = ("str", "null", "seq", "map")


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars: 3e-4 is a number, off and yes are text; a key may stand once."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:  # before merging: a key of its own may override a merged one
            if not isinstance(key_node, yaml.ScalarNode):
                raise _problem("a key is a list or a mapping; write a name", key_node)
            if key_node.tag == _MERGE_TAG:
                continue
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise _problem(f"key {key!r} stands twice; keep one", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_unknown(self, node: yaml.Node) -> object:
        tag = node.tag.replace(_PREFIX, "!!")
        raise _problem(f"the tag {tag} is not known here; write the value alone", node)


_PREFIX = "tag:yaml.org,2002:"
_MERGE_TAG = f"{_PREFIX}merge"
_NUMBER_STARTS = list("-+.0123456789")
_PLAIN_SCALARS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*", _NUMBER_STARTS),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", _NUMBER_STARTS),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", _NUMBER_STARTS),
    ("merge", r"<<", ["<"]),
)
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _starts in _PLAIN_SCALARS:
    _Loader.add_implicit_resolver(f"{_PREFIX}{_tag}", re.compile(f"^(?:{_pattern})$"), _starts)
_FORMS: dict[str, Callable[[str], object]] = {
    "int": int,
    "float": lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
    "bool": lambda text: {"true": True, "false": False}[text],
}


def _construct_scalar(loader: _Loader, node: yaml.ScalarNode) -> object:
    form = node.tag.removeprefix(_PREFIX)
    try:
        return _FORMS[form](node.value.lower())
    except (ValueError, KeyError):  # an explicit tag, or more digits than Python reads
        raise _problem(f"{node.value[:40]!r} is no {form}; mend it", node) from None


_Loader.yaml_constructors = {
    f"{_PREFIX}{_tag}": yaml.SafeLoader.yaml_constructors[f"{_PREFIX}{_tag}"]
    for _tag in _KNOWN_TAGS
}
for _tag in _FORMS:
    _Loader.add_constructor(f"{_PREFIX}{_tag}", _construct_scalar)
_Loader.add_constructor(None, _Loader.construct_unknown)


def read_document(text: str, source: str) -> object:
    """Return the data of a YAML text: scalars, lists and mappings.

    Args:
        text: Of a file, or of one value.
        source: Names it in messages.

    Raises:
        ConfigError: If it is no YAML, or holds what no run file means: a key twice, tags, a
            value inside itself, aliases that grow without bound.
    """
    try:
        data = yaml.load(text, _Loader)  # built on SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}{place}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{source} {_TOO_DEEP}") from None
    _check_shape(data, source)
    return data


def apply_override(data: dict[str, object], override: str) -> str:
    """Write ``a.b[0].c=value`` into the data and return its path; absent sections appear.

    Raises:
        ConfigError: If it names no place of the data, or the value is no YAML.
    """
    dotted, equals, text = override.partition("=")
    names = [name for name in re.split(r"[.\[\]]+", dotted.strip("] ")) if name]
    if not equals or not names or len(names) > MAX_DEPTH:
        raise ConfigError(f"--set {override[:_SHOWN]!r}: write --set section.key=value")
    keys = [int(k) if k.isdecimal() and len(k) < _SHOWN else k for k in names]
    place: object = data
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(place, list) and isinstance(key, int) and key < len(place):
            if last:
                place[key] = read_document(text, f"--set {dotted}")
            place = place[key]
        elif isinstance(place, dict) and isinstance(key, str):
            if last:
                place[key] = read_document(text, f"--set {dotted}")
            elif place.get(key) is None:
                place[key] = {}
            place = place[key]
        else:
            raise ConfigError(f"--set {override!r}: there is no {key!r} in the file")
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return path.removeprefix(".")


_TOO_DEEP = f"holds values more than {MAX_DEPTH} levels deep; write them flat"


def _problem(text: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _check_shape(data: object, source: str) -> None:
    """Walk the data as written out: an alias counts each time, and may stand inside itself."""
    left: list[tuple[object, int]] = [(data, 0)]
    count = 0
    while left:
        value, depth = left.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{source} {_TOO_DEEP}")
        if count > MAX_VALUES:
            raise ConfigError(f"{source} holds more than {MAX_VALUES:,} values; a run needs fewer")
        if isinstance(value, str) and not value.isascii():
            _check_text(value, source)
        elif isinstance(value, dict):
            left += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list):
            left += [(part, depth + 1) for part in value]


def _check_text(value: str, source: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{source}: {value!r} holds half a character; write the character itself"
        ) from None
