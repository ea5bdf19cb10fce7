"""Gradients of any legal plan, with tensor-parallel groups of any size and cut, are those of one process; also when a rank dies
in the middle and the others go on with what they hold. The executor itself runs, on threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.training.threads_comm import Hub, ThreadComm, in_threads

from unskew.analytics.core.device_profiles import PROFILES
from unskew.analytics.core.layout import Layout, Move, Pipeline, to_plan
from unskew.analytics.core.plan import Plan, PlanError, stage_order_of, validate
from unskew.analytics.pipeline.gradient_sync import buckets_of, last_steps
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.analytics.scheduler.kept import nothing_kept, spread
from unskew.analytics.scheduler.recovery import recover
from unskew.analytics.shards.parts import Part, Piece, ends_of, parts_by
from unskew.collector.events import Span
from unskew.runtime.corpus import Corpus
from unskew.runtime.links import Links
from unskew.runtime.model.batch import Batch
from unskew.runtime.model.layers import HeldLayer
from unskew.runtime.options import RunOptions
from unskew.runtime.rank.comm import PeerLost
from unskew.runtime.rank.device import Device, RealDevice, VirtualDevice
from unskew.runtime.rank.executor import ExecutedWork, Executor
from unskew.runtime.rank.gradients import GradientSums, keep_gradients, loss_of
from unskew.runtime.rank.progress import RankProgress

pytestmark = pytest.mark.limit(60)
CPU = torch.device("cpu")
DEVICES: Sequence[Callable[[], Device]] = (partial(RealDevice, []), partial(VirtualDevice, [], PROFILES["steady"]))
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v")


def random_plan(draw: np.random.Generator) -> Plan:
    """Replicas, stages, groups, cuts, micro-batches, and work that is moved between replicas: whatever is legal."""
    schedule, n_layers = str(draw.choice(SCHEDULES)), int(draw.integers(1, 5))
    ranks, pipelines = iter(range(100)), []
    for replica in range(int(draw.integers(1, 4))):
        passes = 2 if schedule in ("interleaved", "zb-v") and n_layers > 1 else 1
        stages = int(draw.integers(1, n_layers // passes + 1))
        groups = [tuple(next(ranks) for _ in range(int(draw.integers(1, 4)))) for _ in range(stages)]
        passed = stage_order_of(schedule, groups) if passes == 2 else groups
        cuts = sorted(draw.choice(np.arange(1, n_layers), len(passed) - 1, replace=False).tolist())
        layers = np.diff([0, *cuts, n_layers]).tolist()
        pipelines.append(Pipeline(replica, tuple(passed), tuple(layers), int(draw.integers(1, 4))))
    moves = []
    if len(pipelines) > 1 and draw.random() < 0.3:
        stage = int(draw.integers(len(pipelines[0].layers)))
        moves.append(Move(stage, 0, 1, tuple(range(int(draw.integers(1, pipelines[0].micro_batches + 1))))))
    plan = to_plan(Layout(tuple(pipelines), tuple(moves), schedule), n_layers)
    cut_of = {group: parts_by(draw.integers(1, 6, len(group)).tolist()) for one in pipelines for group in one.groups}
    part_of = {rank: part for group, parts in cut_of.items() for rank, part in zip(group, parts, strict=True)}
    roles = tuple(msgspec.structs.replace(role, part=part_of[role.rank]) for role in plan.roles)
    plan = msgspec.structs.replace(plan, roles=roles)
    return recomputing(plan, draw)


def recomputing(plan: Plan, draw: np.random.Generator) -> Plan:
    """Some ranks recompute and some are sequence-parallel, each with all of their group."""
    again, by_tokens = (
        {member for rank in plan.ranks if draw.random() < 0.3 for member in plan.team_of.get(rank, (rank,))} for _ in range(2)
    )
    plan = plan.recomputing(again, by_tokens)
    validate(plan)
    return plan


class MortalComm(ThreadComm):
    """Dies before its so-manieth operation: between chunks, in the middle of one, or among the sums."""

    def __init__(self, hub: Hub, rank: int, members: Sequence[int], left: int) -> None:
        super().__init__(hub, rank, members)
        self._left = left

    def _number(self, key: Any) -> int:
        self._left -= 1
        if self._left < 0:
            self.stop()
            raise PeerLost("dead")
        return super()._number(key)


class Job:
    """One iteration of a plan on threads, and the same in one piece."""

    def __init__(self, plan: Plan, dtype: torch.dtype, seed: int, device: Callable[[], Device]) -> None:
        self.plan, self.dtype, self.seed, self.device = plan, dtype, seed, device
        apart = plan.n_layers > 2 and seed % 2 == 1
        self.options = RunOptions(
            micro_batches=len(plan.routes), tokens=24, seed=seed, layers=plan.n_layers - 2 * apart, dim=16, heads=4,
            ends="apart" if apart else "joined",
        )  # fmt: skip
        self.size = self.options.size
        draw = np.random.default_rng(seed)
        documents = [bytes(draw.integers(0, 256, int(length)).tolist()) for length in draw.integers(3, 20, 40)]
        self.batch = Batch(Corpus(documents), self.options, 0)
        self.layers: dict[int, dict[int, HeldLayer]] = {}
        self.losses: dict[int, float] = {}
        self.layer_bytes = [dtype.itemsize * self.size.parameters(number) for number in range(plan.n_layers)]
        self.bucket_bytes = int(draw.integers(3)) * self.layer_bytes[0]
        """At least so large: each layer by itself, or some together."""

    def _hold(self, plan: Plan, rank: int) -> None:
        """What the plan asks it to; of a part that it has not had the gradient is nothing."""
        part, held = plan.role_of[rank].part, self.layers.get(rank, {})
        for number in plan.role_of[rank].layers:
            if number not in held or held[number].part != part:
                held[number] = self.layer(number, part)
        self.layers[rank] = held

    def layer(self, number: int, part: Part | None = None) -> HeldLayer:
        return HeldLayer(self.size, number, seed=self.seed, dtype=self.dtype, device=CPU, part=part)

    def reference(self) -> tuple[list[HeldLayer], float]:
        whole, loss = [self.layer(number) for number in range(self.plan.n_layers)], 0.0
        for number in range(len(self.plan.routes)):
            y = self.batch.inputs(number, CPU)
            for layer in whole:
                y = layer.module(y, self.batch.lengths[number])
            one = torch.nn.functional.cross_entropy(y, self.batch.targets(number, CPU), reduction="sum")
            (one / self.batch.target_tokens).backward()
            loss += float(one.detach()) / self.batch.target_tokens
        return whole, loss

    def attempt(self, plan: Plan, *, dies: tuple[int, int] | None = None, keeps: bool = False) -> None:
        """All ranks execute and reduce; or the first of `dies` is gone before its so-manieth operation, and the rest break."""
        hub, self.losses = Hub(), {}
        for member in plan.ranks:
            self._hold(plan, member)
        held = {
            rank: {number: dict(self.layers[rank][number].summed) for number in role.layers}
            for rank, role in plan.role_of.items()
        }

        def live(rank: int) -> None:
            layers, device, progress = self.layers[rank], self.device(), RankProgress()
            comm = ThreadComm(hub, rank, plan.ranks)
            if dies is not None and rank == dies[0]:
                comm = MortalComm(hub, rank, plan.ranks, dies[1])
            label = partial(Span, device="", rank=rank, plan_version=plan.plan_version, attempt=0, iteration=0)
            kept = keep_gradients(plan, layers, comm, held) if keeps else nothing_kept(plan)
            due = spread(plan, kept)
            actions = [one for one in build_schedule(due).by_rank[rank] if kept.executes(one)]
            buckets = buckets_of(plan, self.layer_bytes, self.bucket_bytes, kept.reduced)
            steps = last_steps(actions, due, buckets, rank)
            sums = GradientSums(
                plan, layers, kept, comm, buckets, device=device, progress=progress, label=label, before_last=lambda: None,
                open_layers=[layer for of in steps.values() for step in of for layer in step.closes],
            )  # fmt: skip
            executor = Executor(
                plan=due, actions=actions, kept=kept, layers=layers, batch=self.batch, comm=comm, device=device,
                progress=progress, label=label, dtype=self.dtype, shapes=self.options.given_on, before=lambda _: None,
                links=Links(self.options, rank, device), executed=ExecutedWork(), steps=steps, closed=sums.close,
            )  # fmt: skip
            try:
                executor.run()
                sums.finish()
            except PeerLost:
                executor.finish_weights()
                sums.keep()
                raise
            assert all(one.flat is None and one.sum is None for one in sums._begun), "copies live to the iteration's end"
            times_us = [(one.start_us, one.start_us + one.wall_us) for one in sums.spans()]
            waits = [since for (_, through), (since, until) in pairwise(times_us) if since < min(through, until)]
            assert waits == [], "the wait for one bucket is no part of the next"
            self.losses[rank] = loss_of(plan, layers, rank)

        in_threads(plan.ranks, live)


def check(job: Job, plan: Plan, tolerance: float) -> None:
    whole, loss = job.reference()
    for rank in plan.ranks:
        role = plan.role_of[rank]
        for number in role.layers:
            mine = job.layers[rank][number].pack_sum(len(plan.routes))
            wanted = whole[number]
            piece = Piece(number, *ends_of(role.part))
            there = wanted.pack_sum(0, piece)
            assert float((mine[: len(there)] - there).abs().max()) <= tolerance * float(there.abs().max())
    assert sum(job.losses.values()) == pytest.approx(loss, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_gradients_are_those_of_one_process(seed: int) -> None:
    """Ten plans each, in every other one embedding and head are layers of their own; of every four one with one, two, three
    deaths in the iteration, as long as a copy of each layer is left; on virtual time a group also agrees on what its chunks
    took."""
    draw = np.random.default_rng(seed)
    for number in range(10):
        plan = random_plan(draw)
        exact = number % 5 > 0
        job = Job(plan, torch.float64 if exact else torch.float32, 100 * seed + number, DEVICES[number % 4 // 2])
        keeps = False
        with suppress(PlanError):  # who is left has all layers until a death takes the last holder of one
            for version in range(1, 1 + number % 4):
                dead = int(draw.choice(plan.ranks))
                left = recomputing(recover(plan, {dead}, version), draw)
                job.attempt(plan, dies=(dead, int(draw.integers(40))), keeps=keeps)
                plan, keeps = left, True
        job.attempt(plan, keeps=keeps)
        check(job, plan, 1e-10 if exact else 1e-5)
