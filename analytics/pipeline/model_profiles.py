"""Models as a planner sees them: what each unit (embedding, block, head) costs, holds and keeps (data/models.toml).

Two kinds of times, both for micro-batches of one sequence of 4,096 tokens:

* measured: per-layer times as the authors of AdaPtis/OctoPipe publish them with their simulator SimPipe (llama3-8b,
  llama3-70b);
* stated: times from floating-point operations at one rate for everything. A block's forward takes 2 operations per token and
  active weight, and causal attention 2 x tokens x heads x (width of keys + width of values) / 2 per token; its B takes the same
  for the weights' part and twice as much for attention, its W the weights' part. Mamba's scan adds 9 x inner width x state size
  per token. What the memory system costs is not in it: real Mamba and MoE layers are slower than stated.
"""

from __future__ import annotations

import msgspec
import numpy as np

from unskew.analytics.pipeline.dag import Array
from unskew.data import table

TOKENS = 4096
FLOPS_PER_US = 400e6  # 400 TFLOP/s: what large kernels reach on one H100; only ratios of costs matter to a plan

LEAST_WEIGHT = 0.01
"""Of a mean unit."""


class UnitCost(msgspec.Struct, frozen=True, kw_only=True):
    """One unit on a healthy device: microseconds of F, B, W for one sequence of `TOKENS`; its parameters; bytes of activations
    that it keeps."""

    f_us: float
    b_us: float
    w_us: float
    parameters: int
    kept_bytes: float


class _UnitPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """A part of a unit, by its dimensions; `ms`: measured F, B, W."""

    ms: tuple[float, float, float] | None = None


class Embedding(_UnitPart, frozen=True, kw_only=True, tag="embedding"):
    vocabulary: int

    def stated(self, hidden: int) -> UnitCost:
        return _stated(hidden, weights=self.vocabulary * hidden, active=0.0, kept=2.0)


class Head(_UnitPart, frozen=True, kw_only=True, tag="head"):
    vocabulary: int

    def stated(self, hidden: int) -> UnitCost:
        return _stated(hidden, weights=self.vocabulary * hidden, kept=4.0 * self.vocabulary / hidden)


class Block(_UnitPart, frozen=True, kw_only=True, tag="block"):
    """Attention and MLP as one, measured."""

    parameters: int

    def stated(self, hidden: int) -> UnitCost:
        return _stated(hidden, weights=self.parameters, kept=34.0)


class Attention(_UnitPart, frozen=True, kw_only=True, tag="attention"):
    heads: int
    groups: int
    width: int

    def stated(self, hidden: int) -> UnitCost:
        weights = hidden * self.width * (2 * self.heads + 2 * self.groups)
        return _stated(hidden, weights=weights, pairs=4.0 * self.heads * self.width)


class LatentAttention(_UnitPart, frozen=True, kw_only=True, tag="latent-attention"):
    heads: int
    query: int
    latent: int
    nope: int
    rope: int
    value: int

    def stated(self, hidden: int) -> UnitCost:
        weights = hidden * (self.query + self.latent + self.rope) + self.query * self.heads * (self.nope + self.rope)
        weights += self.latent * self.heads * (self.nope + self.value) + self.heads * self.value * hidden
        return _stated(hidden, weights=weights, pairs=2.0 * self.heads * (self.nope + self.rope + self.value))


class Mlp(_UnitPart, frozen=True, kw_only=True, tag="mlp"):
    ffn: int
    matrices: int = 3

    def stated(self, hidden: int) -> UnitCost:
        return _stated(hidden, weights=self.matrices * hidden * self.ffn)


class Experts(_UnitPart, frozen=True, kw_only=True, tag="experts"):
    ffn: int
    routed: int
    used: int
    shared: int = 0

    def stated(self, hidden: int) -> UnitCost:
        expert, router = 3.0 * hidden * self.ffn, hidden * self.routed
        held, active = expert * (self.routed + self.shared) + router, expert * (self.used + self.shared) + router
        return _stated(hidden, weights=held, active=active)


class Mamba(_UnitPart, frozen=True, kw_only=True, tag="mamba"):
    inner: int
    state: int
    groups: int = 1

    def stated(self, hidden: int) -> UnitCost:
        weights = hidden * (2 * self.inner + 2 * self.groups * self.state) + self.inner * hidden
        return _stated(hidden, weights=weights, scan=9.0 * self.inner * self.state)


def _stated(
    hidden: int, *, weights: float, active: float | None = None, pairs: float = 0.0, scan: float = 0.0, kept: float = 17.0
) -> UnitCost:
    """`weights` held, `active` of them used per token; `pairs`: operations per pair of tokens before the causal half; `scan`:
    further operations per token; `kept`: bytes per token and hidden value."""
    linear = (2.0 * (weights if active is None else active) + scan) * TOKENS / FLOPS_PER_US
    quadratic = pairs / 2 * TOKENS * TOKENS / FLOPS_PER_US
    return UnitCost(
        f_us=linear + quadratic,
        b_us=linear + 2 * quadratic,
        w_us=linear,
        parameters=round(weights),
        kept_bytes=kept * TOKENS * hidden,
    )


LayerPart = Block | Attention | LatentAttention | Mlp | Experts | Mamba


def _cost(part: Embedding | Head | LayerPart, hidden: int) -> UnitCost:
    """By its dimensions; what was measured counts in place of what they say."""
    stated = part.stated(hidden)
    if part.ms is None:
        return stated
    f, b, w = (1000.0 * one for one in part.ms)
    return msgspec.structs.replace(stated, f_us=f, b_us=b, w_us=w)


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the table. `layers`: letters and how often they are repeated; `parts`: what a letter's layer consists of."""

    source: str
    hidden: int
    embedding: Embedding
    head: Head
    layers: tuple[tuple[str, int], ...]
    parts: dict[str, tuple[LayerPart, ...]]

    def units(self) -> tuple[UnitCost, ...]:
        """Embedding, blocks, head."""
        cost = {letter: _joined([_cost(part, self.hidden) for part in parts]) for letter, parts in self.parts.items()}
        blocks = [cost[letter] for letters, times in self.layers for letter in letters * times]
        return (_cost(self.embedding, self.hidden), *blocks, _cost(self.head, self.hidden))

    def costs_us(self) -> Array:
        """F, B, W of each unit: [kind, unit]."""
        return np.array([(unit.f_us, unit.b_us, unit.w_us) for unit in self.units()]).T

    def layer_weights(self) -> tuple[float, ...]:
        """What each unit costs, all kinds of work together, 1 in the mean; for a run's layers (`Plan.layer_weights`), so none
        costs nothing, as an embedding's products do."""
        each = self.costs_us().sum(axis=0)
        each = np.maximum(each, LEAST_WEIGHT * each.mean())
        return tuple((each / each.mean()).round(3).tolist())

    def kept_bytes(self) -> Array:
        """[unit]"""
        return np.array([unit.kept_bytes for unit in self.units()])


def _joined(parts: list[UnitCost]) -> UnitCost:
    """Units that cannot be parted, as one."""
    return UnitCost(**{field: sum(getattr(part, field) for part in parts) for field in UnitCost.__struct_fields__})


MODELS = table("models", dict[str, Model])
