"""Runs in which something is wrong, or in which nobody could have seen it: none of them is called well."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pytest
from rich.console import Console
from support.dashboard import runs
from support.traces.foreign_traces import log_of, spans_of

from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import JOBS
from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.diagnosis.diagnose import Diagnosis, diagnose
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.diagnosis.trace.model import from_spans
from unskew.analytics.lab.simulator.simulation import SimulationOptions, simulate
from unskew.analytics.policies.registry import POLICIES
from unskew.collector.events import DeviceLost, Dropped, PlanApplied, PlanProposed, RunFinished, Span
from unskew.collector.formats.exporters import straggler_analysis
from unskew.collector.formats.registry import bring_in, take_out
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.service.check import check
from unskew.collector.service.maintenance import maintaining
from unskew.collector.write.commands import hold_controller_lock
from unskew.commands.afterwards.diagnose import shown
from unskew.edge.load_run import load_run
from unskew.edge.record_simulation import record

STEP_US, LATE_US, STEPS = 4_000.0, 40_000.0, 60


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def loaded(store: Store, run: str) -> RunLog:
    with open_store(store) as reader:
        return load_run(reader, run)


def of_table(store: Store, tmp_path: Path, text: str) -> Diagnosis:
    (tmp_path / "t.csv").write_text(text)
    (brought,) = bring_in(store, "iteration-times", tmp_path / "t.csv")
    return diagnose(loaded(store, brought.run))


def not_calm(found: Diagnosis) -> bool:
    """Neither the word nor the sentence of calm."""
    return found.outcome != "well" and found.why != "" and not found.sentence.startswith("Well")


def late_rank(parts: Sequence[tuple[str, float]], *, waits: bool, group: str | None = "0-1") -> RunLog:
    """An own data-parallel job of two ranks: spans of a step's `parts`; rank 1 comes `LATE_US` late in every step, which is in
    none of them, and rank 0 waits for it in the all-reduce where that is recorded."""
    noise, spans = np.random.default_rng(3), []
    period = STEP_US + LATE_US + 1_000
    for step in range(STEPS):
        for rank in (0, 1):
            at = step * period + rank * LATE_US
            place = {"device": f"cpu-{rank}", "rank": rank, "plan_version": 0, "attempt": 0, "iteration": step}
            for kind, share in parts:
                us = share * STEP_US * float(np.exp(noise.normal(0, 0.01)))
                spans.append(Span(kind=kind, start_us=round(at), wall_us=round(us), micro_batch=0, **place))  # type: ignore[arg-type]
                at += us
            end = step * period + LATE_US + STEP_US + 500
            if waits:
                spans.append(
                    Span(
                        kind="all_reduce",
                        start_us=round(at),
                        wall_us=max(round(end - at), 1),
                        group=group,
                        group_seq=step,
                        **place,
                    )
                )
            spans.append(Span(kind="optimizer", start_us=round(end), wall_us=200, **place))
    names = [field.name for field in msgspec.structs.fields(Span)]
    frame = pl.DataFrame([{name: getattr(one, name) for name in names} for one in spans], infer_schema_length=None)
    return RunLog(
        run="ddp", device_kind=None, clock="imported", options={}, ranks=2, trace=from_spans(frame, pl.DataFrame(), {}),
        iterations=pl.DataFrame({"iteration": range(STEPS), "iteration_us": [round(period)] * STEPS}),
    )  # fmt: skip


@pytest.mark.parametrize("pp", [1, 2])
def test_most_replicas_slow_from_the_first_step_on_are_not_said_to_have_long_sequences(pp: int) -> None:
    """All micro-batches are equal: "long sequences, as every chunk of theirs shows; a replica slower by 8 % would show"."""
    plan = uniform_plan(tp=1, pp=pp, dp=4, n_layers=2, micro_batches=8)
    slow = {role.rank for role in plan.roles if role.replica}
    spans = spans_of(plan, iterations=40, spread=0.0, factor=lambda _, chunk: 1.3 if chunk.rank in slow else 1.0)
    found = diagnose(log_of(spans))
    assert [(one.cause, one.confidence) for one in found.verdicts] == [("long_sequences", 0.5)]
    assert re.search(
        r"long sequences, or slow replicas, and the log does not show which: rank [01] takes 0\.77 of its peers' \w+ time: "
        r"they are slow, or it has less to do\.$",
        found.sentence,
    )


@pytest.mark.parametrize(
    ("parts", "waits", "group"),
    [
        ((("F", 0.4), ("B", 0.6)), True, "0-1"),
        ((("F", 0.4), ("B", 0.6)), False, None),
        ((), True, "0-1"),
        ((), True, None),
    ],
    ids=["chunks and collectives", "chunk times", "collectives", "collectives of no group"],
)
def test_a_rank_that_is_late_in_every_step_from_the_first_on(
    parts: tuple[tuple[str, float], ...], waits: bool, group: str | None
) -> None:
    found = diagnose(late_rank(parts, waits=waits, group=group))
    assert not_calm(found), found.sentence
    assert not any(party.rank == 0 for verdict in found.verdicts for party in verdict.culprits)


def test_a_rank_that_is_late_in_every_step_of_a_table_of_ranks(store: Store, tmp_path: Path) -> None:
    noise = np.random.default_rng(5).normal(1.0, 0.01, (STEPS, 2))
    rows = [f"{i},{rank},{(0.004 + 0.04 * rank) * noise[i, rank]}" for i in range(STEPS) for rank in (0, 1)]
    assert not_calm(of_table(store, tmp_path, "step,rank,seconds\n" + "\n".join(rows)))


def test_a_series_that_is_too_short(store: Store, tmp_path: Path) -> None:
    found = of_table(store, tmp_path, "step,seconds\n" + "\n".join(f"{i},1.0" for i in range(6)))
    assert found.outcome == "cannot_be_judged"
    assert "6 iterations" in found.why


@pytest.mark.slow
@pytest.mark.parametrize("shift", [1.03, 1.06, 1.2])
def test_a_shift_that_was_not_named_is_smaller_than_what_would_have_been(store: Store, tmp_path: Path, shift: float) -> None:
    x = np.exp(np.random.default_rng(7).normal(0, 0.003, 400)) * np.where(np.arange(400) >= 200, shift, 1.0)
    found = of_table(store, tmp_path, "step,seconds\n" + "\n".join(f"{i},{value}" for i, value in enumerate(x)))
    assert found.outcome == "wrong" or found.smallest_slowdown is None or found.smallest_slowdown > shift


@pytest.mark.slow
def test_every_slowdown_of_a_job_is_on_the_screen_with_its_own_end(store: Store, tmp_path: Path) -> None:
    """One that comes again after twenty healthy iterations is another; the time between is not slow."""
    episodes = [(60, 80), (100, 106), (126, 150), (170, 175)]
    x = np.exp(np.random.default_rng(9).normal(0, 0.01, 220))
    for since, until in episodes:
        x[since:until] *= 1.4
    found = of_table(store, tmp_path, "step,seconds\n" + "\n".join(f"{i},{value}" for i, value in enumerate(x)))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(shown(found))
    lines = [line for line in console.export_text().splitlines() if "the whole job takes 1." in line]
    assert [tuple(map(int, re.findall(r"iteration (\d+)", line))) for line in lines] == episodes


def test_advice_is_neither_dated_nor_sure(store: Store, tmp_path: Path) -> None:
    """An episode of the whole job that is over: its end belongs to the finding, the advice stands by itself."""
    x = [1.0 + 0.3 * (150 <= i < 220) + 0.002 * (i % 5) for i in range(400)]
    found = of_table(store, tmp_path, "step,seconds\n" + "\n".join(f"{i},{value}" for i, value in enumerate(x)))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(shown(found))
    finding, advice = (line.strip() for line in console.export_text().splitlines()[2:4])
    assert re.search(r"since iteration 1[45]\d, until iteration 2[12]\d +\(confidence \d\.\d\d\)$", finding)
    assert advice.startswith("next: ")
    assert "confidence" not in advice
    assert "until iteration" not in advice


def test_advice_on_what_all_ranks_share_is_neither_dated_nor_sure() -> None:
    """How sure it is of such a cause is a part of the iterations, and stands with what was found, never with the advice."""
    plan = uniform_plan(tp=1, pp=2, dp=2, n_layers=4, micro_batches=8)
    found = diagnose(log_of(spans_of(plan, iterations=30, spread=0.8, noise=0.001)))
    (verdict,) = found.verdicts
    assert (verdict.cause, found.outcome) == ("long_sequences", "wrong"), "of inferred lengths no device is cleared for certain"
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(shown(found))
    finding, advice = (line.strip() for line in console.export_text().splitlines()[2:4])
    assert finding.startswith(f"long_sequences  {verdict.sentence}")
    assert re.search(r"  \(in \d+ % of the iterations\)$", finding)
    assert (advice, "until" in finding) == (f"next: {verdict.evidence['next_step']}", False)


@pytest.mark.limit(60)
def test_a_probe_is_advised_only_where_one_is_answered(store: Store) -> None:
    """Whoever is over, was imported, or is a training of others on GPUs or of one rank answers none."""
    runs.slow(store).close()
    log = loaded(store, "slow")
    others = {**log.options, "command": ["train.py"]}

    def advised(**changed: object) -> bool:
        found = diagnose(msgspec.structs.replace(log, **changed)).verdicts
        steps = {verdict.evidence["next_step"] for verdict in found if verdict.cause == "slow_device"}
        assert steps
        assert all("drain it" in step for step in steps)
        return any("unskew probe" in step for step in steps)

    assert advised(end="running")
    assert advised(end="running", options=others)
    assert not any(advised(end=end) for end in ("done", "failed", "lost"))
    assert not any(advised(end="running", options=others, device_kind=kind) for kind in ("gpus", "shared_gpus"))
    assert not advised(end="running", options=others, ranks=1)
    assert not advised(end="running", clock="imported")


@pytest.mark.limit(60)
def test_what_unequal_documents_cost_is_said_and_is_no_fault(store: Store) -> None:
    """Their lengths are in the log, so each device is known to take what its work should: well live, and well afterwards."""
    writer = runs.healthy(store, iterations=0)
    writer.shortest = 1  # from one document to many in a micro-batch
    writer.train(40)
    writer.control(RunFinished(status="done", iterations=40, committed=40))
    writer.close()
    found = diagnose(loaded(store, "healthy"))
    (verdict,) = found.verdicts
    assert (verdict.cause, verdict.evidence["lengths"]) == ("long_sequences", "logged")
    assert found.outcome == "well"
    assert found.why.startswith("a lasting slowdown of any device by")
    assert verdict.sentence in found.why
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(shown(found))
    printed = console.export_text()
    assert "Something is wrong" not in printed
    assert verdict.evidence["next_step"] in printed
    lost = diagnose(msgspec.structs.replace(loaded(store, "healthy"), end="lost"))
    assert lost.outcome == "cannot_be_judged"
    assert f"; {verdict.sentence}" in lost.why
    assert "fault" not in verdict.sentence, "beside not knowing that was calm, beside a slow rank wrong"
    killed = diagnose(msgspec.structs.replace(loaded(store, "healthy"), end="failed", end_reason="its controller was killed"))
    console.print(shown(killed))
    assert console.export_text().splitlines()[1].startswith("The run failed: its controller was killed; micro-batches of")


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_run_whose_controller_was_killed_and_one_with_holes(store: Store) -> None:
    runs.healthy(store, iterations=40).close()
    with hold_controller_lock(store, "healthy"):
        going_on = loaded(store, "healthy")
    assert (going_on.end, diagnose(going_on).outcome) == ("running", "well"), "what is missing below makes the difference"
    killed = diagnose(loaded(store, "healthy"))
    half = [
        msgspec.structs.replace(one, committed=msgspec.structs.replace(one.committed, log_complete=i % 2 == 0))
        for i, one in enumerate(going_on.released)
    ]
    holes = diagnose(msgspec.structs.replace(going_on, released=tuple(half)))
    short = diagnose(msgspec.structs.replace(going_on, released=going_on.released[:6], iterations=going_on.iterations.head(6)))
    for found, why in (
        (killed, "the run ended without a word of how"),
        (holes, "the log of 20 of 40 iterations is not complete"),
        (short, "too few complete iterations"),
        (short, "6 iterations without a slowdown"),
    ):
        assert (found.outcome, found.verdicts) == ("cannot_be_judged", ())
        assert why in found.why


@pytest.mark.slow
@pytest.mark.limit(120)
def test_our_own_run_exported_and_brought_in_again(store: Store, tmp_path: Path) -> None:
    runs.slow(store).close()
    with open_store(store) as reader:
        straggler_analysis.write(reader, "slow", tmp_path / "slow.parquet")
    (again,) = bring_in(store, "straggler-analysis", tmp_path / "slow.parquet", "again")
    assert not_calm(diagnose(loaded(store, again.run)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resihp", "recover", "unskew"])
def test_a_simulated_run_after_failures(store: Store, policy: str) -> None:
    job = JOBS["llama2-7b"]
    failures = [ClusterEvent(kind="failed", at_s=300.0 * (i + 1), devices=(2 * i,)) for i in range(8)]
    record(store, "r", simulate(job, POLICIES[policy](), failures, SimulationOptions(hours=1.0)), failures, {})
    found = diagnose(loaded(store, "r"))
    assert found.outcome == "wrong"
    dead = [verdict.since_iteration for verdict in found.verdicts if verdict.cause == "dead"]
    assert dead
    assert len(set(dead)) > 1, "each is dated to when it happened"


@pytest.mark.slow
@pytest.mark.limit(120)
def test_the_time_of_a_dead_device_is_lost_until_the_end(store: Store) -> None:
    runs.after_death(store).close()
    log = loaded(store, "death")
    without = [one.committed for one in log.released if 6 not in log.plans[one.committed.plan_version].ranks]
    assert len(without) == 40
    least = sum(one.measured_us for one in without) / 1e6
    assert diagnose(log).time_lost_s["dead"] >= least - 0.01


@pytest.mark.slow
@pytest.mark.limit(120)
def test_the_headline_begins_with_what_no_plan_has_answered(store: Store) -> None:
    """The older of two verdicts stood there whatever became of it."""
    runs.waiting_after_death(store).close()
    log = loaded(store, "waiting")
    swapped = [
        msgspec.structs.replace(event, proposal="p1") if isinstance(event, PlanApplied) and event.proposal else event
        for event in log.control
        if not (isinstance(event, PlanProposed) and event.proposal == "p3")
    ]
    found = [diagnose(one) for one in (log, msgspec.structs.replace(log, control=tuple(swapped)))]
    assert found[0].verdicts == found[1].verdicts
    assert [one.why.partition(" ")[2][:1] for one in found] == ["3", "6"], "a death that its recovery answers is no news"


@pytest.mark.slow
def test_a_log_that_lacks_events_says_so_beside_whatever_is_said(store: Store) -> None:
    """Of a run that is over, in the check, the diagnosis, and what the list and an alert are made of."""
    for run in ("whole", "lacking"):
        writer = runs.healthy(store, run)
        if run == "lacking":
            writer.telemetry.append(Dropped(count=30, types={"span": 20, "heartbeat": 10}))
            writer.telemetry.append(Dropped(count=5, types={"span": 5}))
        writer.control(RunFinished(status="done", iterations=60, committed=60))
        writer.close()
    with maintaining(store):
        assert [one.sentence for one in check(store, mend=False).findings] == [
            "run lacking: 35 events were dropped unwritten (25 span, 10 heartbeat)"
        ]
    assert diagnose(loaded(store, "lacking")).why.endswith("; 35 events were dropped unwritten (25 span, 10 heartbeat)")
    assert "dropped" not in diagnose(loaded(store, "whole")).why
    with open_store(store) as reader:
        why = dict(reader.sql("select run, why from outcomes").iter_rows())
    assert "dropped" not in why["whole"]
    assert why["lacking"].endswith("35 events were dropped unwritten")


@pytest.mark.slow
def test_what_is_wrong_hides_no_gap_of_the_log(store: Store) -> None:
    """A run of which most iterations are missing, and in those that are there a rank is slow."""
    writer = runs.slow(store)
    writer.telemetry.append(Dropped(count=5, types={"span": 5}))
    writer.control(RunFinished(status="incomplete", iterations=60, committed=200, unwritten=30_260))
    writer.close()
    found, gap = diagnose(loaded(store, "slow")), "the log holds 60 of the 200 iterations that were committed"
    assert found.outcome == "wrong"
    assert f"; {gap}, 30,260 events could not be written" in found.why
    assert any(one.startswith(f"what else is wrong: {gap}") for one in found.abstained)
    assert any("5 events were dropped" in one for one in found.abstained)
    runs.slow(store, "killed").close()
    killed = diagnose(loaded(store, "killed"))
    (without_end,) = [one for one in killed.abstained if one.startswith("what else is wrong")]
    assert "without a word of how" in without_end
    assert killed.outcome == "wrong"
    assert "; the run ended without a word of how" in killed.why


@pytest.mark.slow
def test_a_pause_of_no_length_was_not_looked_for(store: Store, tmp_path: Path) -> None:
    """Our export writes one of garbage collection, as ByteDance's analyser asks for a row of it, into every step."""
    writer = runs.healthy(store)
    writer.close()
    take_out(store, "straggler-analysis", "healthy", tmp_path / "t.parquet")
    (brought,) = bring_in(store, "straggler-analysis", tmp_path / "t.parquet")
    log = loaded(store, brought.run)
    assert "gc" in log.trace.operations["kind"]
    assert "gc_pause: no gc spans" in diagnose(log).abstained
    one = pl.when(pl.col("optype").eq("gc") & pl.col("rank").eq(1)).then(0.002).otherwise("duration")
    pl.read_parquet(tmp_path / "t.parquet").with_columns(duration=one).write_parquet(tmp_path / "u.parquet")
    (brought,) = bring_in(store, "straggler-analysis", tmp_path / "u.parquet")
    assert "gc_pause: no gc spans" not in diagnose(loaded(store, brought.run)).abstained


@pytest.mark.slow
def test_survivors_have_taken_over_only_where_a_plan_says_so(store: Store) -> None:
    """Of the last rank that held its layers nobody did: the run stands still, and waits for somebody to start one."""
    writer = runs.healthy(store, iterations=20)
    writer.control(DeviceLost(device="device-6", rank=6, how="exit", detail="signal SIGKILL", detected_us=1))
    writer.close()
    runs.after_death(store).close()
    runs.rejoined(store, joins=False).close()
    twice = runs.rejoined(store, "twice", joins=False)
    again = DeviceLost(device="device-6", rank=6, how="exit", detail="signal SIGKILL", detected_us=1, iteration=twice.iteration)
    twice.control(again)
    twice.close()
    steps = {
        run: [v.evidence["next_step"] for v in diagnose(loaded(store, run)).verdicts if v.cause == "dead"]
        for run in ("healthy", "death", "rejoined", "twice")
    }
    assert ["unskew rank add" in step for step in steps["healthy"]] == [True]
    assert ["the survivors took over" in step for step in steps["death"]] == [True]
    assert ["the survivors took over" in step for step in steps["rejoined"]] == [True]
    assert ["the survivors took over" in step for step in steps["twice"]] == [True, False]
