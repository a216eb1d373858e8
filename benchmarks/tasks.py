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
