"""How long the sequences of a batch are, as far as its tensors show it without reading their values from a device.

Padding counts: it is computed too. So the shape decides, unless the batch is packed and says where its documents begin
(`cu_seqlens`, or `position_ids` that begin anew), which is read from tensors in the host's memory only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

PACKED = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q")
TOKENS = ("input_ids", "attention_mask", "labels", "position_ids")
RARER = frozenset({*PACKED, "position_ids"})
MOST_NESTED = 3


def lengths_of(batch: Any) -> tuple[int, ...]:
    """The sequence lengths of a batch (any nesting of tensors); of one that holds no tokens its number of values, as a single
    length; () = nothing that has a length."""
    if (kind := type(batch)).__name__ == "Tensor" and kind.__module__ == "torch":  # and not a mapping of some
        of_tokens = len(shape := batch.shape) == 2 and not batch.is_floating_point()
        return (shape[1],) * shape[0] if of_tokens else (shape.numel(),) if shape else ()
    if isinstance(batch, Mapping) and RARER.isdisjoint(batch):  # the usual case, in a microsecond
        for name in TOKENS:
            if name in batch and getattr(batch[name], "ndim", 0) == 2:
                rows, length = batch[name].shape
                return (int(length),) * int(rows)
    tensors = _tensors(batch, "", MOST_NESTED)
    named = {name: tensor for name, tensor in reversed(tensors) if name}
    if (packed := next((named[name] for name in PACKED if name in named and _readable(named[name])), None)) is not None:
        return tuple(end - begin for begin, end in pairwise(packed.tolist()) if end > begin)
    positions = named.get("position_ids")
    if positions is not None and _readable(positions) and positions.dim() == 2 and positions.shape[0] == 1:
        return _between_zeros(positions[0].tolist())
    tokens = [named[name] for name in TOKENS if name in named] + [tensor for _, tensor in tensors if _is_tokens(tensor)]
    for tensor in tokens:
        if tensor.dim() == 2:
            return (int(tensor.shape[1]),) * int(tensor.shape[0])
    return (int(tensors[0][1].numel()),) if tensors else ()


def _tensors(value: Any, name: str, depth: int) -> list[tuple[str, Any]]:
    """(name in its mapping, tensor), in order."""
    if hasattr(value, "numel") and hasattr(value, "dim"):
        return [(name, value)] if value.dim() else []
    if depth and isinstance(value, Mapping):
        return [found for key, one in value.items() for found in _tensors(one, str(key), depth - 1)]
    if depth and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [found for one in value[:8] for found in _tensors(one, "", depth - 1)]
    return []


def _is_tokens(tensor: Any) -> bool:
    return bool(tensor.dim() == 2 and not tensor.is_floating_point())


def _readable(tensor: Any) -> bool:
    """Whether its values can be read without waiting for a device."""
    return bool(tensor.device.type == "cpu")


def _between_zeros(positions: Sequence[int]) -> tuple[int, ...]:
    begins = [index for index, position in enumerate(positions) if position == 0]
    return tuple(end - begin for begin, end in pairwise([*begins, len(positions)])) if begins else (len(positions),)
