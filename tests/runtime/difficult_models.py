"""Models that are hard on whoever splits them: each trains right, or is refused with a reason.

``TRAINS`` and ``REFUSED`` are by name; ``difficult(name)`` is the task. Layers are ``WIDTH`` wide.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from orchestrator.core.training import Task
from tests.runtime.models import Rows, squares

WIDTH = 6


class Noisy(Rows):
    """Draws with a generator of its own, which nobody seeds by the index."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.generator = getattr(self, "generator", torch.Generator())
        x, y = super().__getitem__(index)
        return x + torch.randn(x.shape, generator=self.generator), y


def of(layers: Any, loss: Any = squares, **options: Any) -> Task:
    modules = nn.ModuleList(layers) if isinstance(layers, list) else layers
    modules.to(torch.float64)
    data = options.pop("dataset", None) or Rows(40, WIDTH, dtype=torch.float64)
    return Task(layers=layers, loss=loss, dataset=data, **options)


class Says(nn.Module):
    """A layer that is a function of itself, an inner Linear and the input."""

    def __init__(self, function: Callable[["Says", Any], Any]) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def between(*layers: nn.Module, **options: Any) -> Task:
    """Layers between two plain ones."""
    return of([nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, WIDTH)], **options)


def says(function: Callable[[Says, Any], Any], **options: Any) -> Task:
    return between(Says(function), **options)


# These train ---------------------------------------------------------------------------------


def a_block_used_twice() -> Task:
    block = Says(lambda own, x: x + own.line(x).tanh())
    return of([block, nn.Linear(WIDTH, WIDTH), block])


def a_block_used_twice_inside() -> Task:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.block(self.block(x).tanh()).tanh())

    return of(Twice())


def control_flow_by_sample() -> Task:
    def rows(own: Says, x: Tensor) -> Tensor:
        return torch.stack([own.line(row) if row.sum() > 0 else -row for row in x])

    return says(rows)


def views_in_place() -> Task:
    def first_column(own: Says, x: Tensor) -> Tensor:
        x = own.line(x)
        x[:, 0] = 0.5
        x[:, 1:3].mul_(2.0)
        return x

    return between(nn.ReLU(inplace=True), Says(first_column), nn.Dropout(0.3, inplace=True))


def nothing_between() -> Task:
    opened = Says(lambda own, x: {"x": own.line(x), "mask": None, "rest": [None, 3]})
    return between(opened, Says(lambda own, state: own.line(state["x"])))


def integers_between() -> Task:
    opened = Says(lambda own, x: (x, x.argmax(1)))
    return between(opened, Says(lambda own, state: own.line(state[0]) * (1 + state[1][:, None])))


def only_integers_between() -> Task:
    """What comes before them cannot learn."""
    tokens = Says(lambda own, x: (x > 0).sum(1))
    return between(tokens, nn.Embedding(WIDTH + 1, WIDTH, padding_idx=0))


def no_parameters() -> Task:
    return between(nn.Identity(), nn.ReLU(), nn.Unflatten(1, (2, 3)), nn.Flatten())


class Turn(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.rand(WIDTH, dtype=dtype))

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        return self  # to float64 it would lose its imaginary part

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x) * self.turn


def complex_numbers() -> Task:
    return of([nn.Linear(WIDTH, WIDTH), Turn(), Says(lambda own, x: own.line(x.real + x.imag))])


def mixed_widths() -> Task:
    task = between(Says(lambda own, x: own.line(x.float()).double()))
    task.layers[1].to(torch.float32)
    return task


def keywords() -> Task:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, *, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
            x = self.first(x).tanh() * scale
            return self.second(x if mask is None else x * mask)

    return of(Named(), inputs=lambda batch: {"x": batch[0], "mask": (batch[0] > 0).double()})


def prints() -> Task:
    def told(own: Says, x: Tensor) -> Tensor:
        print("shape", x.shape, end="")  # noqa: T201 - what it is about
        return own.line(x)

    return says(told)


def forward_hooks() -> Task:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda _module, _args, output: 2 * output)
    layer.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
    return between(layer)


def weight_norm() -> Task:
    return between(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


def orthogonal() -> Task:
    return between(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH), use_trivialization=False))


def attention_modules() -> Task:
    attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.line = attention, nn.Linear(1, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.line(x[:, :, None])
            return self.attention(x, x, x, need_weights=False)[0].mean(2)

    return between(Attends())


def recurrent_state() -> Task:
    class Reads(nn.Module):
        def __init__(self, kind: type[nn.Module]) -> None:
            super().__init__()
            self.cell = kind(1, 3, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.cell(x[:, :, None])

    class Last(nn.Module):
        def forward(self, value: tuple[Tensor, tuple[Tensor, Tensor]]) -> Tensor:
            _, (hidden, cell) = value
            return torch.cat([hidden[-1], cell[-1]], 1)

    return between(Reads(nn.LSTM), Last())


def sparse_embedding() -> Task:
    words = nn.Embedding(WIDTH + 1, WIDTH, padding_idx=0, sparse=True)
    return between(Says(lambda own, x: (x > 0).sum(1)), words)


def checkpointed() -> Task:
    return says(lambda own, x: checkpoint(own.line, x, use_reentrant=False))


def functional_dropout() -> Task:
    return says(lambda own, x: functional.dropout(own.line(x), 0.4, training=True))


def noise() -> Task:
    return says(lambda own, x: own.line(x) + torch.rand_like(x) * torch.randn(len(x), 1))


def noise_in_the_inputs_and_the_loss() -> Task:
    def noisy(x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return squares(noisy(output), batch)

    return between(loss=loss, inputs=lambda batch: noisy(batch[0]))


def without_gradient_inside() -> Task:
    def target(own: Says, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = own.line(x).norm(dim=1, keepdim=True)
        return own.line(x) / (1 + scale)

    return says(target)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * ctx.saved_tensors[0] * grad


def own_backward() -> Task:
    return says(lambda own, x: _Doubled.apply(own.line(x)))


def keeps_its_activation() -> Task:
    def kept(own: Says, x: Tensor) -> Tensor:
        own.last = own.line(x)
        return own.last

    return says(kept)


def a_lambda_that_cannot_be_pickled() -> Task:
    return between(Says(lambda own, x: own.line(x)), loss=lambda o, b: (squares(o, b)[0], len(o)))


def not_a_number_at_step_3() -> Task:
    """Nobody updates then."""
    return between(dataset=Rows(40, WIDTH, dtype=torch.float64, poisoned=29))


def tied_over_three_layers() -> Task:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    layers[2].weight = layers[3].weight = layers[0].weight
    return of(layers)


def frozen_statistics() -> Task:
    norm = nn.BatchNorm1d(WIDTH)
    nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return between(norm.eval())


def frozen_in_the_middle() -> Task:
    return between(Says(lambda own, x: own.line(x)).requires_grad_(requires_grad=False))


def a_number_beside_the_state() -> Task:
    """No dimension of it is the samples'."""
    opened = Says(lambda own, x: (own.line(x), torch.tensor(2.0, dtype=x.dtype)))
    return between(opened, Says(lambda own, state: own.line(state[0]) * state[1]))


def weighted_samples() -> Task:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        weight = (batch[1][:, 0] > 0).double()
        return (((output - batch[1]) ** 2).mean(1) * weight).sum(), weight.sum()

    return between(loss=loss)


def gradients_of_its_input() -> Task:
    def line(own: Says, x: Tensor) -> Tensor:
        x = x[:, None].requires_grad_()
        energy = own.line(x).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force.squeeze(1)

    return of([Says(line), nn.Linear(WIDTH, WIDTH)])


class Table(nn.Module):
    """Sines of positions, kept in an attribute for the longest input so far, as many do.

    ``by_length``: each entry is a function of that length, too.
    """

    def __init__(self, by_length: bool = False) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH, bias=False)
        self.table, self.by_length = torch.zeros(0, dtype=torch.float64), by_length

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(1.0, x.shape[1] + 1, dtype=torch.float64).sin()
            if self.by_length:
                self.table /= x.shape[1]
        return self.line(x) * self.table[: x.shape[1], None]


class Ragged(Rows):
    """The first samples are of unlike lengths, the longer ones first."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, _ = super().__getitem__(index)
        return x.repeat(5 - index % 4, 1), x


def padded_with_zeros(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    inputs = nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
    return inputs, torch.stack([y for _, y in items])


def of_unlike_lengths(by_length: bool) -> Task:
    """Padding is zero and stays zero, so that it takes no part in the sum."""

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return squares(output.sum(1), batch)

    data = Ragged(40, WIDTH, dtype=torch.float64)
    layers = [Table(by_length), Table(by_length)]
    return of(layers, loss, dataset=data, collate=padded_with_zeros)


def a_table_that_grows() -> Task:
    return of_unlike_lengths(by_length=False)


def a_penalty_beside(penalty: Callable[[Tensor], Tensor]) -> Task:
    """As routers of experts have it: a number beside the output, which the loss takes little of."""

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        loss_sum, weight = squares(output[0], batch)
        return loss_sum + 1e-6 * output[1], weight

    first = Says(lambda own, x: (own.line(x), penalty(own.line(x))))
    return of([first, Says(lambda own, state: (own.line(state[0]), state[1]))], loss)


def a_penalty_by_sample() -> Task:
    return a_penalty_beside(lambda h: (h**2).sum())


TRAINS = (
    a_block_used_twice, a_block_used_twice_inside, control_flow_by_sample, views_in_place,
    nothing_between, integers_between, only_integers_between, no_parameters, complex_numbers,
    mixed_widths, keywords, prints, forward_hooks, weight_norm, orthogonal, attention_modules,
    recurrent_state, sparse_embedding, checkpointed, functional_dropout, noise,
    noise_in_the_inputs_and_the_loss,
    without_gradient_inside, own_backward, keeps_its_activation, a_lambda_that_cannot_be_pickled,
    not_a_number_at_step_3, tied_over_three_layers, frozen_statistics, frozen_in_the_middle,
    a_number_beside_the_state, weighted_samples, gradients_of_its_input, a_table_that_grows,
    a_penalty_by_sample,
)  # fmt: skip


# These are refused ----------------------------------------------------------------------------


def a_little_penalty_in_fp32() -> Task:
    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        loss_sum, weight = squares(output.float(), batch)
        return loss_sum + 2e-3 * output.float().mean(0).norm(), weight

    return between(loss=loss)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.one(x)
        return self.other(x)


@dataclass
class Own:
    x: Tensor


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x / self.count


class Codebook(nn.Module):
    """As moving averages are written, behind the back of autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class OutsideModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.inner = nn.Linear(WIDTH, WIDTH), Outside()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.line(x))


class PlainList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = layer(x)
        return x


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def through_the_back_door() -> Task:
    """A skip that no border knows of."""
    kept: dict[str, Tensor] = {}

    def away(own: Says, x: Tensor) -> Tensor:
        kept["x"] = x
        return own.line(x)

    return between(Says(away), Says(lambda own, x: own.line(x) + kept["x"]))


def twice_the_same_in_place() -> Task:
    opened = Says(lambda own, x: (x, x))
    return between(opened, Says(lambda own, two: own.line(two[0].mul_(2.0)) + two[1]))


def input_in_place() -> Task:
    def shifted(own: Says, x: Tensor) -> Tensor:
        x += 1.0
        return own.line(x)

    def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return squares(output, (None, batch[0]))

    return of([Says(shifted), nn.Linear(WIDTH, WIDTH)], loss)


def generator_output() -> Task:
    def one_by_one(own: Says, x: Tensor) -> Iterator[Tensor]:
        return (row for row in own.line(x))

    return says(one_by_one)


def dropout_in_a_checkpoint() -> Task:
    return says(
        lambda own, x: checkpoint(
            lambda y: functional.dropout(own.line(y), 0.5).tanh(), x, use_reentrant=False
        )
    )


def clipped_gradient_of_the_batch() -> Task:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.register_hook(lambda grad: grad / grad.norm())
    return between(layer)


def samples_beside_each_other() -> Task:
    attention = nn.MultiheadAttention(WIDTH, 2)  # batch_first is False

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]

    return between(Attends())


def padded_to_the_longest() -> Task:
    """Masked, but dropout draws for another length beside other samples."""

    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        return functional.pad(x, (0, 0, 0, len(samples))), y

    def attended(own: Says, x: Tensor) -> Tensor:
        weights = (own.line(x) @ x.mT).masked_fill(x[:, None, :, 0] == 0, -math.inf)
        return (functional.dropout(weights.softmax(2), 0.5) @ x)[:, 1]

    data = Rows(40, WIDTH, dtype=torch.float64)
    rows = [(x.expand(3, WIDTH), y) for x, y in (data[i] for i in range(40))]
    layers: list[nn.Module] = [nn.Identity(), Says(attended), nn.Linear(WIDTH, WIDTH)]
    return of(layers, dataset=rows, collate=collate)


def mean_loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return functional.mse_loss(output, batch[1]), len(output)


def mean_and_one(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return functional.mse_loss(output, batch[1]), 1


def contrast(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Every sample against all others."""
    scores = output @ batch[1].T
    return functional.cross_entropy(scores, torch.arange(len(output)), reduction="sum"), len(output)


def detached(output: Tensor, batch: Any) -> tuple[float, int]:
    loss, weight = squares(output, batch)
    return loss.item(), weight


def of_the_output_only(output: Tensor) -> Tensor:
    return output.sum()


def drawn_by_python(own: Says, x: Tensor) -> Tensor:
    return own.line(x) if random.random() < 0.5 else x


def drawn_for_the_batch(own: Says, x: Tensor) -> Tensor:
    return own.line(x) if torch.rand(()) < 0.5 else x


def wrapped() -> Task:
    return of(nn.DataParallel(nn.Linear(WIDTH, WIDTH)))


def compiled() -> Task:
    return between(torch.compile(nn.Linear(WIDTH, WIDTH)))


REFUSED: dict[str, tuple[Callable[[], Task], str]] = {
    "control_flow_by_value": (
        lambda: of(Branches()), r"a Branches, cannot be cut automatically: .*if x\.sum\(\) > 0"),
    "batch_size_in_the_code": (
        lambda: says(lambda own, x: own.line(x.view(4, -1))), "layer 1 .*any number must do"),
    "batch_size_in_the_code_of_a_model": (
        lambda: of(nn.Sequential(Says(lambda own, x: x.view(2, -1)))), "any number must do"),
    "parameters_outside_modules": (
        lambda: between(Outside()), r"computes with 'scale' of layer '1', .*\(6,\).*nn\.Parameter"),
    "complex_numbers_of_16_bytes": (
        lambda: between(Turn(torch.complex128)), "1.turn .* of torch.complex128 .*complex64"),
    "shapes_that_do_not_fit": (
        lambda: between(nn.Linear(WIDTH + 1, WIDTH)), r"layer 1 \(1\) raised RuntimeError: mat1"),
    "a_layer_that_cannot_take_a_tuple": (
        lambda: between(Says(lambda own, x: (own.line(x), None)), nn.Flatten(0)),
        r"layer 2 \(2\) raised AttributeError"),
    "sparse_output": (
        lambda: says(lambda own, x: own.line(x).to_sparse()), r"layer 1 .*sparse.*to_dense\(\)"),
    "modules_in_a_plain_list": (
        lambda: between(PlainList()), r"'inner' of layer '1'.*nn\.ModuleList"),
    "parameters_outside_a_model": (lambda: of(OutsideModel()), "'scale' of layer 'inner'.*nn.Par"),
    "no_output": (lambda: says(lambda own, x: None), r"layer 1 \(1\) .*it returned None; a layer"),
    "output_of_a_class_of_its_own": (
        lambda: says(lambda own, x: Own(x)), "layer 1 .*it returned a Own; a layer returns a ten"),
    "generator_output": (generator_output, "layer 1 .*it returned a generator"),
    "mutated_buffer": (lambda: between(Counting()), "changes its buffer 'count' while it runs"),
    "mutated_behind_autograd": (lambda: between(Codebook()), "changes its buffer 'mean' while"),
    "spectral_norm": (
        lambda: between(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))),
        r"changes its buffer 'parametrizations\.weight\.0\._.' .*\.eval\(\)"),
    "batch_statistics": (
        lambda: between(nn.BatchNorm1d(WIDTH)), r"'1' is a BatchNorm1d: .*nn.GroupNorm\(1, 6\)"),
    "batch_statistics_by_function": (
        lambda: says(lambda own, x: functional.batch_norm(own.line(x), None, None, training=True)),
        r"layer 1 \(1\)"),
    "statistics_over_the_batch": (
        lambda: says(lambda own, x: own.line(x) - own.line(x).mean(0)),
        r"what layer 1 \(1\) returns for a sample depends on the samples beside it.*GroupNorm"),
    "a_mask_over_the_batch": (
        lambda: between(
            Says(lambda own, x: (own.line(x), x > x.mean(0))),
            Says(lambda own, state: own.line(state[0]) * state[1])),
        r"layer 1 \(1\) returns for a sample"),
    "the_samples_shuffled": (
        lambda: says(lambda own, x: own.line(x)[torch.randperm(len(x))]), "global generator"),
    "samples_that_are_others_each_time": (
        lambda: between(dataset=Noisy(40, WIDTH, dtype=torch.float64)),
        r"dataset .* gave another sample at position \d .*own by the index"),
    "a_penalty_in_the_loss": (
        lambda: between(loss=lambda output, batch: (squares(output, batch)[0] + 1.0, len(output))),
        "a sum of what each sample gives"),
    "a_little_penalty_in_the_loss": (
        lambda: between(loss=lambda output, batch: (
            squares(output, batch)[0] + 1e-3 * output.mean(0).norm(), len(output))),
        "a sum of what each sample gives"),
    "a_little_penalty_in_a_loss_of_32_bits": (a_little_penalty_in_fp32, "a sum of what each sam"),
    "a_little_penalty_of_the_batch_in_the_model": (
        lambda: a_penalty_beside(lambda h: (h**2).mean()), "a sum of what each sample gives"),
    "samples_beside_each_other": (samples_beside_each_other, r"layer 1 \(1\) returns for a sample"),
    "a_little_of_the_others": (
        lambda: says(lambda own, x: own.line(x) - 0.01 * own.line(x).mean(0)),
        r"layer 1 \(1\) returns for a sample"),
    "padded_to_the_longest": (
        padded_to_the_longest, r"layer 0 \(0\) returns has another shape .*pad all samples"),
    "embedding_with_a_largest_norm": (
        lambda: between(
            Says(lambda own, x: (x > 0).sum(1)), nn.Embedding(WIDTH + 1, WIDTH, max_norm=0.5)),
        "Embedding with max_norm"),
    "a_table_by_the_longest_input": (
        lambda: of_unlike_lengths(by_length=True), "the loss of a sample was .* the longest input"),
    "state_in_an_attribute": (lambda: between(Turns()), "keep anything from one run to the next"),
    "through_the_back_door": (through_the_back_door, "other than by returning it"),
    "twice_the_same_in_place": (twice_the_same_in_place, r"in place .*x\.clone\(\)"),
    "input_in_place": (input_in_place, r"in place on their input .*x\.clone\(\)"),
    "nothing_to_train": (
        lambda: of([nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)]),
        "no parameter of the model requires a gradient"),
    "dropout_in_a_checkpoint": (dropout_in_a_checkpoint, "'line.weight' of layer '1'.*checkpoint"),
    "gradient_of_the_batch": (clipped_gradient_of_the_batch, "'weight' of layer '1'.*hooks"),
    "drawn_by_python": (
        lambda: says(drawn_by_python), "the generator of Python or NumPy.*rand_like"),
    "drawn_for_the_batch": (lambda: says(drawn_for_the_batch), "first dimension must run over"),
    "device_in_the_code": (
        lambda: says(lambda own, x: own.line(x.cuda())), "layer 1 .*(CUDA|NVIDIA)"),
    "mean_loss": (lambda: between(loss=mean_loss), r"it looks like a mean .*reduction='sum'"),
    "mean_loss_of_weight_one": (lambda: between(loss=mean_and_one), "the weight 1, one by one 2"),
    "contrastive_loss": (lambda: between(loss=contrast), "a sum of what each sample gives"),
    "detached_loss": (lambda: between(loss=detached), r"does not depend on .*\.item\(\)"),
    "loss_of_one_argument": (
        lambda: between(loss=of_the_output_only), "the loss raised TypeError: .*2 were given"),
    "loss_alone": (
        lambda: between(loss=lambda output, batch: squares(output, batch)[0]),
        r"loss returned a Tensor, not two values; return \(sum over"),
    "wrapped": (wrapped, r"DataParallel.*pass .*\.module"),
    "compiled": (compiled, "torch.compile"),
    "a_function_as_layer": (
        lambda: Task(layers=[nn.Linear(2, 2), torch.relu], loss=squares, dataset=Rows(4, 2)),
        "entry 1 .*wrap a function"),
}  # fmt: skip


def difficult(name: str) -> Task:
    """The task of that name."""
    trains = {function.__name__: function for function in TRAINS}
    return trains[name]() if name in trains else REFUSED[name][0]()
