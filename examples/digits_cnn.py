"""A small convolutional network on the handwritten digits that come with scikit-learn.

1,797 images of 8 x 8 pixels in ten classes: no download. Group norm, not batch norm: what a
layer computes must not depend on who shares its microbatch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from orchestrator import Task

NUM_CLASSES = 10
NUM_EVAL = 297  # the last images; 1,500 are trained on


def digits() -> TensorDataset:
    """The images (1797, 1, 8, 8), pixels from -1 to 1, with their classes.

    Raises:
        ImportError: If scikit-learn is not installed; says how to install it.
    """
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - only this example needs it
    except ImportError as error:
        raise ImportError(
            "digits_cnn needs scikit-learn; install the examples extra: "
            "pip install 'lyray[examples]'  (from a checkout: pip install -e '.[examples]')"
        ) from error
    images, classes = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    return TensorDataset(pixels, torch.tensor(classes, dtype=torch.int64))


class Block(nn.Module):
    """Two 3 x 3 convolutions with group norm, added to their input; dropout for good measure."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm_1 = nn.GroupNorm(4, width)
        self.conv_2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm_2 = nn.GroupNorm(4, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, width, height, width of the image) to the same shape."""
        inner = functional.relu(self.norm_1(self.conv_1(x)))
        return functional.relu(x + self.dropout(self.norm_2(self.conv_2(inner))))


def class_loss(scores: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Cross entropy in nats, summed over the images, and how many there are."""
    classes = batch[1]
    return functional.cross_entropy(scores, classes, reduction="sum"), len(classes)


def hits(scores: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """How many images are told right, and of how many: ``accuracy`` of an evaluation."""
    classes = batch[1]
    return {"accuracy": ((scores.argmax(1) == classes).sum(), len(classes))}


def task(num_blocks: int = 4, width: int = 16, dropout: float = 0.1) -> Task:
    """A stem, ``num_blocks`` residual blocks and a head over the digits."""
    if width % 4:
        raise ValueError(f"width is {width}; it must be a multiple of 4, for group norm")
    images = digits()
    split = len(images) - NUM_EVAL
    return Task(
        layers=[
            nn.Conv2d(1, width, 3, padding=1),
            *(Block(width, dropout) for _ in range(num_blocks)),
            nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, NUM_CLASSES)),
        ],
        loss=class_loss,
        dataset=TensorDataset(*images[:split]),
        eval_dataset=TensorDataset(*images[split:]),
        metrics=hits,
    )
