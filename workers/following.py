"""Graphs that run wherever their data lies: torch.export writes down the device it ran on."""

from collections.abc import Collection
from typing import Any

import torch
from torch import fx


def follow(graph: fx.Graph, anchor: fx.Node, constants: Collection[fx.Node]) -> None:
    """Make what a graph creates, or holds for itself, lie where one of its tensors does.

    Args:
        graph: Changed in place.
        anchor: The tensor that shows the device, an input or a parameter.
        constants: Tensors that the graph holds and no module does: nobody else moves them.
    """
    bound = [node for node in graph.nodes if node.op == "call_function" and _devices_of(node)]
    if not bound and not constants:
        return
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        shows = anchor if anchor.op == "placeholder" else graph.get_attr(str(anchor.target))
        device = graph.call_function(getattr, (shows, "device"))
    for constant in constants:
        users = list(constant.users)
        with graph.inserting_after(constant):
            there = graph.call_method("to", (constant, device))
        for user in users:
            user.replace_input_with(constant, there)

    def placed(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    for node in bound:
        node.args = fx.node.map_aggregate(node.args, placed)
        node.kwargs = fx.node.map_aggregate(node.kwargs, placed)


def _devices_of(node: fx.Node) -> list[torch.device]:
    found: list[torch.device] = []

    def look(argument: Any) -> Any:
        if isinstance(argument, torch.device):
            found.append(argument)
        return argument

    fx.node.map_aggregate((node.args, node.kwargs), look)
    return found
