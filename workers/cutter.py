"""A model cut between its operations, as torch.export tells them, where least has to cross."""

import io
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from orchestrator.errors import ConfigError
from workers import border
from workers.failures import user_code, user_frames
from workers.following import follow
from workers.registered import check_registered
from workers.units import Belongings, Unit, Uses

WINDOW = 12
"""Operations before and behind a cut, none of which has less to cross."""

MAX_UNITS = 128

MOST_TERMS = 64
"""Of a length, as a formula of those of the input. Usual models have a dozen; of windows that are
laid over pictures torch would think for hours."""

MEND = "pass a layer list, or say in Task.blocks how the model runs in parts"

_RANDOM_IN_TRAINING = {  # operation: which argument says so, and what it is in evaluation
    **{
        f"aten.{kind}dropout{in_place}.default": (2, False)
        for kind in ("", "feature_", "alpha_", "feature_alpha_")
        for in_place in ("", "_")
    },
    "aten.rrelu.default": (3, False),
    "aten.rrelu_.default": (3, False),
    "aten.scaled_dot_product_attention.default": (4, 0.0),
}

_CHECKS = "aten._assert_"
"""What the export assumed: types differ under autocast."""


logger = logging.getLogger(__name__)


def call_model(model: Callable[..., Any], value: Any) -> Any:
    """What the model makes of its input: a dict are keywords, a tuple or list arguments."""
    args, kwargs = _arguments(value)
    return model(*args, **kwargs)


def _arguments(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(value, dict):
        return (), value
    return (tuple(value) if isinstance(value, tuple | list) else (value,)), {}


def cut_graph(model: nn.Module, value: Any) -> dict[str, Unit]:
    """Units by name, in the order in which they run.

    Args:
        model: Any module; ``call_model`` says how it is called.
        value: Its input, of some samples whose number is no other length in it.

    Raises:
        ConfigError: If torch cannot tell what the model does.
        UserCodeError: If the model raises.
    """
    place = f"training.task: {type(model).__name__}, on some samples (any number must do),"
    with user_code(place), torch.random.fork_rng():
        outputs = list(border.tensors(call_model(model, value)))
    check_registered(outputs, {"": model}, value)
    del outputs  # and all that backward would need
    exported, shapes = _exported(model, value)
    story = _Story(
        exported.module(),
        _Call(tuple(value) if isinstance(value, dict) else None, shapes),
        frozenset(exported.graph_signature.inputs_to_lifted_tensor_constants.values()),
    )
    bounds = [0, *_cuts(story), len(story.nodes)]
    belongings, units = Belongings(model), dict[str, Unit]()
    for first, end in itertools.pairwise(bounds):
        part = story.nodes[first:end]
        ran = story.part(first, end, exported.call_spec.out_spec)
        unit = Unit(ran, _looks(part), ran.at_rest)
        belongings.hand(unit, Uses(tensors={id(story.attribute(n)) for n in attributes_of(part)}))
        units[_name(part, units)] = unit
    belongings.hand_rest(unit)
    return units


_Shapes = tuple[tuple[int, ...], ...]


def _exported(model: nn.Module, value: Any) -> tuple[torch.export.ExportedProgram, _Shapes | None]:
    """What torch tells of the model; and, if it is for them alone, the shapes of its samples."""
    try:
        with _Formulas():
            return _export(model, value, of_any_shape=True), None
    except _InvolvedError:
        shapes = tuple(tuple(tensor.shape[1:]) for tensor in border.tensors(_arguments(value)))
        logger.info("%s is cut for samples of shapes %s", type(model).__name__, shapes)
    return _export(model, value, of_any_shape=False), shapes


class _InvolvedError(Exception):
    """A length has become too long a formula."""


class _Formulas(TorchFunctionMode):
    """Raises an _InvolvedError before torch is lost in formulas."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for size in made.shape if isinstance(made, Tensor) else ():
            if isinstance(size, torch.SymInt) and size.node.expr.count_ops() > MOST_TERMS:
                raise _InvolvedError
        return made


def _export(model: nn.Module, value: Any, *, of_any_shape: bool) -> torch.export.ExportedProgram:
    args, kwargs = _arguments(value)
    place = f"training.task: Task.layers, a {type(model).__name__}, cannot be cut automatically"
    hook = model.register_forward_hook(lambda _model, _args, output: _told(output))
    lengths = _lengths(kwargs or args, of_any_shape=of_any_shape)
    try:
        # torch prints all operations that it could tell, and warns of lengths that it fixes.
        with redirect_stderr(io.StringIO()), _quiet(logging.getLogger("torch._export")):
            return torch.export.export(model, args, kwargs, dynamic_shapes=lengths, strict=False)
    except _InvolvedError:
        raise
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        shown = user_frames(error)
        here = f". It was here:\n{shown}" if shown else ""
        raise ConfigError(f"{place}: {line}; {MEND}{here}") from error
    finally:
        hook.remove()


@contextmanager
def _quiet(log: logging.Logger) -> Iterator[None]:
    """Lets only errors through."""
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _told(output: Any) -> Any:
    """The output without what torch cannot tell of, for instance caches: no loss takes those."""
    if isinstance(output, dict):
        for key, item in output.items():
            output[key] = _told(item)
        return output
    if type(output) in (tuple, list):
        return type(output)(map(_told, output))
    return output if isinstance(output, (Tensor, *border.PLAIN_TYPES)) else None


def _lengths(value: Any, *, of_any_shape: bool) -> Any:
    """Which lengths of every tensor may be others in the next batch: all, or the first alone."""
    if isinstance(value, dict):
        return {key: _lengths(item, of_any_shape=of_any_shape) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_lengths(item, of_any_shape=of_any_shape) for item in value)
    every = range(value.dim()) if isinstance(value, Tensor) else ()
    return dict.fromkeys(every if of_any_shape else every[:1], torch.export.Dim.AUTO) or None


@dataclass(frozen=True, slots=True)
class _Call:
    """How the model is called."""

    keys: tuple[str, ...] | None  # of a dict
    shapes: _Shapes | None  # of the samples in each tensor, if it takes no others

    def leaves(self, value: Any) -> Iterator[Any]:
        """What the first operations take.

        Raises:
            ValueError: If samples have another shape than it takes.
        """
        value = {key: value[key] for key in self.keys} if self.keys else value
        given = _arguments(value)
        if self.shapes is not None:
            found = tuple(tuple(tensor.shape[1:]) for tensor in border.tensors(given))
            if found != self.shapes:
                raise ValueError(
                    f"it was cut for samples of shapes {self.shapes}, not {found}; bring all to "
                    f"one shape in Task.collate, or {MEND}"
                )
        return border.leaves(given)


@dataclass(frozen=True, slots=True)
class _Part:
    """Runs some operations on the values that they take, by name."""

    graph: fx.GraphModule
    taken: tuple[str, ...]
    call: _Call | None  # of the first part
    out_spec: Any  # of the last part

    def __call__(self, value: Any) -> Any:
        if self.call is None:
            made = self.graph(*[value[name] for name in self.taken])
        else:
            made = self.graph(*self.call.leaves(value))
        return made if self.out_spec is None else self.out_spec.unflatten(made)

    def at_rest(self) -> "_Part":
        """The same in evaluation: what the export saw was training."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph.graph, {}))
        for node in graph.nodes:
            index, value = _RANDOM_IN_TRAINING.get(str(node.target), (len(node.args), None))
            if index < len(node.args):
                node.update_arg(index, value)
        return replace(self, graph=fx.GraphModule(self.graph, graph))


class _Story:
    """What a model does, operation by operation."""

    def __init__(self, graph: fx.GraphModule, call: _Call, constants: frozenset[str]) -> None:
        self.graph, self._call, self._constants = graph, call, constants
        every = list(graph.graph.nodes)
        self.inputs = [node for node in every if node.op == "placeholder"]
        self.output = next(node for node in every if node.op == "output")
        self.nodes = [
            node
            for node in every
            if node.op == "call_function" and not str(node.target).startswith(_CHECKS)
        ]
        place = {node: i for i, node in enumerate(self.nodes)}
        place[self.output] = len(self.nodes)
        self.born = dict.fromkeys(self.inputs, -1) | {n: place[n] for n in self.nodes}
        self.last_use = {
            node: max((place[user] for user in node.users if user in place), default=-1)
            for node in self.born
        }

    def crossing(self, at: int) -> list[fx.Node]:
        """Values that exist before operation ``at``, and are needed by it or later."""
        return [n for n, born in self.born.items() if born < at <= self.last_use[n]]

    def attribute(self, node: fx.Node) -> Any:
        """The parameter, buffer or constant that a node gets."""
        owner, _, name = str(node.target).rpartition(".")
        return getattr(self.graph.get_submodule(owner), name)

    def part(self, first: int, end: int, out_spec: Any) -> _Part:
        """Operations ``first`` to ``end`` by themselves."""
        is_last = end == len(self.nodes)
        taken = self.crossing(first) if first else self.inputs
        graph = fx.Graph()
        copies = {node: graph.placeholder(node.name) for node in taken}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies and node.op == "get_attr":
                copies[node] = graph.get_attr(str(node.target))
            return copies[node]

        for node in self.nodes[first:end]:
            copies[node] = graph.node_copy(node, copied)
        if is_last:
            graph.output(fx.map_arg(self.output.args[0], copied))
        else:
            graph.output({node.name: copied(node) for node in self.crossing(end)})
        self._let_follow(graph, copies)
        return _Part(
            fx.GraphModule(self.graph, graph),
            tuple(node.name for node in taken),
            None if first else self._call,
            out_spec if is_last else None,
        )

    def _let_follow(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
        """Have a part run on any device; ``copies``: its nodes by those of the whole."""
        held = {copy: str(n.target) for n, copy in copies.items() if n.op == "get_attr"}
        constants = [copy for copy, name in held.items() if name in self._constants]
        shown = [
            copy
            for node, copy in copies.items()
            if copy.op == "placeholder" and isinstance(node.meta.get("val"), Tensor)
        ]
        shown += [copy for copy, name in held.items() if name not in self._constants]
        if shown:
            follow(graph, shown[0], constants)


def _bytes(node: fx.Node) -> int:
    """Of what an operation makes of the samples that the model was looked at with."""
    return sum(
        _number(tensor.numel()) * tensor.element_size()
        for tensor in border.tensors(node.meta.get("val"))
    )


def _number(size: Any) -> int:
    """A length that another batch may have otherwise; 0 where only values tell it."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 0
    return int(size)


def _cuts(story: _Story) -> list[int]:
    """Between which operations least crosses, as far as one sees; each part has parameters."""
    bytes_of = {node: _bytes(node) for node in story.born}
    crossing = [sum(bytes_of[n] for n in story.crossing(at)) for at in range(len(story.nodes))]
    found: list[int] = []
    for at in range(1, len(crossing)):
        around = crossing[max(1, at - WINDOW) : at + WINDOW + 1]
        is_new = not found or at - found[-1] > 1 or crossing[at] != crossing[found[-1]]
        if crossing[at] == min(around) and is_new:
            found.append(at)
    holds = [any(_is_parameter(story, n) for n in attributes_of([node])) for node in story.nodes]
    kept: list[int] = []
    for at in found:  # what has no parameters goes with the part behind it
        if any(holds[kept[-1] if kept else 0 : at]):
            kept.append(at)
    while kept and not any(holds[kept[-1] :]):
        kept.pop()
    while len(kept) >= MAX_UNITS:
        kept.remove(max(kept, key=lambda at: crossing[at]))
    return kept


def _is_parameter(story: _Story, node: fx.Node) -> bool:
    return isinstance(story.attribute(node), nn.Parameter)


def attributes_of(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Parameters, buffers and constants that operations take."""
    for node in nodes:
        yield from (n for n in node.all_input_nodes if n.op == "get_attr")


def _looks(nodes: Sequence[fx.Node]) -> str:
    """Operations and shapes, without names: parts that do the same look the same."""
    return "\n".join(
        f"{node.target} {[getattr(n.meta.get('val'), 'shape', None) for n in node.all_input_nodes]}"
        for node in nodes
    )


def _name(nodes: Sequence[fx.Node], taken: dict[str, Unit]) -> str:
    """After the module of its first parameter."""
    first = next((str(n.target) for n in attributes_of(nodes)), "operations.")
    name = first.rpartition(".")[0] or first
    same = sum(other == name or other.startswith(f"{name}#") for other in taken)
    return f"{name}#{same + 1}" if same else name
