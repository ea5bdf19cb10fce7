"""`unskew watch -- CMD` on each node of a job, and again after one: who watches which run, and under what name."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.jobs.watched_command import ONE_STEP, runs_that_ranks_wrote, watched

from unskew.collector.events import Note
from unskew.collector.paths import Store
from unskew.collector.write.control_stream import ControlStream
from unskew.runtime.attach.outside import command
from unskew.runtime.attach.outside.command import claim


def begun(store: Store, run: str) -> None:
    stream = ControlStream(store, run, f"run/{run}", "controller")
    stream.append(0, [Note(text="it began", by="controller")], actor="controller")  # a collector clears away what is empty
    stream.close()


def test_a_node_joins_the_run_of_its_job_whenever_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    run, lock = claim(store, "job")
    assert (run, claim(store, "job")) == ("job", ("job", None))
    assert lock is not None
    with monkeypatch.context() as patched:  # this node has asked who watches before that one held it, which begins meanwhile
        patched.setattr(command, "controller_alive", begun)
        assert claim(store, "job") == ("job", None)
    lock.release()
    # Started again: the first node is given the next name, which the others find watched, judged already or not.
    run, lock = claim(store, "job")
    assert lock is not None
    assert (run, claim(store, "job")) == ("job-2", ("job-2", None))
    begun(store, "job-2")
    assert claim(store, "job") == ("job-2", None)
    lock.release()
    assert claim(store, "job")[0] == "job-3"


@pytest.mark.slow
@pytest.mark.limit(120)
@pytest.mark.parametrize("again", [False, True])
def test_nodes_that_start_at_once_train_in_one_run(tmp_path: Path, again: bool) -> None:
    """Of two that both found nobody who watched, one refused to run its command; started again, each had a run of its own."""
    if again:
        begun(Store(tmp_path / "store"), "job")
    (tmp_path / "here").mkdir()
    script = f"""
import os, pathlib, sys, time
here = pathlib.Path({str(tmp_path / "here")!r})
(here / str(os.getpid())).touch()
until = time.monotonic() + 20
while len(list(here.iterdir())) < 2 and time.monotonic() < until: time.sleep(0.01)
{ONE_STEP}
time.sleep(1)
sys.exit(7)
"""
    with ThreadPoolExecutor() as nodes:
        started = [nodes.submit(watched, tmp_path, sys.executable, "-c", script, UNSKEW_RUN="job") for _ in range(2)]
        done = [one.result() for one in started]
    assert [one.returncode for one in done] == [7, 7], done
    assert runs_that_ranks_wrote(tmp_path) == ["job-2" if again else "job"] * 2


@pytest.mark.slow
def test_a_watch_within_a_watch_leaves_its_ranks_to_the_outer_one(tmp_path: Path) -> None:
    within = [sys.executable, "-m", "unskew", "watch", "--", sys.executable, "-c", ONE_STEP]
    done = watched(tmp_path, *within, UNSKEW_RUN="job")
    assert done.returncode == 0, done.stderr
    assert "run job has its watcher, who sees these ranks too" in done.stderr
    assert runs_that_ranks_wrote(tmp_path) == ["job"]


@pytest.mark.slow
def test_a_job_that_is_started_again_is_another_run(tmp_path: Path) -> None:
    done = [watched(tmp_path, sys.executable, "-c", ONE_STEP, UNSKEW_RUN="job") for _ in range(2)]
    assert [one.returncode for one in done] == [0, 0], done
    assert f"there is a run job already in {tmp_path / 'store'}; this one is job-2" in done[1].stderr
    assert runs_that_ranks_wrote(tmp_path) == ["job", "job-2"]
