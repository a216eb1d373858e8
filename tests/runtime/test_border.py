"""What layers may hand on, and that another process rebuilds it."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.border import checked, describe, mapped, rebuild, tensors

Pair = namedtuple("Pair", "left right")


def test_a_nest_is_rebuilt_around_its_tensors() -> None:
    plain, wanting = torch.arange(3), torch.ones(2, requires_grad=True)
    value = {"x": wanting, "more": [plain, (None, 1, 2.5, True, "text", {})], "empty": ()}
    arrived = iter([t.detach() for t in tensors(value)])
    wants: list[bool] = []

    def place(wants_gradient: bool) -> Tensor:
        wants.append(wants_gradient)
        return next(arrived)

    made = rebuild(describe(value), place)
    assert wants == [True, False]
    assert torch.equal(made["x"], wanting)
    assert torch.equal(made["more"][0], plain)
    assert made["more"][1] == (None, 1, 2.5, True, "text", {})
    assert made["empty"] == ()
    assert list(made) == ["x", "more", "empty"]


def test_a_named_tuple_is_a_tuple_for_the_next_layer_wherever_that_is() -> None:
    assert type(checked(Pair(torch.ones(1), None))) is tuple
    assert type(mapped(Pair(torch.ones(1), None), lambda t: t)) is Pair  # a batch stays what it is


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "it returned None; a layer returns a tensor"),
        (3, "it returned a int; a layer returns a tensor"),
        ({"x": torch.ones(1), "cache": object()}, r"a object at \['cache'\]"),
        ((torch.ones(1), [{"a": {1, 2}}]), r"a set at \[1\]\[0\]\['a'\]"),
        ({1: torch.ones(1)}, "a dict with the key 1; name what a layer returns by text"),
        ({"x": None}, "a dict without a tensor in it"),
        ((), "a tuple without a tensor in it"),
    ],
)
def test_what_another_stage_could_not_rebuild_is_refused(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        checked(value)
