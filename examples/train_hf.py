"""A Hugging Face Trainer that knows nothing of Unskew: two ranks, a tiny model with random weights, two micro-batches a step.

`unskew watch -- torchrun --nproc-per-node 2 examples/train_hf.py [--slow forward|backward]` watches it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from slow_rank import slow_down
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--slow", choices=["nothing", "forward", "backward"], default="nothing")
parser.add_argument("--slow-from", type=int, default=40, help="step")
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--micro-batches", type=int, default=2, help="of a rank in a step")
parser.add_argument("--out", default="own-hf", help="folder")
options = parser.parse_args()


def collate(rows: list[torch.Tensor]) -> dict[str, Any]:
    ids = pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(), "labels": ids}


set_seed(0)
torch.set_num_threads(1)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
)
slow_down(model.model.layers, options.slow, options.slow_from * options.micro_batches)
arguments = TrainingArguments(
    output_dir=options.out, max_steps=options.steps, per_device_train_batch_size=4, use_cpu=True, ddp_backend="gloo",
    gradient_accumulation_steps=options.micro_batches, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
    lr_scheduler_type="constant",
)  # fmt: skip
rows = [torch.randint(0, 256, (int(length),)) for length in torch.randint(16, 129, (512,))]
trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate)
trainer.train()
if trainer.is_world_process_zero():
    print("losses", json.dumps([row["loss"] for row in trainer.state.log_history if "loss" in row]))
