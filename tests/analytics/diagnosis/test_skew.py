"""Skew on constructed runs, in which it is known: the view `skew`, and what is made of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import duckdb
import msgspec
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.core.layout import uniform_plan
from unskew.analytics.core.plan import Plan
from unskew.analytics.diagnosis.skew import skew_of
from unskew.collector import events as ev
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.read.skew import SKEW
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter

TABLES = """
    create table judged (run text, iteration int, plan_version int, rank int, measured_us bigint, healthy_us bigint);
    create table plans (run text, plan_version int, plan json);
    create table writers (run text);
    create table iterations (run text, iteration int, plan_version int, attempt int);
    create table chunks (run text, iteration int, plan_version int, attempt int, rank int, compute_us bigint);
    create table recorded_operations (run text, iteration int, rank int, replica int, stage int)"""
Times = Mapping[int, int]


def planned(tp: int, pp: int, dp: int) -> Plan:
    return uniform_plan(tp=tp, pp=pp, dp=dp, n_layers=8, micro_batches=dp)


def alike(plan: Plan, us: int = 100) -> dict[int, int]:
    return dict.fromkeys(plan.ranks, us)


@pytest.fixture(scope="module")
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    """What the view reads, as tables."""
    with duckdb.connect(":memory:") as connection:
        connection.execute(TABLES).fetchall()
        yield connection


def skew_rows(database: duckdb.DuckDBPyConnection, plan: Plan, own: Times, healthy: Times) -> pl.DataFrame:
    """The rows of the view for one judged iteration."""
    database.execute("delete from judged; delete from plans").fetchall()
    database.execute("insert into plans values ('r', 0, ?)", [msgspec.json.encode(plan.to_data()).decode()]).fetchall()
    values = ", ".join(f"('r', 0, 0, {rank}, {own[rank]}, {healthy[rank]})" for rank in plan.ranks)
    database.execute(f"insert into judged values {values}").fetchall()
    found = pl.from_arrow(database.sql(SKEW).to_arrow_table())
    assert isinstance(found, pl.DataFrame)
    return found


def amplifications(rows: pl.DataFrame) -> dict[str, float | None]:
    found = skew_of(rows)
    assert found is not None
    return {one.level: one.amplification for one in found.levels}


def write(store: Store, run: str, plan: Plan | None, telemetry: list[ev.Telemetry]) -> None:
    stream = ControlStream(store, run, "control", "controller.1")
    started = ev.RunStarted(run=run, device="x", clock="imported", mode="auto", ranks=8, options={}, code="", version="")
    stream.append(0, [started], actor="c")
    if plan is not None:
        applied = ev.PlanApplied(plan_version=0, digest="", proposal="", iteration=0, reason="", plan=plan.to_data())
        stream.append(1, [applied], actor="c")
    stream.close()
    writer = SpoolWriter(store, run, "rank-0000.1")
    for event in telemetry:
        writer.append(event)
    assert writer.close(10.0)


def test_a_slow_member_stage_and_replica_are_told_apart_in_the_log(tmp_path: Path) -> None:
    """A member of a group at 1.5, another stage at 1.3, the other replica at 1.2 of the healthy 100 us; and the same in an
    import without prediction, in which both replicas have the slow stage."""
    store, plan = Store(tmp_path), planned(tp=2, pp=2, dp=2)
    own = {0: 100, 1: 150, 2: 130, 3: 130, 4: 120, 5: 120, 6: 120, 7: 120}
    ratios = tuple(ev.RankRatio(rank=rank, measured_us=us, healthy_us=100) for rank, us in own.items())
    judged = ev.IterationJudged(iteration=0, plan_version=0, measured_us=200, predicted_us=150, ranks=ratios)
    write(store, "own", plan, [judged])
    foreign: list[ev.Telemetry] = []
    for rank, us in {0: 100, 1: 130, 2: 120, 3: 156}.items():
        empty: dict[str, tuple[()]] = dict.fromkeys(
            ("name", "start_s", "duration_s", "sequence", "chunk", "global_chunk", "micro_batch"), ()
        )
        foreign += [
            ev.OperationsRecorded(iteration=7, rank=rank, replica=rank // 2, stage=rank % 2, **empty),
            ev.IterationTimed(iteration=7, rank=rank, start_us=0, wall_us=200),
        ]
        for attempt, part_us in ((0, us - 40), (0, 40), (1, 999)):  # the last one was cut off, and does not count
            foreign.append(
                ev.Span(kind="F", device="d", rank=rank, plan_version=0, attempt=attempt, iteration=7, start_us=0,
                        wall_us=300, compute_us=part_us)
            )  # fmt: skip
    write(store, "foreign", None, foreign)
    with open_store(store) as reader:
        query = "select level, ratio, spent_us, lost_us from skew where run = ? order by spent_us desc, level"
        of_own, of_foreign = reader.sql(query, ["own"]), reader.sql(query, ["foreign"])
        rows = reader.sql("select * from skew where run = 'own'")
        stated = reader.sql(
            "select level, sum(lost_us) / max(sum(lost_us)) filter (level = 'device') over () as amplification "
            "from skew where run = 'own' and iteration between 0 and 9 group by level"
        )
    assert of_own.rows() == [
        ("device", 1.5, 990, 190), ("dp", 1.25, 120, 120), ("tp", 1.5, 50, 50), ("pp", pytest.approx(150 / 130), 40, 40),
    ]  # fmt: skip
    assert of_foreign.rows() == [("device", 1.56, 506, 106), ("pp", 1.3, 66, 66), ("dp", 1.2, 52, 52)]
    found = skew_of(rows)
    assert found is not None
    assert (found.slowest, found.slowest_share, found.predicted, found.lost_us) == (1, 1.0, True, 400)
    assert found.amplification == pytest.approx(400 / 190)
    assert dict(stated.rows()) == pytest.approx(amplifications(rows))  # the query that docs/reference/sql.md shows


def test_one_slow_device_reaches_all_others_as_in_figure_2_of_resihp(database: duckdb.DuckDBPyConnection) -> None:
    plan = planned(tp=4, pp=4, dp=2)
    rows = skew_rows(database, plan, alike(plan) | {5: 200}, alike(plan))
    assert amplifications(rows) == {"device": 1.0, "tp": 3.0, "pp": 12.0, "dp": 16.0}


def test_a_plan_that_gives_the_slow_device_less_to_do_has_nobody_wait(database: duckdb.DuckDBPyConnection) -> None:
    plan = planned(tp=1, pp=2, dp=1)
    found = skew_of(skew_rows(database, plan, alike(plan), alike(plan) | {1: 50}))
    assert found is not None
    assert [one.amplification for one in found.levels] == [1.0, -1.0]
    assert found.amplification == 0.0


def test_noise_is_not_divided_by(database: duckdb.DuckDBPyConnection) -> None:
    plan = planned(tp=1, pp=2, dp=2)
    rows = skew_rows(database, plan, alike(plan, 1000) | {1: 1010}, alike(plan, 1000))
    assert amplifications(rows) == {"device": None, "pp": None, "dp": None}
    assert skew_of(rows.clear()) is None


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    times=st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), min_size=27, max_size=27),
)
def test_device_time_is_split_with_nothing_left_over(
    database: duckdb.DuckDBPyConnection, shape: tuple[int, int, int], times: list[tuple[int, int]]
) -> None:
    tp, pp, dp = shape
    plan = planned(tp, pp, dp)
    own, healthy = ({rank: times[rank][which] for rank in plan.ranks} for which in (0, 1))
    rows = skew_rows(database, plan, own, healthy)
    n = tp * pp * dp
    assert rows["spent_us"].sum() == n * max(own.values())
    assert rows["lost_us"].sum() == n * (max(own.values()) - max(healthy.values()))
    assert dict(rows.select("level", "spent_us").rows()) == waited(plan, own)


def waited(plan: Plan, us: Times) -> dict[str, int]:
    """Level -> what devices spend at it, member by member."""
    found = {"device": sum(us.values()), "tp": 0, "pp": 0, "dp": 0}
    replicas, stages = ({getattr(role, name) for role in plan.roles} for name in ("replica", "stage"))
    for replica, stage in product(replicas, stages):
        group = [us[role.rank] for role in plan.roles if (role.replica, role.stage) == (replica, stage)]
        whole = max(us[role.rank] for role in plan.roles if role.replica == replica)
        found["tp"] += sum(max(group) - one for one in group)
        found["pp"] += len(group) * (whole - max(group))
        found["dp"] += len(group) * (max(us.values()) - whole)
    group_size = len(plan.roles) // (len(replicas) * len(stages))
    there = {"device": True, "tp": group_size > 1, "pp": len(stages) > 1, "dp": len(replicas) > 1}
    return {level: spent for level, spent in found.items() if there[level]}
