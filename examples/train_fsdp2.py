"""A loop with FSDP2 (`fully_shard`) and activation checkpointing that knows nothing of Unskew: two ranks, a tiny model.

`unskew watch -- torchrun --nproc-per-node 2 examples/train_fsdp2.py [--slow forward|backward]` watches it.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist
from slow_rank import slow_down
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--slow", choices=["nothing", "forward", "backward"], default="nothing")
parser.add_argument("--slow-from", type=int, default=40, help="step")
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--micro-batches", type=int, default=2, help="of a rank in a step")
options = parser.parse_args()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        scores: torch.Tensor = self.out(x)
        return scores


torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = Model()
slow_down(model.layers, options.slow, options.slow_from * options.micro_batches)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for part in (*model.layers, model):
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
random, losses = torch.Generator().manual_seed(dist.get_rank()), list[float]()
for _ in range(options.steps):
    optimizer.zero_grad()
    for _ in range(options.micro_batches):
        ids = torch.randint(0, 256, (4, int(torch.randint(16, 129, (), generator=random))), generator=random)
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        (loss / options.micro_batches).backward()
        losses.append(loss.item())
    optimizer.step()
if dist.get_rank() == 0:
    print("losses", json.dumps(losses))
dist.destroy_process_group()
