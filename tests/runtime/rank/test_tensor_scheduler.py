"""The Scheduler and tensor-parallel groups on real ranks: cut by speed, shrunk, grown again, and predicted as they are."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.training.replica_reference import expected_losses
from support.training.runtime_runs import LONG_CHUNKS, SMALL, Run, assert_exact, train

from unskew.analytics.core.plan import Plan
from unskew.analytics.diagnosis.sections import sections_of
from unskew.collector.command import Command
from unskew.collector.events import (
    DeviceJoined,
    IterationCommitted,
    IterationJudged,
    PlanApplied,
    PlanProposed,
    PredictorFitted,
    Regrouped,
    RunFinished,
    StandbyMeasured,
    Verdict,
)
from unskew.collector.files.tail import Entry
from unskew.collector.read.reader import open_store
from unskew.collector.write.commands import send
from unskew.edge.load_run import load_run

pytestmark = [pytest.mark.limit(300), pytest.mark.slow]


def in_force(entry: Entry) -> Plan | None:
    return Plan.from_data(entry.event.plan) if isinstance(entry.event, PlanApplied) else None


class DeathAndReturn:
    """Kills rank 5 some iterations after the groups were cut by speed, and asks for it again once rank 4 has the whole of the
    layers that they had together; until it is back iterations take as long as a process takes to start: ranks on virtual time
    wait for a controller that is behind."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.judged, self.waits = 0, False

    def __call__(self, run: Run, entry: Entry) -> None:
        event, plan = entry.event, in_force(entry)
        if isinstance(event, DeviceJoined):
            self.pids[event.rank] = event.pid
            self.waits = self.waits and event.rank != 5
        if plan is not None and 5 not in self.pids and plan.role_of[4].part is None:
            self.waits = True
            send(run.store, run.id, Command(kind="rank", run=run.id, target="5", by="ann"))
        if isinstance(event, IterationJudged):
            self.judged += event.plan_version == 1
            if self.judged == 6 and 5 in self.pids:
                self.judged += 1
                os.kill(self.pids.pop(5), signal.SIGKILL)
            if self.waits:
                time.sleep(0.5)


def test_groups_follow_their_members_and_are_predicted(tmp_path: Path) -> None:
    """Over links that cost, with one member slow and one of the other replica dead, which comes back."""
    options = msgspec.structs.replace(
        LONG_CHUNKS,
        tp=2,
        micro_batches=6,
        dim=24,
        heads=12,
        tokens=128,
        iterations=56,
        profile="longest",
        link_us=1200,
        link_mbps=31,
    )
    run = train(tmp_path, "slow:rank=2,factor=2,at=9", base=options, on_event=DeathAndReturn())
    assert run.of(RunFinished)[-1].status == "done"
    whole = msgspec.structs.replace(options, tp=1)
    expected = expected_losses(whole, {number: {0: number, 1: number} for number in range(options.iterations)})
    assert run.losses == pytest.approx(expected, rel=0, abs=1e-8)
    assert {verdict.culprits[0].rank: verdict.cause for verdict in run.of(Verdict)} == {2: "slow_device", 5: "dead"}

    plans = [Plan.from_data(plan.plan) for plan in run.of(PlanApplied)]
    of_five = [plan.team_of.get(5, ()) for plan in plans]
    assert [len(team) for team in of_five] == [2, 2, 0, 0, 2], "cut anew, rerouted, rank 4 alone, the group again"
    assert [plan.weight_of.get(2, 1.0) < 0.9 for plan in plans][:2] == [False, True]
    assert plans[3].role_of[4].part is None
    assert 4 in plans[3].executors
    proposed = [plan for plan in run.of(PlanProposed) if plan.optional]
    assert all(plan.predicted_us < 0.97 * (plan.baseline_us or 0) for plan in proposed)

    (fitted, *_) = run.of(PredictorFitted)
    assert fitted.model["sum_us"] == pytest.approx(1200, rel=0.01), "a step of a sum takes what a message takes"
    begun_anew = {one.iteration for one in run.of(Regrouped) if one.kept is not None}
    judged = [one for one in run.of(IterationJudged) if one.predicted_us and one.iteration not in {*range(9, 14), *begun_anew}]
    assert len(judged) > 25
    assert [one for one in judged if abs((one.predicted_us or 0) / one.measured_us - 1) > 0.03] == []


class DeathBesideASpare:
    """Rank 4 is asked for, whose group has a member for each head already. Once it is measured rank 1 dies, and within the same
    iteration, once rank 4 has its place, a member of the other group."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.seen: set[type[object]] = set()

    def __call__(self, run: Run, entry: Entry) -> None:
        event, asked = entry.event, IterationCommitted in self.seen
        self.seen.add(type(event))
        if isinstance(event, DeviceJoined):
            self.pids[event.rank] = event.pid
        if isinstance(event, IterationCommitted) and not asked:
            send(run.store, run.id, Command(kind="rank", run=run.id, target="4", by="ann"))
        if {StandbyMeasured, PredictorFitted} <= self.seen and 1 in self.pids:
            os.kill(self.pids.pop(1), signal.SIGKILL)
        plan = in_force(entry)
        if plan is not None and 4 in plan.ranks and 3 in self.pids:
            os.kill(self.pids.pop(3), signal.SIGKILL)


def test_a_spare_takes_a_dead_member_s_place_in_its_group_and_carries_on_alone(tmp_path: Path) -> None:
    options = msgspec.structs.replace(SMALL, tp=2, pp=1, heads=2, layers=2, iterations=60)
    run = train(tmp_path, base=options, on_event=DeathBesideASpare())
    whole = msgspec.structs.replace(options, tp=1)
    expected = expected_losses(whole, {number: {0: number, 1: number} for number in range(options.iterations)})
    assert_exact(run, expected, {0, 2, 4})
    first, promoted, rerouted, *_ = [Plan.from_data(plan.plan) for plan in run.of(PlanApplied)]
    assert ({*promoted.teams}, {*rerouted.teams}) == ({(0, 4), (2, 3)}, {(0, 4)})
    assert promoted.role_of[4].part == first.role_of[1].part
    assert run.of(Regrouped)[1].moved_bytes > 0


def test_who_is_slow_from_the_start_in_a_group_of_a_size_of_its_own_is_named_and_nobody_else_costs_time(tmp_path: Path) -> None:
    """What such a group takes is learned from it alone, so its slowness was "well"; and each member of the others' groups was
    expected to take as long as a rank by itself."""
    options = msgspec.structs.replace(
        SMALL, degrees="3,1/2", heads=6, dim=48, layers=8, micro_batches=6, tokens=256, iterations=24, dtype="float32"
    ).with_degrees()
    run = train(tmp_path, "slow:rank=3,factor=2,at=0", base=options)
    (verdict,) = run.of(Verdict)
    assert ([party.rank for party in verdict.culprits], verdict.cause, verdict.since_iteration) == ([3], "slow_device", 0)
    assert verdict.speed == pytest.approx(dict.fromkeys(verdict.speed, 0.5), rel=0.02)
    with open_store(run.store) as reader:
        section, *_ = sections_of(load_run(reader, run.id))[0]
    took: dict[int, set[float]] = {}
    for operation, work_us, expected_us in zip(
        section.recording.graph.operations, section.parts.work_us, section.expected_us, strict=True
    ):
        if operation.micro_batch is not None and operation.layers is not None:
            took.setdefault(operation.rank, set()).add(round(float(np.median(work_us / expected_us)), 1))
    assert took == {0: {1.0}, 1: {1.0}, 2: {1.0}, 3: {2.0}, 4: {1.0}, 5: {1.0}}
