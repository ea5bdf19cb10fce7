"""Exact gradients for any plan: each layer is summed over all ranks that hold it.

Micro-batch losses are divided by the iteration's target tokens before the backward pass, so a sum is all that is needed,
whatever replica executed which micro-batch. Groups are taken in the plan's order (first layer ascending), the same on every
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from unskew.analytics.core.plan import Plan
from unskew.collector.events import Span
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.rank.comm import Comm
from unskew.runtime.rank.device import Device
from unskew.runtime.rank.progress import RankProgress


def reduce_gradients(
    plan: Plan,
    layers: Mapping[int, HeldLayer],
    comm: Comm,
    *,
    device: Device,
    progress: RankProgress,
    label: Callable[..., Span],
) -> list[Span]:
    """Leave the reduced gradients in the layers' parameters; one span per collective. Raises `PeerLost`."""
    spans = []
    for ranks, group in plan.gradient_groups:
        if comm.rank not in ranks:
            continue
        parameters = [parameter for layer in group for parameter in layers[layer].parameters]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if len(ranks) == 1:
            continue
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None]).to("cpu")
        start_us = device.now_us()
        with progress.waiting("collective"):
            comm.all_reduce(flat, ranks)
        spans.append(
            label(
                kind="all_reduce", start_us=start_us, wall_us=device.now_us() - start_us, first_layer=group[0],
                n_layers=len(group), group="-".join(map(str, ranks)), bytes=flat.nbytes,
            )
        )  # fmt: skip
        offset = 0
        for parameter in parameters:
            part = flat[offset : offset + parameter.numel()].view_as(parameter)
            parameter.grad = part.to(parameter.device, copy=True)
            offset += parameter.numel()
    return spans
