"""A rank dies in real processes, and the iteration goes on with the gradients that the others hold."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import send_signal
from support.training.replica_reference import undisturbed_losses
from support.training.runtime_runs import SMALL, Run, assert_exact, train

from unskew.analytics.replay.replay import replay
from unskew.collector.events import DeviceJoined, DeviceLost, Regrouped
from unskew.collector.files.tail import Entry
from unskew.collector.read.reader import open_store
from unskew.edge.recorded_run import recorded_run

pytestmark = [pytest.mark.limit(90), pytest.mark.slow]


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    return undisturbed_losses(SMALL)


def executed_again(run: Run) -> int:
    """Chunks of iteration 5 in later attempts than the first."""
    (row,) = run.sql("select count(*) as n from chunks where run = $run and iteration = 5 and attempt > 0")
    return int(row["n"])


def chunks(run: Run) -> int:
    return 2 * run.options.pp * run.options.micro_batches


def test_a_death_by_the_barrier_redoes_nothing(tmp_path: Path, undisturbed: list[float]) -> None:
    run = train(tmp_path, "kill:rank=0,at=5,point=before_barrier")
    assert_exact(run, undisturbed, {1, 2, 3})
    assert executed_again(run) == 0
    assert run.of(Regrouped)[-1].kept == 1.0
    kept = run.sql("select first_layer, n_layers, of_plan_version, micro_batches from gradients_kept where run = $run")
    assert kept == [{"first_layer": 0, "n_layers": 4, "of_plan_version": 0, "micro_batches": "[0,1,2,3]"}]
    with open_store(run.store) as reader:
        assert replay(recorded_run(reader, run.id)).differences == ()


def test_a_death_before_the_barrier_redoes_the_step_where_that_is_asked_for(tmp_path: Path, undisturbed: list[float]) -> None:
    run = train(tmp_path, "kill:rank=0,at=5,point=before_barrier", recovery="redo")
    assert_exact(run, undisturbed, {1, 2, 3})
    assert executed_again(run) == chunks(run)
    assert run.of(Regrouped)[-1].kept == 0.0


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_death_before_the_last_bucket_redoes_what_no_survivor_had_ended(
    schedule: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    """How far the others are by then is chance: what they have ended is kept, and exactly the rest is redone."""
    dead = 3
    run = train(tmp_path, f"kill:rank={dead},at=5,point=in_sync", schedule=schedule)
    assert_exact(run, undisturbed, {0, 1, 2})
    adds = "W" if schedule == "zb-h1" else "B"
    executed = run.sql("select * from chunks where run = $run and iteration = 5")
    first = [one for one in executed if one["attempt"] == 0]
    ended = {
        (one["micro_batch"], layer)
        for one in first
        if one["kind"] == adds and one["rank"] != dead
        for layer in range(one["first_layer"], one["first_layer"] + one["n_layers"])
    }
    lacks = {m: {layer for layer in range(run.options.layers) if (m, layer) not in ended} for m in range(4)}
    assert {one["micro_batch"] for one in first if one["rank"] == dead} <= {m for m, layers in lacks.items() if layers}
    needed = [
        (kind, micro_batch, stage)
        for micro_batch, layers in lacks.items()
        for stage in (0, 2)
        if layers
        for kind, least in (("F", True), ("B", min(layers) < stage + 2), ("W", adds == "W" and {stage, stage + 1} & layers))
        if least
    ]
    again = [(one["kind"], one["micro_batch"], one["first_layer"]) for one in executed if one["attempt"] > 0]
    assert sorted(again) == sorted(needed)
    assert run.of(Regrouped)[-1].kept == len(ended) / (4 * run.options.layers)


@pytest.mark.parametrize(
    "second", ["kill:rank=3,at=5,point=before_barrier", None], ids=["in the next attempt", "at any moment"]
)
def test_a_death_while_the_first_is_answered(second: str | None, tmp_path: Path, undisturbed: list[float]) -> None:
    first = "kill:rank=0,at=5,point=compute"
    run = train(tmp_path, first, second) if second else train(tmp_path, first, on_event=killer(rank=3, delay_s=0.01))
    assert_exact(run, undisturbed, {1, 2})
    assert {event.rank for event in run.of(DeviceLost)} == {0, 3}


def killer(rank: int, delay_s: float) -> Callable[[Run, Entry], None]:
    """Kills `rank` from outside, so long after the loss of another was logged."""
    pids: dict[int, int] = {}

    def watch(_: Run, entry: Entry) -> None:
        if isinstance(entry.event, DeviceJoined):
            pids[entry.event.rank] = entry.event.pid
        elif isinstance(entry.event, DeviceLost) and rank in pids:
            threading.Timer(delay_s, send_signal, (pids.pop(rank), signal.SIGKILL)).start()

    return watch
