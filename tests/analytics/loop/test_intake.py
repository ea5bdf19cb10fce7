"""Whole committed iterations come out the same, in whatever order the entries of different writers are read."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.loop.intake import Intake
from unskew.analytics.pipeline.schedule import build_schedule
from unskew.collector.events import IterationCommitted, MicroBatchPacked, Span, Telemetry

PLAN = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=4)
RANKS = len(PLAN.ranks)
LATER = PLAN.renumbered(1)
PLAN_OF = {0: PLAN, 1: LATER}
ITERATIONS = 6
LONG_ENOUGH = 25
Log = dict[int, list[tuple[float, Telemetry]]]


def attempt_of(plan: Plan, iteration: int, attempt: int, rank: int) -> list[Telemetry]:
    """What a rank writes of one attempt before it votes."""
    events: list[Telemetry] = [
        Span(
            kind=action.kind,
            device=f"cpu-{rank}",
            rank=rank,
            plan_version=plan.plan_version,
            attempt=attempt,
            iteration=iteration,
            start_us=1000 * index,
            wall_us=100 + rank,
            micro_batch=action.micro_batch,
            first_layer=action.first_layer,
            n_layers=action.n_layers,
            compute_us=1000 * attempt + 100 * (rank + 1) + 10 * action.micro_batch + iteration,
        )
        for index, action in enumerate(build_schedule(plan).by_rank[rank])
    ]
    return events + [
        MicroBatchPacked(iteration=iteration, micro_batch=number, attempt=attempt, lengths=(30 + iteration, 20 + number))
        for number, route in enumerate(plan.routes)
        if route.hops[0].rank == rank
    ]


def written(aborted: int | None) -> Log:
    """rank -> (when, event): iteration i is computed within [i, i + 0.5), committed within [i + 0.5, i + 1).

    Iteration `aborted` has a first attempt, cut short on rank 1, that a second one under the next epoch replaces.
    """
    log: Log = {rank: [] for rank in range(RANKS)}
    plan = PLAN
    for iteration in range(ITERATIONS):
        attempt = 0
        if iteration == aborted:
            for rank in log:
                cut = attempt_of(plan, iteration, 0, rank)[: 2 if rank == 1 else None]
                log[rank] += [(iteration + 0.1, event) for event in cut]
            plan, attempt = LATER, 1
        for rank in log:
            log[rank] += [(iteration + 0.3, event) for event in attempt_of(plan, iteration, attempt, rank)]
            mark = IterationCommitted(
                iteration=iteration,
                plan_version=plan.plan_version,
                attempt=attempt,
                rank=rank,
                loss=5.0 - iteration,
                tokens=200,
                start_us=0,
                wall_us=1000 + 7 * rank,
                log_complete=True,
            )
            log[rank].append((iteration + 0.5 + 0.1 * rank, mark))
    return log


def read(log: Log, reads: Sequence[Sequence[float]]) -> list[IterationTelemetry]:
    """Poll k reads writer w up to the moment `reads[k][w]`; at the end everything, and some empty polls."""
    intake, released = Intake(), []
    offsets = dict.fromkeys(log, 0)
    for moments in [*reads, *[[float("inf")] * RANKS] * LONG_ENOUGH]:
        events: list[Telemetry] = []
        for rank, moment in zip(log, moments, strict=True):
            upto = sum(when <= moment for when, _ in log[rank])
            events += [event for _, event in log[rank][offsets[rank] : upto]]
            offsets[rank] = max(offsets[rank], upto)
        released += intake.take(events, PLAN_OF)
    return released


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    aborted=st.none() | st.integers(0, ITERATIONS - 1),
    gaps=st.lists(st.tuples(st.floats(0, 1.5), *[st.floats(0, 1)] * RANKS), max_size=15),
)
def test_any_order_of_arrival_between_writers_gives_the_same_iterations(
    aborted: int | None, gaps: list[tuple[float, ...]]
) -> None:
    log = written(aborted)
    reads, now = [], 0.0
    for gap, *within in gaps:  # each poll reads its writers one after the other, somewhere within its own time
        reads.append([now + gap * moment for moment in within])
        now += gap
    released = read(log, reads)
    assert [one.committed.iteration for one in released] == list(range(ITERATIONS))
    assert all(one.committed.log_complete for one in released)
    for one in released:
        assert all((chunk.us >= 1000) == (one.committed.iteration == aborted) for chunk in one.committed.chunks)
    assert all(one.committed.measured_us == 1000 + 7 * (RANKS - 1) for one in released)
    assert released == read(log, [])


def test_a_reader_that_was_away_releases_everything_at_once() -> None:
    intake = Intake()
    events = [event for lines in written(None).values() for _, event in lines]
    assert intake.take(events, PLAN_OF) == []
    assert len(intake.take([], PLAN_OF)) == ITERATIONS


def test_an_iteration_whose_chunks_never_come_is_released_as_incomplete_and_holds_nobody_up_for_long() -> None:
    log = written(None)
    log[2] = [(when, event) for when, event in log[2] if not (isinstance(event, Span) and event.iteration == 3)]
    released = read(log, [])
    assert [one.committed.log_complete for one in released] == [iteration != 3 for iteration in range(ITERATIONS)]


def test_a_rank_that_died_before_its_step_is_not_waited_for_forever() -> None:
    log = written(None)
    log[1] = [(when, event) for when, event in log[1] if not isinstance(event, IterationCommitted)][:-10]
    assert read(log, [])[0].committed.log_complete


def test_a_step_that_only_the_dead_rank_took_does_not_count() -> None:
    log = written(3)
    early = IterationCommitted(
        iteration=3, plan_version=0, attempt=0, rank=3, loss=9.0, tokens=200, start_us=0, wall_us=9999, log_complete=True
    )
    log[3] = sorted([*log[3], (3.2, early)], key=lambda line: line[0])
    assert read(log, [[3.25] * RANKS]) == read(written(3), [])


@pytest.mark.parametrize(("late", "coreless_us"), [(0, 0), (1, 700)])
@pytest.mark.parametrize("emulated", [False, True])
def test_time_without_a_core_counts_as_far_as_the_iteration_was_longer_for_it(
    late: int, coreless_us: int, emulated: bool
) -> None:
    """Rank 1 lacks its core for 700 us: while rank 0 is late nobody waits for it; an emulated device may have gone on."""

    def lacking(event: Span) -> Span:
        own_us = 2000 if event.rank == late else 10
        us = 700 if (event.rank, event.micro_batch, event.kind) == (1, 0, "F") else 0
        return msgspec.structs.replace(event, compute_us=own_us, wall_us=own_us + us * (not emulated), runq_us=us)

    log = [lacking(event) if isinstance(event, Span) else event for rank in range(RANKS) for _, event in written(None)[rank]]
    intake = Intake()
    first, *_ = (one for _ in range(LONG_ENOUGH) for one in intake.take([log.pop(0) for _ in [*log]], PLAN_OF))
    assert (first.coreless_us, first.maybe_coreless_us) == ((0, coreless_us) if emulated else (coreless_us, 0))
    assert [rank for rank, share in first.without_core.items() if share > 0] == [1]


def test_what_ranks_exchange_amid_their_chunks_is_what_the_one_that_waits_least_waits() -> None:
    """The others wait for it as well: rank 0's chunks are long, and the others' waits with them."""

    def waiting(event: Span) -> Span:
        return msgspec.structs.replace(event, wait_dp_us=50 if event.rank == 0 else 500)

    log = [waiting(event) if isinstance(event, Span) else event for rank in range(RANKS) for _, event in written(None)[rank]]
    intake = Intake()
    first, *_ = (one for _ in range(LONG_ENOUGH) for one in intake.take([log.pop(0) for _ in [*log]], PLAN_OF))
    assert first.exchanged_us == 50 * sum(chunk.rank == 0 for chunk in first.committed.chunks)
