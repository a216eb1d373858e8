"""Models as people bring them: of the transformers package, from a config, and a U-Net of our own.

Nothing is downloaded. Each comes as a Task by one of the three front ends: ``automatic`` (the
module alone), ``blocks`` (it says how it runs in parts) or ``list`` (its parts, one after another).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.hub_parts import (
    bert_blocks,
    gpt2_blocks,
    llama_blocks,
    resnet_blocks,
    resnet_list,
    t5_blocks,
    unet_blocks,
    vit_blocks,
    vit_list,
)
from orchestrator.core.training import Blocks, Task

FrontEnd = Literal["list", "blocks", "automatic"]
FRONT_ENDS: tuple[FrontEnd, ...] = ("list", "blocks", "automatic")

VOCABULARY, LENGTH = 101, 9
SIDE, CLASSES = 32, 7


# What they are fed -------------------------------------------------------------------------------


class Texts:
    """Token ids of one length, some of the last ones masked, as a tokenizer returns them."""

    def __init__(self, length: int = LENGTH, *, vocabulary: int = VOCABULARY, answers: int = 0):
        self._length, self._vocabulary, self._answers = length, vocabulary, answers

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, self._vocabulary, (self._length + 1,), generator=generator)
        mask = torch.ones(self._length, dtype=torch.long)
        mask[self._length - index % 3 :] = 0
        sample = {"input_ids": tokens[:-1], "attention_mask": mask, "labels": tokens[1:]}
        if self._answers:
            given, wanted = tokens[: self._answers], tokens[1 : self._answers + 1]
            sample |= {"decoder_input_ids": given, "labels": wanted}
        return sample


class Pictures:
    """Random pictures of ``SIDE`` x ``SIDE`` in three colours, each with a class."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        picture = torch.randn(3, SIDE, SIDE, generator=generator, dtype=torch.float64)
        return {"pixel_values": picture.to(self._dtype), "labels": torch.tensor(index % CLASSES)}


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the model itself takes."""
    return {key: value for key, value in batch.items() if key != "labels"}


def first_of(batch: dict[str, Tensor]) -> Tensor:
    """What the first layer of a list takes: pixels, or token ids."""
    return next(iter(batch.values()))


def cross_entropy(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Sum over tokens, or pictures, and their number."""
    logits, labels = getattr(output, "logits", output), batch["labels"]
    loss = functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum"
    )
    return loss, labels.numel()


def distance(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """How far a picture is from the one that went in."""
    return (output - batch["pixel_values"]).square().mean((1, 2, 3)).sum(), len(output)


# The models --------------------------------------------------------------------------------------


def gpt2(**changes: Any) -> nn.Module:
    """Learned positions, the head tied to the words."""
    settings = {
        "n_layer": 3, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32,
        "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0, "use_cache": False,
    }  # fmt: skip
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**(settings | changes)))


def llama() -> nn.Module:
    """Rotary positions, and two queries a key."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=3,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def bert() -> nn.Module:
    """Attention in both directions, over what is not padding."""
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            num_hidden_layers=3,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5() -> nn.Module:
    """An encoder and a decoder: what the first returns is taken by every block of the second."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            num_layers=2,
            d_model=32,
            d_ff=64,
            num_heads=4,
            d_kv=8,
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            use_cache=False,
        )
    )


def resnet(*, frozen: bool = True) -> nn.Module:
    """Convolutions with skips. Its BatchNorm keeps the statistics that it has: ``frozen``."""
    settings: dict[str, Any] = {
        "embedding_size": 8, "hidden_sizes": [8, 16, 24], "depths": [2, 1, 2],
        "layer_type": "basic", "num_labels": CLASSES,
    }  # fmt: skip
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**settings))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.get_buffer("running_mean"), -0.2, 0.2)
            nn.init.uniform_(module.get_buffer("running_var"), 0.5, 1.5)
            module.train(mode=not frozen)
    return model


def resnet_batch_statistics() -> nn.Module:
    """The same as it comes: its BatchNorm takes the statistics of whatever batch it sees."""
    return resnet(frozen=False)


def vit() -> nn.Module:
    """A picture in patches, as a text of them."""
    settings: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 64, "image_size": SIDE, "patch_size": 8, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "num_labels": CLASSES,
    }  # fmt: skip
    return transformers.ViTForImageClassification(transformers.ViTConfig(**settings))


class Convolutions(nn.Module):
    """Two convolutions of one width."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        """As wide as it was."""
        return functional.silu(self.norm(self.second(functional.silu(self.first(x)))))


class UNet(nn.Module):
    """Down, and up again, where what was at the same size on the way down is put beside it."""

    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(depth)]
        self.start = nn.Conv2d(3, width, 1)
        self.down = nn.ModuleList(
            Convolutions(a, b) for a, b in zip([width, *widths], widths, strict=False)
        )
        self.middle = Convolutions(widths[-1], widths[-1])
        self.up = nn.ModuleList(Convolutions(2 * w, max(width, w // 2)) for w in reversed(widths))
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """A picture of the same size."""
        x, skips = self.start(pixel_values), []
        for block in self.down:
            skips.append(block(x))
            x = functional.avg_pool2d(skips[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], 1))
        return self.out(x)


# Tasks -------------------------------------------------------------------------------------------


def children(model: nn.Module) -> list[nn.Module]:
    """What somebody tries first."""
    return list(model.children())


@dataclass(frozen=True, slots=True)
class Brought:
    """A model and how it may run in parts."""

    make: Callable[[], nn.Module]
    blocks: Callable[[Any], Blocks]
    is_of_pictures: bool = False
    as_list: Callable[[Any], list[nn.Module]] = children
    answers: int = 0  # tokens of a second text
    loss: Callable[[Any, Any], tuple[Any, Any]] = cross_entropy


MODELS = {
    "gpt2": Brought(gpt2, blocks=gpt2_blocks),
    "llama": Brought(llama, blocks=llama_blocks),
    "bert": Brought(bert, blocks=bert_blocks),
    "t5": Brought(t5, answers=5, blocks=t5_blocks),
    "vit": Brought(vit, is_of_pictures=True, blocks=vit_blocks, as_list=vit_list),
    "resnet": Brought(resnet, is_of_pictures=True, blocks=resnet_blocks, as_list=resnet_list),
    "resnet, batch statistics": Brought(
        resnet_batch_statistics, is_of_pictures=True, blocks=resnet_blocks, as_list=resnet_list
    ),
    "unet": Brought(UNet, is_of_pictures=True, blocks=unet_blocks, loss=distance),
}  # fmt: skip


def hub(name: str, front_end: FrontEnd = "automatic", double: bool = True) -> Task:
    """A model of ``MODELS`` by one of the front ends."""
    brought = MODELS[name]
    dtype = torch.float64 if double else torch.float32
    model = brought.make().to(dtype)
    is_list = front_end == "list"
    return Task(
        layers=brought.as_list(model) if is_list else model,
        blocks=brought.blocks(model) if front_end == "blocks" else None,
        loss=brought.loss,
        dataset=Pictures(dtype) if brought.is_of_pictures else Texts(answers=brought.answers),
        inputs=first_of if is_list else without_labels,
    )
