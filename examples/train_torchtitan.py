"""A step as torchtitan 0.3 has it (FSDP2, its structured log, a loader of its own): two ranks, a tiny model.

`pip install --no-deps torchtitan`, then `unskew watch -- torchrun --nproc-per-node 2 examples/train_torchtitan.py`; with
`--slow loader` rank 1 waits for its data. torchtitan's own trainer asks for an accelerator.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.observability import structured_logger as sl
from torchtitan.observability.structured_logger.step_state import set_step

parser = argparse.ArgumentParser()
parser.add_argument("--slow", choices=["nothing", "loader"], default="nothing")
parser.add_argument("--slow-from", type=int, default=0, help="step")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--micro-batches", type=int, default=2, help="of a rank in a step")
parser.add_argument("--out", default="titan-out", help="where torchtitan's log goes")
options = parser.parse_args()


def batches(rank: int) -> Iterator[torch.Tensor]:
    random = torch.Generator().manual_seed(rank)
    for number in range(options.steps * options.micro_batches):
        if options.slow == "loader" and rank == 1 and number >= options.slow_from * options.micro_batches:
            time.sleep(0.02)
        yield torch.randint(0, 256, (4, int(torch.randint(16, 129, (), generator=random))), generator=random)


torch.manual_seed(0)
torch.set_num_threads(1)
sl.init_structured_logger(source="trainer", output_dir=options.out)
dist.init_process_group("gloo")
layers = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)]
model = nn.Sequential(nn.Embedding(256, 64), *layers, nn.Linear(64, 256))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for part in (*layers, model):
    fully_shard(part, mesh=mesh)
optimizer, coming, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), batches(dist.get_rank()), list[float]()
for step in range(1, options.steps + 1):
    set_step(step)
    with sl.log_trace_span("step"):
        optimizer.zero_grad()
        group = []
        for _ in range(options.micro_batches):
            with sl.log_trace_span("fetching_batch"):
                group.append(next(coming))
        sl.log_trace_scalar({"local_valid_tokens": sum(one[:, 1:].numel() for one in group)})
        for ids in group:
            with sl.log_trace_span("fwd_bwd"):
                loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                (loss / options.micro_batches).backward()
            losses.append(loss.item())
        with sl.log_trace_span("optim"):
            optimizer.step()
if dist.get_rank() == 0:
    print("losses", json.dumps(losses))
dist.destroy_process_group()
