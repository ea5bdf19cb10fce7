"""Models as a planner sees them: what each unit (embedding, block, head) costs, holds and keeps.

Two kinds of profile, both for micro-batches of one sequence of 4,096 tokens:

* measured: per-layer times as the authors of AdaPtis/OctoPipe publish them with their simulator SimPipe (llama3-8b,
  llama3-70b);
* stated: times from floating-point operations at one rate for everything. A block's forward takes 2 operations per token and
  active weight, and causal attention 2 x tokens x heads x (width of keys + width of values) / 2 per token; its B takes the same
  for the weights' part and twice as much for attention, its W the weights' part. Mamba's scan adds 9 x inner width x state size
  per token. What the memory system costs is not in it: real Mamba and MoE layers are slower than stated.

A split of a unit's forward into a linear and a quadratic part in the tokens serves packed micro-batches of other lengths
(`UnitCost.scaled`, as ResiHP's group does: W has no quadratic part).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from unskew.analytics.pipeline.dag import Array

TOKENS = 4096
FLOPS_PER_US = 400e6  # 400 TFLOP/s: what large kernels reach on one H100; only ratios of costs matter to a plan


class UnitCost(msgspec.Struct, frozen=True, kw_only=True):
    """One unit on a healthy device: microseconds of F, B, W for one sequence of `TOKENS`; of them, what is quadratic in the
    tokens; its parameters; bytes of activations that it keeps."""

    name: str
    f_us: float
    b_us: float
    w_us: float
    f_quadratic_us: float = 0.0
    b_quadratic_us: float = 0.0
    parameters: int = 0
    kept_bytes: float = 0.0

    def scaled(self, linear: float, quadratic: float) -> tuple[float, float, float]:
        """(F, B, W) of a micro-batch with `linear` = tokens / TOKENS and `quadratic` = sum of squared lengths / TOKENS^2."""
        f = (self.f_us - self.f_quadratic_us) * linear + self.f_quadratic_us * quadratic
        b = (self.b_us - self.b_quadratic_us) * linear + self.b_quadratic_us * quadratic
        return f, b, self.w_us * linear


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The units in order: embedding, blocks, head. `source`: where the figures come from."""

    name: str
    units: tuple[UnitCost, ...]
    source: str

    def costs_us(self) -> Array:
        """F, B, W of each unit: [kind, unit]."""
        return np.array([(unit.f_us, unit.b_us, unit.w_us) for unit in self.units]).T


def _measured(
    name: str, ms: dict[str, str], *, hidden: int, vocabulary: int, blocks: int, block_parameters: int
) -> ModelProfile:
    """A profile of published times: `ms` has "F B W" per unit in milliseconds."""

    def unit(of: str, parameters: int, kept: float) -> UnitCost:
        f, b, w = (1000.0 * float(part) for part in ms[of].split())
        return UnitCost(name=of, f_us=f, b_us=b, w_us=w, parameters=parameters, kept_bytes=kept)

    width = TOKENS * hidden
    units = (
        unit("embedding", vocabulary * hidden, 2.0 * width),
        *[unit("block", block_parameters, 34.0 * width)] * blocks,
        unit("head", vocabulary * hidden, 4.0 * TOKENS * vocabulary),
    )
    return ModelProfile(name=name, units=units, source="SimPipe's published profile: sequence 4096, micro-batch 1")


class _Stated:
    """Builds units from a model's published dimensions."""

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden

    def unit(
        self,
        name: str,
        *,
        weights: float,
        active: float | None = None,
        pairs: float = 0.0,
        scan: float = 0.0,
        kept: float = 17.0,
    ) -> UnitCost:
        """`weights` held, `active` of them used per token; `pairs`: operations per pair of tokens before the causal half;
        `scan`: further operations per token; `kept`: bytes per token and hidden value."""
        linear = (2.0 * (weights if active is None else active) + scan) * TOKENS / FLOPS_PER_US
        quadratic = pairs / 2 * TOKENS * TOKENS / FLOPS_PER_US
        return UnitCost(
            name=name,
            f_us=linear + quadratic,
            b_us=linear + 2 * quadratic,
            w_us=linear,
            f_quadratic_us=quadratic,
            b_quadratic_us=2 * quadratic,
            parameters=round(weights),
            kept_bytes=kept * TOKENS * self.hidden,
        )

    def embedding(self, vocabulary: int) -> UnitCost:
        return self.unit("embedding", weights=vocabulary * self.hidden, active=0.0, kept=2.0)

    def head(self, vocabulary: int) -> UnitCost:
        return self.unit("head", weights=vocabulary * self.hidden, kept=4.0 * vocabulary / self.hidden)

    def attention(self, heads: int, groups: int, width: int) -> UnitCost:
        weights = self.hidden * width * (2 * heads + 2 * groups)
        return self.unit("attention", weights=weights, pairs=4.0 * heads * width)

    def latent_attention(self, heads: int, *, query: int, latent: int, nope: int, rope: int, value: int) -> UnitCost:
        weights = self.hidden * (query + latent + rope) + query * heads * (nope + rope)
        weights += latent * heads * (nope + value) + heads * value * self.hidden
        return self.unit("attention", weights=weights, pairs=2.0 * heads * (nope + rope + value))

    def mlp(self, ffn: int, matrices: int = 3) -> UnitCost:
        return self.unit("mlp", weights=matrices * self.hidden * ffn)

    def experts(self, ffn: int, *, routed: int, used: int, shared: int = 0) -> UnitCost:
        expert = 3.0 * self.hidden * ffn
        router = self.hidden * routed
        return self.unit("moe", weights=expert * (routed + shared) + router, active=expert * (used + shared) + router)

    def mamba(self, inner: int, state: int, groups: int = 1) -> UnitCost:
        weights = self.hidden * (2 * inner + 2 * groups * state) + inner * self.hidden
        return self.unit("mamba", weights=weights, scan=9.0 * inner * state)


def joined(name: str, *parts: UnitCost) -> UnitCost:
    """Units that cannot be parted, as one."""
    sums = {field: sum(getattr(part, field) for part in parts) for field in UnitCost.__struct_fields__ if field != "name"}
    return UnitCost(name=name, **sums)


def _nemotron_h_8b() -> ModelProfile:
    of = _Stated(4096)
    kinds = {"M": of.mamba(8192, 128, 8), "-": of.mlp(21504, 2), "*": of.attention(32, 8, 128)}
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    units = (of.embedding(131072), *(kinds[letter] for letter in pattern), of.head(131072))
    return ModelProfile(
        name="nemotron-h-8b",
        units=units,
        source="dimensions and layer pattern of nvidia/Nemotron-H-8B-Base-8K's config.json (arXiv 2504.03624); times stated",
    )


def _jamba_52b() -> ModelProfile:
    of = _Stated(4096)
    blocks = []
    for layer in range(32):
        mixer = of.attention(32, 8, 128) if layer % 8 == 4 else of.mamba(8192, 16)
        after = of.experts(14336, routed=16, used=2) if layer % 2 == 1 else of.mlp(14336)
        blocks.append(joined(f"{mixer.name}+{after.name}", mixer, after))
    return ModelProfile(
        name="jamba-52b",
        units=(of.embedding(65536), *blocks, of.head(65536)),
        source="dimensions of ai21labs/Jamba-v0.1's config.json (arXiv 2403.19887); times stated",
    )


def _gemma2_9b() -> ModelProfile:
    of = _Stated(3584)
    block = joined("block", of.attention(16, 8, 256), of.mlp(14336))
    return ModelProfile(
        name="gemma2-9b",
        units=(of.embedding(256000), *[block] * 42, of.head(256000)),
        source="dimensions of google/gemma-2-9b's config.json (arXiv 2408.00118); sliding windows not modelled; times stated",
    )


def _deepseek_like() -> ModelProfile:
    of = _Stated(7168)
    attention = of.latent_attention(128, query=1536, latent=512, nope=128, rope=64, value=128)
    dense = joined("dense block", attention, of.mlp(18432))
    sparse = joined("moe block", attention, of.experts(2048, routed=256, used=8, shared=1))
    return ModelProfile(
        name="deepseek-like",
        units=(of.embedding(129280), *[dense] * 3, *[sparse] * 58, of.head(129280)),
        source="dimensions of DeepSeek-V3's config.json (arXiv 2412.19437), without multi-token prediction; times stated",
    )


PROFILES: dict[str, Callable[[], ModelProfile]] = {
    "llama3-8b": lambda: _measured(
        "llama3-8b",
        {"block": "1.737 1.967 1.083", "embedding": "3.54 2.11 0", "head": "10.39 7.46 0.04"},
        hidden=4096,
        vocabulary=128256,
        blocks=32,
        block_parameters=218_112_000,
    ),
    "llama3-70b": lambda: _measured(
        "llama3-70b",
        {"block": "5.599 6.844 4.366", "embedding": "4.37 2.09 0", "head": "11.45 18.61 7.43"},
        hidden=8192,
        vocabulary=128256,
        blocks=80,
        block_parameters=855_654_400,
    ),
    "nemotron-h-8b": _nemotron_h_8b,
    "jamba-52b": _jamba_52b,
    "gemma2-9b": _gemma2_9b,
    "deepseek-like": _deepseek_like,
}


class UnknownModelError(ValueError):
    """An unknown profile; the message is one sentence."""


def model_profile(name: str) -> ModelProfile:
    """The profile of this name. Raises `UnknownModelError`."""
    if name not in PROFILES:
        raise UnknownModelError(f"model {name} is not known, allowed: {', '.join(PROFILES)}")
    return PROFILES[name]()
