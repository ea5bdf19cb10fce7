"""GPT-2, Llama and Qwen configurations of `transformers` as a model of one's own: a list of layers for `--model`.

    def model():
        return layers_of(GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256))

The embedding is the first layer, each block one, the final norm with the head the last. Weights are initialised here, as
`transformers` does; head and embedding are not tied, and nothing is dropped out: layers share no parameters, and an iteration
that is gone on with after a death is the same one. Attention stays within each packed document, positions begin with it. Each
layer names its shards: heads (with grouped queries, groups of them), feed-forward columns, tokens of the vocabulary. GPT-2's
`Conv1D`s become `nn.Linear`s, their weights turned over.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unskew.runtime.model.own_shards import ColumnCut, PerUnit, RowCut, Sharding, VocabularyCut

_DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "summary_first_dropout")
_LLAMA_LIKE = ("llama", "qwen2", "qwen3", "mistral")


def layers_of(config: Any) -> list[nn.Module]:
    """The layers of a causal language model of this configuration. Raises `ValueError` for one that is not known."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an extra

    if config.model_type not in ("gpt2", *_LLAMA_LIKE):
        raise ValueError(f"model type {config.model_type} is not known, allowed: gpt2, {', '.join(_LLAMA_LIKE)}")
    config = copy.deepcopy(config)
    config.tie_word_embeddings = False
    for name in _DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    whole = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if config.model_type == "gpt2":
        base = whole.transformer
        return [_PlacedTokens(base.wte, base.wpe), *map(_Gpt2Block, base.h), _Head(base.ln_f, whole.lm_head)]
    base = whole.model
    blocks = [_RotaryBlock(block, copy.deepcopy(base.rotary_emb)) for block in base.layers]
    return [_Tokens(base.embed_tokens), *blocks, _Head(base.norm, whole.lm_head)]


class _Tokens(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(ids)
        return embedded

    def shards(self) -> dict[str, Sharding]:
        return {"embedding": VocabularyCut()}


class _PlacedTokens(nn.Module):
    """With learned positions, from 0 in each document."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        places = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
        placed: Tensor = self.tokens(ids) + self.positions(places)
        return placed

    def shards(self) -> dict[str, Sharding]:
        return {"tokens": VocabularyCut()}


class _Gpt2Block(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block
        for of in (block.attn, block.mlp):
            for name, part in of.named_children():
                if type(part).__name__ == "Conv1D":
                    setattr(of, name, _turned(part))
        self._heads, self._width = int(block.attn.num_heads), int(block.attn.head_dim)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        return _each(x, lengths, self.block)

    def shards(self) -> dict[str, Sharding]:
        block: Any = self.block
        inner = block.mlp.c_fc.out_features
        return {
            "block.attn.c_attn": ColumnCut(self._heads, times=3), "block.attn.c_proj": RowCut(self._heads),
            "block.mlp.c_fc": ColumnCut(inner), "block.mlp.c_proj": RowCut(inner),
        }  # fmt: skip

    def cut_to(self, count: Callable[[int], int]) -> None:
        block: Any = self.block
        block.attn.split_size = self._width * count(self._heads)


def _turned(conv: Any) -> nn.Linear:
    """The same product: `Conv1D` has its weight as [what it takes, what it gives]."""
    taken, given = conv.weight.shape
    linear = nn.Linear(taken, given)
    linear.weight, linear.bias = nn.Parameter(conv.weight.detach().T.contiguous()), conv.bias
    return linear


class _RotaryBlock(nn.Module):
    def __init__(self, block: Any, rotary: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        def of(document: Tensor) -> Any:
            places = torch.arange(document.shape[1], device=document.device)[None]
            return self.block(document, position_ids=places, position_embeddings=self.rotary(document, places))

        return _each(x, lengths, of)

    def shards(self) -> dict[str, Sharding]:
        block: Any = self.block
        attention, inner = block.self_attn, block.mlp.up_proj.out_features
        heads = attention.k_proj.out_features // attention.head_dim
        taking = {f"block.self_attn.{name}": ColumnCut(heads) for name in ("q_proj", "k_proj", "v_proj")}
        norms = {f"block.self_attn.{name}": PerUnit() for name in ("q_norm", "k_norm") if hasattr(attention, name)}
        wide = {f"block.mlp.{name}": ColumnCut(inner) for name in ("gate_proj", "up_proj")}
        return {**taking, **norms, "block.self_attn.o_proj": RowCut(heads), **wide, "block.mlp.down_proj": RowCut(inner)}


class _Head(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits

    def shards(self) -> dict[str, Sharding]:
        return {"head": VocabularyCut()}


def _each(x: Tensor, lengths: Sequence[int], block: Callable[[Tensor], Any]) -> Tensor:
    """What a block makes of each document by itself; some versions return a tuple."""

    def made() -> Iterator[Tensor]:
        for document in torch.split(x, list(lengths)):
            y = block(document[None])
            yield (y[0] if isinstance(y, tuple) else y)[0]

    return torch.cat(list(made()))
