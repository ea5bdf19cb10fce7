"""What a rank keeps in memory: its layers, and activations of micro-batches in flight; and whether it has room for a plan.

Activations of a chunk are kept from the start of its forward to the end of its backward; where the backward pass is split, to
the end of its weights' gradient. A rank that recomputes keeps what layers were given alone, until its backward begins; then the
activations of one layer after the other are there, all of them to the end of W where the backward pass is split. Of what the
members of a group would each have whole a sequence-parallel one keeps its own tokens, all of them from B to W. A layer is kept
with its parameters, both moments and its gradient; while a group's backward pass, which may break, adds to the gradients of its
layers, what it adds is there beside them; and a bucket is summed in a copy. Where a plan follows another one, layers that it
moves are counted on both sides (handover.py). Not counted: buffers of messages, what a chunk needs for a moment, copies that a
checkpoint is written from (in the memory of the host), the allocator's waste.

>>> from unskew.analytics.core.layout import uniform_plan
>>> plan = uniform_plan(tp=1, pp=2, dp=1, n_layers=2, micro_batches=4)
>>> memory = LayerMemory(gradient_bytes=(100, 100), token_bytes=(4.0, 4.0), cut_token_bytes=(0.0, 0.0), bucket_bytes=100)
>>> peak_bytes(plan, memory, tokens=10)
{0: 480.0, 1: 440.0}
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import msgspec
import numpy as np

from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.pipeline.dag import Array, Chunks
from unskew.analytics.pipeline.gradient_sync import MOST_IN_FLIGHT, buckets_of
from unskew.analytics.pipeline.handover import KEPT_WITH_GRADIENT, MOST_MOVING, handed_over
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.analytics.shards.parts import size_of

ROUNDING = 1e-9


class LayerMemory(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Of each whole layer: its gradients, and its activations for each token, those that all members of a tensor-parallel group
    have, and those that they divide. `held_bytes`: what it takes as long as it is there, () = as many times its gradients as
    ours. `given_bytes`: what it is given for each token, which is all that is kept where it is computed again; () = it cannot
    be. `by_tokens`: whether groups can be sequence-parallel. `bucket_bytes`: as in `GradientSync`."""

    gradient_bytes: tuple[int, ...]
    token_bytes: tuple[float, ...]
    cut_token_bytes: tuple[float, ...]
    bucket_bytes: int
    held_bytes: tuple[int, ...] = ()
    given_bytes: tuple[float, ...] = ()
    by_tokens: bool = False

    @staticmethod
    def of_layers(held_bytes: tuple[int, ...]) -> LayerMemory:
        """Where layers are all that is known to take memory."""
        none = (0.0,) * len(held_bytes)
        return LayerMemory(
            gradient_bytes=(0,) * len(held_bytes), token_bytes=none, cut_token_bytes=none, bucket_bytes=0, held_bytes=held_bytes
        )

    @cached_property
    def held(self) -> Array:
        """[layer]: parameters, moments and gradient."""
        return np.array(self.held_bytes or [(KEPT_WITH_GRADIENT + 1) * one for one in self.gradient_bytes], dtype=np.float64)

    def added(self, members: int) -> Array:
        """[layer]: what a chunk of a group of so many adds to the gradients, beside them; one rank adds to them as it goes."""
        return np.array(self.gradient_bytes, dtype=np.float64) * (members > 1)

    @cached_property
    def of_layers_alone(self) -> bool:
        """Whether nothing is known to come and go."""
        return not any(self.gradient_bytes) and not any(self.token_bytes) and not any(self.cut_token_bytes)

    def kept(self, share: float, tokens: int, parts: int = 1) -> Array:
        """[layer]: the activations of a micro-batch, of a part of the layer; between what is cut the tokens are divided in so
        many `parts`."""
        return _part(tokens, parts) * np.array(self.token_bytes) + tokens * share * np.array(self.cut_token_bytes)

    def given(self, tokens: int, parts: int = 1) -> Array:
        """[layer]: what it is given of a micro-batch; the first one's tokens everybody has."""
        given = _part(tokens, parts) * np.array(self.given_bytes)
        given[0] = tokens * self.given_bytes[0]
        return given


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """`rank_bytes` that each rank has for what `memory` counts, with micro-batches of at most so many `tokens`."""

    memory: LayerMemory
    tokens: int
    rank_bytes: float

    def holds_everything(self, micro_batches: int) -> bool:
        """Whether a rank has room for the whole model and all its micro-batches at once, and for as much again of the plan
        before, so that any plan fits."""
        memory = self.memory
        kept, gradients = float(memory.kept(1.0, self.tokens).sum()), sum(memory.gradient_bytes)
        before = KEPT_WITH_GRADIENT * (gradients + MOST_MOVING * max(memory.gradient_bytes))
        return float(memory.held.sum()) + 2 * gradients + micro_batches * kept + before <= self.rank_bytes

    def lack(self, plan: Plan, before: Plan | None = None) -> str:
        """Why its ranks cannot hold a plan, or go over to it from the one `before`, in a sentence; "" when they can."""
        peaks = peak_bytes(plan, self.memory, self.tokens, before)
        rank = max(peaks, key=lambda one: peaks[one])
        if peaks[rank] <= self.rank_bytes * (1 + ROUNDING):
            return ""
        need, room = mebibytes(peaks[rank]), mebibytes(self.rank_bytes)
        return f"rank {rank} would need {need} MiB of memory under it and has room for {room}"

    def fitted(self, plan: Plan, before: Plan | None = None) -> Plan:
        """The plan, as its ranks can hold it, and go over to it from the one `before`: groups that have no room otherwise are
        sequence-parallel, those ranks recompute that have none even then, with their groups, and no others. Raises `PlanError`.
        """
        plan = plan.recomputing(())
        by_tokens = {rank for rank in self._short(plan, before) if rank in plan.team_of} if self.memory.by_tokens else set()
        plan = plan.recomputing((), by_tokens)
        if self.memory.given_bytes:
            plan = plan.recomputing(self._short(plan, before), by_tokens)
        if lack := self.lack(plan, before):
            raise PlanError(f"plan {plan.plan_version} does not fit: {lack}")
        return plan

    def _short(self, plan: Plan, before: Plan | None) -> set[int]:
        """The ranks that have no room for a plan, with their groups."""
        peaks = peak_bytes(plan, self.memory, self.tokens, before)
        short = [rank for rank in peaks if peaks[rank] > self.rank_bytes * (1 + ROUNDING)]
        return {member for rank in short for member in plan.team_of.get(rank, (rank,))}

    def least_bytes(self, plan: Plan) -> float:
        """With how much each rank could hold a plan."""
        by_tokens = plan.team_of if self.memory.by_tokens else ()
        again = [(), *([plan.ranks] if self.memory.given_bytes else [])]
        peaks = [peak_bytes(plan.recomputing(ranks, by_tokens), self.memory, self.tokens) for ranks in again]
        return max(min(of[rank] for of in peaks) for rank in plan.ranks)

    def layer_bytes(self, members: int) -> float:
        """Of a mean layer, as planners of whole jobs count it: held, and what a group of so many adds to its gradients."""
        return float(np.mean(self.memory.held + self.memory.added(members)))

    @property
    def activation_bytes(self) -> float:
        """Of a mean layer and a micro-batch."""
        return float(self.memory.kept(1.0, self.tokens).mean())

    @property
    def given_bytes(self) -> float | None:
        """What a mean layer is given of a micro-batch; None where it cannot be computed again."""
        return float(self.memory.given(self.tokens).mean()) if self.memory.given_bytes else None

    def end_of(self, first: int, share: float, in_flight: int, *, members: int = 1, times: int = 1) -> int:
        """Up to which layer one of so many members of a group that comes up so many `times` has room for its `share` of those
        from `first` on, with so many micro-batches in flight."""
        memory, room = self.memory, self.rank_bytes / times * (1 + ROUNDING)
        parts = members if memory.by_tokens else 1
        layers, kept = share * (memory.held + memory.added(members)), memory.kept(share, self.tokens, parts)
        needed = [np.cumsum((layers + in_flight * kept)[first:])]
        if memory.given_bytes:
            given = memory.given(self.tokens, parts)
            one_by_one = np.maximum.accumulate((kept - given)[first:])
            needed.append(np.cumsum((layers + in_flight * given)[first:]) + one_by_one)
        return first + max(int(np.searchsorted(taken, room, side="right")) for taken in needed)


def _part(tokens: int, parts: int) -> int:
    """The most tokens that one of so many members has."""
    return -(-tokens // parts)


def mebibytes(n_bytes: float) -> str:
    """For people."""
    return f"{n_bytes / 2**20:,.1f}" if n_bytes < 100 * 2**20 else f"{n_bytes / 2**20:,.0f}"


def in_flight_at(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """How many micro-batches a stage of a pipeline has begun and not ended at most; where ranks are passed more than once at
    least so many."""
    if schedule in ("interleaved", "zb-v"):
        return 1
    return micro_batches if schedule == "gpipe" else min(micro_batches, stages - stage)


def peak_bytes(plan: Plan, memory: LayerMemory, tokens: int, before: Plan | None = None) -> dict[int, float]:
    """Rank -> the most bytes that it keeps at once under `plan`, with micro-batches of at most so many tokens; `before`: on the
    way to it from that plan, too."""
    peaks = _peak_under(plan, memory, tokens)
    if before is None or memory.of_layers_alone:
        return peaks
    handed = handed_over(before, plan, memory.gradient_bytes)
    return {rank: max(peaks[rank] + one.kept, one.at_once) for rank, one in handed.items()}


def _peak_under(plan: Plan, memory: LayerMemory, tokens: int) -> dict[int, float]:
    shares = {role.rank: size_of(role.part) for role in plan.roles}
    layers_of = {role.ranges: role for role in plan.roles}  # many ranks hold the same layers
    held_by = {ranges: float(memory.held[list(role.layers)].sum()) for ranges, role in layers_of.items()}
    held = {role.rank: shares[role.rank] * held_by[role.ranges] for role in plan.roles}
    if memory.of_layers_alone:
        return held
    schedule = build_schedule(plan)
    ending = "W" if any(action.kind == "W" for action in schedule.order) else "B"
    buckets = buckets_of(plan, memory.gradient_bytes, memory.bucket_bytes)
    gradients_before = [0.0, *accumulate(map(float, memory.gradient_bytes))]
    found = {}
    for rank, share in shares.items():
        parts, again, team = plan.token_parts(rank), plan.role_of[rank].recompute, plan.team_of.get(rank)
        kept = memory.kept(share, tokens, parts if ending == "B" else 1)
        given = memory.given(tokens, parts) if again else memory.kept(share, tokens, parts)
        kept_before, given_before = ([0.0, *accumulate(each.tolist())] for each in (kept, given))
        in_flight = most = last = 0.0
        for action in schedule.by_rank[rank]:
            first, end = action.first_layer, action.first_layer + action.n_layers
            last, taken = kept_before[end] - kept_before[first], given_before[end] - given_before[first]
            adds = share * (gradients_before[end] - gradients_before[first]) if team and action.kind == "B" else 0.0
            if action.kind == "F":
                in_flight += taken
            elif action.kind == "B" and ending == "W":
                in_flight += last - taken
            elif again and action.kind == "B":
                adds += float((kept - given)[first:end].max())
            most = max(most, in_flight + adds)
            in_flight -= (taken if again and ending == "B" else last) * (action.kind == ending)
            last = float(kept[first:end].max()) if again and ending == "B" else last
        copies = sorted((one.n_bytes for one in buckets if rank in one.ranks), reverse=True)[:MOST_IN_FLIGHT]
        found[rank] = held[rank] + max(most, last + sum(copies))
    return found


def peak_activations(chunks: Chunks, activation_bytes: Array) -> dict[int, float]:
    """rank -> most bytes of activations kept at once, for `activation_bytes` [hop] of one micro-batch.

    A rank works on one chunk at a time, so the order alone decides.
    """
    weights = chunks.are("W")
    released = weights if weights.any() else chunks.are("B")
    steps = (chunks.are("F").astype(float) - released) * activation_bytes[chunks.hop]
    return {rank: float(np.cumsum(steps[positions]).max()) for rank, positions in chunks.rank_positions()}
