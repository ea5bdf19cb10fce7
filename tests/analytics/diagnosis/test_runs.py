"""A diagnosis of each observability: one run that trained here with a slow rank, looked at with more and more hidden."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import polars as pl
import pytest
import typer
from rich.console import Console
from support.training.runtime_runs import LONG_CHUNKS, Run, light, train
from typer.testing import CliRunner

from unskew.analytics.core.layout import plan_from_partition
from unskew.analytics.diagnosis.diagnose import Diagnosis, diagnose, sections_of
from unskew.analytics.diagnosis.failslow import follow_run
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.analytics.diagnosis.trace.lost import time_lost
from unskew.analytics.diagnosis.trace.replay import makespan_us
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.analytics.diagnosis.trace.whatif import ask, what_if
from unskew.cli import app
from unskew.collector.events import (
    COLLECTIVE_KINDS,
    AdaptationStarted,
    CollectiveRecorded,
    DeviceLost,
    GroupRecorded,
    Regrouped,
    Verdict,
    VerdictScored,
)
from unskew.collector.read.reader import open_store
from unskew.commands.afterwards import whatif
from unskew.edge.load_run import load_run

pytestmark = [pytest.mark.limit(180), pytest.mark.slow]

CAUSES = {
    "slow_device", "slow_link", "dead", "hung", "long_sequences", "stage_imbalance", "input_bound", "gc_pause", "unknown",
}  # fmt: skip
SLOW = 3
AT = 14
OPTIONS = msgspec.structs.replace(light(LONG_CHUNKS), iterations=34, mode="observe")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """On the virtual device, PP2 x DP2: rank 3 takes 1.8 times as long from iteration 14 on."""
    return train(tmp_path_factory.mktemp("store"), f"slow:rank={SLOW},factor=1.8,at={AT}", base=OPTIONS)


@pytest.fixture(scope="module")
def slowed(run: Run) -> tuple[RunLog, list[Verdict]]:
    """What its log holds, and its verdicts."""
    with open_store(run.store) as reader:
        return load_run(reader, run.id), run.of(Verdict)


def pick(section: TraceSection, iterations: Sequence[int]) -> TraceSection:
    """The same with these of its iterations (positions) only."""
    at, recording = list(iterations), section.recording
    return msgspec.structs.replace(
        section,
        recording=msgspec.structs.replace(
            recording,
            iterations=tuple(recording.iterations[i] for i in at),
            start_us=recording.start_us[:, at],
            wall_us=recording.wall_us[:, at],
            iteration_us=recording.iteration_us[at],
        ),
        expected_us=section.expected_us[:, at],
    )


def devices(found: Diagnosis) -> list[tuple[str, int | None]]:
    return [(v.cause, party.rank) for v in found.verdicts for party in v.culprits if party.kind == "device"]


def test_with_chunks_the_offline_verdict_is_the_live_one_and_its_cost_adds_up(slowed: tuple[RunLog, list[Verdict]]) -> None:
    log, live = slowed
    found = diagnose(log)
    assert found.observability == "chunks"
    assert devices(found) == [("slow_device", SLOW)]
    (verdict,) = [one for one in found.verdicts if one.cause == "slow_device"]
    assert (verdict.since_iteration, verdict.at_iteration) == (live[0].since_iteration, live[0].at_iteration)
    assert verdict.speed == live[0].speed
    assert verdict.evidence["next_step"]
    sections, _, _ = sections_of(log)
    (section,) = sections
    parts = section.parts
    replayed = makespan_us(section.recording.graph, parts.work_us, parts.delay_us)
    assert replayed == pytest.approx(section.recording.iteration_us, rel=0.005)
    ideal_us = time_lost(section, found.verdicts).ideal_us
    assert float(ideal_us.mean()) < what_if(section.recording).ideal_us  # whose mean has the slow device in it
    lost = len(section.ranks) * float((section.recording.iteration_us - ideal_us).sum()) / 1e6
    assert sum(found.time_lost_s.values()) == pytest.approx(lost, abs=0.01)
    assert abs(found.time_lost_s["unexplained"]) < 0.005 * lost  # on a logical clock there is neither noise nor delay
    assert found.time_lost_s["slow_device"] > 0.4 * lost
    assert set(found.time_lost_s) <= {"slow_device", "long_sequences", "stage_imbalance", "unexplained"}
    assert any("input_bound" in sentence for sentence in found.abstained)
    assert not any("slow_link" in sentence for sentence in found.abstained)  # on a logical clock links are judged too


def test_what_if_without_the_slow_rank_gives_the_iterations_before_it_was_slow(
    slowed: tuple[RunLog, list[Verdict]],
) -> None:
    (section,) = sections_of(slowed[0])[0]
    ill = pick(section, range(AT, len(section.recording.iterations)))
    (answer,) = ask(ill, ranks=[SLOW])
    (nobody,) = ask(ill, ranks=[0])
    assert answer.saves_percent > 20
    assert abs(nobody.saves_percent) < 2
    before = pick(section, range(1, AT))
    assert answer.iteration_us == pytest.approx(what_if(before.recording).replayed_us, rel=0.1)
    with pytest.raises(ValueError, match="rank 9 has no part in it, allowed: 0, 1, 2, 3"):
        ask(ill, ranks=[9])


def test_with_collectives_only_the_rank_that_waits_least_is_named(slowed: tuple[RunLog, list[Verdict]]) -> None:
    log, _ = slowed
    bare = msgspec.structs.replace(
        log, released=(), plans={}, trace=log.trace.only([*COLLECTIVE_KINDS, "send", "recv", "optimizer"])
    )
    found = diagnose(bare)
    assert found.observability == "collectives"
    assert devices(found) == [("slow_device", SLOW)]
    assert abs(found.verdicts[0].since_iteration - AT) <= 2
    assert found.time_lost_s == {}
    assert any(sentence.startswith("long_sequences, stage_imbalance, time lost") for sentence in found.abstained)


def test_with_iteration_times_only_the_job_is_slower_and_nobody_is_named(
    slowed: tuple[RunLog, list[Verdict]],
) -> None:
    log, _ = slowed
    times = log.iterations["iteration_us"].to_list()
    longer = 10 * times[1:AT] + 5 * times[AT:]
    onset = 10 * (AT - 1)
    bare = msgspec.structs.replace(
        log, released=(), plans={}, trace=log.trace.only([]),
        iterations=pl.DataFrame({"iteration": range(len(longer)), "iteration_us": longer}),
    )  # fmt: skip
    found = diagnose(bare)
    assert found.observability == "iterations"
    assert [(verdict.cause, verdict.culprits) for verdict in found.verdicts] == [("unknown", ())]
    assert abs(found.verdicts[0].since_iteration - onset) <= 2
    assert any(sentence.startswith("slow_device, slow_link: neither chunk nor collective") for sentence in found.abstained)
    few = diagnose(msgspec.structs.replace(bare, iterations=bare.iterations.head(5)))
    assert "unknown: 5 iterations, at least 12 are needed to judge the whole job" in few.abstained
    nothing = diagnose(msgspec.structs.replace(bare, iterations=log.iterations.clear()))
    assert (nothing.observability, nothing.abstained) == ("nothing", ("everything: the log holds no iteration",))


def test_pauses_that_were_recorded_are_named_and_cost_what_they_took(
    slowed: tuple[RunLog, list[Verdict]],
) -> None:
    """Collections of 60 ms on rank 1 before its first chunk in every iteration, put into the real spans."""
    log, _ = slowed
    pause = 60_000
    early = pl.col("iteration") < AT
    spans = log.trace.operations.filter(early)
    first = spans.filter((pl.col("kind") == "F") & (pl.col("rank") == 1)).group_by("iteration").agg(pl.col("start_us").min())
    collections = (
        spans.filter((pl.col("kind") == "F") & (pl.col("rank") == 1))
        .join(first, on=["iteration", "start_us"], how="semi")
        .with_columns(kind=pl.lit("gc"), start_us=pl.col("start_us") - pause, wall_us=pl.lit(float(pause)))
    )
    trace = msgspec.structs.replace(
        log.trace,
        operations=pl.concat([spans, collections.select(spans.columns)]),
        iterations=log.trace.iterations.filter(early),
    )
    healthy = msgspec.structs.replace(log, released=log.released[:AT], iterations=log.iterations.filter(early), trace=trace)
    found = diagnose(healthy)
    per_iteration = found.time_lost_s["gc_pause"] / (4 * AT)
    assert 0.2 * pause / 1e6 < per_iteration <= 1.05 * pause / 1e6
    gc = [verdict for verdict in found.verdicts if verdict.cause == "gc_pause"]
    assert [party.rank for verdict in gc for party in verdict.culprits] == [1]
    assert not any("gc_pause" in sentence for sentence in found.abstained)


def regrouped(plan_version: int, seconds: float) -> Regrouped:
    return Regrouped(plan_version=plan_version, iteration=0, seconds=seconds, migrate_seconds=0.0, moved_bytes=0)


def test_a_loss_costs_what_its_own_recovery_took(slowed: tuple[RunLog, list[Verdict]]) -> None:
    """Plan 1 is a change that somebody chose, plan 2 the one without rank 3: only its regrouping was for the loss."""
    log, _ = slowed
    without = plan_from_partition(
        plan_version=2, n_layers=8, schedule="1f1b", members=[[0, 1], [2]], layers=[[4, 4], [8]], micro_batches=[4, 4]
    )
    lost = DeviceLost(
        device="cpu-3", rank=3, how="exit", detail="signal SIGKILL", detected_us=0, watermark=33, iteration=34, victims=(2,)
    )
    found = diagnose(
        msgspec.structs.replace(
            log,
            control=(*log.control, lost, *(regrouped(plan_version, s) for plan_version, s in ((0, 0.5), (1, 0.25), (2, 5.0)))),
            plans={**log.plans, 1: log.plans[0].renumbered(1), 2: without},
        )
    )
    assert found.time_lost_s["dead"] == 3 * 5.0
    (dead,) = [one for one in found.verdicts if one.cause == "dead"]
    assert dead.at_iteration == 34
    assert [party.rank for party in dead.victims] == [2]


def test_a_job_that_stands_still_names_who_did_not_join(slowed: tuple[RunLog, list[Verdict]]) -> None:
    """Three ranks in a barrier that rank 2 never launched; rank 2 has nothing under way."""
    log, _ = slowed
    members = (0, 1, 2, 3)
    flights = tuple(
        CollectiveRecorded(
            rank=rank, record=7, group="0", group_description="default_pg", group_seq=8, op="nccl:all_reduce", state="started",
        )
        for rank in members if rank != 2
    )  # fmt: skip
    groups = tuple(
        GroupRecorded(
            rank=rank, group="0", group_description="default_pg", members=members, last_enqueued=7 if rank == 2 else 8
        )
        for rank in members
    )
    bare = msgspec.structs.replace(
        log, released=(), plans={}, trace=log.trace.only([]), iterations=log.iterations.clear(), flights=flights,
        flight_groups=groups,
    )  # fmt: skip
    found = diagnose(bare)
    assert found.observability == "flight recorder"
    assert devices(found) == [("hung", 2)]
    assert sorted(party.rank or 0 for party in found.verdicts[0].victims) == [0, 1, 3]
    assert found.verdicts[0].sentence.startswith("rank 2 did not join nccl:all_reduce #8")


def test_whatif_says_which_plan_it_replayed_and_which_others_there_are(slowed: tuple[RunLog, list[Verdict]]) -> None:
    (all_of_it,), _, _ = sections_of(slowed[0])
    sections = [pick(all_of_it, range(10)), msgspec.structs.replace(pick(all_of_it, range(10, 34)), plan_version=1)]
    section = whatif.chosen(sections, None)
    assert section.plan_version == 1
    assert whatif.chosen(sections, 0) is sections[0]
    with pytest.raises(typer.Exit):
        whatif.chosen(sections, 7)
    plans = [whatif.stretch(one) for one in sections]
    data = {"run_id": "r", "epoch": 1, "plans": plans, "not_replayed": ["plan 2: why"], "asked": []}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(whatif.shown({**data, **msgspec.to_builtins(what_if(section.recording))}))
    first, second, third, *_ = console.export_text().splitlines()
    assert first == "r, plan 1: 24 iterations, 10 to 33"
    assert second == "not in these figures: plan 0, 10 iterations, 0 to 9; see them with --plan N"
    assert third == "not replayed: plan 2: why"


def test_what_a_predictor_is_fitted_on_knows_who_was_slow_before_anybody_was_named(
    slowed: tuple[RunLog, list[Verdict]],
) -> None:
    speeds = {one.committed.iteration: one.speeds for one in follow_run(slowed[0]).seen}
    assert list(speeds) == list(range(34))
    assert [now for now, of in speeds.items() if SLOW in of] == list(range(AT, 34))


def test_iterations_that_are_long_for_want_of_cores_teach_no_predictor(slowed: tuple[RunLog, list[Verdict]]) -> None:
    """Ranks that share cores wait for each other's chunks: that is no drift of what work takes; where none are shared it is."""
    change, (log, _) = msgspec.structs.replace, slowed
    longer = [change(one, committed=change(one.committed, measured_us=4 * one.committed.measured_us)) for one in log.released]
    stretched = change(log, released=(*log.released[:12], *longer[12:]))
    shared = [
        change(one, site={**one.site, "shared_cores": 2}) if isinstance(one, AdaptationStarted) else one for one in log.control
    ]
    costs = [follow_run(change(one, control=tuple(shared))).cost for one in (stretched, log)]
    assert costs[0] == costs[1]
    assert follow_run(stretched).cost != follow_run(log).cost


def call(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def test_a_run_of_ours_with_a_slow_rank(run: Run, tmp_path: Path) -> None:
    code, output = call("diagnose", "--store", run.store.root, "--json", tmp_path / "d.json")
    assert code == 0, output
    (found,) = json.loads((tmp_path / "d.json").read_text())["runs"]
    assert found["run_id"] == run.id
    named = [verdict for verdict in found["verdicts"] if verdict["culprits"]]
    assert [(verdict["cause"], verdict["culprits"]) for verdict in named] == [
        ("slow_device", [{"kind": "device", "rank": SLOW}])
    ]
    assert named[0]["since_iteration"] == run.of(Verdict)[0].since_iteration
    assert set(found["time_lost_s"]) <= CAUSES | {"unexplained"}
    assert f"rank {SLOW}" in output
    assert "next:" in output
    again, _ = call("diagnose", run.id, "--store", run.store.root)
    assert again == 0
    written = run.sql("select stream, payload from events where run = $run and type = 'diagnosed@1'")
    assert [row["stream"] for row in written] == ["analysis/diagnose"]  # the same is not written twice
    assert json.loads(written[0]["payload"])["time_lost_s"] == found["time_lost_s"]


def test_precision_recall_and_delay_are_a_view(run: Run) -> None:
    (row,) = run.sql("select * exclude (run) from detection where run = $run")
    assert row == {
        "n_verdicts": 1, "n_correct": 1, "n_false": 0, "precision": 1.0, "n_faults": 1, "n_found": 1, "recall": 1.0,
        "median_delay_iterations": float(run.of(VerdictScored)[0].delay_iterations or 0),
    }  # fmt: skip


def test_retraining_by_hand_is_tested_on_later_iterations_and_logged_when_better(run: Run, tmp_path: Path) -> None:
    code, output = call("retrain", run.id, "--store", run.store.root, "--json", tmp_path / "r.json")
    assert code == 0, output
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["fitted_on"][1] < found["tested_on"][0]
    assert found["error_percent"]["chunks, later"] < 0.01  # exactly, on a virtual device: the slow rank's speed is divided out
    written = run.sql("select predictor, trigger from predictors where run = $run order by predictor")
    assert ("by hand" in [row["trigger"] for row in written]) == found["replaced"]
