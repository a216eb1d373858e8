"""The factor of the loss in fp16, which keeps small gradients from vanishing; the same for all."""

from collections.abc import Mapping

import torch
from torch import Tensor

from orchestrator.core.training import Precision

FIRST_SCALE = 2.0**16
GROWTH, BACKOFF = 2.0, 0.5
GROWTH_STEPS = 2000
"""Steps in a row with finite gradients, after which the factor grows."""

LEAST_SCALE, MOST_SCALE = 2.0**-24, 2.0**127
_KEYS = "scaler/scale", "scaler/good_steps"


class LossScale:
    """What the loss is multiplied by before backward: as torch's GradScaler has it by default.

    It is a function of which steps had finite gradients, which all workers know from their votes,
    so that each carries its own. It travels and is saved with every layer. Always a power of two:
    dividing by it rounds nothing. Precisions other than fp16 keep the factor 1.
    """

    def __init__(self, precision: Precision) -> None:
        self._moves = precision == "fp16"
        self.reset()

    def reset(self) -> None:
        """As before the first step."""
        self.scale, self._good_steps = FIRST_SCALE if self._moves else 1.0, 0

    def follow(self, finite: bool) -> None:
        """Go on to the next step; ``finite``: whether the gradients of this one were."""
        if not self._moves:
            return
        if not finite:
            self.scale, self._good_steps = max(LEAST_SCALE, BACKOFF * self.scale), 0
            return
        self._good_steps += 1
        if self._good_steps == GROWTH_STEPS:
            self.scale, self._good_steps = min(MOST_SCALE, GROWTH * self.scale), 0

    def tensors(self) -> dict[str, Tensor]:
        """What a layer's state holds of it; nothing where the factor never moves."""
        values = self.scale, float(self._good_steps)
        pairs = zip(_KEYS, values, strict=True)
        return {k: torch.tensor(v, dtype=torch.float64) for k, v in pairs} if self._moves else {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what a layer's state holds; one of another precision holds nothing."""
        if self._moves and all(key in tensors for key in _KEYS):
            scale, good_steps = (float(tensors[key]) for key in _KEYS)
            self.scale, self._good_steps = scale, int(good_steps)
