"""Tensor parallelism on real cores: against a uniform one written by hand, and what it takes to move layers and cut them anew.

Processes of this machine with Gloo, one thread each. Both take turns in the same processes, on the same
weights; what counts is the processor time of all members, for where ranks share cores the wall clock measures the cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from unskew.analytics.core.layout import plan_from_partition, uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.shards.parts import Part, parts_by
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.benchmarks.runtime.processes import CPU, Files, in_processes
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.model.model import Layer, build_layer
from unskew.runtime.model.tensor_parallel import cross_entropy
from unskew.runtime.rank.comm import Comm, Team
from unskew.runtime.rank.migrate import settle_in
from unskew.runtime.rank.progress import RankProgress
from unskew.runtime.size import VOCABULARY, ModelSize

SMALL = ModelSize(n_layers=4, dim=512, heads=8)
LARGE = ModelSize(n_layers=12, dim=512, heads=8)
LENGTHS = (512,)


def figures(bench: Bench) -> list[Figure]:
    """Both: a chunk's passes, and moves of layers of a 39M model with Adam."""
    parts = bench.steps("tensor parallelism", ("passes", "move", "cut"))
    found: list[Figure] = []
    for part in parts:
        found += {"passes": _passes, "move": _move, "cut": _cut}[part]()
    return found


# --- passes ----------------------------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reduce: Callable[[Tensor], None]) -> Tensor:
        ctx.reduce = reduce
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.reduce(dy)
        return dy, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, reduce: Callable[[Tensor], None]) -> Tensor:
        reduce(x)
        return x

    @staticmethod
    def backward(_: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def _by_hand(layers: Sequence[Layer], tokens: Tensor, targets: Tensor, reduce: Callable[[Tensor], None]) -> Tensor:
    """The same maths as one writes it for two equal shards: embedding, blocks and head of `torch.nn.functional`, no parts."""
    first, last = layers[0], layers[-1]
    assert first.embedding is not None
    assert last.head is not None
    assert last.final_norm is not None
    low, high = first.vocabulary.start, first.vocabulary.stop
    absent = (tokens < low) | (tokens >= high)
    x = functional.embedding((tokens - low).clamp(0, high - low - 1), first.embedding.weight)
    x = _Sum.apply(x * ~absent[:, None], reduce)  # type: ignore[no-untyped-call]
    n, heads, width = len(tokens), first.heads, first.width
    cos, sin = _turn_of(n, width)

    def turned(part: Tensor) -> Tensor:
        a, b = part.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = _Copy.apply(functional.rms_norm(x, (x.shape[-1],), weight, 1e-5), reduce)  # type: ignore[no-untyped-call]
        return y

    for block in layers:
        qkv = functional.linear(normed(x, block.attention_norm), block.qkv.weight).view(n, 3, heads, width).permute(1, 2, 0, 3)
        out = functional.scaled_dot_product_attention(turned(qkv[0])[None], turned(qkv[1])[None], qkv[2][None], is_causal=True)
        mixed = functional.linear(out[0].transpose(0, 1).reshape(n, -1), block.out.weight)
        x = x + _Sum.apply(mixed, reduce)  # type: ignore[no-untyped-call]
        gate, up = functional.linear(normed(x, block.ffn_norm), block.gate_up.weight).chunk(2, dim=-1)
        x = x + _Sum.apply(functional.linear(functional.silu(gate) * up, block.down.weight), reduce)  # type: ignore[no-untyped-call]
    logits = functional.linear(normed(x, last.final_norm), last.head.weight)
    most = logits.detach().amax(1)
    reduce(most)  # a sum is as good a shift as the largest one
    exponents = (logits - most[:, None] / 2).exp()
    total = _Sum.apply(exponents.sum(1), reduce)  # type: ignore[no-untyped-call]
    own = (targets >= low) & (targets < high)
    picked = logits.gather(1, (targets - low).clamp(0, high - low - 1)[:, None])[:, 0] * own
    return (total.log() + most / 2 - _Sum.apply(picked, reduce)).sum()  # type: ignore[no-untyped-call,no-any-return]


@cache
def _turn_of(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(tokens), 10_000.0 ** (-torch.arange(0, width, 2) / width))
    return angles.cos(), angles.sin()


class _Passes(msgspec.Struct):
    """Processor seconds of each turn, ours and by hand, and the largest relative difference of their losses."""

    ours: list[float]
    by_hand: list[float]
    apart: float


def _turns(files: Files, rank: int, parts: Sequence[Part | None], turns: int) -> _Passes:
    group = (0, 1)
    comm = Comm(files, 0, rank, group, [group])
    comm.build()
    team = Team(comm, group, RankProgress())
    layers = [
        build_layer(SMALL, number, seed=0, dtype=torch.float32, device=CPU, part=parts[rank])
        for number in range(SMALL.n_layers)
    ]
    tokens, targets = torch.randint(0, 256, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    plain = comm._groups[group]  # by hand means without what is ours

    def ours() -> Tensor:
        y = tokens
        for layer in layers:
            y = layer(y, LENGTHS, None, team)
        return cross_entropy(y, targets, layers[-1].vocabulary, team)

    methods: dict[str, Callable[[], Tensor]] = {
        "ours": ours,
        "by_hand": partial(_by_hand, layers, tokens, targets, lambda x: plain.allreduce([x]).wait()),
    }
    spent: dict[str, list[float]] = {name: [] for name in methods}
    losses = {}
    for _ in range(turns):
        for name, method in methods.items():
            comm.all_gather(torch.zeros(1))
            began = time.process_time()
            loss = method()
            loss.backward()  # type: ignore[no-untyped-call]
            spent[name].append(time.process_time() - began)
            losses[name] = float(loss.detach())
    return _Passes(spent["ours"], spent["by_hand"], abs(losses["ours"] / losses["by_hand"] - 1))


def _passes() -> list[Figure]:
    found = []
    for name, parts in (("4/4 heads", parts_by([4, 4])), ("5/3 heads", parts_by([5, 3]))):
        ranks = in_processes(2, partial(_turns, parts=parts, turns=24))
        if None in ranks:
            found.append(figure(f"tensor parallelism: {name}", None, "", better="lower", note="the processes did not end"))
            continue
        pairs = [(sum(rank.ours[turn] for rank in ranks), sum(rank.by_hand[turn] for rank in ranks)) for turn in range(4, 24)]
        ratios = sorted(ours / by_hand for ours, by_hand in pairs)
        found.append(
            figure(
                f"tensor parallelism: forward and backward, {name}, of a uniform one by hand", median(ratios), "", bar=1.2,
                better="lower",
                note=f"processor time of both members, pairs in turn, middle half {ratios[5]:.2f} to {ratios[14]:.2f}; ours "
                f"{1e3 * median(ours for ours, _ in pairs):.0f} ms; losses differ by {max(rank.apart for rank in ranks):.0e}",
            )
        )  # fmt: skip
    return found


# --- moves -----------------------------------------------------------------------------------------------------------


def _changed(files: Files, rank: int, plans: Sequence[Plan], times: int) -> list[tuple[float, int]]:
    """(seconds, bytes that came) of each change to and fro between two plans."""
    comm = Comm(files, 0, rank, plans[0].ranks, [])
    comm.build()
    layers: dict[int, HeldLayer] = {}
    before: dict[int, list[HeldLayer]] = {}

    def make(number: int, part: Part | None, seed: int | None = None) -> HeldLayer:
        return HeldLayer(LARGE, number, seed=seed, dtype=torch.float32, device=CPU, part=part)

    settle_in(comm, plans[0], layers, before, partial(make, seed=0), current=None, committed=0)
    for layer in layers.values():
        layer.stepped(1)
    found = []
    for turn in range(times):
        old, plan = plans[turn % 2], plans[(turn + 1) % 2]
        current = {role.rank: {number: [role.part] for number in role.layers} for role in old.roles}
        comm.all_gather(torch.zeros(1))
        began = time.monotonic()
        received = settle_in(comm, plan, layers, before, make, current=current, committed=1)
        found.append((time.monotonic() - began, received))
        before.clear()
        for number in [number for number in layers if number not in plan.role_of[rank].layers]:
            del layers[number]
    return found


def _moved(name: str, plans: tuple[Plan, Plan], bar_ms: float, due: Callable[[int], float]) -> list[Figure]:
    ranks = in_processes(len(plans[0].ranks), partial(_changed, plans=plans, times=13))
    if None in ranks:
        return [figure(name, None, "ms", better="lower", note="the processes did not end")]
    changes = [(max(rank[turn][0] for rank in ranks), sum(rank[turn][1] for rank in ranks)) for turn in range(1, 13)]
    ms = sorted(1e3 * seconds for seconds, _ in changes)
    state = 3 * 4 * sum(parameter.numel() for parameter in nn.ModuleList(_middle_layer()).parameters())
    return [
        figure(
            f"tensor parallelism: {name}, 39M parameters with Adam", median(ms), "ms", bar=bar_ms, better="lower",
            note=f"{len(plans[0].ranks)} processes, slowest of them, median of 12 to and fro, {ms[0]:.0f} to {ms[-1]:.0f} ms",
        ),
        figure(
            f"tensor parallelism: {name}: bytes that travel, of what is moved", changes[0][1] / due(state), "", bar=1.01,
            better="lower", note=f"{changes[0][1] / 1e6:.1f} MB; norms, which every member has, do not travel",
        ),
    ]  # fmt: skip


def _middle_layer() -> list[nn.Module]:
    return [HeldLayer(LARGE, 1, seed=None, dtype=torch.float32, device=CPU).module]


def _move() -> list[Figure]:
    """One layer from the first stage to the second, of two stages."""
    sizes = ((6, 6), (5, 7))
    one, other = (
        plan_from_partition(plan_version=0, n_layers=12, schedule="1f1b", members=[[0, 1]], layers=[layers], micro_batches=[2])
        for layers in sizes
    )
    return _moved("a layer moves to the other stage", (one, other), 60, float)


def _cut() -> list[Figure]:
    """Two stages of two members, all layers: one head of eight, and as much of the rest, changes hands."""
    even = uniform_plan(tp=2, pp=2, dp=1, n_layers=12, micro_batches=2)
    parts = parts_by([5, 3])
    uneven = msgspec.structs.replace(
        even, roles=tuple(msgspec.structs.replace(role, part=parts[role.shard]) for role in even.roles)
    )
    # An eighth of each layer, of the embedding and of the head; 12 bytes a parameter, for Adam has two moments of it.
    outer = 12 * 2 * VOCABULARY * LARGE.dim
    return _moved("4/4 -> 5/3 heads on both stages", (even, uneven), 200, lambda layer: (LARGE.n_layers * layer + outer) / 8)
