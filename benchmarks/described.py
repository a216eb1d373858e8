"""How long it takes to describe a model too large for this machine, and to plan it."""

import argparse
import time

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.result import Figure, Result, main
from orchestrator.config import RunConfig
from orchestrator.core.training import Blocks, Task
from orchestrator.runtime.processes import look_at_model
from orchestrator.whatif.plans import what_if

LENGTH, VOCABULARY = 2048, 32_000

CONFIG = """
run: {{name: described, seed: {seed}}}
training:
  task: benchmarks.described:llama
  global_batch: 64
  microbatch: 2
  steps: 100
  precision: bf16
cluster:
  source: file
  offers:
    - {{pool: fast, kind: a100-80, count: 16, devices_per_node: 8, price_per_hour: 2.5}}
    - {{pool: mid, kind: a100-40, count: 8, devices_per_node: 8, price_per_hour: 1.5}}
    - {{pool: slow, kind: l4, count: 8, price_per_hour: 0.8}}
  links:
    - {{within: node, latency_s: 0.00001, bandwidth_gbytes_per_s: 200}}
    - {{within: zone, latency_s: 0.0001, bandwidth_gbytes_per_s: 10}}
budget: {{average_per_hour_usd: 60}}
"""


class Tokens:
    """Texts of one length."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.full((LENGTH + 1,), index % VOCABULARY)
        return tokens[:-1], tokens[1:]


def llama(num_layers: int = 31) -> Task:
    """A Llama of 10 billion parameters, none of which has a value."""
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=num_layers,
                hidden_size=5120,
                intermediate_size=13_824,
                num_attention_heads=40,
                vocab_size=VOCABULARY,
                max_position_embeddings=LENGTH,
                use_cache=False,
            )
        )
    inner = model.model

    def embed(tokens: Tensor) -> dict[str, Tensor]:
        x = inner.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cos, sin = inner.rotary_emb(x, positions)
        return {"x": x, "cos": cos, "sin": sin}

    def block(index: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        rotary = state["cos"], state["sin"]
        return {**state, "x": inner.layers[index](state["x"], position_embeddings=rotary)}

    def head(state: dict[str, Tensor]) -> Tensor:
        return model.lm_head(inner.norm(state["x"]))

    def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        answers = batch[1].flatten()
        total = functional.cross_entropy(logits.flatten(0, 1), answers, reduction="sum")
        return total, answers.numel()

    return Task(
        layers=model,
        blocks=Blocks(embed=embed, block=block, head=head),
        loss=loss,
        dataset=Tokens(),
    )


def described(seed: int) -> list[Figure]:
    """Seconds from the file to a plan, without a profile, once torch and such are loaded."""
    config = RunConfig.parse(CONFIG.format(seed=seed))
    start_s = time.perf_counter()
    model = look_at_model(config)
    described_s = time.perf_counter() - start_s
    found = what_if(config, model, stopwatch=time.monotonic)
    planned_s = time.perf_counter() - start_s
    parameters = sum(model.sizes[0].param_bytes) / 4
    assert not found.chosen.plan.is_idle, "nothing would run"
    return [
        Figure("described_parameters_1e9", parameters / 1e9, "10^9", ">= 10"),
        Figure("described_s", described_s, "s"),
        Figure("described_and_planned_s", planned_s, "s", "<= 10"),
    ]


def run(options: argparse.Namespace) -> Result:
    """Describe and plan once."""
    return Result(tuple(described(options.seed)))


if __name__ == "__main__":
    main("described", run)
