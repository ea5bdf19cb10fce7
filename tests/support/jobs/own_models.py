"""Models and data of somebody's own, for the runtime's tests: what the ranks' processes import."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from unskew.runtime.model.own_shards import ColumnCut, PerUnit, RowCut, Sharding, VocabularyCut

VOCABULARY = 32


class Wide(nn.Module):
    """A layer that sees its token alone, of any inner width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model() -> list[nn.Module]:
    return [nn.Embedding(VOCABULARY, 16), Wide(16), Wide(16), Wide(4096), Wide(16), nn.Linear(16, VOCABULARY)]


class Attending(nn.Module):
    """Attention of heads whose queries are normed, one weight for all heads; and what follows. It names its shards."""

    heads, width = 4, 4

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(16, 48), nn.LayerNorm(4), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, -1, self.width).transpose(0, 2).unbind(1)
        parts = zip(*(torch.split(one, list(lengths), dim=1) for one in (self.norm(q), k, v)), strict=True)
        attended = torch.cat([functional.scaled_dot_product_attention(*one, is_causal=True) for one in parts], dim=1)
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        return x + self.down(torch.relu(self.up(x)))

    def shards(self) -> dict[str, Sharding]:
        attention = {"qkv": ColumnCut(4, times=3), "norm": PerUnit(), "out": RowCut(4)}
        return {**attention, "up": ColumnCut(24), "down": RowCut(24)}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of = nn.Embedding(VOCABULARY, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.of(ids)  # type: ignore[no-any-return]

    def shards(self) -> dict[str, Sharding]:
        return {"of": VocabularyCut()}


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.of = nn.LayerNorm(16), nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(self.norm(x))  # type: ignore[no-any-return]

    def shards(self) -> dict[str, Sharding]:
        return {"of": VocabularyCut()}


class Misnamed(Logits):
    def shards(self) -> dict[str, Sharding]:
        return {"of": RowCut(5)}


def sharded() -> list[nn.Module]:
    """One layer names no shards: every member has all of it."""
    return [Tokens(), Attending(), Wide(16), Attending(), Logits()]


def misnamed() -> list[nn.Module]:
    return [Tokens(), Misnamed()]


def tied() -> list[nn.Module]:
    first, last = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY, bias=False)
    last.weight = first.weight
    return [first, last]


def documents() -> Iterator[list[int]]:
    draw = random.Random(5)
    while True:
        yield [draw.randrange(VOCABULARY) for _ in range(draw.randrange(4, 40))]


def batch_of(iteration: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(iteration)
    return [[torch.randint(0, VOCABULARY, (9,), generator=generator)] * 2 for _ in range(4)]


def few() -> list[list[int]]:
    return [[number % VOCABULARY] * 30 for number in range(60)]


def gpt2() -> list[nn.Module]:
    from transformers import GPT2Config  # noqa: PLC0415 - an extra

    from unskew.runtime.model.transformers_layers import layers_of  # noqa: PLC0415

    return layers_of(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=64))


def light(layers: int) -> list[nn.Module]:
    """Of bytes; computes next to nothing."""
    return [nn.Embedding(256, 16), *(Wide(16) for _ in range(layers - 2)), nn.Linear(16, 256)]


def light_4() -> list[nn.Module]:
    return light(4)


def light_6() -> list[nn.Module]:
    return light(6)


def light_8() -> list[nn.Module]:
    return light(8)


def light_12() -> list[nn.Module]:
    return light(12)


def qwen3() -> list[nn.Module]:
    """With grouped queries and normed heads."""
    from transformers import Qwen3Config  # noqa: PLC0415 - an extra

    from unskew.runtime.model.transformers_layers import layers_of  # noqa: PLC0415

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    return layers_of(Qwen3Config(num_hidden_layers=2, vocab_size=VOCABULARY, **sizes))
