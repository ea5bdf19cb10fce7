"""A Lightning module under DDP that knows nothing of Unskew: two ranks, a tiny model with random weights.

`unskew watch -- torchrun --nproc-per-node 2 examples/train_lightning.py [--slow forward|backward]` watches it.
"""

from __future__ import annotations

import argparse
import json

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from slow_rank import slow_down
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--slow", choices=["nothing", "forward", "backward"], default="nothing")
parser.add_argument("--slow-from", type=int, default=40, help="step")
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--micro-batches", type=int, default=2, help="of a rank in a step")
options = parser.parse_args()


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out, self.losses = nn.Embedding(256, 64), nn.Linear(64, 256), list[float]()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        x = self.words(batch[:, :-1])
        for layer in self.layers:
            x = layer(x)
        loss = nn.functional.cross_entropy(self.out(x).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0, verbose=False)
torch.set_num_threads(1)
model = Model()
slow_down(model.layers, options.slow, options.slow_from * options.micro_batches)
rows = [torch.randint(0, 256, (int(length),)) for length in torch.randint(16, 129, (2048,))]
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), max_steps=options.steps, logger=False,
    accumulate_grad_batches=options.micro_batches, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, DataLoader(rows, batch_size=4, shuffle=True, collate_fn=lambda of: pad_sequence(of, batch_first=True)))
if trainer.is_global_zero:
    print("losses", json.dumps(model.losses))
