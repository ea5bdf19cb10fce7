"""GPT-2, Llama and Qwen configurations of `transformers` as a model of one's own: a list of layers for `--model`.

    def model():
        return layers_of(GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256))

The embedding is the first layer, each block one, the final norm with the head the last. Weights are initialised here, as
`transformers` does; head and embedding are not tied, and nothing is dropped out: layers share no parameters, and an iteration
that is gone on with after a death is the same one. Attention stays within each packed document, positions begin with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
        return [_PlacedTokens(base.wte, base.wpe), *map(_Block, base.h), _Head(base.ln_f, whole.lm_head)]
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


class _PlacedTokens(nn.Module):
    """With learned positions, from 0 in each document."""

    def __init__(self, tokens: nn.Embedding, positions: nn.Embedding) -> None:
        super().__init__()
        self.tokens, self.positions = tokens, positions

    def forward(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        places = torch.cat([torch.arange(length, device=ids.device) for length in lengths])
        placed: Tensor = self.tokens(ids) + self.positions(places)
        return placed


class _Block(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        return _each(x, lengths, self.block)


class _RotaryBlock(nn.Module):
    def __init__(self, block: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, rotary

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        def of(document: Tensor) -> Any:
            places = torch.arange(document.shape[1], device=document.device)[None]
            return self.block(document, position_ids=places, position_embeddings=self.rotary(document, places))

        return _each(x, lengths, of)


class _Head(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


def _each(x: Tensor, lengths: Sequence[int], block: Callable[[Tensor], Any]) -> Tensor:
    """What a block makes of each document by itself; some versions return a tuple."""

    def made() -> Iterator[Tensor]:
        for document in torch.split(x, list(lengths)):
            y = block(document[None])
            yield (y[0] if isinstance(y, tuple) else y)[0]

    return torch.cat(list(made()))
