"""Nodes are asked for their GPUs once, and never for long."""

from typing import Any

import pytest

from orchestrator.runtime import products as module
from orchestrator.runtime.inventory import Product
from orchestrator.runtime.products import Products

T4 = Product("Tesla T4", 15 << 30)
NODE = {"NodeID": "ab" * 28, "Alive": True, "Resources": {"GPU": 2.0}}


class Ray:
    """As much of Ray as asking needs; an answer is there once ``answer`` is set."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: object = None

    def remote(self, **options: Any) -> Any:
        self.asked.append(options)
        return lambda function: type("Task", (), {"remote": staticmethod(lambda: "answer")})

    def wait(self, answers: list[str], **options: Any) -> tuple[list[str], list[str]]:
        return (answers, []) if self.answer is not None else ([], answers)

    def get(self, answer: str) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_node_is_asked_once_with_all_its_gpus() -> None:
    ray = Ray()
    products = Products(ray)
    assert products.ask([NODE]) == {NODE["NodeID"]: None}
    ray.answer = (T4, T4)
    assert [products.ask([NODE]) for _ in range(2)] == [{NODE["NodeID"]: (T4, T4)}] * 2
    assert [options["num_gpus"] for options in ray.asked] == [2]


@pytest.mark.parametrize("silent", [False, True])
def test_of_a_node_that_fails_or_is_silent_nothing_is_told(
    silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = Ray()
    products = Products(ray)
    if silent:
        monkeypatch.setattr(module, "ANSWER_S", -1.0)
    else:
        ray.answer = ImportError("no torch here")
    assert products.ask([NODE]) == {NODE["NodeID"]: ()}
