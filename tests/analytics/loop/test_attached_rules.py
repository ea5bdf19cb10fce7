"""A training that is not ours, made up: who is named, with what, and who is not; no ranks and no clocks, so at any load."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from unskew.analytics.core.iteration import BesideChunks, Chunk, CommittedIteration, IterationTelemetry
from unskew.analytics.core.workload import work_of
from unskew.analytics.detector.job_wide import JobWideOptions
from unskew.analytics.detector.options import options_for
from unskew.analytics.loop.monitor import JobPace
from unskew.analytics.loop.watched.attached_rules import AttachedState, begin, committed
from unskew.analytics.loop.watched.found_plan import plan_of
from unskew.analytics.loop.watched.side_by_side import RankWindow, compare
from unskew.collector.events import DetectionLimit, Event, RankAttached, Verdict, VerdictClosed

NOISE, STEPS = 0.04, 56
END_US = 500.0
"""Of a step of 14 ms what nobody times: with 5 % and more a run is not well (loop/account.py)."""
TOOK_US = {"F": 4000.0, "B": 8000.0, "optimizer": 1500.0, "other": 500.0, "data_wait": 300.0}


EVERY = -2


class Fault:
    """Rank `rank`, or `EVERY`, takes `factor` times as long for `kinds`, from iteration `since` on, and from the one in `later`
    on another."""

    def __init__(
        self,
        rank: int,
        kinds: tuple[str, ...],
        factor: float,
        since: int = 0,
        until: int = 10**6,
        *,
        later: tuple[int, float] = (10**6, 1.0),
    ) -> None:
        self.rank, self.kinds, self.factor, self.since, self.until = rank, kinds, factor, since, until
        self.later = later

    def of(self, rank: int, kind: str, iteration: int) -> float:
        mine = self.rank in (rank, EVERY)
        factor = self.factor if iteration < self.later[0] else self.later[1]
        return factor if mine and kind in self.kinds and self.since <= iteration < self.until else 1.0


HEALTHY = Fault(-1, (), 1.0)


def lengths_of(what: str, rank: int, random: np.random.Generator) -> tuple[int, ...]:
    if what == "random":
        return tuple(int(length) for length in random.integers(16, 256, 3))
    if what == "longer":
        return (200,) * 3 if rank == 1 else (40,) * 3
    return () if what == "unknown" else (64,) * 3


def job(
    fault: Fault,
    *,
    ranks: int = 2,
    lengths: str = "alike",
    seed: int = 0,
    per_rank: int = 1,
    without_core: dict[int, float] | None = None,
    lacking: range = range(10**6),
    coreless_us: float = 0.0,
    exchanged_us: float = 0.0,
    untimed_us: float = 0.0,
    steps: int = STEPS,
    longer: float = 1.0,
) -> list[Event]:
    """What is decided on the job, all of whose times are so many times as long; `lacking`: when it is without cores."""
    random = np.random.default_rng(seed)
    names = {rank: RankAttached(rank=rank, ranks=ranks, node="node", pid=rank) for rank in range(ranks)}
    plan, why_not = plan_of(names, dict.fromkeys(range(ranks), per_rank))
    state: AttachedState
    state, first = begin(plan, why_not, options_for("cores"))
    events = [*first]
    for iteration in range(steps):
        chunks, works, took = [], [], np.zeros(ranks)
        for route in plan.routes:
            rank = route.hops[0].rank
            of = lengths_of(lengths, rank, random)
            work = work_of(of)
            works.append(work)
            heavy = 1.0 if not of else work.tokens / 192 + work.sum_sq / 192 / 640
            for kind in ("F", "B"):
                us = longer * TOOK_US[kind] * heavy * float(random.lognormal(0, NOISE)) * fault.of(rank, kind, iteration)
                took[rank] += us
                chunks.append(Chunk(rank=rank, kind=kind, n_layers=1, has_head=True, work=work, us=us))
        beside = []
        for rank in range(ranks):
            for kind in ("optimizer", "other", "data_wait"):
                us = longer * TOOK_US[kind] * float(random.lognormal(0, NOISE)) * fault.of(rank, kind, iteration)
                took[rank] += us
                beside.append(BesideChunks(rank, kind, us))
        one = CommittedIteration(
            iteration=iteration,
            plan_version=0,
            chunks=tuple(chunks),
            works=tuple(works),
            measured_us=float(took.max()) + END_US + coreless_us + exchanged_us + untimed_us,
            log_complete=True,
        )
        released = IterationTelemetry(
            committed=one,
            beside=tuple(beside),
            without_core=(without_core or {}) if iteration in lacking else {},
            coreless_us=coreless_us,
            exchanged_us=exchanged_us,
        )
        state, found = committed(state, released)
        events += found
    return events


def named(events: list[Event]) -> list[tuple[str, tuple[int | None, ...]]]:
    """What stays open, by cause and ranks."""
    over = {event.verdict for event in events if isinstance(event, VerdictClosed)}
    last = {event.verdict: event for event in events if isinstance(event, Verdict) and event.verdict not in over}
    return [(verdict.cause, tuple(party.rank for party in verdict.culprits)) for verdict in last.values()]


def limits(events: list[Event]) -> list[float | None]:
    return [event.smallest_slowdown for event in events if isinstance(event, DetectionLimit)]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "ranks", "since"), [(1, 2, 0), (2, 5, 0), (3, 2, 22), (4, 5, 22)])
@pytest.mark.parametrize(("kind", "factor"), [("F", 2.5), ("B", 2.0), ("optimizer", 6.0), ("other", 9.0)])
def test_a_slow_rank_is_named_by_its_phase(seed: int, ranks: int, since: int, kind: str, factor: float) -> None:
    events = job(Fault(1, (kind,), factor, since), ranks=ranks, lengths="random" if seed % 2 else "alike", seed=seed)
    assert named(events) == [("slow_device", (1,))]
    verdict = next(event for event in events if isinstance(event, Verdict))
    assert set(verdict.speed) == {kind}
    assert verdict.speed[kind] == pytest.approx(1 / factor, rel=0.3)
    assert verdict.at_iteration <= since + 32


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "ranks"), [(1, 1), (2, 2), (3, 5)])
@pytest.mark.parametrize("lengths", ["alike", "random"])
def test_nobody_is_named_in_a_healthy_job_and_what_would_be_is_stated(seed: int, ranks: int, lengths: str) -> None:
    events = job(HEALTHY, ranks=ranks, lengths=lengths, seed=seed, per_rank=1 + seed % 2)
    assert named(events) == []
    assert 1.3 < (limits(events)[-1] or 0.0) < 2.0


@pytest.mark.slow
@pytest.mark.parametrize("since", [0, 22])
@pytest.mark.parametrize(("kind", "factor"), [("F", 3.0), ("B", 4.0), ("optimizer", 8.0), ("other", 12.0), ("data_wait", 40.0)])
def test_a_large_slowdown_needs_fewer_iterations_than_a_small_one(since: int, kind: str, factor: float) -> None:
    lengths = "random" if since else "alike"  # of which the cost is known only after some iterations
    events = job(Fault(1, (kind,), factor, since), lengths=lengths, steps=since + 10)
    assert next(event for event in events if isinstance(event, Verdict)).at_iteration <= since + 9
    small = [event for event in job(Fault(1, ("B",), 1.5, since), lengths=lengths, steps=32) if isinstance(event, Verdict)]
    assert not [event for event in small if event.at_iteration < since + 10]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_disturbance_before_a_rank_turns_slow_is_no_part_of_its_slowness(seed: int) -> None:
    """Less than is named, but enough for a test to fire on it and some of the slow iterations together."""

    class Both(Fault):
        def of(self, rank: int, kind: str, iteration: int) -> float:
            return super().of(rank, kind, iteration) * Fault(1, ("F", "B"), 1.3, 18, 32).of(rank, kind, iteration)

    events = job(Both(1, ("B",), 6.0, 32), seed=seed, steps=64)
    assert named(events) == [("slow_device", (1,))]
    verdicts = [event for event in events if isinstance(event, Verdict)]
    assert all(abs(verdict.since_iteration - 32) <= 2 for verdict in verdicts)
    assert all(verdict.speed["B"] == pytest.approx(1 / 6, rel=0.2) for verdict in verdicts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_pass_that_was_slow_from_the_start_stays_named_when_another_turns_slow_too(seed: int) -> None:
    """The Detector, for which the first iterations are the healthy ones, names the other alone."""

    class Both(Fault):
        def of(self, rank: int, kind: str, iteration: int) -> float:
            return super().of(rank, kind, iteration) * Fault(1, ("B",), 1.6, 24).of(rank, kind, iteration)

    events = job(Both(1, ("F",), 6.0), seed=seed, steps=64, longer=10)
    over = {event.verdict for event in events if isinstance(event, VerdictClosed)}
    last = {event.verdict: event for event in events if isinstance(event, Verdict) and event.verdict not in over}
    assert {party.rank for verdict in last.values() for party in verdict.culprits} == {1}
    assert min(verdict.speed.get("F", 1.0) for verdict in last.values()) == pytest.approx(1 / 6, rel=0.2)


@pytest.mark.slow
def test_a_slight_slowdown_has_to_last_for_a_time_not_for_a_number_of_iterations() -> None:
    """A core is disturbed for a second now and then: 20 iterations of some 18 ms are no evidence of one, of 180 ms they are."""
    for kinds in (("F",), ("B",), ("F", "B")):
        for since in (0, 22):
            brief = Fault(1, kinds, 1.6, since, since + 20)
            assert not [one for one in job(brief, seed=since) if isinstance(one, Verdict)]
            found = [one for one in job(brief, seed=since, longer=10) if isinstance(one, Verdict)]
            assert {party.rank for one in found for party in one.culprits} == {1}


@pytest.mark.slow
def test_ranks_that_are_slow_together_are_the_whole_job_until_they_are_not() -> None:
    verdict, closed = (
        one
        for one in job(Fault(EVERY, ("F", "B"), 2.2, 40, 76), lengths="random", steps=100)
        if isinstance(one, Verdict | VerdictClosed)
    )
    assert isinstance(verdict, Verdict)
    assert (verdict.cause, verdict.culprits, verdict.since_iteration, verdict.at_iteration < 68) == ("unknown", (), 40, True)
    assert isinstance(closed, VerdictClosed)
    assert (closed.until_iteration, closed.at_iteration <= 96) == (76, True)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["alike", "random"])
def test_a_job_of_which_all_ranks_are_slow_from_an_early_iteration_on_is_never_well(lengths: str) -> None:
    """Named where enough was seen before, else it cannot be judged: from iteration 2 or 3 on it was called well."""
    for since in (2, 3, 4, 5, 8, 12):
        events = job(Fault(EVERY, ("F", "B", "optimizer", "other"), 3.0, since), lengths=lengths, seed=since)
        assert named(events) == [("unknown", ())] or limits(events)[-1] is None, since


class Changing(Fault):
    """As a fault, and `then` times as long from iteration 60 on, for `then_kinds`."""

    then, then_kinds = 1.0, ("optimizer",)

    def of(self, rank: int, kind: str, iteration: int) -> float:
        later = rank == self.rank and kind in self.then_kinds and iteration >= 60
        return self.then if later else super().of(rank, kind, iteration)


def changing(kind: str, factor: float, then: float, then_kinds: tuple[str, ...]) -> Changing:
    fault = Changing(1, (kind,), factor)
    fault.then, fault.then_kinds = then, then_kinds
    return fault


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("kind", "factor", "then", "then_kinds"),
    [
        ("optimizer", 4.0, 20.0, ("optimizer",)),
        ("other", 9.0, 60.0, ("other",)),
        ("optimizer", 20.0, 4.0, ("optimizer",)),
        ("optimizer", 4.0, 30.0, ("other",)),
    ],
    ids=["the optimizer is worse", "the rest is worse", "better, and slow still", "another part is slow too"],
)
def test_what_only_a_comparison_sees_is_sized_anew_when_it_becomes_much_worse(
    kind: str, factor: float, then: float, then_kinds: tuple[str, ...], seed: int
) -> None:
    events = job(changing(kind, factor, then, then_kinds), seed=seed, steps=112)
    verdicts = [event for event in events if isinstance(event, Verdict)]
    assert {verdict.verdict for verdict in verdicts} == {verdicts[0].verdict}
    assert named(events) == [("slow_device", (1,))]
    first, last = verdicts[0], verdicts[-1]
    assert first.speed == {kind: pytest.approx(1 / factor, rel=0.3)}
    expected = {kind: 1 / factor} | dict.fromkeys(then_kinds, 1 / then)
    assert last.speed == {one: pytest.approx(speed, rel=0.3) for one, speed in expected.items()}
    assert abs(last.since_iteration - 60) <= 4
    assert last.at_iteration <= 84
    assert len(verdicts) <= 3
    assert 0.0 < float(last.evidence["share_of_time"]) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_what_stays_as_it_is_is_said_once(seed: int) -> None:
    events = job(Fault(1, ("optimizer", "other"), 5.0), ranks=2 + seed % 2, seed=seed, steps=200)
    assert len([event for event in events if isinstance(event, Verdict)]) == 1


@pytest.mark.slow
def test_a_wait_for_data_that_becomes_longer_is_stated_with_what_it_costs_now() -> None:
    events = job(changing("data_wait", 10.0, 120.0, ("data_wait",)), ranks=4, steps=130)
    assert named(events) == [("input_bound", (1,))]
    verdicts = [event for event in events if isinstance(event, Verdict)]
    shares = [float(verdict.evidence["share_of_time"]) for verdict in verdicts]
    assert len({verdict.verdict for verdict in verdicts}) == 1
    assert shares[0] < 0.2
    assert shares[-1] > 0.45
    assert all(later >= 1.5 * before for before, later in pairwise(shares))


@pytest.mark.slow
def test_what_creeps_on_all_ranks_is_no_rank_s() -> None:
    """Over 100 iterations both become twice as slow: rank 0 was accused with what its past had risen by, as rank 1's had."""

    class Creeping(Fault):
        def of(self, rank: int, kind: str, iteration: int) -> float:
            slow = super().of(rank, kind, iteration) > 1
            return 1 + min(max(iteration - 200, 0) / 100, 1) if slow else 1.0

    events = job(Creeping(EVERY, ("F", "B"), 2.0), seed=5, steps=310)
    assert named(events) == []
    assert limits(events)[-1] is None


class Ramp(Fault):
    """It takes `factor` times as long after `length` iterations, evenly."""

    length = 40

    def of(self, rank: int, kind: str, iteration: int) -> float:
        slow = super().of(rank, kind, iteration)
        return 1 + (slow - 1) * min((iteration - self.since + 1) / self.length, 1.0) if slow > 1 else 1.0


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.parametrize(("ranks", "lengths"), [(2, "alike"), (2, "random"), (4, "alike")])
@pytest.mark.parametrize(("factor", "length"), [(1.8, 10), (1.8, 120), (3.0, 40)])
def test_a_ramp_of_all_ranks_is_no_rank_s_and_the_job_is_not_well(ranks: int, lengths: str, factor: float, length: int) -> None:
    """One by 1.8 over 120 iterations was called well at 1.6 times the time: its reference had followed, and what rose slowly
    looked like noise."""
    ramp = Ramp(EVERY, ("F", "B"), factor, 60)
    ramp.length = length
    events = job(ramp, ranks=ranks, lengths=lengths, steps=60 + length + 80)
    assert not [event for event in events if isinstance(event, Verdict) and event.culprits]
    assert named(events) == [("unknown", ())] or limits(events)[-1] is None
    called = [(event.at_iteration, event.smallest_slowdown) for event in events if isinstance(event, DetectionLimit)]
    first = next((event.at_iteration for event in events if isinstance(event, Verdict)), 10**6)
    high = 60 + round(length * (1.55 - 1) / (factor - 1)) + 16  # 1.4 times the iteration for long enough to be seen, or soon
    for (since, smallest), until in zip(called, [*(at for at, _ in called[1:]), 60 + length + 80], strict=True):
        assert smallest is None or until <= high or since >= first or smallest >= 1.5, (since, smallest, until)


@pytest.mark.slow
def test_one_that_waits_for_its_data_is_no_slow_device() -> None:
    assert named(job(Fault(1, ("data_wait",), 20.0), ranks=4)) == [("input_bound", (1,))]


def test_always_longer_sequences_are_reported_as_such() -> None:
    events = job(HEALTHY, lengths="longer")
    assert named(events) == [("long_sequences", ())]
    assert next(event for event in events if isinstance(event, Verdict)).evidence["ranks"] == [1]


def test_what_lengths_cost_by_a_predictor_that_is_wrong_is_no_more_than_all_of_the_time() -> None:
    """It was 580 % of the time."""
    expected = {kind: np.tile([100.0, 3000.0], (20, 1)) for kind in ("F", "B")}
    us = {kind: np.full((20, 2), 450.0) for kind in ("F", "B", "optimizer", "other", "data_wait", "gc")}
    window = RankWindow(
        stage_of={0: 0, 1: 0}, iterations=tuple(range(20)), measured_us=np.full(20, 1000.0), us=us, expected_us=expected
    )
    (given,) = [one for one in compare(window, options_for("cores")).verdicts if one.cause == "long_sequences"]
    assert given.evidence["share_of_time"] == 1.0
    assert "costs 100.0 % of the time" in given.sentence


@pytest.mark.parametrize(("slow", "ranks"), [(0, 2), (1, 2), (1, 4)])
def test_of_a_rank_that_alone_is_given_its_lengths_nobody_says_that_it_would_be_seen_to_be_slow(slow: int, ranks: int) -> None:
    """What it takes longer is what its lengths cost, as the predictor has it. Who turns slow is seen."""
    events = job(Fault(slow, ("F", "B"), 1.8), lengths="longer", ranks=ranks)
    assert not [cause for cause, _ in named(events) if cause == "slow_device"]
    assert limits(events)[-1] is None
    turned = job(Fault(slow, ("F", "B"), 1.8, 40), lengths="longer", ranks=ranks, steps=96, longer=10)
    assert ("slow_device", (slow,)) in named(turned)


@pytest.mark.slow
def test_without_lengths_one_that_is_slow_in_all_its_work_may_have_more_to_do() -> None:
    events = job(Fault(1, ("F", "B"), 2.5), lengths="unknown", ranks=4)
    assert named(events) == []
    assert limits(events)[-1] is None
    assert named(job(Fault(1, ("B",), 2.5), lengths="unknown", ranks=4)) == [("slow_device", (1,))]


@pytest.mark.slow
def test_of_a_rank_that_lacks_a_core_a_slight_slowdown_is_no_evidence() -> None:
    slight, grave = Fault(1, ("F", "B"), 1.6), Fault(1, ("F", "B"), 3.0)
    assert named(job(slight, ranks=4, without_core={0: 0.7})) == [("slow_device", (1,))], "its own core it has"
    crowded = job(slight, ranks=4, without_core={1: 0.7})
    assert (named(crowded), limits(crowded)[-1]) == ([], None), "and what is held back is no calm"
    assert named(job(grave, ranks=4, without_core={1: 0.7})) == [("slow_device", (1,))]


@pytest.mark.slow
@pytest.mark.parametrize("until", [22, 10**6])
def test_where_all_lack_their_cores_alike_a_slight_slowdown_is_named_once_it_lasts(until: int) -> None:
    events = job(Fault(1, ("F", "B"), 1.6, until=until), ranks=4, without_core=dict.fromkeys(range(4), 0.7))
    found = [event for event in events if isinstance(event, Verdict)]
    assert [event.at_iteration >= 30 for event in found] == ([] if until == 22 else [True])


@pytest.mark.parametrize("kinds", [("F", "B"), ("optimizer",)], ids=["by the Detector", "side by side"])
def test_a_verdict_that_is_over_ends_though_its_revision_waits_for_a_core(kinds: tuple[str, ...]) -> None:
    """Rank 1 is named, lacks its core while it becomes less slow, so that this is not told yet, and is healthy again."""
    fault = Fault(1, kinds, 12.0, 24, 120, later=(60, 1.8))
    events = job(fault, ranks=4, steps=180, without_core={1: 0.7}, lacking=range(44, 130))
    assert any(isinstance(event, Verdict) for event in events)
    assert named(events) == []


@pytest.mark.slow
def test_time_without_cores_makes_no_slow_rank_a_slow_job() -> None:
    """The end of an iteration is learned without it: a share of it that stays would look like a slowdown of all."""
    events = job(Fault(1, ("F",), 6.0, 32), steps=80, without_core={0: 0.7, 1: 0.7}, coreless_us=25_000.0)
    assert named(events) == [("slow_device", (1,))]


def test_a_rank_that_is_slow_from_its_first_step_on_is_a_cause_once_it_is_named() -> None:
    """The predictor is fitted on it: by that half of an iteration had no cause, for which nobody could be called well."""
    events = job(Fault(1, ("B",), 6.0, 0), steps=80)
    assert named(events) == [("slow_device", (1,))]
    stated = [event.why for event in events if isinstance(event, DetectionLimit)]
    assert not [why for why in stated if "no cause explains" in why]


def test_what_all_ranks_wait_for_each_other_amid_their_passes_is_no_time_of_which_nothing_is_known() -> None:
    """FSDP's: 36 % of a healthy job's time was said to lie outside of all that is timed, or to have no cause."""
    assert limits(job(HEALTHY, exchanged_us=9000.0))[-1] is not None


def test_ranks_are_seen_before_the_whole_job_is_but_not_where_much_of_the_time_is_not() -> None:
    """What is slow outside of all that is timed may be one rank."""

    def of_devices(events: list[Event]) -> list[float | None]:
        return [event.of_devices for event in events if isinstance(event, DetectionLimit)]

    (seen,) = of_devices(job(HEALTHY, steps=26, longer=3.0))
    assert seen is not None
    assert 1.3 < seen < 2
    for events in (job(HEALTHY, steps=26, longer=3.0, ranks=1), job(HEALTHY, untimed_us=9000.0)):
        assert not any(of_devices(events)), of_devices(events)
    assert JobPace(outside=(0.4,)).sight(JobWideOptions.like(options_for("cores"))).scope == "device"
