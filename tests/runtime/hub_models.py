"""Tasks around models of the transformers package, built from a config: nothing is downloaded."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.core.training import Task

VOCABULARY, LENGTH = 101, 9


class Texts:
    """Token ids of one length, some of the last ones masked, as a tokenizer returns them."""

    def __init__(self, *, answers: bool = False) -> None:
        self._answers = answers

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(3, VOCABULARY, (LENGTH + 1,), generator=generator)
        mask = torch.ones(LENGTH, dtype=torch.long)
        mask[LENGTH - index % 3 :] = 0
        sample = {"input_ids": tokens[:-1], "attention_mask": mask, "labels": tokens[1:]}
        if self._answers:
            sample |= {"decoder_input_ids": tokens[:5], "labels": tokens[1:6]}
        return sample


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if key != "labels"}


def next_token(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    logits, labels = output.logits, batch["labels"]
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, labels.numel()


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=3,
            n_embd=32,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=32,
            bos_token_id=1,
            eos_token_id=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


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
        )
    )


def bert() -> nn.Module:
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
        )
    )


def hub(name: str, double: bool = True) -> Task:
    """A model as its package makes it, its own ``forward`` and all."""
    model = {"gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5}[name]()
    model.config.use_cache = False
    model.to(torch.float64 if double else torch.float32)
    return Task(
        layers=model, loss=next_token, dataset=Texts(answers=name == "t5"), inputs=without_labels
    )
