"""Every error message of the source, found without running it, with ``…`` for values.

A small reader of syntax trees: it follows f-strings, both sides of conditions, local names, lists
that are filled, and functions of ours that make texts, so far as they stand in the source.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product
from pathlib import Path

VALUE = "…"
"""Stands for what only a run can tell."""

PACKAGES = ("orchestrator", "workers")

_MOST_DEEP = 9  # calls of functions that make a text
_MOST_FORMS = 400  # of one text
_FEW = 4  # forms of a part, beside others that have many
_SENTENCE = 12  # characters from which a part of a text is shown in its forms
_PATH = re.compile(r"[a-z_]+(\.[a-z_]+(\[…\])?)+")  # of a key
_NUMBERS = ("len", "sum", "max", "min", "round")
_SAME_TEXTS = ("list", "tuple", "sorted", "iter", "next", "str", "filter", "chain", "reversed")
_OF_SAME_TEXTS = ("values", "rstrip", "lstrip", "strip", "format", "items", "from_iterable")


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """A text that may be raised, where that is, and as what."""

    module: str  # dotted
    text: str
    error: str
    exit_code: int | None  # of the command that ends with it; None: told on inside another one


@dataclass(frozen=True, slots=True)
class Site:
    """A place where an error is made, and the forms of its text; of another library's: none."""

    module: str
    line: int
    error: str
    texts: tuple[str, ...]


@dataclass
class _Module:
    name: str
    tree: ast.Module

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """Functions and methods by their bare names."""
        return {n.name: n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)}

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {n.name: n for n in self.tree.body if isinstance(n, ast.ClassDef)}

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        return {
            alias.asname or alias.name: (node.module, alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }

    @cached_property
    def constants(self) -> dict[str, list[ast.expr]]:
        return _filled(self.tree.body)


@dataclass(frozen=True)
class _Scope:
    """Where an expression stands: its module, its function, and the texts of its arguments."""

    module: _Module
    filled: Mapping[str, list[ast.expr]] = field(default_factory=dict)
    bound: Mapping[str, list[str]] = field(default_factory=dict)
    stack: tuple[ast.AST, ...] = ()  # functions and names that are being followed


class Source:
    """The packages of a tree, read once."""

    def __init__(self, root: Path) -> None:
        """Read every module below ``root``."""
        paths = sorted(path for name in PACKAGES for path in (root / name).rglob("*.py"))
        names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in paths}
        self.modules = {
            name: _Module(name, ast.parse(path.read_text("utf-8"))) for path, name in names.items()
        }
        self._filled: dict[ast.FunctionDef, dict[str, list[ast.expr]]] = {}

    @cached_property
    def exit_codes(self) -> Mapping[str, int]:
        """Our own types of errors to the exit code of the command that ends with one."""
        codes: dict[str, int] = {"OrchestratorError": 1}
        classes = {name: cls for m in self.modules.values() for name, cls in m.classes.items()}
        for _ in classes:  # bases may come later
            for name, cls in classes.items():
                bases = [ast.unparse(base) for base in cls.bases if ast.unparse(base) in codes]
                if bases and name not in codes:
                    codes[name] = next(_exit_code_in(cls), codes[bases[0]])
        return codes

    @cached_property
    def option_modules(self) -> frozenset[str]:
        """Modules of options: what they refuse is told of the file, with the key's path."""
        return frozenset(
            name
            for name, module in self.modules.items()
            if any(cls.endswith("Options") for cls in module.classes)
        )

    @cached_property
    def _homes(self) -> Mapping[str, list[_Module]]:
        """Functions and methods to the modules that define one of that name."""
        found: dict[str, list[_Module]] = {}
        for module in self.modules.values():
            for name in module.functions:
                found.setdefault(name, []).append(module)
        return found

    def sites(self) -> Iterator[Site]:
        """Every place that makes an error with a text, in the order of the source."""
        for module in self.modules.values():
            for function, call in _errors_made(module.tree, self.exit_codes):
                scope = _Scope(module, self._filled_in(function) if function else {})
                texts = map(_tidy, self._texts(call.args[0], scope) if call.args else [])
                ours = _callee(call) in self.exit_codes
                forms = list(dict.fromkeys(texts))
                told = [text for text in forms if _says(text)] or (forms if ours else [])
                alone = f": {VALUE}"  # of a pair of a file and a text, taken the wrong way round
                told = [t for t in told if not t.endswith(alone) or t[: -len(alone)] not in told]
                yield Site(module.name, call.lineno, _callee(call), tuple(told))

    def messages(self) -> list[Message]:
        """Every message, once for each place and type, sorted."""
        found = set()
        for site in self.sites():
            code = self.exit_codes.get(site.error)
            if site.error == "ValueError" and site.module in self.option_modules:
                code = self.exit_codes["ConfigError"]
            found |= {Message(site.module, text, site.error, code) for text in site.texts}
        return sorted(found, key=lambda m: (m.exit_code or 99, m.module, m.text, m.error))

    def _texts(self, node: ast.expr, scope: _Scope) -> list[str]:  # noqa: C901, PLR0911 - by kind
        """The forms that the text of an expression may take; of a list, those of its items."""
        match node:
            case ast.Constant():
                return [str(node.value)]
            case ast.JoinedStr():
                parts = [self._part(part, scope) for part in node.values]
                largest = max(parts, key=len, default=[])
                few = [p if p is largest or len(p) <= _FEW else [VALUE] for p in parts]
                return self._joined(few)  # of two lists of problems one is enough
            case ast.BinOp(op=ast.Add()):
                sides = [self._texts(side, scope) for side in (node.left, node.right)]
                return sides[0] + sides[1] if _is_list(node) else self._joined(sides)
            case ast.IfExp():
                return self._all([node.body, node.orelse], scope)
            case ast.BoolOp():
                return self._all(node.values, scope)
            case ast.List() | ast.Tuple():
                return self._all(node.elts, scope)
            case ast.Dict():
                return self._all(node.values, scope)
            case ast.ListComp() | ast.GeneratorExp():
                return self._texts(node.elt, _inside(node, scope))
            case ast.Starred() | ast.Subscript() | ast.NamedExpr():
                return self._texts(node.value, scope)
            case ast.YieldFrom() | ast.Yield() if node.value:
                return self._texts(node.value, scope)
            case ast.Name():
                return self._name(node, scope)
            case ast.Call():
                return self._call(node, scope)
        return [VALUE]

    def _all(self, nodes: list[ast.expr], scope: _Scope) -> list[str]:
        return list(chain.from_iterable(self._texts(node, scope) for node in nodes))

    def _part(self, node: ast.expr, scope: _Scope) -> list[str]:
        """Of an f-string: a value is followed where it is a sentence, such as what to do."""
        if not isinstance(node, ast.FormattedValue):
            return self._texts(node, scope)
        texts = self._texts(node.value, scope)
        told = [text for text in texts if _PATH.fullmatch(text) or _is_sentence(text)]
        return [*told, *([VALUE] if len(told) < len(texts) and "" not in texts else []),
                *([""] if told and "" in texts else [])] or [VALUE]  # fmt: skip

    def _joined(self, parts: list[list[str]]) -> list[str]:
        forms = [
            "".join(form) for form, _ in zip(product(*parts), range(_MOST_FORMS), strict=False)
        ]
        return list(dict.fromkeys(forms))

    def _name(self, node: ast.Name, scope: _Scope) -> list[str]:
        if node.id in scope.bound:
            return scope.bound[node.id]
        for known in (scope.filled, scope.module.constants):
            if node.id in known:
                values = [value for value in known[node.id] if value not in scope.stack]
                inner = _Scope(scope.module, scope.filled, scope.bound, (*scope.stack, *values))
                return self._all(values, inner) or [VALUE]
        home, name = scope.module.imports.get(node.id, ("", ""))
        if home in self.modules and name in self.modules[home].constants:
            return self._all(self.modules[home].constants[name], _Scope(self.modules[home]))
        return [VALUE]

    def _call(self, node: ast.Call, scope: _Scope) -> list[str]:
        """What our function returns; else what it was told, which it may tell on."""
        name = _callee(node)
        if name in _SAME_TEXTS:
            return self._all(node.args, scope) or [VALUE]
        if name in _OF_SAME_TEXTS and isinstance(node.func, ast.Attribute):
            return self._texts(node.func.value, scope)
        texts = self._returned(node, scope)
        if not any(map(_says, texts)) and name not in _NUMBERS:
            texts = [text for text in self._all(node.args, scope) if _is_sentence(text)]
        return texts or [VALUE]

    def _returned(self, node: ast.Call, scope: _Scope) -> list[str]:
        module = self._home_of(node, scope.module)
        called = module.functions[_name_at_home(_callee(node), scope.module)] if module else None
        if module is None or called is None or called in scope.stack:
            return []
        if len(scope.stack) > _MOST_DEEP:
            return []
        filled, bound = self._filled_in(called), self._bound(node, called, scope)
        inner = _Scope(module, filled, bound, (*scope.stack, called))
        values = [
            n.value
            for n in _own(called.body)
            if isinstance(n, ast.Return | ast.Yield | ast.YieldFrom) and n.value
        ]
        ours = self.exit_codes  # an error that is returned has been found where it is made
        texts = [v for v in values if not (isinstance(v, ast.Call) and _callee(v) in ours)]
        return self._all(texts, inner)

    def _home_of(self, node: ast.Call, module: _Module) -> _Module | None:
        """The module of a function that is called by name, or of the only method of its name."""
        name = _callee(node)
        on_self = (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in ("self", "cls")
        )
        if isinstance(node.func, ast.Name) or on_self:
            home = self.modules.get(module.imports.get(name, (module.name, ""))[0])
            return home if home and _name_at_home(name, module) in home.functions else None
        homes = self._homes.get(name, [])
        return homes[0] if len(homes) == 1 else None

    def _filled_in(self, function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
        if function not in self._filled:
            self._filled[function] = _filled(function.body)
        return self._filled[function]

    def _bound(
        self, node: ast.Call, called: ast.FunctionDef, scope: _Scope
    ) -> dict[str, list[str]]:
        names = [a.arg for a in called.args.args if a.arg not in ("self", "cls")]
        bound = {name: [VALUE] for name in (*names, *(a.arg for a in called.args.kwonlyargs))}
        given = [*zip(names, node.args, strict=False), *((k.arg, k.value) for k in node.keywords)]
        return bound | {name: self._texts(value, scope) for name, value in given if name}


def _exit_code_in(cls: ast.ClassDef) -> Iterator[int]:
    for node in cls.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id="exit_code")], value=ast.Constant(value=int(code)))
                | ast.AnnAssign(
                    target=ast.Name(id="exit_code"), value=ast.Constant(value=int(code))
                )
            ):
                yield code


def _errors_made(
    tree: ast.Module, ours: Mapping[str, int]
) -> Iterator[tuple[ast.FunctionDef | None, ast.Call]]:
    """Calls that make what is raised, or one of our errors, with the function around them."""

    def below(
        node: ast.AST, function: ast.FunctionDef | None
    ) -> Iterator[tuple[ast.FunctionDef | None, ast.Call]]:
        if isinstance(node, ast.FunctionDef):
            function = node
        if isinstance(node, ast.Call) and _callee(node) in ours:
            yield function, node
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = _callee(node.exc)
            if name.endswith("Error") and name not in ours:
                yield function, node.exc
        for child in ast.iter_child_nodes(node):
            yield from below(child, function)

    return below(tree, None)


def _inside(node: ast.ListComp | ast.GeneratorExp, scope: _Scope) -> _Scope:
    """The scope of what a comprehension makes: its names stand for what they run over."""
    filled = dict(scope.filled)
    for part in node.generators:
        for name in (n.id for n in ast.walk(part.target) if isinstance(n, ast.Name)):
            filled[name] = [part.iter]
    return _Scope(scope.module, filled, scope.bound, scope.stack)


def _filled(body: list[ast.stmt]) -> dict[str, list[ast.expr]]:
    """Names to all that is assigned to them, or put into them."""
    found: dict[str, list[ast.expr]] = {}
    for node in _own(body):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    _fill(found, target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                _fill(found, target, value)
            case (
                ast.AugAssign(target=target, value=value)
                | ast.NamedExpr(target=target, value=value)
            ):
                _fill(found, target, value)
            case ast.Call(
                func=ast.Attribute(attr="append" | "extend" | "add", value=target), args=[value]
            ):
                _fill(found, target, value)
            case ast.For(target=target, iter=value):
                _fill(found, target, value)
    return found


def _fill(found: dict[str, list[ast.expr]], target: ast.expr, value: ast.expr) -> None:
    match target, value:
        case ast.Name(), _:
            found.setdefault(target.id, []).append(value)
        case ast.Subscript(value=ast.Name(id=name)), _:
            found.setdefault(name, []).append(value)
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            for one, its in zip(targets, values, strict=True):
                _fill(found, one, its)
        case ast.Tuple(elts=[ast.Subscript() as first, *_]), _:
            _fill(found, first, value)


def _own(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes of a function, but those of functions in it."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from _own(list(ast.iter_child_nodes(node)))  # type: ignore[arg-type]


def _callee(node: ast.Call) -> str:
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _name_at_home(name: str, module: _Module) -> str:
    return module.imports.get(name, ("", name))[1]


def _is_list(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.List | ast.Tuple) for side in (node.left, node.right))


def _tidy(text: str) -> str:
    lines = " ".join(text.split()).removeprefix("- ")  # of a list
    while VALUE + VALUE in lines:
        lines = lines.replace(VALUE + VALUE, VALUE)
    return lines


def _is_sentence(text: str) -> bool:
    return len(text) >= _SENTENCE and " " in text


def _says(text: str) -> bool:
    """Whether something stands there beside values."""
    return sum(letter.isalpha() for letter in text) >= 4
