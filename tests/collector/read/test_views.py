"""The views over one small run that uses every event, live and sealed; and that the documentation names them all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Literal, get_args, get_origin

import msgspec
import pytest
from support.paths import DOCS

from unskew.analytics.core.layout import uniform_plan
from unskew.collector import events as ev
from unskew.collector import projections
from unskew.collector.files import manifest
from unskew.collector.paths import Store
from unskew.collector.read.reader import Reader, open_store
from unskew.collector.read.views import VIEWS
from unskew.collector.service.ingest import working_database
from unskew.collector.service.sealing import seal
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter

PLAN = uniform_plan(tp=1, pp=2, dp=1, n_layers=4, micro_batches=2)
FAULT = ev.Party(kind="device", rank=1)
ITERATIONS = 3
REDONE = 1
"""The iteration whose first attempt was cut short."""


def telemetry() -> Iterator[tuple[int, ev.Telemetry]]:
    """(rank, event): two ranks, three iterations."""
    for iteration in range(ITERATIONS):
        counted = int(iteration == REDONE)
        for attempt in range(counted + 1):
            for route in PLAN.routes if attempt == counted else PLAN.routes[:1]:
                yield (
                    0,
                    ev.MicroBatchPacked(iteration=iteration, micro_batch=route.micro_batch, attempt=attempt, lengths=(3, 4)),
                )
                for hop in route.hops:
                    for kind in ("F", "B"):
                        yield hop.rank, span(hop.rank, iteration, attempt, kind, micro_batch=route.micro_batch,
                                             first_layer=hop.first_layer, n_layers=hop.n_layers, compute_us=90)  # fmt: skip
            yield 0, span(0, iteration, attempt, "send", peer=1, bytes=64, posted_us=5)
            yield 1, span(1, iteration, attempt, "all_reduce", group="layer-2", group_seq=iteration)
        for rank in (0, 1):
            yield rank, ev.IterationCommitted(
                iteration=iteration, plan_version=0, attempt=counted, rank=rank, loss=2.5, tokens=14, start_us=0,
                wall_us=1000 + rank, log_complete=rank == 0 or iteration != 2,
            )  # fmt: skip
        ratio = ev.RankRatio(rank=1, measured_us=180, healthy_us=100, f=1.8, score=0.8)
        yield 0, ev.IterationJudged(iteration=iteration, plan_version=0, measured_us=1001, predicted_us=900, ranks=(ratio,))
    yield 0, ev.Heartbeat(rank=0, pid=7, iteration=2, progress=9, activity="compute", age_us=5, stalled_us=0)
    yield 0, ev.Dropped(count=4)
    yield 0, ev.IterationTimed(iteration=0, wall_us=1)
    written = (
        ev.Span, ev.MicroBatchPacked, ev.IterationCommitted, ev.IterationJudged, ev.IterationTimed, ev.Heartbeat, ev.Dropped,
    )  # fmt: skip
    for kind in ev.TELEMETRY:
        if kind not in written:
            yield 0, filled(kind)


def filled(kind: type[ev.Event]) -> ev.Event:
    """An event with the least that its required fields take."""
    least: dict[object, object] = {int: 0, float: 0.5, bool: False, str: "x", dict: {}, UnionType: None}
    values: dict[str, object] = {"type": ev.tag_of(kind)}
    for field in msgspec.structs.fields(kind):
        origin = get_origin(field.type) or field.type
        if field.required:
            values[field.encode_name] = get_args(field.type)[0] if origin is Literal else least.get(origin, [])
    return msgspec.convert(values, kind)


def span(rank: int, iteration: int, attempt: int, kind: str, **fields: object) -> ev.Span:
    return msgspec.convert(
        {"type": "span@1", "kind": kind, "device": f"device-{rank}", "rank": rank, "epoch": 0, "attempt": attempt,
         "iteration": iteration, "start_us": 10, "wall_us": 100, **fields},
        ev.Span,
    )  # fmt: skip


def proposed(name: str, plan_version: int) -> ev.PlanProposed:
    return ev.PlanProposed(
        proposal=name,
        plan_version=plan_version,
        digest="d",
        optional=True,
        reason="rank 1 is slow",
        verdict=1,
        plan=PLAN.to_data(),
        predicted_us=8,
        baseline_us=10,
        gain_percent=20.0,
        cost_us=3,
        payback_iterations=2,
        at_iteration=1,
    )


CONTROL: list[ev.Control] = [
    ev.RunStarted(run="r", device="sleep", clock="monotonic", mode="approve", ranks=2, options={"dim": 8}, code="c0de",
                  version="0.1"),
    ev.DeviceJoined(device="device-0", rank=0, node="n", pid=7),
    ev.DeviceJoined(device="device-1", rank=1, node="n", pid=8),
    ev.PlanApplied(plan_version=0, digest=PLAN.digest, proposal="", iteration=0, reason="start", plan=PLAN.to_data()),
    ev.FaultInjected(kind="slow", rank=1, at_iteration=1, factor=1.8),
    ev.PredictorFitted(predictor=1, watermark=0, model={"F": 1}, n_chunks=8, error_percent={"F": 1.5}, trigger="warm-up"),
    ev.Verdict(verdict=1, cause="slow_device", culprits=(FAULT,), speed={"F": 0.56}, since_iteration=1, at_iteration=1,
               confidence=0.9, sentence="rank 1 is slow", evidence={"score": 4}),
    ev.Verdict(verdict=2, cause="unknown", culprits=(), since_iteration=2, at_iteration=2, confidence=0.1, sentence="?",
               evidence={}),
    ev.VerdictClosed(verdict=1, until_iteration=2, at_iteration=2, reason="healthy again"),
    ev.VerdictScored(verdict=1, correct=True, truth="slow", delay_iterations=0, onset_error_iterations=0, speed_error=0.01),
    *(proposed(name, n) for n, name in enumerate(("open", "approved", "rejected", "expired", "applied", "failed"), 1)),
    *(ev.PlanApproved(proposal=name, by="ada", reason="yes") for name in ("approved", "applied", "failed")),
    ev.PlanRejected(proposal="rejected", by="bob", reason="no"),
    ev.PlanExpired(proposal="expired", reason="too late"),
    ev.CheckpointSaved(iterations=10, bytes=4096, seconds=0.1, paused_us=40),
    ev.Suspected(rank=2, how="hung", detail="no progress"),
    ev.PlanKept(plan_version=1, at_iteration=9, reason="nothing better"),
    ev.PlanApplied(plan_version=5, digest="d", proposal="applied", iteration=3, reason="rank 1 is slow", plan=PLAN.to_data()),
    ev.PlanFailed(plan_version=6, proposal="failed", reason="a rank died"),
    ev.PlanScored(plan_version=5, proposal="applied", from_iteration=3, to_iteration=13, n=10, predicted_s=0.5, baseline_s=0.8,
                  measured_s=0.51, effect_s=0.29, interval_s=(0.27, 0.31)),
    ev.Regrouped(plan_version=5, iteration=3, seconds=0.2, migrate_seconds=0.1, moved_bytes=10),
    ev.DeviceLost(device="device-1", rank=1, how="exit", detail="signal 9", detected_us=5),
    ev.CommandRefused(command="approve", by="eve", reason="expired"),
    ev.Note(text="look here", by="ada"),
    ev.ModeChanged(mode="auto", by="ada"),
    ev.RunFinished(status="done", iterations=3),
]  # fmt: skip


CONTROL += [filled(kind) for kind in ev.CONTROL if kind not in {type(event) for event in CONTROL}]  # no view of their own


@pytest.fixture(scope="module", params=["live", "sealed", "published"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    store = Store(tmp_path_factory.mktemp("views"))
    stream = ControlStream(store, "r", "control", "controller.1")
    stream.append(0, CONTROL, actor="controller")
    stream.close()
    writers = [SpoolWriter(store, "r", f"rank-{rank:04d}.1") for rank in (0, 1)]
    for rank, event in telemetry():
        writers[rank].append(event)
    assert all(writer.close(10.0) for writer in writers)
    if request.param != "live":
        database = working_database(store)
        assert seal(store, database, "r")
        if request.param == "published":
            sealed = manifest.load(store)
            published = projections.publish(database, store, sealed)
            manifest.publish(store, msgspec.structs.replace(sealed, number=sealed.number + 1, published=published))
        database.close()
    with open_store(store) as reader:
        yield reader


def test_the_run_uses_every_event() -> None:
    used = {type(event) for event in (*CONTROL, *(event for _, event in telemetry()))}
    assert used == {*ev.CONTROL, *ev.TELEMETRY}


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_answers_about_the_run(reader: Reader, view: str) -> None:
    frame = reader.sql(f"select * from {view}")
    assert frame.height
    assert "run" in frame.columns or view == "device_history"
    assert not [name for name in frame.columns if re.search(r"time$|duration$|_at$", name)], "units belong into names"


@pytest.mark.slow
def test_former_names_give_the_same_answers(reader: Reader) -> None:
    renamed = [view for view in VIEWS if "plan_version" in reader.sql(f"select * from {view} limit 0").columns]
    assert {"spans", "iterations", "judged", "plans", "proposals", "decisions"} < set(renamed)
    for view in renamed:
        assert reader.sql(f"select * from {view} limit 0").columns[-1] == "epoch"
        assert reader.sql(f"select count(*) from {view} where epoch is distinct from plan_version").item() == 0
    assert reader.sql("select max(plan_version) from plans").item() == 5
    assert reader.sql("select * from accused").equals(reader.sql("select * from flagged"))
    assert reader.sql("select count(*) from judged where predicted_us is distinct from healthy_us").item() == 0


def test_events_hold_every_event_as_it_was_written(reader: Reader) -> None:
    rows = reader.sql("select type, payload from events where stream is not null order by version").rows()
    types = {ev.tag_of(kind): kind for kind in ev.CONTROL}
    decoded = [msgspec.json.decode(payload, type=types[tag]) for tag, payload in rows]
    assert msgspec.json.encode(decoded) == msgspec.json.encode(CONTROL)
    assert reader.sql("select count(*) from events").item() == len(CONTROL) + sum(1 for _ in telemetry())


def test_iterations_have_one_row_each_with_the_attempt_that_counted(reader: Reader) -> None:
    assert reader.sql(
        "select iteration, attempt, loss, tokens, iteration_us, predicted_us, log_complete from iterations order by iteration"
    ).rows() == [(0, 0, 2.5, 14, 1001, 900, True), (1, 1, 2.5, 14, 1001, 900, True), (2, 0, 2.5, 14, 1001, 900, False)]


def test_executed_proves_exactly_once_and_shows_what_is_missing_or_double(reader: Reader, tmp_path: Path) -> None:
    per_iteration = "select iteration, count(*), min(times), max(times) from executed('{}') group by all order by all"
    assert reader.sql(per_iteration.format("r")).rows() == [(iteration, 16, 1, 1) for iteration in range(ITERATIONS)]

    store = Store(tmp_path)
    stream = ControlStream(store, "wrong", "control", "controller.1")
    stream.append(0, CONTROL[3:4], actor="controller")
    stream.close()
    writer = SpoolWriter(store, "wrong", "rank-0000.1")
    everything = [event for _, event in telemetry() if isinstance(event, ev.Span | ev.IterationCommitted)]
    for event in everything[1:]:
        writer.append(event)
    writer.append(next(event for event in everything if isinstance(event, ev.Span) and event.kind == "B"))
    assert writer.close(10.0)
    with open_store(store) as other:
        wrong = "select kind, layer, micro_batch, times from executed('wrong') where times != 1 order by all"
        assert other.sql(wrong).rows() == [("B", 0, 0, 2), ("B", 1, 0, 2), ("F", 0, 0, 0), ("F", 1, 0, 0)]


def test_proposals_and_decisions_tell_what_became_of_each(reader: Reader) -> None:
    status = dict(reader.sql("select proposal, status from proposals").rows())
    assert status == {name: name for name in ("open", "approved", "rejected", "expired", "applied", "failed")}
    assert reader.sql("select decision, decisions.by, reason from decisions where proposal = 'rejected'").rows() == [
        ("rejected", "bob", "no")
    ]
    assert reader.sql("select decision from decisions where proposal = 'applied' order by seq")["decision"].to_list() == [
        "approved", "applied", "scored",
    ]  # fmt: skip
    assert reader.sql("select decided_by, decision_reason from proposals where proposal = 'failed'").row(0) == (
        "controller",
        "a rank died",
    )


def test_runs_verdicts_plans_and_devices_join_what_belongs_together(reader: Reader) -> None:
    run = reader.runs().row(0, named=True)
    assert (run["run"], run["mode"], run["status"], run["iterations"], run["version"]) == ("r", "auto", "done", 3, "0.1")
    assert run["last_us"] >= run["finished_us"] >= run["started_us"]
    verdicts = reader.sql("select verdict, until_iteration, first_correct, culprits->0->>'rank' from verdicts order by 1")
    assert verdicts.rows() == [(1, 2, True, "1"), (2, None, None, None)]
    assert reader.sql("select plan_version, from_iteration, measured_s, interval_s->>0 from plans order by 1").rows() == [
        (0, 0, None, None), (5, 3, 0.51, "0.27"),
    ]  # fmt: skip
    assert reader.sql("select rank, state, how from devices order by rank").rows() == [(0, "joined", None), (1, "lost", "exit")]
    assert reader.sql("select n_documents, tokens, sum_sq from micro_batches limit 1").row(0) == (2, 7, 25)
    assert reader.sql("select end_us - start_us, bytes from transfers limit 1").row(0) == (100, 64)


def test_a_revised_verdict_is_one_row_with_the_newest_estimate_and_the_score_of_its_first_revision(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = next(event for event in CONTROL if isinstance(event, ev.Verdict))
    scored = next(event for event in CONTROL if isinstance(event, ev.VerdictScored))
    revised = msgspec.structs.replace(first, speed={"F": 0.3}, at_iteration=7)
    stream = ControlStream(store, "r", "control", "controller.1")
    stream.append(0, [first, scored, revised], actor="c")
    stream.close()
    with open_store(store) as reader:
        rows = reader.sql("select verdict, at_iteration, speed->>'F', first_correct, first_speed_error from verdicts").rows()
    assert rows == [(1, 7, "0.3", True, 0.01)]


def test_no_event_has_a_field_of_the_envelope() -> None:
    envelope = {"seq", "at_us", "stream", "version", "actor", "type"}
    for kind in (*ev.TELEMETRY, *ev.CONTROL):
        names = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert not names & envelope, kind


def test_the_documentation_names_every_event_and_every_view() -> None:
    docs = DOCS
    text = (docs / "reference" / "events.md").read_text() + (docs / "reference" / "sql.md").read_text()
    for name in (*(ev.tag_of(kind) for kind in (*ev.TELEMETRY, *ev.CONTROL)), *VIEWS, "executed"):
        assert re.search(rf"`{re.escape(name)}[`(]", text), name
