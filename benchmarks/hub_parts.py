"""How the models of ``hub_models`` run in parts: as blocks, and some as lists; to copy from."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.core.training import Blocks


def causal(mask: Tensor) -> Tensor:
    """Who may look at whom: at what came before, where the mask of the text is not 0."""
    length = mask.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    return before & mask[:, None, None, :].bool()


def gpt2_blocks(model: Any) -> Blocks:
    """The mask rides along."""
    inner = model.transformer

    def embed(value: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens = value["input_ids"]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = inner.drop(inner.wte(tokens) + inner.wpe(places))
        return {"x": x, "mask": causal(value["attention_mask"])}

    def block(i: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**state, "x": inner.h[i](state["x"], None, state["mask"])}

    return Blocks(
        embed=embed, block=block, head=lambda state: model.lm_head(inner.ln_f(state["x"]))
    )


def llama_blocks(model: Any) -> Blocks:
    """The mask and the rotary tables ride along."""
    inner = model.model

    def embed(value: dict[str, Tensor]) -> dict[str, Any]:
        x = inner.embed_tokens(value["input_ids"])
        places = torch.arange(x.shape[1], device=x.device)[None]
        turns = inner.rotary_emb(x, position_ids=places)
        return {"x": x, "mask": causal(value["attention_mask"]), "turns": turns}

    def block(i: int, state: dict[str, Any]) -> dict[str, Any]:
        x = inner.layers[i](
            state["x"], attention_mask=state["mask"], position_embeddings=state["turns"]
        )
        return {**state, "x": x}

    return Blocks(
        embed=embed, block=block, head=lambda state: model.lm_head(inner.norm(state["x"]))
    )


def bert_blocks(model: Any) -> Blocks:
    """The mask rides along."""
    inner = model.bert

    def embed(value: dict[str, Tensor]) -> dict[str, Any]:
        mask = value["attention_mask"][:, None, None, :].bool()
        return {"x": inner.embeddings(value["input_ids"]), "mask": mask}

    def block(i: int, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "x": inner.encoder.layer[i](state["x"], state["mask"])}

    return Blocks(embed=embed, block=block, head=lambda state: model.cls(state["x"]))


def t5_blocks(model: Any) -> Blocks:
    """Those of the encoder, then those of the decoder: what the first returned rides along."""
    first, second = model.encoder, model.decoder
    count = len(first.block)

    def embed(value: dict[str, Tensor]) -> dict[str, Any]:
        x = first.embed_tokens(value["input_ids"])
        hidden = value["attention_mask"][:, None, None, :] == 0
        mask = torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -1e9)
        return {"x": x, "mask": mask, "bias": None, "answer": value["decoder_input_ids"]}

    def block(i: int, state: dict[str, Any]) -> dict[str, Any]:
        if i < count:
            x, bias, _ = first.block[i](state["x"], state["mask"], state["bias"])
            state = {**state, "x": x, "bias": bias}
            if i < count - 1:
                return state
            text, x = first.final_layer_norm(x), second.embed_tokens(state["answer"])
            before = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            causal_mask = torch.zeros_like(before, dtype=x.dtype).masked_fill(~before, -1e9)
            look = {"look": causal_mask[None, None], "bias": None, "cross": None}
            return {"x": x, "text": text, "mask": state["mask"], **look}
        x, bias, cross = second.block[i - count](
            state["x"], state["look"], state["bias"], state["text"], state["mask"], state["cross"]
        )
        return {**state, "x": x, "bias": bias, "cross": cross}

    def head(state: dict[str, Any]) -> Tensor:
        x = second.final_layer_norm(state["x"])
        return model.lm_head(x * model.model_dim**-0.5 if model.config.scale_decoder_outputs else x)

    return Blocks(embed=embed, block=block, head=head, count=count + len(second.block))


def vit_blocks(model: Any) -> Blocks:
    """Every layer takes a tensor and returns one."""
    return Blocks(
        embed=lambda value: model.vit.embeddings(value["pixel_values"]),
        block=lambda i, x: model.vit.layers[i](x),
        head=lambda x: model.classifier(model.vit.layernorm(x)[:, 0]),
    )


def resnet_blocks(model: Any) -> Blocks:
    """A stage is a block."""
    inner = model.resnet
    return Blocks(
        embed=lambda value: inner.embedder(value["pixel_values"]),
        block=lambda i, x: inner.encoder.stages[i](x),
        head=lambda x: model.classifier(inner.pooler(x)),
    )


def unet_blocks(model: Any) -> Blocks:
    """The way down, the middle, the way up: the skips are a list in the state."""
    depth = len(model.down)

    def block(i: int, state: dict[str, Any]) -> dict[str, Any]:
        x, skips = state["x"], state["skips"]
        if i < depth:
            skip = model.down[i](x)
            return {"x": functional.avg_pool2d(skip, 2), "skips": [*skips, skip]}
        if i == depth:
            return {"x": model.middle(x), "skips": skips}
        x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        return {"x": model.up[i - depth - 1](torch.cat([x, skips[-1]], 1)), "skips": skips[:-1]}

    return Blocks(
        embed=lambda value: {"x": model.start(value["pixel_values"]), "skips": []},
        block=block,
        head=lambda state: model.out(state["x"]),
        count=2 * depth + 1,
    )


class FirstToken(nn.Module):
    """What stands for the whole picture."""

    def forward(self, x: Tensor) -> Tensor:
        """Without the other patches."""
        return x[:, 0]


def resnet_list(model: Any) -> list[nn.Module]:
    """Its stages, and what is around them."""
    inner = model.resnet
    return [inner.embedder, *inner.encoder.stages, inner.pooler, model.classifier]


def vit_list(model: Any) -> list[nn.Module]:
    """Its layers, and what is around them."""
    inner = model.vit
    return [inner.embeddings, *inner.layers, inner.layernorm, FirstToken(), model.classifier]
