"""Whole models in parts: what belongs to which, what keeps its name, and what is refused."""

import logging
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.core.training import Blocks, Task
from orchestrator.errors import ConfigError, UserCodeError
from tests.runtime.models import Rows, Speaker, speaker, squares
from workers import border
from workers.cutter import cut_graph
from workers.splitting import SplitModel, split

WIDTH = 6


def of_model(model: nn.Module, **options: Any) -> Task:
    return Task(layers=model, loss=squares, dataset=Rows(40, WIDTH, dtype=torch.float32), **options)


def run(model: SplitModel, value: Any) -> Any:
    for layer in model.layers:
        value = layer(value)
    return value


def test_blocks_hold_what_they_use_under_the_names_of_the_model() -> None:
    task = speaker(double=False)
    model = split(task)
    assert model.names == ("embed", *(f"body.layers.{i}" for i in range(4)), "head")
    held = [set(model.state_keys(i)) for i in range(6)]
    assert held[0] == {"start", "body.words.weight"}
    assert held[2] == {
        f"body.layers.1.{part}.{kind}" for part in ("qkv", "out") for kind in ("weight", "bias")
    }
    assert held[5] == {"body.norm.weight", "body.norm.bias", "score.weight", "idle"}
    assert set().union(*held) == set(task.layers.state_dict())
    (tie,) = model.ties
    assert [layer for layer, _ in tie.keys] == [0, 5]


def test_blocks_that_do_something_else_than_the_model_are_refused() -> None:
    class Wrong(Speaker):
        def head(self, state: dict[str, Tensor]) -> Tensor:
            return self.score(self.body.norm(state["x"]))

        def forward(self, tokens: Tensor) -> Tensor:
            return 2 * super().forward(tokens)

    model, good = Wrong(WIDTH, 3), speaker(double=False)
    blocks = Blocks(embed=model.embed, block=model.block, head=model.head)
    task = Task(layers=model, blocks=blocks, loss=good.loss, dataset=good.dataset)
    with pytest.raises(ConfigError, match=r"in parts, the model returns something else: .*0\.5"):
        split(task)


def test_a_block_that_raises_is_named_with_the_users_frames() -> None:
    model = Speaker(WIDTH, 3)

    def block(i: int, state: Any) -> Any:
        return {}[i] if i == 2 else model.block(i, state)

    good = speaker(double=False)
    blocks = Blocks(embed=model.embed, block=block, head=model.head)
    with pytest.raises(UserCodeError, match=r"body\.layers\.2 raised KeyError") as told:
        split(Task(layers=model, blocks=blocks, loss=good.loss, dataset=good.dataset))
    assert "in block" in told.value.user_traceback


class Residual(nn.Module):
    """A skip over several layers, and a function instead of a module in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(torch.nn.functional.gelu(self.first(x)))
        return self.third(x + y * self.scale) + self.shift


def test_a_module_nobody_cut_is_cut_where_least_crosses() -> None:
    whole = Residual()
    model = split(of_model(whole))
    assert set().union(*(model.state_keys(i) for i in range(len(model.layers)))) == set(
        whole.state_dict()
    )
    assert len(model.layers) > 1
    for count in (1, 2, 7):
        x = torch.randn(count, WIDTH)
        assert torch.equal(run(model, x), whole(x))
    value = torch.randn(2, WIDTH)
    for layer in model.layers[:-1]:  # never the wide one in the middle
        value = layer(value)
        assert sum(t.shape[-1] for t in value.values()) <= 2 * WIDTH


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.line(x) / self.count


class FixedBatch(nn.Module):
    """The number of samples stands in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x.view(4, WIDTH))


class Overwritten(nn.Module):
    """Backward lacks what was worked on in place, whether it is cut or not."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x).relu().mul_(2)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (
            Overwritten(),
            UserCodeError,
            "whole model, on some samples and back, raised RuntimeError",
        ),
        (Counting(), ConfigError, "a Counting changes its buffer 'count' while it runs"),
        (FixedBatch(), UserCodeError, r"any number must do\), raised .*'\[4, 6\]'"),
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), ConfigError, "its statistics would"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_cut_is_refused_with_the_users_line(
    model: nn.Module, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        split(of_model(model))


def test_a_refusal_shows_the_users_lines_and_nothing_of_torch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Undecided(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(ConfigError) as refused:
        split(of_model(Undecided()))
    frames = re.findall(r'File "(.*)", line \d+, in (\w+)', str(refused.value))
    assert frames == [(__file__, "forward")]
    assert "def forward" not in capsys.readouterr().err  # the graph, as torch prints it


def test_a_model_may_ask_for_gradients_of_what_it_is_given() -> None:
    class Heard(nn.Module):  # as those of the wav2vec2 kind do
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None]
            x.requires_grad = True
            return self.line(x)[:, 0]

    assert len(split(of_model(Heard())).layers) == 1


def test_a_model_whose_lengths_are_long_formulas_is_cut_for_samples_of_one_shape() -> None:
    class Windows(nn.Module):  # laid over each other, as in a Swin: torch would think for hours
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(5, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(9):
                x = torch.cat([x[:, ::2], x[:, ::3]], 1)
            return self.line(x)

    model, x = Windows(), torch.randn(4, WIDTH)
    cut = split(of_model(model))
    assert torch.equal(run(cut, x), model(x))
    with pytest.raises(
        ValueError, match=r"cut for samples of shapes \(\(6,\),\), not \(\(7,\),\); "
    ):
        run(cut, torch.randn(4, WIDTH + 1))


def test_what_torch_thinks_of_a_length_of_one_is_not_shown_to_the_user() -> None:
    told: list[logging.LogRecord] = []
    handler, log = logging.Handler(), logging.getLogger("torch._export.non_strict_utils")
    handler.emit = told.append  # type: ignore[method-assign]  # a handler that keeps them
    log.addHandler(handler)
    try:
        model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        assert cut_graph(model, torch.zeros(2, 1, 6))
    finally:
        log.removeHandler(handler)
    assert not told


def test_a_dict_of_inputs_are_keywords_and_an_unknown_one_is_told() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
            return {"y": self.line(x if mask is None else x * mask)}

    def inputs(batch: tuple[Tensor, Tensor]) -> Mapping[str, Tensor]:
        return {"x": batch[0], "mask": (batch[0] > 0).float()}

    model = split(of_model(Named(), inputs=inputs))
    assert run(model, {"x": torch.ones(2, WIDTH), "mask": torch.ones(2, WIDTH)})["y"].shape == (
        2,
        WIDTH,
    )
    with pytest.raises(UserCodeError, match="unexpected keyword argument 'z'"):
        split(of_model(Named(), inputs=lambda batch: {"z": batch[0]}))


class Placed(nn.Module):
    """Makes positions, a mask and a constant of its own, on the device that it is traced on."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.words(tokens) + torch.arange(length, device=tokens.device)[None, :, None]
        mask = torch.full((length, length), 0.5).tril()
        for layer in self.layers:
            x = x + (mask @ layer(x)) * torch.tensor([0.5, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
        return self.head(x.to(torch.device("cpu")))


def test_the_parts_of_a_model_run_wherever_their_data_lies() -> None:
    """Traced on a processor, run on a GPU: here on the meta device, which is neither."""
    model, tokens = Placed(), torch.randint(0, 11, (5, 6))
    units = cut_graph(model, (tokens,))
    assert len(units) > 1
    value: Any = (tokens,)
    for unit in units.values():
        value = unit(value)
    assert torch.equal(value, model(tokens))
    value = (tokens.to("meta"),)
    for unit in units.values():
        part = unit._run
        state = {k: p.to("meta") for k, p in part.graph.named_parameters(remove_duplicate=False)}
        taken = (value[0],) if part.call else tuple(value[name] for name in part.taken)
        value = torch.func.functional_call(part.graph, state, taken)
        assert {t.device.type for t in border.tensors(value)} == {"meta"}


@pytest.mark.parametrize("seed", range(3))
def test_a_tied_model_of_two_bytes_a_parameter_is_compared_as_roughly_as_it_computes(
    seed: int,
) -> None:
    torch.manual_seed(seed)
    task = speaker(double=False)
    task.layers.to(torch.bfloat16)
    assert len(split(task).layers) == 6
