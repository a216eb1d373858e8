"""Small tasks that the exactness tests train, each with traits that could go wrong."""

import math
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.core.training import Blocks, Task

IGNORED = -100


def _dtype(double: bool) -> torch.dtype:
    return torch.float64 if double else torch.float32


class Rows:
    """Random inputs and targets; sample i is a function of i alone.

    ``poisoned`` is infinite, and the target of ``loud`` so large that fp16 overflows at first.
    """

    def __init__(
        self,
        num_samples: int,
        width: int,
        *,
        dtype: torch.dtype = torch.float32,
        poisoned: int | None = None,
        loud: int | None = None,
    ) -> None:
        self._num_samples, self._width, self._dtype = num_samples, width, dtype
        self._poisoned, self._loud = poisoned, loud

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x, y = torch.randn(2, self._width, generator=generator, dtype=torch.float64)
        if index == self._poisoned:
            x[0] = torch.inf
        if index == self._loud:
            y[0] = 500.0
        return x.to(self._dtype), y.to(self._dtype)


def squares(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Sum over samples of the mean squared error."""
    return ((output - batch[1]) ** 2).mean(1).sum(), len(batch[1])


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(functional.gelu(self.up(self.norm(x)))))


def mlp(
    num_layers: int = 6,
    width: int = 8,
    num_samples: int = 64,
    double: bool = False,
    poisoned: int | None = None,
    loud: int | None = None,
) -> Task:
    """Residual layers; plain."""
    dtype = _dtype(double)
    layers = [Block(width).to(dtype) for _ in range(num_layers)]
    data = Rows(num_samples, width, dtype=dtype, poisoned=poisoned, loud=loud)
    return Task(layers=layers, loss=squares, dataset=data)


def scheduled(kind: str) -> Task:
    """Residual layers with a learning rate of the user's own, good or bad."""
    factors: dict[str, Any] = {
        "waves": lambda step, num_steps: 1.0 + math.sin(step) * step / num_steps,
        "raises": lambda step, num_steps: step / 0,
        "nan": lambda step, num_steps: math.nan,
        "text": lambda step, num_steps: "fast",
        "late": lambda step, num_steps: -1.0 if step == 3 else 1.0,
    }
    return replace(mlp(double=True), lr_factor=factors[kind])


# A language model: tied embedding, attention, ragged lengths, dropout ----------------------


class Embed(nn.Module):
    def __init__(self, vocabulary: int, width: int, *, sparse: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, sparse=sparse)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)


class Attention(nn.Module):
    """Causal attention with a residual: what comes after a sample's end does not reach it."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        # No bias: the keys' would have a gradient of exactly zero, whose rounding noise Adam
        # turns into steps of its own, in one process as well (1e-11 after 20 steps in fp64).
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).chunk(3, dim=-1)
        attended = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout, is_causal=True
        )
        return x + self.out(attended)


class Head(nn.Module):
    def __init__(self, embed: Embed | None, vocabulary: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary, bias=False)
        if embed is not None:
            self.out.weight = embed.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Sentences:
    def __init__(self, num_samples: int, vocabulary: int, length: int, *, ragged: bool) -> None:
        self._num_samples, self._vocabulary = num_samples, vocabulary
        self._length, self._ragged = length, ragged

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = self._length
        if self._ragged:
            length = int(torch.randint(2, self._length + 1, (), generator=generator))
        tokens = torch.randint(self._vocabulary, (length + 1,), generator=generator)
        targets = tokens[1:].clone()
        if self._ragged and index % 5 == 0:
            targets[:] = IGNORED  # a sample without any weight
        return tokens[:-1], targets


def pad(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pad to the longest sample of the microbatch: shapes differ from microbatch to microbatch."""
    tokens, targets = zip(*samples, strict=True)
    return (
        nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORED),
    )


def cross_entropy(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum over valid tokens, and their number."""
    loss = functional.cross_entropy(
        output.flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, (batch[1] != IGNORED).sum()


def language(
    tied: bool = True,
    ragged: bool = False,
    dropout: float = 0.0,
    double: bool = True,
    sparse: bool = False,
) -> Task:
    """Seven layers: embedding, attention and blocks, head."""
    vocabulary, width = 13, 8
    embed = Embed(vocabulary, width, sparse=sparse)
    layers = [
        embed,
        Attention(width, dropout),
        Block(width, dropout),
        Attention(width, dropout),
        Block(width, dropout),
        nn.Dropout(dropout),
        Head(embed if tied else None, vocabulary, width),
    ]
    data = Sentences(48, vocabulary, 6, ragged=ragged)
    layers = [layer.to(_dtype(double)) for layer in layers]
    if tied:  # ``to`` keeps the Parameter, so the tie holds
        assert layers[-1].out.weight is embed.tokens.weight
    return Task(layers=layers, loss=cross_entropy, dataset=data, collate=pad if ragged else None)


# What crosses a border, and parameters that learn nothing -----------------------------------


class Widen(nn.Module):
    """Makes the state a tuple: activations, a mask of integers, nothing."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        return x, (x[:, :1] > 0).long(), None


class Masked(nn.Module):
    """Passes a tuple on. ``rare`` is used by some samples only, ``unused`` by none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width)
        self.rare = nn.Parameter(torch.full((width,), 0.1))
        self.unused = nn.Parameter(torch.ones(width))

    def forward(self, state: tuple[Tensor, Tensor, None]) -> tuple[Tensor, Tensor, None]:
        x, mask, nothing = state
        x = self.block(x) * (1 + 0.1 * mask)
        chosen = x[:, 0] > 0.8
        if chosen.any():
            x = torch.where(chosen[:, None], x + self.rare, x)
        return x, mask, nothing


class Narrow(nn.Module):
    def forward(self, state: tuple[Tensor, Tensor, None]) -> Tensor:
        return state[0]


def odd(double: bool = True, frozen: int = 2, width: int = 6) -> Task:
    """Nine layers: frozen ones in front, tuples with a mask and None, layers that work in place."""
    layers: list[nn.Module] = [
        Block(width),
        Block(width),
        Widen(),
        Masked(width),
        Masked(width),
        Narrow(),
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
        nn.Linear(width, width),
    ]
    layers = [layer.to(_dtype(double)) for layer in layers]
    for layer in layers[:frozen]:
        layer.requires_grad_(requires_grad=False)
    layers[6].bias.requires_grad_(requires_grad=False)
    return Task(layers=layers, loss=squares, dataset=Rows(40, width, dtype=_dtype(double)))


class Opened(nn.Module):
    """Makes the state a dict: activations, what a later layer takes as it is now, a number."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x, "skip": x * 0.5, "kept": [x[:, 0] > 0, (None, "as it was")], "step": 0}


class Counted(nn.Module):
    """Works on one entry in place and counts; its dict has another order than the one it got."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        x = torch.where(state["kept"][0][:, None], self.block(state["x"]), state["x"])
        return {"step": state["step"] + 1, **state, "x": x} | {"step": state["step"] + 1}


class Closed(nn.Module):
    """The long way round: what the first layers made is added at the end."""

    def forward(self, state: dict[str, Any]) -> Tensor:
        assert state["kept"][1] == (None, "as it was")
        return state["x"] * state["step"] + state["skip"]


def nested(double: bool = True, width: int = 6) -> Task:
    """Seven layers with dicts, lists, text and numbers between them, and a skip over all."""
    layers = [
        Block(width),
        Opened(),
        *(Counted(width) for _ in range(3)),
        Closed(),
        nn.Linear(width, width),
    ]
    layers = [layer.to(_dtype(double)) for layer in layers]
    return Task(layers=layers, loss=squares, dataset=Rows(40, width, dtype=_dtype(double)))


# A model with blocks, as people write them ----------------------------------------------------


class Layer(nn.Module):
    """Attention over what the mask leaves, with positions that turn queries and keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor, turns: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = (query * turns) @ (key * turns).transpose(1, 2) / x.shape[-1] ** 0.5
        scores = scores.masked_fill(~mask[:, None, :], -1e9)
        return x + self.out(scores.softmax(-1) @ value)


class Body(nn.Module):
    """What a larger model would hold its layers in."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.words = nn.Embedding(11, width, padding_idx=0)
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("turns", torch.linspace(0.5, 1.5, 9)[:, None], persistent=False)


class Speaker(nn.Module):
    """A language model whose head shares the words' vectors; a start vector of its own."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.full((width,), 0.1))
        self.body = Body(width, count)
        self.score = nn.Linear(width, 11, bias=False)
        self.score.weight = self.body.words.weight
        self.idle = nn.Parameter(torch.ones(3))

    def embed(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.body.words(tokens) + self.start
        return {"x": x, "mask": tokens != 0, "turns": self.body.turns[: tokens.shape[1]]}

    def block(self, i: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.body.layers[i](state["x"], state["mask"], state["turns"])
        return {**state, "x": x}

    def head(self, state: dict[str, Tensor]) -> Tensor:
        return self.score(self.body.norm(state["x"]))

    def forward(self, tokens: Tensor) -> Tensor:
        state = self.embed(tokens)
        for i in range(len(self.body.layers)):
            state = self.block(i, state)
        return self.head(state)


def speaker(double: bool = True, width: int = 6, count: int = 4) -> Task:
    """Six layers: what embeds, four blocks, a head tied to what embeds."""
    model = Speaker(width, count).to(_dtype(double))
    return Task(
        layers=model,
        blocks=Blocks(embed=model.embed, block=model.block, head=model.head),
        loss=cross_entropy,
        dataset=Sentences(40, 11, 8, ragged=True),
        collate=pad,
    )


# User code that fails ------------------------------------------------------------------------


class Faulty(nn.Module):
    def __init__(self, width: int, calls: int, fail: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.calls_left, self._fail = calls, fail

    def forward(self, x: Tensor) -> Tensor:
        self.calls_left -= 1
        if self.calls_left < 0:
            if self._fail is not None:
                self._fail()
            raise KeyError("no such thing")
        return self.inner(x)


def failing(place: str, calls: int = 6) -> Task:
    """Four layers; ``place`` raises after some calls: layer, shape, loss, data, output, memory."""
    width = 4
    layers: list[nn.Module] = [nn.Linear(width, width) for _ in range(4)]
    data = Rows(32, width)
    counts = {"loss": calls, "data": 4 * calls}

    def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        counts["loss"] -= 1
        if place == "loss" and counts["loss"] < 0:
            raise ZeroDivisionError("a loss of mine")
        return squares(output, batch)

    class Data(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            counts["data"] -= 1
            if place == "data" and counts["data"] < 0:
                raise OSError("a file of mine")
            return super().__getitem__(index)

    if place == "layer":
        layers[2] = Faulty(width, calls)
    if place == "memory":
        layers[2] = Faulty(width, calls, lambda: torch.empty(1 << 50))
    if place == "shape":
        layers[2] = nn.Linear(width + 1, width)
    if place == "output":
        layers[2] = Widen()
        layers[3] = nn.Flatten(0)
    data = Data(32, width)
    return Task(layers=layers, loss=loss, dataset=data)


class _SlowBackward(torch.autograd.Function):
    """Nothing forward; backward takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delay_s: float) -> Tensor:
        ctx.delay_s = delay_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.delay_s)
        return gradient, None


class Sleepy(Block):
    """A residual layer that takes its time in one phase, in one process, once a file is there."""

    def __init__(self, width: int, phase: str, pid: int, delay_s: float, since: str) -> None:
        super().__init__(width)
        self._phase, self._pid, self._delay_s, self._since = phase, pid, delay_s, Path(since)

    def forward(self, x: Tensor) -> Tensor:
        is_slow = os.getpid() == self._pid and self._since.exists()
        if is_slow and self._phase == "forward":
            time.sleep(self._delay_s)
        output = super().forward(x)
        if is_slow and self._phase == "backward":
            output = _SlowBackward.apply(output, self._delay_s)
        return output


class SleepyRows(Rows):
    """Rows that one process is slow to load."""

    def __init__(self, width: int, pid: int, delay_s: float) -> None:
        super().__init__(64, width)
        self._pid, self._delay_s = pid, delay_s

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if os.getpid() == self._pid:
            time.sleep(self._delay_s)
        return super().__getitem__(index)


def sleepy(phase: str, pid: int, delay_s: float, since: str = "/") -> Task:
    """Three layers; the process ``pid`` takes ``delay_s`` longer a layer, or a sample it loads.

    The layers do once there is a file ``since``.
    """
    layers = [Sleepy(8, phase, pid, delay_s, since) for _ in range(3)]
    data = SleepyRows(8, pid if phase == "loader" else 0, delay_s)
    return Task(layers=layers, loss=squares, dataset=data)


# A model that is judged, too, and notices whether it trains ---------------------------------


class Moody(nn.Module):
    """Another function in training than in evaluation, beside its dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width, dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * (0.9 if self.training else 1.0)


class Jittery(Rows):
    """Draws from every global generator, as careless datasets do."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        torch.rand(3)
        np.random.rand()  # noqa: NPY002 - that is what it does
        random.random()
        return super().__getitem__(index)


class Shaken(Rows):
    """What a sample is hangs on every global generator."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        noise = random.random() + np.random.rand()  # noqa: NPY002 - that is what it does
        return x + 0.1 * noise + 0.1 * torch.rand(x.shape, dtype=x.dtype), y


class Whole(nn.Module):
    """As one module: an embedding, blocks and a head, with dropout of every kind between them."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width, dropout=0.3) for _ in range(num_layers - 2)])
        self.last = nn.Linear(width, width)
        self.alpha = nn.AlphaDropout(0.2)

    def embed(self, x: Tensor) -> Tensor:
        # Of the whole model's mode, and in place.
        return functional.dropout(self.first(x), 0.2, self.training, True)

    def head(self, x: Tensor) -> Tensor:
        q = x.view(-1, 1, 2, x.shape[1] // 2)
        rate = 0.2 if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, q, q, dropout_p=rate)
        return self.alpha(self.last(x + mixed.reshape(x.shape)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Deadly(Shaken):
    """One sample of it ends, or holds up, every process that asks for it."""

    def __init__(self, length: int, width: int, at: int, hangs: bool) -> None:
        super().__init__(length, width)
        self.at, self.hangs = at, hangs

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.at and self.hangs:
            threading.Event().wait()
        if index == self.at:
            os._exit(3)
        return super().__getitem__(index)


def deadly(at: int = 33, hangs: bool = False) -> Task:
    """``judged`` with a dataset that no process survives."""
    return replace(judged(num_layers=6), dataset=Deadly(64, 8, at, hangs), eval_dataset=None)


def judged(
    num_layers: int = 4,
    width: int = 8,
    num_eval: int = 21,
    raises: bool = False,
    form: str = "",
    blank: bool = False,
) -> Task:
    """Residual layers with dropout, an evaluation dataset of its own, and a metric.

    ``form``: ``blocks`` or ``whole`` for a model as one module. ``blank``: it has no weight.
    """

    def metrics(output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
        if raises:
            raise ZeroDivisionError("a metric of mine")
        torch.rand(3)
        np.random.rand()  # noqa: NPY002 - careless, as ``Jittery``
        random.random()
        near = ((output - batch[1]).abs().mean(1) < 1.5).sum()
        return {"near": (near, 0 if blank else len(batch[1]))}

    model = Whole(num_layers, width)
    blocks = Blocks(embed=model.embed, block=lambda i, x: model.blocks[i](x), head=model.head)
    return Task(
        layers=model if form else [Moody(width) for _ in range(num_layers)],
        blocks=blocks if form == "blocks" else None,
        loss=squares,
        dataset=Shaken(64, width),
        eval_dataset=Jittery(num_eval, width),
        metrics=metrics,
    )
