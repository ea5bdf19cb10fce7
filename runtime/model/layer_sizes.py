"""What the layers of a run's model take: known before it starts, without torch where the model is ours."""

from __future__ import annotations

import math
from collections.abc import Sequence

from unskew.analytics.core.cost import GradientSync
from unskew.analytics.pipeline.memory import LayerMemory
from unskew.runtime.options import RunOptions

_ID_BYTES = 8
"""Of a token's."""


def element_bytes(options: RunOptions) -> int:
    """Of a number in the run's format."""
    return 8 if options.dtype == "float64" else 4


def parameters_of(options: RunOptions) -> Sequence[int]:
    """How many each layer has."""
    if options.model is None:
        return [options.size.parameters(layer) for layer in range(options.n_layers)]
    from unskew.runtime.model.own_model import own_model  # noqa: PLC0415 - torch

    model = own_model(options.model, options.seed)
    return [model.parameters(layer) for layer in range(options.layers)]


def sync_of(options: RunOptions) -> GradientSync | None:
    """The sizes of the gradients that are summed, where that is priced."""
    if not options.prices_sums:
        return None
    layer_bytes = tuple(element_bytes(options) * count for count in parameters_of(options))
    return GradientSync(layer_bytes=layer_bytes, bucket_bytes=options.bucket_bytes)


def memory_of(options: RunOptions) -> LayerMemory:
    """What ranks keep of layers; what somebody's own keep for their backward pass was measured."""
    each = element_bytes(options)
    cut = options.kept_cut or (0,) * len(options.kept)
    kept = [*zip(options.kept, cut, strict=True)] or [options.size.activations(layer) for layer in range(options.n_layers)]
    return LayerMemory(
        gradient_bytes=tuple(each * count for count in parameters_of(options)),
        token_bytes=tuple(float(each * whole) for whole, _ in kept),
        cut_token_bytes=tuple(float(each * cut) for _, cut in kept),
        given_bytes=(float(_ID_BYTES), *(float(each * math.prod(shape)) for shape in options.given_on[:-1])),
        by_tokens=options.model is None,  # where tokens are what between layers is made of, only ours is known to be so
        bucket_bytes=options.bucket_bytes,
    )
