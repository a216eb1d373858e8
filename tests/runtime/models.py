"""Small tasks that the exactness tests train, each with one trait that could go wrong."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.core.model import Task


class Rows:
    """Random inputs and targets; sample i is a function of i alone."""

    def __init__(self, num_samples: int, width: int, *, dtype: torch.dtype = torch.float32) -> None:
        self._num_samples, self._width, self._dtype = num_samples, width, dtype

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        x, y = torch.randn(2, self._width, generator=generator, dtype=torch.float64)
        return x.to(self._dtype), y.to(self._dtype)


def squares(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Sum over samples of the mean squared error."""
    return ((output - batch[1]) ** 2).mean(1).sum(), len(batch[1])


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def mlp(num_layers: int = 6, width: int = 8, num_samples: int = 64, double: bool = False) -> Task:
    """Residual layers; plain."""
    dtype = torch.float64 if double else torch.float32
    layers = [Block(width).to(dtype) for _ in range(num_layers)]
    return Task(layers=layers, loss=squares, dataset=Rows(num_samples, width, dtype=dtype))
