"""A rank dies in real processes, and the iteration goes on with the gradients that the others hold."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes import send_signal
from support.runtime_runs import Run, assert_exact, train

from unskew.analytics.replay.replay import replay
from unskew.collector.events import DeviceJoined, DeviceLost, Regrouped
from unskew.collector.files.tail import Entry
from unskew.collector.read.reader import open_store
from unskew.edge.recorded_run import recorded_run

pytestmark = [pytest.mark.limit(90), pytest.mark.slow]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("undisturbed")).losses


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
def test_a_death_before_the_last_bucket_redoes_what_only_the_dead_rank_had(
    schedule: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    """Two of the four micro-batches once more; of those of the other replica all is kept, and the layers of stage 0."""
    run = train(tmp_path, "kill:rank=3,at=5,point=in_sync", schedule=schedule)
    assert_exact(run, undisturbed, {0, 1, 2})
    assert 0 < executed_again(run) <= chunks(run) // 2 * (3 if schedule == "zb-h1" else 2) // 2
    kept = run.of(Regrouped)[-1].kept
    assert kept is not None
    assert 0.5 <= kept < 1.0


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
