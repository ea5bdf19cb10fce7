"""Actuators on a made-up job: what they predict, what they propose and when not, and the path to whoever replaces a device."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.jobs import divided_rules
from support.jobs.divided_rules import DividedLoop

from unskew.analytics.actuators import acting
from unskew.analytics.actuators.actuator import Situation
from unskew.analytics.actuators.balance import Balance
from unskew.analytics.actuators.replace import Replace
from unskew.analytics.actuators.shares import Exclude, Shares
from unskew.analytics.actuators.times import JobTimes
from unskew.analytics.core.division import Division, grouped, split, weights
from unskew.analytics.lab.studies.noise import load_lengths
from unskew.analytics.loop.watched.found_plan import plan_of
from unskew.collector.alerts.rules import Rule
from unskew.collector.command import Command
from unskew.collector.events import (
    Event,
    LoaderDivided,
    Note,
    Party,
    PlanFailed,
    PlanProposed,
    PlanScored,
    RankAttached,
    Verdict,
)
from unskew.collector.paths import Store
from unskew.runtime.attach.acting import ActOptions, JobActing

PLAN, _ = plan_of({rank: RankAttached(rank=rank, ranks=3, node="n", pid=rank) for rank in range(3)}, dict.fromkeys(range(3), 1))
OFFER = LoaderDivided(rank=0, samples=(8, 8, 8), window=4, lengths=True, loss="mean", leaves=True)
EVEN = Division(samples=(8, 8, 8))
SLOW = Verdict(
    verdict=1, cause="slow_device", culprits=(Party(kind="device", rank=1),), victims=(), since_iteration=1, at_iteration=17,
    confidence=1.0, sentence="rank 1 is slow", speed={"B": 0.5}, evidence={},
)  # fmt: skip


def situation(slowness: float, batches: tuple[tuple[float, ...], ...] = ((100.0,) * 24,) * 8, **more: object) -> Situation:
    times = JobTimes(micro_batch_us=0.0, token_us=10.0, token2_us=0.0, slowness=(1.0, slowness, 1.0),
                     beside_us=(500.0,) * 3, end_us=1_000.0)  # fmt: skip
    slow = {1: SLOW} if slowness > 1 else {}
    now = Situation(iteration=24, plan=PLAN, division=EVEN, times=times, batches=batches, fitted_on=24, slow=slow, offer=OFFER)
    return msgspec.structs.replace(now, **more)


def test_a_slow_rank_gets_what_it_gets_done_and_leaves_where_it_only_holds_up() -> None:
    shares, why = Shares().propose(situation(2.0))
    assert shares is not None, why
    assert shares.plan.division is not None
    assert shares.plan.division.samples == (10, 5, 9)
    assert (round(shares.baseline_us), round(shares.predicted_us)) == (17_500, 11_500)
    assert shares.change == "rank 0: 10 samples; rank 1: 5 samples; rank 2: 9 samples"
    assert Exclude().propose(situation(2.0))[0] is None
    exclude, why = Exclude().propose(situation(20.0))
    assert exclude is not None, why
    assert exclude.plan.ranks == (0, 2)
    assert exclude.plan.division is not None
    assert exclude.plan.division.samples == (12, 0, 12)
    # Well again: back to even parts.
    now = msgspec.structs.replace(situation(1.0), plan=shares.plan, division=shares.plan.division)
    back, why = Shares().propose(now)
    assert back is not None, why
    assert back.plan.division is not None
    assert back.plan.division.samples == (8, 8, 8)


@pytest.mark.parametrize("more", [{"offer": None}, {"offer": msgspec.structs.replace(OFFER, loss="unknown", leaves=False)}])
def test_what_the_loop_does_not_offer_is_not_done(more: dict[str, object]) -> None:
    for actuator in (Shares(), Exclude(), Replace()):
        proposal, why = actuator.propose(situation(4.0, **more))
        assert proposal is None
        assert why
    assert Shares().propose(situation(1.0))[0] is None


@pytest.mark.parametrize("name", ["code", "prolong"])
@pytest.mark.parametrize("padded", [False, True])
def test_balanced_lengths_cost_what_is_predicted_on_batches_that_nobody_saw(name: str, padded: bool) -> None:
    random = np.random.default_rng(3)
    drawn = np.minimum(random.choice(load_lengths(name), (128, 24)), 16_384.0)
    batches = tuple(tuple(map(float, of)) for of in drawn)
    now = situation(1.0, batches[:32])
    times = msgspec.structs.replace(now.times, token2_us=10 / 8_000, padded=padded)
    proposal, why = Balance().propose(msgspec.structs.replace(now, times=times))
    assert proposal is not None, why
    division = proposal.plan.division
    assert division is not None
    assert division.samples == EVEN.samples
    later = 1 - times.mean_us(division, batches[32:]) / times.mean_us(EVEN, batches[32:])
    assert later > 0.1
    assert abs(proposal.gain_percent / 100 / later - 1) < 0.2
    for window in (batches[:4], batches[4:8]):
        groups = grouped(window, division, "0-0")
        assert sorted(at for group in groups for at in group) == [(batch, place) for batch in range(4) for place in range(24)]


@pytest.mark.slow
@pytest.mark.parametrize("loop", [DividedLoop("code"), DividedLoop("prolong", padded=True), DividedLoop("prolong", epoch=45)])
def test_the_gain_of_balanced_lengths_is_predicted_for_the_batches_that_come(loop: DividedLoop) -> None:
    gains = [divided_rules.gain_of(divided_rules.trained(loop, seed)) for seed in (1, 4, 6)]
    for gain in gains:
        assert gain is not None
        assert abs(gain.predicted / gain.measured - 1) < 0.2
        low, high = gain.interval
        assert low < gain.measured < high


@pytest.mark.slow
def test_ranks_that_lack_cores_or_are_held_up_hide_nothing_of_the_gain() -> None:
    """What was waited for want of cores was in the measurement and not in what it was held against: of 55 % 40 were left."""
    gains = [
        divided_rules.gain_of(divided_rules.trained(DividedLoop("prolong", padded=True, coreless=0.3), seed))
        for seed in range(3)
    ]
    assert [abs(gain.predicted / gain.measured - 1) < 0.2 for gain in gains if gain is not None] == [True] * 3


def test_steps_that_are_held_up_alike_before_and_after_are_no_error_of_the_prediction() -> None:
    """What held them up was counted for the division before alone."""
    events = divided_rules.trained(DividedLoop("prolong", padded=True, coreless=0.5), 0)
    (score,) = [event for event in events if isinstance(event, PlanScored)][:1]
    assert score.predicted_s is not None
    assert score.measured_s is not None
    assert abs(score.predicted_s / score.measured_s - 1) < 0.05


def test_a_loader_of_short_batches_alone_is_nothing_to_act_on() -> None:
    """A data set smaller than a global batch: each that is drawn is the last of its epoch, and no division is for any."""
    events = divided_rules.trained(DividedLoop("code", slow=3.0, epoch=1), 1, steps=40)
    assert "slow_device" in [event.cause for event in events if isinstance(event, Verdict)]
    assert not [event for event in events if isinstance(event, PlanProposed)]


def test_weights_are_parts_of_the_whole_batch_and_one_where_all_have_the_same() -> None:
    lengths = [3, 9, 1, 7, 5, 5]
    given = split(lengths, Division(samples=(3, 0, 2, 1), window=1))
    assert [len(of) for of in given] == [3, 0, 2, 1]
    assert weights(lengths, given, by_tokens=False) == [1.5, 0.0, 1.0, 0.5]
    by_tokens = weights(lengths, given, by_tokens=True)
    assert sum(by_tokens) == pytest.approx(3.0)
    assert by_tokens[3] == pytest.approx(3 * sum(lengths[place] for place in given[3]) / 30)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["cat > {file}", "echo no such node >&2; exit 3"])
def test_an_approved_replacement_gets_the_verdict_on_stdin(tmp_path: Path, command: str) -> None:
    file, logged = tmp_path / "given.json", list[Event]()
    rule = Rule(command=("sh", "-c", command.format(file=file)))
    job = JobActing(Store(tmp_path / "store"), "run", PLAN, ActOptions("approve", rule),
                    log=lambda events, _="": logged.extend(events), place_of=lambda rank: (f"node-{rank}", 4711))  # fmt: skip
    state = acting.begin(PLAN, "approve", rule.target)
    proposal, why = Replace().propose(situation(2.0, hand_to=rule.target))
    assert proposal is not None, why
    state = state.take(*state.queue.propose(proposal, 1, "replace: rank 1 is slow", 24, PLAN))
    approve = Command(kind="approve", run="run", by="ann", target="p1", reason="it is slow")
    (job._state, events, orders), actors = acting.commanded(state, [approve], 30)
    assert [(type(event).__name__, actor) for event, actor in zip(events, actors, strict=True)] == [
        ("PlanApproved", "ann"),
        ("PlanIssued", "controller"),
    ]
    job._carry_out(orders)
    until = time.monotonic() + 30
    while not logged and time.monotonic() < until:
        job.look(31)
        time.sleep(0.05)
    (outcome,) = logged
    again, why = Replace().propose(situation(2.0, hand_to=rule.target, handed=job._state.handed))
    assert (again is None, "handed on already" in why) == (file.exists(), file.exists())
    if file.exists():
        assert isinstance(outcome, Note)
        given = json.loads(file.read_text())
        assert (given["rank"], given["node"], given["pid"], given["proposal"]) == (1, "node-1", 4711, "p1")
        assert given["verdict"]["sentence"] == "rank 1 is slow"
    else:
        assert isinstance(outcome, PlanFailed)
        assert "no such node" in outcome.reason
