"""A task whose steps take real processor time and real bandwidth."""

import torch
from torch import Tensor, nn

from orchestrator.core.training import Task
from tests.runtime.models import squares

SIDE, CHANNELS, OUTPUTS = 40, 48, 8


class Pictures:
    """Random pictures and targets; a few, over and over, so that reading them costs nothing."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._pictures = torch.randn(16, CHANNELS, SIDE, SIDE, generator=generator)
        self._targets = torch.randn(48, OUTPUTS, generator=generator)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._pictures[index % 16], self._targets[index % 48]


def pictures(num_layers: int = 6) -> Task:
    """Convolutions that take tens of milliseconds, with gradients of 0.6 MB to add up."""
    body = [
        nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU())
        for _ in range(num_layers)
    ]
    width = CHANNELS * (SIDE // 4) ** 2
    head = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(width, OUTPUTS))
    return Task(layers=[*body, head], loss=squares, dataset=Pictures())
