"""The parts of the measuring, without ranks: sessions, plans, seams, ends of processes, who holds up a job, a run's name."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from unskew.analytics.loop.watched.found_plan import plan_of
from unskew.analytics.loop.watched.stalled import hung
from unskew.collector.events import (
    CollectiveRecorded,
    DeviceLost,
    GroupRecorded,
    Heartbeat,
    IterationCommitted,
    PipelinePlace,
    RankAttached,
    RankDetached,
    Span,
)
from unskew.collector.files.tail import Entry
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.attach import seams
from unskew.runtime.attach.flights import last_flights
from unskew.runtime.attach.outside.exits import Exits, ranks_under
from unskew.runtime.attach.outside.watcher import JobWatcher
from unskew.runtime.attach.session import JobFacts, LoopSession
from unskew.runtime.attach.start import run_name
from unskew.terminal.time_by_phase import PhaseTimes, phase_table


def test_a_loop_without_loader_and_optimizer_says_its_steps(tmp_path: Path) -> None:
    session = LoopSession(Store.locate(tmp_path), "mine", lambda: JobFacts(0, 1, (), on_gpu=False))
    for _ in range(3):
        with session.step():
            pass
    with suppress(ZeroDivisionError), session.step():
        raise ZeroDivisionError
    session.close()
    with open_store(Store.locate(tmp_path)) as reader:
        kinds = reader.sql("select iteration, kind from spans order by 1").rows()
        commits = reader.sql("select iteration from iterations order by 1").rows()
    assert kinds == [(0, "other"), (1, "other"), (2, "other")]
    assert [iteration for (iteration,) in commits] == [0, 1, 2]


def test_a_first_step_inside_of_which_the_passes_run_is_a_step(tmp_path: Path) -> None:
    """As Lightning runs them without accumulation: nothing is measured yet when the optimizer begins."""
    session = LoopSession(Store.locate(tmp_path), "mine", lambda: JobFacts(0, 1, (), on_gpu=False))
    before, after = seams._around_step(session)
    for _ in range(3):
        before()
        loop = session.loop_or_begin()
        assert loop is not None
        loop.backward(None)
        loop.returned()
        after()
    session.close()
    with open_store(Store.locate(tmp_path)) as reader:
        spans = reader.sql("select iteration, micro_batch, kind from spans where kind != 'other' order by 1, start_us").rows()
    assert spans == [(step, *of) for step in range(3) for of in ((0, "F"), (0, "B"), (None, "optimizer"))]


def attached(rank: int, *, ranks: int = 2, **more: Any) -> RankAttached:
    return RankAttached(rank=rank, ranks=ranks, node="node", pid=rank, **more)


def test_stages_of_pipelines_are_found_and_others_are_not_guessed() -> None:
    place = {rank: PipelinePlace(rank // 2, 2, (rank % 2, rank % 2 + 2)) for rank in range(4)}
    ranks = {rank: attached(rank, ranks=4, pipeline=place[rank], groups=((rank % 2, rank % 2 + 2),)) for rank in range(4)}
    plan, why_not = plan_of(ranks, {0: 3, 1: 3})
    assert [(role.rank, role.replica, role.stage) for role in plan.roles] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert ([hop.rank for hop in plan.routes[1].hops], len(plan.routes), why_not) == ([1, 3], 6, "")
    assert "not one rank a stage" in plan_of({rank: ranks[rank] for rank in range(3)}, {0: 3, 1: 3})[1]
    sharded = {rank: msgspec.structs.replace(one, groups=((0, 3),)) for rank, one in ranks.items()}
    assert "several process groups" in plan_of(sharded, {0: 3, 1: 3})[1]


def test_who_did_not_join_is_read_from_the_flight_recorder() -> None:
    entry = {"record_id": 4, "process_group": ["0", "default_pg"], "collective_seq_id": 7, "profiling_name": "gloo:all_reduce",
             "state": "scheduled", "p2p_seq_id": 0, "is_p2p": False}  # fmt: skip
    dump = json.dumps({"entries": [{**entry, "collective_seq_id": 6}, entry]}).encode()
    group, launched = last_flights(dump, {"0": (0, 1)}, 1)
    assert isinstance(group, GroupRecorded)
    assert isinstance(launched, CollectiveRecorded)
    assert (group.members, launched.group_seq) == ((0, 1), 7)
    assert last_flights(b"", {}, 0) == last_flights(b"[]", {}, 0) == last_flights(b'{"entries": [{}]}', {}, 0) == []
    assert json.loads(seams.flight_recorder()[0])["version"]


def test_the_plan_is_what_was_found_and_nobody_is_judged_where_it_is_not_known() -> None:
    plan, why_not = plan_of({rank: attached(rank) for rank in range(2)}, {0: 3, 1: 3})
    assert (plan.ranks, dict(plan.executed), why_not) == ((0, 1), {0: 3, 1: 3}, "")
    assert "[0, 1]" in plan_of({rank: attached(rank, ranks=4, groups=((0, 1), (2, 3))) for rank in range(4)}, {0: 1})[1]
    mesh = {rank: attached(rank, ranks=4, groups=((rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)),
                           dimensions=("tp", "dp")) for rank in range(4)}  # fmt: skip
    assert plan_of(mesh, dict.fromkeys(range(4), 1))[1] == ""
    experts = {rank: msgspec.structs.replace(one, dimensions=("ep", "dp")) for rank, one in mesh.items()}
    assert "several process groups" in plan_of(experts, dict.fromkeys(range(4), 1))[1]
    assert "GPUs" in plan_of({0: attached(0, on_gpu=True)}, {0: 1})[1]
    assert "micro-batches" in plan_of({rank: attached(rank) for rank in range(2)}, {0: 3, 1: 2})[1]


def beat(rank: int, activity: str, *, iteration: int = 7, stalled_us: int = 9_000_000) -> Heartbeat:
    return Heartbeat(rank=rank, pid=rank, iteration=iteration, progress=1, activity=activity, age_us=0, stalled_us=stalled_us)


def test_a_hang_is_named_by_who_waits_for_nobody_and_not_before_its_time() -> None:
    beats = {0: beat(0, "collective"), 1: beat(1, "compute"), 2: beat(2, "collective")}
    found = hung(11.0, 0.05, beats)
    assert found is not None
    assert (found.rank, found.how, found.victims) == (1, "hung", (0, 2))
    assert hung(9.0, 0.05, beats) is None
    assert hung(11.0, 2.0, beats) is None
    assert hung(60.0, None, beats) is None
    assert hung(60.0, 0.05, {0: beat(0, "collective"), 1: beat(1, "collective")}) is None


def test_ends_are_seen_in_their_order_and_with_their_status() -> None:
    commands = [("import time; time.sleep(.6)", 0), ("import os, signal, time; time.sleep(.1); os.kill(os.getpid(), 9)", -9),
                ("import sys, time; time.sleep(.35); sys.exit(3)", 3)]  # fmt: skip
    started = [subprocess.Popen([sys.executable, "-S", "-c", code]) for code, _ in commands]
    exits = Exits()
    for rank, process in enumerate(started):
        exits.watch(rank, process.pid)
    until = time.monotonic() + 20
    while len(exits.seen) < len(started) and time.monotonic() < until:
        time.sleep(0.02)
    exits.close()
    for process in started:
        process.wait()
    assert {one.rank: one.status for one in exits.seen} == {rank: status for rank, (_, status) in enumerate(commands)}
    assert next(one.detail for one in exits.seen if one.rank == 1) == "signal SIGKILL"


def test_a_seam_that_moved_is_named_and_the_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which names these are: test_attach_seams.py."""
    monkeypatch.setattr(seams, "_wrapped", set())
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(seams, "dataloader", SimpleNamespace())
    for owner, name in ((torch._C._distributed_c10d.Work, "wait"), (seams.DistributedDataParallel, "forward"),
                        (seams.DistributedDataParallel, "_sync_buffers"), (torch.amp.GradScaler, "step"), (torch, "save"),
                        (torch.nn.Module, "train")):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(seams.optimizer, "register_optimizer_step_pre_hook", lambda _: None)
    monkeypatch.setattr(seams.optimizer, "register_optimizer_step_post_hook", lambda _: None)
    session = LoopSession(Store.locate(tmp_path), "mine", lambda: JobFacts(0, 1, (), on_gpu=False))
    (missing,) = seams.install(session)
    assert missing.startswith("waiting for data: torch")


def test_an_error_of_ours_ends_the_measuring_and_not_the_loop(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a file").touch()
    session = LoopSession(Store(tmp_path / "a file" / "store"), "run", lambda: JobFacts(0, 1, (), False))
    assert session.loop_or_begin() is None
    assert not session.active
    assert capfd.readouterr().err.count("this rank is not measured any more, training goes on") == 1


def _rank_that(ends: Callable[[], object], folder: Path) -> None:
    session = LoopSession(Store.locate(folder), "mine", lambda: JobFacts(0, 1, (), on_gpu=False))
    assert session.loop_or_begin() is not None
    ends()


def _passes_it_on() -> None:
    """As torch.multiprocessing.spawn does."""
    try:
        raise KeyError("shard 17")
    except KeyError:
        sys.exit(1)


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ([].pop, "IndexError: pop from empty list"),
        (_passes_it_on, "KeyError: 'shard 17'"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: sys.exit(0), ""),
        (lambda: None, ""),
    ],
)
def test_a_rank_that_multiprocessing_has_forked_writes_how_it_ended(
    tmp_path: Path, ends: Callable[[], object], error: str, capfd: pytest.CaptureFixture[str]
) -> None:
    rank = multiprocessing.get_context("fork").Process(target=_rank_that, args=(ends, tmp_path))
    rank.start()
    rank.join(30)
    capfd.readouterr()
    assert _last_words(tmp_path) == error


def test_an_exception_that_is_handled_ended_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank said it had died of what it had stopped early by, or of what its parent went on after."""
    for name in ("last_exc", "last_value"):
        monkeypatch.delattr(sys, name, raising=False)
    session = LoopSession(Store.locate(tmp_path / "1"), "mine", lambda: JobFacts(0, 1, (), on_gpu=False))
    assert session.loop_or_begin() is not None
    try:
        raise KeyError("early stop")
    except KeyError:
        session.close()
        rank = multiprocessing.get_context("fork").Process(target=_rank_that, args=(bool, tmp_path / "2"))
        rank.start()
    rank.join(30)
    assert (_last_words(tmp_path / "1"), _last_words(tmp_path / "2")) == ("", "")


def _last_words(folder: Path) -> str:
    with open_store(Store.locate(folder)) as reader:
        (last,) = reader.sql("select payload from events where type like 'rank_detached%'").rows()
    return str(json.loads(last[0]).get("error", ""))


def test_the_most_memory_of_a_rank_stands_beside_its_times(tmp_path: Path) -> None:
    peak = LoopSession(Store.locate(tmp_path), "mine", lambda: JobFacts(0, 1, (), on_gpu=False)).peak()
    assert 10e6 < peak < 100e9
    times = PhaseTimes()
    times.take(IterationCommitted(iteration=0, plan_version=0, attempt=0, rank=0, loss=1.0, tokens=1, start_us=0, wall_us=9,
                                  log_complete=True))  # fmt: skip
    times.take(
        Heartbeat(rank=0, pid=1, iteration=0, progress=1, activity="compute", age_us=0, stalled_us=0, peak_bytes=41_000_000)
    )
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(phase_table(times))
    heading, row = console.export_text().splitlines()[:2]
    assert (heading.split()[-2:], row.split()[-1]) == (["peak", "MB"], "41")


def test_waits_for_other_stages_and_shards_are_waiting_too() -> None:
    times = PhaseTimes()
    times.take(IterationCommitted(iteration=0, plan_version=0, attempt=0, rank=0, loss=1.0, tokens=1, start_us=0, wall_us=9,
                                  log_complete=True))  # fmt: skip
    times.take(
        Span(kind="other", device="d", rank=0, plan_version=0, attempt=0, iteration=0, start_us=0, wall_us=9_000,
             compute_us=1_000, wait_dp_us=1_000, wait_tp_us=2_000, wait_pp_us=5_000)
    )  # fmt: skip
    assert times.us == {(0, "other"): 1_000, (0, "all_reduce"): 8_000}


def test_a_rank_that_said_goodbye_while_the_log_was_read_is_not_called_dead(tmp_path: Path) -> None:
    store, run = Store.locate(tmp_path), "run-1"
    spool = SpoolWriter(store, run, "rank-0000.1", flush_s=0.01)
    with subprocess.Popen(["sh", "-c", "read _; exit 1"], stdin=subprocess.PIPE) as process:
        lost: list[DeviceLost] = []

        def ends(entry: Entry) -> None:
            """The rank ends as soon as its first event has been read."""
            lost.extend([entry.event] if isinstance(entry.event, DeviceLost) else [])
            if isinstance(entry.event, RankAttached):
                spool.append(RankDetached(rank=0, pid=process.pid))
                spool.close()
                process.communicate(b"\n")
                while not watcher._exits.seen:
                    time.sleep(0.01)

        watcher = JobWatcher(store, run, ["a test"], ends)
        spool.append(RankAttached(rank=0, ranks=1, node=socket.gethostname(), pid=process.pid))
        while not watcher._exits.seen:
            watcher.look()
        watcher.look()
        watcher.finish(1)
        watcher.close()
    assert lost == []


def test_how_a_rank_ended_is_known_though_its_launcher_reaped_it_before_it_was_known_to_be_one() -> None:
    """As one that dies in its first steps under torchrun, which looks ten times in a second: "its process ended" was all."""
    rank_process = "subprocess.Popen(['sh', '-c', 'sleep 0.3; kill -9 $$'], env={'RANK': '1'})"
    script = f"import subprocess, time; rank = {rank_process}; time.sleep(0.8); rank.wait()"
    launcher, exits = subprocess.Popen([sys.executable, "-c", script]), Exits()
    try:
        until = time.monotonic() + 5.0
        while not (ranks := ranks_under(launcher.pid)) and time.monotonic() < until:
            time.sleep(0.01)
        exits.expect(ranks)
        assert launcher.wait(5) == 0
        exits.watch(1, ranks[0])
        ((rank, at_s, status),) = exits.seen
        assert (rank, status) == (1, -signal.SIGKILL)
        assert at_s is not None
    finally:
        launcher.kill()
        launcher.wait()
        exits.close()


def test_a_number_that_is_used_again_is_another_process() -> None:
    """One that was expected has ended before all ranks were known, and a rank has its number: it would be born dead."""
    exits, first = Exits(), subprocess.Popen(["true"])
    exits.expect([first.pid])
    first.wait()
    time.sleep(0.05)
    again = _started_as(first.pid)
    try:
        exits.watch(0, again.pid)
        assert exits.seen == []
        again.kill()
        until = time.monotonic() + 10.0
        while not exits.seen and time.monotonic() < until:
            time.sleep(0.01)
        assert [one.status for one in exits.seen] == [-signal.SIGKILL]
    finally:
        exits.close()
        again.kill()
        again.wait()


def _started_as(pid: int) -> subprocess.Popen[bytes]:
    """A process that sleeps, under a number that was used before; skips where the kernel lets nobody choose."""
    for _ in range(50):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError as error:
            pytest.skip(f"numbers of processes cannot be chosen here: {error.strerror}")
        process = subprocess.Popen(["sleep", "60"])
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    pytest.skip("the number was taken each time")


def test_the_end_of_a_process_has_a_time_only_where_it_was_watched_before() -> None:
    exits, processes = Exits(), [subprocess.Popen(["sh", "-c", "read _; exit 3"], stdin=subprocess.PIPE) for _ in range(3)]
    try:
        exits.watch(0, processes[0].pid)
        for process in processes[:2]:
            assert process.stdin is not None
            process.stdin.close()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        exits.watch(1, processes[1].pid)
        processes[2].communicate()
        exits.watch(2, processes[2].pid)
        until = time.monotonic() + 10.0
        while len(exits.seen) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        exits.close()
        for process in processes:
            process.communicate()
    found = {one.rank: (one.at_s is None, one.status) for one in exits.seen}
    assert found == {0: (False, 3), 1: (True, 3), 2: (True, None)}


def test_ranks_of_one_start_share_the_name_of_their_run() -> None:
    assert run_name({"UNSKEW_RUN": "mine", "MASTER_PORT": "1"}) == "mine"
    assert run_name({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "42"}) == "job-42"
    assert run_name({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}).endswith("job-29500")


def test_who_evaluates_or_saves_hangs_only_after_minutes() -> None:
    assert hung(60.0, 0.05, {0: beat(0, "idle"), 1: beat(1, "collective")}) is None
    found = hung(700.0, 0.05, {0: beat(0, "idle", stalled_us=601_000_000), 1: beat(1, "collective")})
    assert found is not None
    assert (found.rank, found.victims) == (0, (1,))
