"""Models and data of somebody's own, for the runtime's tests: what the ranks' processes import."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn

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
