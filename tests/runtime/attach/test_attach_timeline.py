"""Moments of a loop to its spans: what is a pass, a pause, a wait, and whose time it is; batches to their lengths."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.training.virtual_loop import VirtualClock

from unskew.collector.events import (
    IterationCommitted,
    MicroBatchPacked,
    Span,
    Telemetry,
)
from unskew.collector.files.loop_parts import LoopPart, line_of
from unskew.collector.files.segment import flush, unpack
from unskew.collector.paths import Store
from unskew.runtime.attach import pauses
from unskew.runtime.attach.lengths import lengths_of
from unskew.runtime.attach.session import JobFacts, LoopSession
from unskew.runtime.attach.timeline import LoopTimeline


class Clock(VirtualClock):
    def timeline(self, rank: int, ranks: int, events: list[Telemetry]) -> LoopTimeline:
        """One whose events, as a reader sees them, go to `events`."""
        return LoopTimeline(
            rank, ranks, f"node:{rank}", lambda part: events.extend(part.events()), ready=self.ready, now=self.now
        )


def test_own_time_is_apart_from_waiting_and_from_time_without_a_core() -> None:
    clock, events = Clock(), list[Telemetry]()
    timeline = clock.timeline(1, 2, events)
    for _ in range(2):  # a step of two micro-batches
        for _ in range(2):
            timeline.loading()
            clock.work(3)
            timeline.loaded({"cu_seqlens": torch.tensor([0, 5, 11])})
            clock.work(10, without_core=4)
            before = timeline.wait()
            clock.work(7)
            timeline.waited(*before)
            timeline.backward(2.0)
            clock.work(20)
            timeline.computed()
            clock.work(15)
            timeline.returned()
        timeline.stepping()
        clock.work(2)
        timeline.stepped()
        clock.work(9)
        before = timeline.wait()
        clock.work(1)
        timeline.waited(*before)
    timeline.finish()
    first = [event for event in events if isinstance(event, Span) and event.iteration == 0]
    own = [(span.kind, (span.compute_us or 0) // 1000, span.wall_us // 1000, (span.wait_dp_us or 0) // 1000) for span in first]
    micro_batch = [("data_wait", 3, 3, 0), ("F", 10, 21, 7), ("B", 20, 20, 0), ("all_reduce", 0, 15, 0)]
    assert own == [*micro_batch, *micro_batch, ("optimizer", 2, 2, 0), ("other", 9, 10, 1)]
    assert [span.micro_batch for span in first if span.kind == "F"] == [1, 3]
    assert [event.lengths for event in events if isinstance(event, MicroBatchPacked)] == [(5, 6)] * 4
    commits = [event for event in events if isinstance(event, IterationCommitted)]
    assert [(one.iteration, one.loss, one.tokens, one.wall_us) for one in commits] == [
        (0, 2.0, 22, 130_000),
        (1, 2.0, 22, 120_000),
    ]


def test_tokens_that_the_loop_states_count_where_nothing_shows_lengths() -> None:
    clock, events = Clock(), list[Telemetry]()
    timeline = clock.timeline(0, 1, events)
    for tokens in (40, None):
        timeline.note(tokens, None)
        clock.work(1)
        timeline.backward(2.0)
        clock.work(2)
        timeline.returned()
        timeline.stepping()
        timeline.stepped()
    timeline.finish()
    assert [event.lengths for event in events if isinstance(event, MicroBatchPacked)] == [(40,), ()]


def test_a_pause_is_no_part_of_what_it_interrupts() -> None:
    clock, events = Clock(), list[Telemetry]()
    timeline = clock.timeline(0, 2, events)
    for step in range(2):
        timeline.loading()
        clock.work(1)
        timeline.loaded(torch.zeros(2, 5, dtype=torch.long))
        begun = timeline.moment()
        clock.work(4)
        timeline.paused("gc", begun, timeline.moment())
        clock.work(6)
        timeline.backward(None)
        clock.work(7)
        timeline.returned()
        timeline.stepping()
        timeline.stepped()
        clock.work(3)
        timeline.evaluates(1)
        timeline.loading()
        clock.work(20)
        timeline.loaded(torch.zeros(2, 9, dtype=torch.long))
        since = timeline.moment()
        clock.work(8)
        timeline.paused("checkpoint", since, timeline.moment())
        timeline.trains(1)
        clock.work(2 * step)
    timeline.finish()
    second = [event for event in events if isinstance(event, Span) and event.iteration == 0]
    own = [(span.kind, (span.compute_us or 0) // 1000) for span in second]
    assert own == [("data_wait", 1), ("gc", 4), ("F", 6), ("B", 7), ("optimizer", 0), ("checkpoint", 8), ("evaluation", 20),
                   ("other", 3)]  # fmt: skip
    assert [event.lengths for event in events if isinstance(event, MicroBatchPacked)] == [(5, 5)] * 2


def test_a_teacher_that_is_evaluated_in_each_step_is_part_of_it() -> None:
    clock, events = Clock(), list[Telemetry]()
    timeline = clock.timeline(0, 1, events)
    for _ in range(3):
        timeline.evaluates(7)
        timeline.backward(None)
        timeline.returned()
        timeline.trains(7)
        timeline.stepping()
        timeline.stepped()
    timeline.finish()
    assert not [event for event in events if isinstance(event, Span) and event.kind == "evaluation"]


def test_a_loop_that_runs_its_passes_inside_the_optimizer_is_taken_apart() -> None:
    clock, events = Clock(), list[Telemetry]()
    timeline = clock.timeline(0, 1, events)
    timeline.stepping()
    clock.work(5)
    timeline.backward(None)
    clock.work(6)
    timeline.returned()
    clock.work(1)
    timeline.stepped()
    timeline.finish()
    spans = [(event.kind, event.wall_us // 1000) for event in events if isinstance(event, Span)]
    assert spans == [("F", 5), ("B", 6), ("optimizer", 1), ("other", 0)]


def test_the_lengths_of_what_the_model_is_given_count_and_not_those_read_ahead() -> None:
    clock, events = Clock(), list[Telemetry]()
    timeline = clock.timeline(0, 1, events)
    for given in (4, 3):
        timeline.loading()
        timeline.loaded(torch.zeros(1, 9, dtype=torch.long))
        timeline.called({"input_ids": torch.zeros(2, given, dtype=torch.long)}, gathers=True)
        timeline.backward(None)
        timeline.called({"": torch.zeros(2, 8, 16)}, gathers=True)  # a part of the model, whose activations are computed again
        timeline.returned()
    timeline.finish()
    assert [event.lengths for event in events if isinstance(event, MicroBatchPacked)] == [(4, 4), (3, 3)]


def test_the_time_without_a_core_is_asked_for_often_only_where_ranks_take_turns() -> None:
    clock, events = Clock(), list[Telemetry]()
    timeline = clock.timeline(0, 2, events)

    def steps(n: int, without_core: int) -> int:
        asked = clock.asked
        for _ in range(n):
            clock.work(1, without_core=without_core)
            timeline.backward(None)
            clock.work(3)
            timeline.returned()
            timeline.stepping()
            timeline.stepped()
        return (clock.asked - asked) // n

    steps(2, 0)
    assert steps(10, 0) == 1
    steps(2, 1)
    assert steps(10, 1) == 2
    timeline.finish()
    forward = [event for event in events if isinstance(event, Span) and event.kind == "F"]
    assert [span.runq_us for span in forward] == [0] * 12 + [400] + [1000] * 11


def test_what_a_woken_rank_waits_for_its_core_is_no_discount_on_its_work() -> None:
    clock, events = Clock(), list[Telemetry]()
    timeline = clock.timeline(0, 2, events)
    for _ in range(3):
        clock.work(2, without_core=1)
        timeline.backward(None)
        clock.work(3)
        before = timeline.wait()
        clock.work(20, without_core=8)
        timeline.waited(*before)
        clock.work(4)
        timeline.returned()
        timeline.stepping()
        timeline.stepped()
    timeline.finish()
    passes = [event for event in events if isinstance(event, Span) and event.kind == "B"]
    assert [(one.compute_us, one.wait_dp_us, one.runq_us) for one in passes] == [(7_000, 20_000, 8_000)] * 3


def test_a_long_iteration_is_written_part_by_part_and_ends_once() -> None:
    clock, parts = Clock(), list[LoopPart]()
    timeline = LoopTimeline(0, 1, "node:0", parts.append, ready=clock.ready, now=lambda: clock.ns)
    for _ in range(4):
        clock.work(200)
        timeline.backward(None)
        timeline.returned()
    timeline.stepping()
    clock.work(7)
    timeline.stepped()
    timeline.finish()
    assert [part.commit is None for part in parts] == [True, True, False]
    lines = b"".join(line_of(10 * number, 5, part) for number, part in enumerate(parts))
    events = [json.loads(line) for line in unpack(flush(lines)).lines.splitlines()]
    assert [event["seq"] for event in events] == [10 * n + at for n, part in enumerate(parts) for at in range(part.n_events)]
    assert sum(event["wall_us"] for event in events if event["type"] == "span@1") == 807_000
    (commit,) = [event for event in events if event["type"] == "iteration_committed@1"]
    assert commit["wall_us"] == 807_000


@pytest.mark.parametrize(
    ("batch", "lengths"),
    [
        (torch.zeros(3, 7, dtype=torch.long), (7, 7, 7)),
        ({"labels": torch.zeros(2), "input_ids": torch.zeros(2, 9, dtype=torch.long)}, (9, 9)),
        ((torch.zeros(4, 5), torch.zeros(4, dtype=torch.long)), (20,)),
        ({"input_ids": torch.zeros(1, 8, dtype=torch.long), "cu_seqlens": torch.tensor([0, 5, 8])}, (5, 3)),
        ({"input_ids": torch.zeros(1, 6, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0]])}, (3, 2, 1)),
        ({"input_ids": torch.zeros(2, 3, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}, (3, 3)),
        (["a text"], ()),
        (3, ()),
    ],
)
def test_lengths_come_from_what_a_batch_shows(batch: object, lengths: tuple[int, ...]) -> None:
    assert lengths_of(batch) == lengths


def test_torchtitan_s_log_is_listened_to_and_stays_as_it_is() -> None:
    """Its records as torchtitan 0.3 writes them."""
    clock, events = Clock(), list[Telemetry]()
    session = LoopSession(Store(Path("store")), "run", lambda: JobFacts(0, 1, (), False))
    timeline = session.timeline = clock.timeline(0, 1, events)
    log = ModuleType("torchtitan")
    log._structured_logger = logging.Logger("titan")  # type: ignore[attr-defined]
    pauses.listen_to_torchtitan(session, log)

    def report(name: str, **more: object) -> None:
        log._structured_logger.info("words", extra={"log_type_name": name, **more})

    for _ in range(2):
        report("fetching_batch_start", step=1)
        clock.work(7)
        report("fetching_batch_end", value=7.0)
        report("metric_value", event_name="local_valid_tokens", value=90)
        clock.work(3)
        timeline.backward(None)
        timeline.returned()
        timeline.stepping()
        timeline.stepped()
    session.timeline = None
    report("fetching_batch_start")
    timeline.finish()
    spans = [(one.kind, one.wall_us) for one in events if isinstance(one, Span) and one.iteration == 1]
    assert spans[:2] == [("data_wait", 7000), ("F", 3000)]
    assert [one.tokens for one in events if isinstance(one, IterationCommitted)] == [90, 90]
    with pytest.raises(AttributeError):
        pauses.listen_to_torchtitan(session, ModuleType("torchtitan"))
