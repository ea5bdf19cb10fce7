"""A DDP training on samples of a shared distribution of lengths: `torchrun ... divided_job.py DISTRIBUTION DEVICE SEED`

DISTRIBUTION is of data/lengths.toml, or `alike`: then rank 1 takes `SLOWER` times as long as the others. DEVICE `sleep` sleeps
for what packed documents would cost, `cores` computes padded ones on real cores.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import unskew
from unskew.analytics.lab.studies.noise import load_lengths

EACH, LONGEST, WORDS, WIDTH, SLOWER = 4, 16_384, 64, 128, 2.5
STEPS = {"sleep": 110, "cores": 240}
"""Those of real cores take some 15 ms: a plan is entered after 40 to 90 of them, and measured over 38 more."""
TOKEN_S, TOKEN2_S = 0.5e-6, 0.5e-6 / 6_000
"""Of the forward pass; backward takes twice as long."""
SHRUNK = 64
"""Real cores are given a 64th of the tokens."""


class Slept(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Documents(Dataset[int]):
    def __init__(self, name: str, seed: int, n: int) -> None:
        random = np.random.default_rng(seed)
        if name == "alike":
            self.lengths = [2_000] * n
        else:
            drawn = np.minimum(random.choice(load_lengths(name), n), LONGEST)
            self.lengths = [max(int(length), SHRUNK) for length in drawn]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> int:
        return self.lengths[index]


class Sleeping(nn.Module):
    def __init__(self, slower: float) -> None:
        super().__init__()
        self.slower, self.out = slower, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        lengths = cu_seqlens.diff().tolist()
        seconds = sum(TOKEN_S * length + TOKEN2_S * length * length for length in lengths)
        found: torch.Tensor = Slept.apply(self.out(x), seconds * self.slower)
        return found


class Computing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.0)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.layer(self.words(input_ids)))
        return found


def packed(lengths: list[int]) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(len(lengths), 8), "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}


def padded(lengths: list[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.ones(len(lengths), max(lengths) // SHRUNK, dtype=torch.long)}


def main(name: str, device: str, seed: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, late = dist.get_world_size(), name == "alike" and dist.get_rank() == 1
    data = Documents(name, seed, STEPS[device] * EACH * ranks)
    module: nn.Module = Computing() if device == "cores" else Sleeping(SLOWER if late else 1.0)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(data, shuffle=True, seed=seed)
    loader = DataLoader(data, batch_size=EACH, sampler=sampler, collate_fn=padded if device == "cores" else packed)
    session = unskew.attach()
    for batch in session.balance(loader, length=None if name == "alike" else data.lengths):
        optimizer.zero_grad()
        model(**batch).square().mean().backward()
        optimizer.step()
    session.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
