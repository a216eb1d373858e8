"""The samples of a run: which one stands at a position of its global sequence, and batches."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from orchestrator.errors import ConfigError
from workers.failures import user_code


class SampleSource:
    """A map-style dataset in the run's order.

    Position p of the run is sample ``perm(seed, p div N)[p mod N]`` of a dataset of N: a
    function of the seed alone, never of the plan, so every plan and every restart sees the
    same samples in the same places.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None,
        seed: int,
        inputs: Callable[[Any], Any] | None = None,
    ) -> None:
        """Wrap ``dataset``; see ``Task`` for ``collate`` and ``inputs``.

        Raises:
            ConfigError: If the dataset has no length or no sample.
            UserCodeError: If its ``__len__`` raises.
        """
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"training.task: Task.dataset is a {type(dataset).__name__}; give a map-style "
                "dataset, with __len__ and __getitem__"
            )
        with user_code("len(Task.dataset)"):
            self.num_samples = len(dataset)
        if self.num_samples < 1:
            raise ConfigError("training.task: Task.dataset is empty; give at least one sample")
        self._dataset = dataset
        self._collate = collate or default_collate
        self._inputs = inputs or _first
        self._seed = seed
        self._orders: dict[int, np.ndarray] = {}  # of the two newest epochs

    def sample_index(self, position: int) -> int:
        """Index in the dataset of the sample at a position of the run."""
        epoch, place = divmod(position, self.num_samples)
        if epoch not in self._orders:
            # A batch straddles two epochs at most, and only forwards.
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._orders[epoch] = generator.permutation(self.num_samples)
        return int(self._orders[epoch][place])

    def batch(self, positions: Sequence[int]) -> Any:
        """The collated samples at these positions; errors of the user's code come through."""
        return self._collate([self._dataset[self.sample_index(p)] for p in positions])

    def first_input(self, batch: Any) -> Any:
        """What the first layer receives of a batch."""
        return self._inputs(batch)


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple | list) else batch
