"""FT-HSDP's rules in real processes with real kills: the other replicas go on, the lost one comes back equal to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest
from support.training.replica_reference import contributions, expected_losses
from support.training.runtime_runs import SMALL, Run, train

from unskew.analytics.core.plan import Plan
from unskew.analytics.replay.replay import replay
from unskew.collector.events import (
    DeviceLost,
    IterationCommitted,
    PlanApplied,
    QuorumFormed,
    RankAdded,
    ReplicaStep,
    RunFinished,
)
from unskew.collector.read.reader import open_store
from unskew.edge.recorded_run import recorded_run
from unskew.runtime.control.allowed import check
from unskew.runtime.control.resume import resumed
from unskew.runtime.options import OptionsError

pytestmark = [pytest.mark.limit(120), pytest.mark.slow]
TWO = msgspec.structs.replace(SMALL, recovery="ft-hsdp", iterations=60, respawns=3)
FOUR = msgspec.structs.replace(TWO, pp=1, dp=4)


def assert_by_the_rules(run: Run, replicas: Collection[int]) -> None:
    """Each batch is trained once, in the order of its replica's stream; the losses are those of these batches; who trains at
    the end has the same bits; and the log is decided again as it was."""
    options = run.options
    assert run.of(RunFinished)[-1].status == "done", run.of(RunFinished)[-1].reason
    contributed = contributions(run.events)
    assert sorted(contributed) == list(range(options.iterations))
    assert run.losses == pytest.approx(expected_losses(options, contributed), rel=0, abs=1e-8)
    trained = [step for step in run.of(ReplicaStep) if step.committed and step.state == "healthy"]
    assert {step.position - contributed[step.iteration][step.replica] for step in trained} == {0}
    end = [step for step in run.of(ReplicaStep) if step.iteration == options.iterations - 1 and step.committed]
    for stage in range(options.pp):
        digests = {step.rank: step.digest for step in end if step.rank % options.pp == stage}
        assert len({*digests.values()}) == 1
        assert {rank // options.pp for rank in digests} == {*replicas}
    commits = Counter((event.iteration, event.rank) for event in run.of(IterationCommitted))
    assert set(commits.values()) == {1}
    with open_store(run.store) as reader:
        assert replay(recorded_run(reader, run.id)).differences == ()


def replicas(event: PlanApplied) -> tuple[int, ...]:
    return tuple(sorted({role.replica for role in Plan.from_data(event.plan).roles}))


def test_without_a_loss_it_trains_what_ours_trains(tmp_path: Path) -> None:
    run = train(tmp_path, base=TWO, iterations=12)
    assert_by_the_rules(run, {0, 1})
    assert contributions(run.events) == {iteration: {0: iteration, 1: iteration} for iteration in range(12)}
    assert all(event.fast for event in run.of(QuorumFormed) if event.iteration > 0)
    assert {(step.state, step.exchanged, step.committed) for step in run.of(ReplicaStep)} == {("healthy", True, True)}


@pytest.mark.parametrize("point", ["in_sync", "before_barrier"])
def test_a_lost_replica_returns_equal_to_the_others(point: str, tmp_path: Path) -> None:
    run = train(tmp_path, f"kill:rank=3,at=8,point={point}", base=TWO)
    assert_by_the_rules(run, {0, 1})
    assert [(event.rank, event.process) for event in run.of(RankAdded)] == [(3, 2)]
    assert [replicas(event) for event in run.of(PlanApplied)] == [(0, 1), (0,), (0, 1)]
    assert run.same_process == {0, 1, 2, 3}  # who lived is the process it was, and the new one
    joined = [step for step in run.of(ReplicaStep) if step.state == "rejoined"]
    assert {step.rank for step in joined} == {2, 3}
    assert {step.source for step in joined} == {0, 1}
    others = [step for step in run.of(ReplicaStep) if step.replica == 0 and step.iteration == joined[0].iteration]
    assert {step.committed for step in others} == {True}
    assert {step.digest for step in others} == {step.digest for step in joined}


def test_two_of_four_replicas_are_lost_at_once_and_return_and_a_third_later(tmp_path: Path) -> None:
    faults = "kill:rank=1,at=8,point=in_sync", "kill:rank=2,at=8", "kill:rank=3,at=45"
    # A process takes some 0.5 s to begin, ten iterations of virtual time 0.2 s: the others wait before the run's end.
    pauses = (f"hang:rank=0,at={at},seconds=0.4" for at in (50, 52, 54))
    run = train(tmp_path, *faults, *pauses, base=FOUR)
    assert_by_the_rules(run, replicas(run.of(PlanApplied)[-1]))
    assert [event.rank for event in run.of(DeviceLost)][-1] == 3
    assert (0, 1, 2, 3) in [replicas(event) for event in run.of(PlanApplied)][2:]


def test_a_run_that_is_resumed_goes_on_with_the_batches_that_each_replica_has_left(tmp_path: Path) -> None:
    before = train(tmp_path, "kill:rank=3,at=6", base=TWO, iterations=20, respawns=0, checkpoint_every=10)
    with open_store(before.store) as reader:
        options = resumed(before.store, reader, before.id, {"iterations": 32}, ["iterations"])
        with pytest.raises(OptionsError, match=f"^replicas of run {before.id} were away, .* --recovery ft-hsdp and --dp 2$"):
            resumed(before.store, reader, before.id, {"iterations": 32, "dp": 3}, ["iterations", "dp"])
    assert options.resume is not None
    assert options.resume.positions == (20, 6)
    check(options)  # as the command line does
    after = Run(options).perform()
    contributed = contributions([*before.events, *after.events])
    assert contributed[31] == {0: 31, 1: 17}
    assert after.summary.losses == pytest.approx(expected_losses(options, contributed), rel=0, abs=1e-8)
