"""Train a model and data of your own in parallel: two stages, two replicas, one of them slow, one rank killed.

    python examples/own_model.py

A model is a list of modules; their costs are measured, so layers may differ. Data is any iterator of documents. The same by
command: unskew run --model examples/own_model.py:model --data examples/own_model.py:documents --pp 2 --dp 2
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import unskew

WORDS, WIDTH = 64, 32


class Mixed(nn.Module):
    """A block whose tokens see the ones before them in their document, by a running mean; `width` of its inner layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(2 * WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        normed = self.norm(x)
        means = [
            part.cumsum(0) / torch.arange(1, len(part) + 1, dtype=x.dtype)[:, None] for part in normed.split(list(lengths))
        ]
        return x + self.down(torch.relu(self.up(torch.cat((normed, torch.cat(means)), dim=1))))


def model() -> list[nn.Module]:
    """Six layers: the fourth costs several times what the others do."""
    blocks = [Mixed(width) for width in (64, 64, 1024, 64)]
    return [nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS)]


def documents() -> Iterator[list[int]]:
    """Walks over the numbers, each from the one before: always the same ones, so that a resumed run goes on where it was."""
    draw = random.Random(0)
    while True:
        place = draw.randrange(WORDS)
        yield [place := (place + draw.choice((1, 1, 2, 5))) % WORDS for _ in range(draw.randrange(8, 60))]


def main(iterations: int) -> None:
    """One run in a store of its own; `unskew dashboard --store ...` shows it."""
    store = tempfile.mkdtemp(prefix="unskew-own-")
    summary = unskew.train(
        model, documents, pp=2, dp=2, micro_batches=8, tokens=128, iterations=iterations, device="virtual",
        faults=[f"kill:rank=3,at={iterations // 2}"], store=store,
    )  # fmt: skip
    print(f"loss {summary.losses[0]:.3f} -> {summary.losses[-1]:.3f} in {len(summary.losses)} iterations, {summary.status}")
    print(f"the log is in {store}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
