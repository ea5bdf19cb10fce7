"""The layers a rank holds, each with its optimiser: the state that moves when a plan moves a layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unskew.runtime.model.model import Layer, ModelSize, build_layer


class HeldLayer:
    """A layer's parameters and AdamW state. `steps` counts its optimiser steps: the version that distinguishes a current
    copy from a stale one."""

    def __init__(self, size: ModelSize, layer: int, *, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.module: Layer = build_layer(size, layer, seed=seed, dtype=dtype, device=device)
        self.parameters: list[torch.nn.Parameter] = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.steps = 0
        for parameter in self.parameters:
            # The state exists from the start so that a layer can be moved, or filled by a move, before its first step.
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def step(self) -> None:
        """Apply the gradients that the parameters hold, then drop them."""
        self.optimizer.step()
        self.steps += 1
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def pack(self) -> Tensor:
        """Parameters and both moments as one flat tensor, the same order on every rank."""
        return torch.cat([tensor.detach().reshape(-1) for _, tensor in self.named_tensors()])

    def unpack(self, flat: Tensor, steps: int) -> None:
        """The inverse of `pack`: take over another rank's state after `steps` optimiser steps."""
        offset = 0
        with torch.no_grad():
            for _, tensor in self.named_tensors():
                tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
                offset += tensor.numel()
        for parameter in self.parameters:
            self.optimizer.state[parameter]["step"].fill_(float(steps))
        self.steps = steps
        self.clear_gradients()

    @property
    def packed_size(self) -> int:
        """Elements of `pack`."""
        return 3 * sum(parameter.numel() for parameter in self.parameters)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter and its moments, in the order of `pack`."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter
            for moment in ("exp_avg", "exp_avg_sq"):
                yield f"{name}.{moment}", self.optimizer.state[parameter][moment]
