"""The parts of the measuring, without ranks: moments to spans, batches to lengths, who holds up a job, a process's name."""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console
from support.training.virtual_loop import VirtualClock

from unskew.analytics.loop.watched.attached_rules import hung, plan_of
from unskew.collector.events import (
    CollectiveRecorded,
    DeviceLost,
    GroupRecorded,
    Heartbeat,
    IterationCommitted,
    MicroBatchPacked,
    PipelinePlace,
    RankAttached,
    RankDetached,
    Span,
    Telemetry,
)
from unskew.collector.files.loop_parts import LoopPart, line_of
from unskew.collector.files.segment import flush, unpack
from unskew.collector.files.tail import Entry
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.write.spool import SpoolWriter
from unskew.runtime.attach import pauses, seams
from unskew.runtime.attach.exits import Exits
from unskew.runtime.attach.flights import last_flights
from unskew.runtime.attach.lengths import lengths_of
from unskew.runtime.attach.session import JobFacts, LoopSession
from unskew.runtime.attach.start import run_name
from unskew.runtime.attach.timeline import LoopTimeline
from unskew.runtime.attach.watcher import JobWatcher
from unskew.terminal.time_by_phase import PhaseTimes, phase_table


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


def test_a_pause_is_no_part_of_what_it_interrupts() -> None:
    clock, events = Clock(), list[Telemetry]()
    timeline = clock.timeline(0, 2, events)
    for step in range(2):
        timeline.loading()
        clock.work(1)
        timeline.loaded(torch.zeros(2, 5, dtype=torch.long))
        begun_ns = clock.ns
        clock.work(4)
        timeline.collected(begun_ns)
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
    commands = [("import time; time.sleep(.6)", 0), ("import os, signal, time; time.sleep(.1); os.kill(os.getpid(), 9)", 9),
                ("import sys, time; time.sleep(.35); sys.exit(3)", 3 << 8)]  # fmt: skip
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


def test_an_error_of_ours_ends_the_measuring_and_not_the_loop(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a file").touch()
    session = LoopSession(Store(tmp_path / "a file" / "store"), "run", lambda: JobFacts(0, 1, (), False))
    assert session.loop_or_begin() is None
    assert not session.active
    assert capfd.readouterr().err.count("this rank is not measured any more, training goes on") == 1


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


def test_attaching_imports_msgspec_only() -> None:
    code = (
        "import sys, unskew.runtime.attach.session, unskew.runtime.attach.start;"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    ).stdout.split()
    assert not {"torch", "numpy", "polars", "duckdb", "pyarrow", "typer", "rich"} & set(modules)
    assert "msgspec" in modules


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


def test_ranks_of_one_start_share_the_name_of_their_run() -> None:
    assert run_name({"UNSKEW_RUN": "mine", "MASTER_PORT": "1"}) == "mine"
    assert run_name({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "42"}) == "job-42"
    assert run_name({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}).endswith("job-29500")
