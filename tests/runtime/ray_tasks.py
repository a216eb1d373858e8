"""Tasks with a flaw, for runs that must end well nevertheless."""

from torch import Tensor

from orchestrator.core.training import Task
from tests.runtime.models import Block, Rows, squares


class Broken(Rows):
    """Its sample 40 cannot be read."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 40:
            raise ValueError("sample 40 is broken")
        return super().__getitem__(index)


def fails_at_sample(num_layers: int = 6, width: int = 8) -> Task:
    """Trains until that sample's turn comes."""
    layers = [Block(width) for _ in range(num_layers)]
    return Task(layers=layers, loss=squares, dataset=Broken(64, width))
