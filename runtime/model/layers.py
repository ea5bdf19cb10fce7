"""The layers a rank holds, each with its optimiser: the state that moves when a plan moves a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from unskew.analytics.shards.parts import Part, Piece
from unskew.runtime.model.cuts import UNCUT
from unskew.runtime.model.model import Layer, build_layer, cut_of
from unskew.runtime.model.own_model import OwnLayer, OwnModel
from unskew.runtime.size import ModelSize


class HeldLayer:
    """A layer's parameters and AdamW state, or a `part` of them. `steps` counts its optimiser steps: the version that
    distinguishes a current copy from a stale one; `step_counts` is the same as the optimiser has it, of each parameter."""

    def __init__(
        self,
        size: ModelSize | OwnModel,
        layer: int,
        *,
        seed: int | None,
        dtype: torch.dtype,
        device: torch.device,
        part: Part | None = None,
    ) -> None:
        self.part = part
        self.module: Layer | OwnLayer
        if isinstance(size, OwnModel):
            self.module = size.build(layer, dtype=dtype, device=device, part=part)
        else:
            self.module = build_layer(size, layer, seed=seed, dtype=dtype, device=device, part=part)
        self.parameters: list[torch.nn.Parameter] = list(self.module.parameters())
        names = [name for name, _ in self.module.named_parameters()]
        own = size.layers[layer].cuts if isinstance(size, OwnModel) else None
        self._cuts = [cut_of(name, size) if isinstance(size, ModelSize) else (own or {}).get(name, UNCUT) for name in names]
        self._sizes: dict[Piece | None, int] = {}
        self.steps = 0
        # What the parameters' gradients are the sum of: micro-batch -> the plan version under which that one was computed;
        # and, of the last layer, the loss of each of them, which is reduced and kept together with the gradient.
        self.summed: dict[int, int] = {}
        self.losses: dict[int, float] = {}
        self._has_losses = layer == size.n_layers - 1
        # The moments exist from the start so that a layer can be moved, or filled by a move, before its first step.
        moments = torch.zeros_like if seed is not None else torch.empty_like
        self._exp_avg, self._exp_avg_sq = ([moments(parameter) for parameter in self.parameters] for _ in range(2))
        self.step_counts = [torch.zeros((), dtype=torch.float32, device=device) for _ in self.parameters]

    def step(self) -> None:
        """Apply the gradients that the parameters hold, then drop them."""
        # torch.optim.AdamW does just this, but its first step imports torch._dynamo: a second of work in each rank.
        with torch.no_grad():
            adamw(
                list[Tensor](self.parameters),
                [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters],
                self._exp_avg,
                self._exp_avg_sq,
                [],
                self.step_counts,
                fused=True,
                amsgrad=False,
                beta1=0.9,
                beta2=0.95,
                lr=1e-3,
                weight_decay=0.1,
                eps=1e-8,
                maximize=False,
            )
        self.steps += 1
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.summed, self.losses = {}, {}

    def add(self, micro_batch: int, plan_version: int, loss: float | None) -> None:
        """The gradient of `micro_batch` has been added; `loss` where this rank computed it."""
        self.summed[micro_batch] = plan_version
        if self._has_losses and loss is not None:
            self.losses[micro_batch] = loss

    @property
    def uncut(self) -> list[torch.nn.Parameter]:
        """What every member of a tensor-parallel group has."""
        return [parameter for parameter, cut in zip(self.parameters, self._cuts, strict=True) if cut == UNCUT]

    def pack_sum(self, n_micro_batches: int, piece: Piece | None = None) -> Tensor:
        """The gradients of a piece (None = all that is here) as one flat tensor on the CPU, and behind those of the last layer
        the losses; 0 where there is none."""
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters]
        flat = torch.cat([view.reshape(-1) for view in self._views(piece, gradients)]).to("cpu")
        if not self._sums_losses(piece):
            return flat
        # Exact in the run's number format: each is the loss of one micro-batch, and all but one holder add 0.
        losses = [self.losses.get(number, 0.0) for number in range(n_micro_batches)]
        return torch.cat((flat, torch.tensor(losses, dtype=flat.dtype)))

    def unpack_sum(self, flat: Tensor, summed: Mapping[int, int], piece: Piece | None = None) -> None:
        """The inverse of `pack_sum`: take over a gradient that is the sum of the micro-batches `summed`."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        offset = _fill(self._views(piece, gradients), flat)
        self.summed = dict(summed)
        if self._sums_losses(piece):
            self.losses = dict(enumerate(flat[offset:].tolist()))

    def sum_size(self, n_micro_batches: int, piece: Piece | None = None) -> int:
        """Elements of `pack_sum`."""
        return self._elements(piece) + (n_micro_batches if self._sums_losses(piece) else 0)

    def _sums_losses(self, piece: Piece | None) -> bool:
        return self._has_losses and (piece is None or piece.uncut)

    def pack(self, piece: Piece | None = None) -> Tensor:
        """Parameters and both moments of a piece as one flat tensor, the same order on every rank."""
        return torch.cat([view.reshape(-1) for view in self._state(piece)])

    def saved(self) -> Tensor:
        """What `pack` gives of all that is here, in the host's memory."""
        flat, views = self.room_for(), self._state(None)
        for view, place in zip(views, torch.split(flat, [view.numel() for view in views]), strict=True):
            place.copy_(view.reshape(-1))
        return flat

    def unpack(self, flat: Tensor, piece: Piece | None = None) -> None:
        """The inverse of `pack`: take over another rank's state."""
        _fill(self._state(piece), flat)

    def copy_from(self, other: HeldLayer, piece: Piece) -> None:
        """Take over the state of a piece that `other`, another part of this layer, has as well."""
        for own, there in zip(self._state(piece), other._state(piece), strict=True):
            own.copy_(there)

    def stepped(self, steps: int) -> None:
        """All that is here is what it was after so many optimiser steps."""
        for count in self.step_counts:
            count.fill_(float(steps))
        self.steps = steps
        self.clear_gradients()

    def packed_size(self, piece: Piece | None = None) -> int:
        """Elements of `pack`."""
        return 3 * self._elements(piece)

    def _elements(self, piece: Piece | None) -> int:
        if piece not in self._sizes:
            self._sizes[piece] = sum(view.numel() for view in self._views(piece, [one.detach() for one in self.parameters]))
        return self._sizes[piece]

    def room_for(self, piece: Piece | None = None) -> Tensor:
        """A tensor on the CPU that takes what `pack` gives of a piece (None = all that is here)."""
        return torch.empty(self.packed_size(piece), dtype=self.parameters[0].dtype)

    def _state(self, piece: Piece | None) -> list[Tensor]:
        return [
            view
            for tensors in (self.parameters, self._exp_avg, self._exp_avg_sq)
            for view in self._views(piece, [tensor.detach() for tensor in tensors])
        ]

    def _views(self, piece: Piece | None, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a piece has of tensors that are one of each parameter; a change of it is one of theirs."""
        return [cut.view(tensor, self.part, piece) for cut, tensor in zip(self._cuts, tensors, strict=True)]


def _fill(views: Sequence[Tensor], flat: Tensor) -> int:
    """Copy a flat tensor into views of others; how much of it they took."""
    offset = 0
    for view in views:
        view.copy_(flat[offset : offset + view.numel()].view_as(view))
        offset += view.numel()
    return offset
