"""A small GPT over bytes, trained on text every machine has: the source of Python's own library.

It is the demo's task (``examples/byte_gpt.yaml``) and a template for your own: a list of layers,
a loss that returns sums, a map-style dataset. Nothing here knows of devices or plans.
"""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from orchestrator import Task

NUM_BYTES = 256
MAX_TEXT_BYTES = 2_000_000


def stdlib_text(max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """The top-level modules of the standard library, one after another in the order of names.

    Raises:
        FileNotFoundError: If this Python was installed without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for file in sorted(folder.glob("*.py")):
        if len(text) >= max_bytes:
            break
        text += file.read_bytes()
    if not text:
        raise FileNotFoundError(f"no *.py files in {folder}; this Python came without its sources")
    return bytes(text[:max_bytes])


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of ``length`` bytes that do not overlap, each with the bytes that follow."""

    def __init__(self, text: bytes, length: int) -> None:
        """Cut ``text``; a rest shorter than a window is left out."""
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length = length

    def __len__(self) -> int:
        return (len(self._text) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first = index * self._length
        window = self._text[first : first + self._length + 1].long()
        return window[:-1], window[1:]


class Embed(nn.Module):
    """Bytes (batch, length) to vectors (batch, length, width): what each is and where it stands."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(NUM_BYTES, width)
        self.place = nn.Embedding(length, width)
        for table in (self.byte, self.place):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Return the sum of both embeddings."""
        return self.byte(text) + self.place.weight[: text.shape[1]]


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class Head(nn.Module):
    """Vectors to one score a byte value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, NUM_BYTES)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, length, width) to (batch, length, 256)."""
        return self.score(self.norm(x))


def next_byte_loss(scores: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Cross entropy of the next byte in nats, summed over all bytes, and how many there are."""
    following = batch[1]
    loss_sum = functional.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="sum")
    return loss_sum, following.numel()


def task(num_layers: int = 8, width: int = 64, num_heads: int = 4, length: int = 32) -> Task:
    """The model as ``num_layers`` blocks between an embedding and a head, and its text."""
    return Task(
        layers=[
            Embed(width, length),
            *(Block(width, num_heads) for _ in range(num_layers)),
            Head(width),
        ],
        loss=next_byte_loss,
        dataset=Windows(stdlib_text(), length),
    )
