"""The models that benchmarks train: small layer lists on seeded random data."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from orchestrator.core.training import Task


def _sum_of_errors(output: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return functional.cross_entropy(output, batch[1], reduction="sum"), len(output)


def chain(
    num_layers: int = 8, width: int = 8, num_samples: int = 4096, *, double: bool = False
) -> Task:
    """Linear layers with tanh: almost no work, so that an emulated device is never late."""
    return perceptron(num_layers=num_layers, width=width, num_samples=num_samples, double=double)


def perceptron(
    num_layers: int = 6, width: int = 512, num_samples: int = 4096, *, double: bool = False
) -> Task:
    """A classifier of 16 classes out of ``num_layers`` equal layers and a head."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64 if double else torch.float32
    inputs = torch.randn(num_samples, width, generator=generator, dtype=dtype)
    labels = torch.randint(16, (num_samples,), generator=generator)
    body = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers - 1)]
    return Task(
        layers=[layer.to(dtype) for layer in (*body, nn.Linear(width, 16))],
        loss=_sum_of_errors,
        dataset=TensorDataset(inputs, labels),
    )


class _Block(nn.Module):
    """Attention and two linear layers, each beside a way around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.into(self.before(x)).unflatten(-1, (3, 4, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.after(x))))


def _next_token(output: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    loss = functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return loss, batch[1].numel()


def transformer(num_blocks: int = 6, width: int = 64, length: int = 48, words: int = 200) -> Task:
    """A language model as a layer list: embedding, blocks, head."""
    tokens = torch.randint(words, (256, length + 1), generator=torch.Generator().manual_seed(0))
    return Task(
        layers=[
            nn.Embedding(words, width),
            *(_Block(width) for _ in range(num_blocks)),
            nn.Linear(width, words),
        ],
        loss=_next_token,
        dataset=TensorDataset(tokens[:, :-1], tokens[:, 1:]),
    )


def convolutions(num_blocks: int = 6, channels: int = 16, size: int = 32) -> Task:
    """A classifier of images of 16 classes: pairs of convolutions, pooling, a linear head."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(128, 3, size, size, generator=generator)
    labels = torch.randint(16, (128,), generator=generator)

    def block(before: int, after: int) -> nn.Module:
        parts: list[nn.Module] = []
        for width in (before, after):
            convolution = nn.Conv2d(width, after, 3, padding=1)
            parts += [convolution, nn.GroupNorm(4, after), nn.ReLU()]
        return nn.Sequential(*parts)

    body = [block(channels, channels) for _ in range(num_blocks - 1)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 16))
    return Task(
        layers=[block(3, channels), *body, head],
        loss=_sum_of_errors,
        dataset=TensorDataset(images, labels),
    )
