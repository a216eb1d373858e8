"""The models that benchmarks train: small layer lists on seeded random data."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from orchestrator.core.model import Task


def _sum_of_errors(output: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return functional.cross_entropy(output, batch[1], reduction="sum"), len(output)


def chain(num_layers: int = 8, width: int = 8, num_samples: int = 4096) -> Task:
    """Linear layers with tanh: almost no work, so that an emulated device is never late."""
    return perceptron(num_layers=num_layers, width=width, num_samples=num_samples)


def perceptron(num_layers: int = 6, width: int = 512, num_samples: int = 4096) -> Task:
    """A classifier of 16 classes out of ``num_layers`` equal layers and a head."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, width, generator=generator)
    labels = torch.randint(16, (num_samples,), generator=generator)
    body = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers - 1)]
    return Task(
        layers=[*body, nn.Linear(width, 16)],
        loss=_sum_of_errors,
        dataset=TensorDataset(inputs, labels),
    )
