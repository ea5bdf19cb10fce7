"""`unskew watch -- CMD`: an untouched script under torchrun, named verdicts in the terminal, the command's exit code."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs.watched_command import ONE_STEP, watched
from support.paths import ROOT
from typer.testing import CliRunner

from unskew.analytics.loop.watched import stalled
from unskew.cli import app
from unskew.collector.events import IterationCommitted, RankAttached, RankDetached, RunStarted, Span
from unskew.collector.files.manifest import load
from unskew.collector.files.tail import Entry
from unskew.collector.paths import Store, StoreError
from unskew.collector.read.reader import open_store
from unskew.collector.service import sealing
from unskew.collector.service.collecting import Collector
from unskew.collector.write import spool
from unskew.collector.write.control_stream import ControlStream
from unskew.collector.write.spool import SpoolWriter
from unskew.commands.train import watch
from unskew.runtime.attach.outside.command import unwatched, watch_command, watch_ranks
from unskew.runtime.attach.outside.watcher import JobWatcher

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.view_as(x)
    @staticmethod
    def backward(ctx, g): time.sleep(0.03); return g

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank, what = dist.get_rank(), sys.argv[1]
model = DistributedDataParallel(torch.nn.Linear(128, 128))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step, x in enumerate(DataLoader(torch.randn(16 * 40, 128), batch_size=16)):
    if what == "dies" and rank == 1 and step == 30:
        raise ValueError("no such file")
    if what == "killed" and rank == 1 and step == 3:
        os.kill(os.getpid(), 9)
    optimizer.zero_grad()
    y = model(x)
    (Slow.apply(y) if what == "slow" and rank == 1 else y).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


ALONE = """
import torch
from torch.utils.data import DataLoader

model = torch.nn.Linear(128, 128)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in DataLoader(torch.randn(16 * 3, 128), batch_size=16):
    model(x).square().mean().backward()
    optimizer.step()
"""


def diagnosed(tmp_path: Path) -> dict[str, Any]:
    """What is found afterwards in the log of the store's only run."""
    done = CliRunner().invoke(app, ["diagnose", "--store", str(tmp_path / "store"), "--json", str(tmp_path / "d.json")])
    assert done.exit_code == 0, done.output
    (run,) = json.loads((tmp_path / "d.json").read_text())["runs"]
    return dict(run)


@pytest.mark.alone
@pytest.mark.limit(120)
@pytest.mark.parametrize(("what", "code", "cause"), [("slow", 0, "slow_device"), ("dies", 1, "dead"), ("killed", 1, "dead")])
def test_an_untouched_script_is_watched_while_it_runs(tmp_path: Path, what: str, code: int, cause: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "sitecustomize.py").write_text("print('a sitecustomize of the user')")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), what]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = watched(tmp_path, *torchrun, PYTHONPATH=path)
    assert done.returncode == code, done.stderr
    assert done.stdout.count("a sitecustomize of the user") >= 3
    summary = json.loads((tmp_path / "w.json").read_text())
    # Its input is made in the same process: on some machines it takes more than a twentieth of a step, of every rank.
    (verdict,) = [one for one in summary["verdicts"] if one["cause"] != "input_bound"]
    assert (verdict["cause"], [party["rank"] for party in verdict["culprits"]]) == (cause, [1])
    assert verdict["sentence"] in done.stderr
    assert summary["status"] == ("failed" if code else "done")
    if what == "slow":
        assert summary["iterations"] == 40
        assert min(verdict["speed"], key=verdict["speed"].get) == "B"
    else:
        # Who is killed in the first steps has ended, as its peer has, before the watcher has seen them begin.
        assert {"dies": "ValueError: no such file", "killed": "signal SIGKILL"}[what] in verdict["sentence"]
    (found,) = [one for one in diagnosed(tmp_path)["verdicts"] if one["cause"] != "input_bound"]
    assert (found["cause"], [party["rank"] for party in found["culprits"]]) == (cause, [1])


@pytest.mark.alone
@pytest.mark.limit(120)
@pytest.mark.parametrize(
    ("what", "sentence"), [("slow", "rank 1 runs its backward pass"), ("dies", "ValueError: no such file")]
)
def test_ranks_that_somebody_else_has_started_are_watched_by_the_name_of_their_run(
    tmp_path: Path, what: str, sentence: str
) -> None:
    script, store = tmp_path / "train.py", tmp_path / "store"
    script.write_text(f"import unskew; unskew.attach(){SCRIPT}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    place |= {"UNSKEW_STORE": str(store), "UNSKEW_RUN": "job"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), what],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        until = time.monotonic() + 60.0
        while not (store / "spool" / "job").is_dir() and time.monotonic() < until:
            time.sleep(0.05)
        command = [sys.executable, "-m", "unskew", "watch", "--store", str(store), "job"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    finally:
        for rank in ranks:
            rank.wait(60)
    assert done.returncode == 0, done.stderr
    assert sentence in done.stdout + done.stderr
    assert "rank 0 died" not in done.stdout + done.stderr
    again = CliRunner().invoke(app, ["watch", "--store", str(store), "job"])
    assert (again.exit_code, "controller" in again.output) == (0, False), again.output


@pytest.mark.slow
def test_a_command_that_does_not_train_is_passed_through(tmp_path: Path) -> None:
    done = watched(tmp_path, sys.executable, "-c", "import sys; print('its own words'); sys.exit(7)")
    assert (done.returncode, done.stdout) == (7, "its own words\n")
    assert "no training was seen" in done.stderr
    assert not (tmp_path / "w.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--"], ["a-run", "--", "true"], ["--json", "x.json", "a-run"], ["--", "no-such-command"],
                                   ["--html", ".", "--", "true"], ["--", ""]])  # fmt: skip
def test_bad_usage_is_one_sentence(tmp_path: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "unskew", "watch", "--store", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)
    assert done.returncode in {1, 2}
    assert "watch" in done.stderr or "no-such-command" in done.stderr or "--html . cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_that_was_typed_a_moment_before_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    stream = ControlStream(Store(tmp_path / "later"), "r", "run/r", "controller")
    started = RunStarted(run="r", device="d", clock="monotonic", mode="auto", ranks=1, options={}, code="", version="0")
    stream.append(0, [started], actor="controller")
    stream.close()
    monkeypatch.setattr(
        watch.time, "sleep", lambda _: (tmp_path / "later").exists() and (tmp_path / "later").rename(store.root)
    )
    result = CliRunner().invoke(app, ["watch", "--store", str(store.root)])
    assert (result.exit_code, f"store: {store.root}" in result.stdout) == (0, True), result.output


def test_what_breaks_on_our_side_costs_the_command_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that took no log any more ended the watching, and left the training an orphan whose end nobody passed on."""

    def refused(_: JobWatcher) -> None:
        raise StoreError("cannot write stream run/r: No space left on device")

    monkeypatch.setattr(JobWatcher, "look", refused)
    store, problems = Store(tmp_path / "store"), list[str]()
    store.enter()
    words = [sys.executable, "-c", "import sys, time; time.sleep(0.5); sys.exit(7)"]
    assert watch_command(store, "r", words, on_problem=problems.append) == (7, None)
    assert problems == ["cannot write stream run/r: No space left on device"]


def test_a_run_that_was_sealed_before_anybody_judged_it_is_said_to_be(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    writer = SpoolWriter(store, "job", "rank-0000.7")
    writer.append(RankAttached(rank=0, ranks=1, node="n", pid=7))
    writer.close()
    collecting = Collector(store)
    while collecting.step() or store.spooled_runs():
        time.sleep(0.05)
    collecting.close()
    shown = CliRunner().invoke(app, ["watch", "--store", str(store.root), "job"])
    assert (shown.exit_code, "run job was only recorded: nobody can judge it any more" in shown.output) == (0, True), (
        shown.output
    )
    found = CliRunner().invoke(app, ["diagnose", "--store", str(store.root), "job"])
    assert found.exit_code == 2
    assert "run job was never watched" in f"{found.output}{found.exception}"


def test_ranks_of_which_a_part_is_sealed_while_they_write_are_judged_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a dashboard's collector had sealed the first 12 MB of a job, nobody could judge the rest of it."""
    monkeypatch.setattr(sealing, "SEAL_BYTES", 1)
    monkeypatch.setattr(spool, "ROTATE_EVENTS", 20)
    store, commits = Store(tmp_path / "store"), list[int]()
    writer = SpoolWriter(store, "job", "rank-0000.7")
    writer.append(RankAttached(rank=0, ranks=1, node="n", pid=7))
    collecting = Collector(store)
    for iteration in range(40):
        for kind in ("F", "B"):
            span = Span(kind=kind, device="n:0", rank=0, plan_version=0, attempt=0, iteration=iteration,
                        start_us=9 * iteration, wall_us=4, micro_batch=0, compute_us=4)  # fmt: skip
            writer.append(span)
        writer.append(
            IterationCommitted(iteration=iteration, plan_version=0, attempt=0, rank=0, loss=1.0, tokens=1,
                               start_us=9 * iteration, wall_us=9, log_complete=True)
        )  # fmt: skip
        assert writer.hand_over(5.0)
        if iteration == 30:
            collecting.step()
    collecting.close()
    assert load(store).sealed
    assert unwatched(store, "job")
    writer.append(RankDetached(rank=0, pid=7))
    writer.close()

    def take(entry: Entry) -> None:
        if isinstance(entry.event, IterationCommitted):
            commits.append(entry.event.iteration)

    code, end = watch_ranks(store, "job", on_entry=take)
    assert (code, end and end.status, end and end.iterations) == (0, "done", 40)
    assert commits == list(range(40))


def test_a_fault_of_ours_costs_the_command_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short batch at an epoch's end raised an IndexError in what judges: the training went on without anybody to end it."""
    monkeypatch.setattr(JobWatcher, "look", lambda _: [].pop())
    store, problems = Store(tmp_path / "store"), list[str]()
    store.enter()
    words = [sys.executable, "-c", "import sys, time; time.sleep(0.5); sys.exit(7)"]
    assert watch_command(store, "r", words, on_problem=problems.append) == (7, None)
    (problem,) = problems
    assert problem.startswith("an error of Unskew's own, IndexError: pop from empty list (test_watch_command.py, line")


def _no_place(store: Path) -> None:
    store.symlink_to("/proc/nowhere")


def _no_lock(store: Path) -> None:
    (store / "locks" / "controller-job").mkdir(parents=True)


def _no_manifest(store: Path) -> None:
    store.mkdir()
    (store / "manifest.json").write_text("{")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "more"),
    [
        (lambda _: None, {"UNSKEW": "0"}),
        (lambda _: None, {"UNSKEW_RUN": "no name"}),
        (lambda store: store.write_text(""), {}),
        (_no_place, {}),
        (_no_lock, {"UNSKEW_RUN": "job"}),
        (_no_manifest, {"UNSKEW_RUN": "job"}),
    ],
)
def test_where_nothing_can_be_watched_the_command_runs_all_the_same(
    tmp_path: Path, before: Callable[[Path], None], more: dict[str, str]
) -> None:
    before(tmp_path / "store")
    words = "import os, sys; print(os.environ.get('UNSKEW_STORE')); sys.exit(7)"
    done = watched(tmp_path, sys.executable, "-c", words, **more)
    assert (done.returncode, done.stdout) == (7, "None\n"), done.stderr
    assert done.stderr.count("nothing is watched here, the command runs all the same: ") == 1
    assert done.stderr.count("\n") == 1
    assert "UNSKEW" not in more or not (tmp_path / "store").exists()


def test_a_watcher_that_cannot_begin_leaves_its_place_to_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that was full already was said to be a command that cannot be started."""

    def refused(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def run(_: str, words: list[str], __: object) -> None:
        print(*words)
        sys.exit(7)

    monkeypatch.setattr(JobWatcher, "__init__", refused)
    monkeypatch.setattr(os, "execvpe", run)
    result = CliRunner().invoke(app, ["watch", "--store", str(tmp_path / "store"), "--", "true", "--json", "7"])
    assert (result.exit_code, result.stdout) == (7, "true --json 7\n"), result.output
    assert "the command runs all the same: [Errno 28] No space left on device" in result.stderr


@pytest.mark.parametrize("error", [PermissionError, RuntimeError])
def test_a_command_that_runs_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A signal that cannot be passed on, as to another user's process, was taken for a command that had not been started."""

    def refused(*_: object) -> None:
        raise error

    def run(*_: object) -> None:
        sys.exit(9)

    monkeypatch.setattr(subprocess.Popen, "send_signal", refused)
    monkeypatch.setattr(os, "execvpe", run)
    words = "sleep 1; kill -TERM $PPID; sleep 0.5; kill -TERM $PPID; sleep 0.5; exit 7"
    result = CliRunner().invoke(app, ["watch", "--store", str(tmp_path / "store"), "--", "sh", "-c", words])
    assert result.exit_code == 7, result.output


@pytest.mark.slow
def test_a_training_of_which_the_disk_took_nothing_is_not_said_to_be_none(tmp_path: Path) -> None:
    """With no file larger than nothing, as on a disk that is full from the start."""
    words = f"{ONE_STEP}; import sys; sys.exit(7)"
    unskew = f"ulimit -f 0; exec {sys.executable} -m unskew watch --store {tmp_path / 'store'}"
    full = ["sh", "-c", f'{unskew} -- "$@"', "sh", sys.executable, "-c", words]
    done = subprocess.run(full, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 7, done.stderr
    assert f"nothing of it could be written to {tmp_path / 'store'}: File too large" in done.stderr
    assert "no training was seen" not in done.stderr


@pytest.mark.slow
def test_the_command_runs_where_a_package_that_watching_needs_is_missing(tmp_path: Path) -> None:
    words = "import sys; sys.modules['duckdb'] = None; from unskew.__main__ import main; main()"
    command = [sys.executable, "-c", "import sys; print('trained'); sys.exit(7)"]
    unskew = [sys.executable, "-c", words, "watch", "--store", str(tmp_path / "store"), "--", *command]
    done = subprocess.run(unskew, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (7, "trained\n"), done.stderr
    assert "the command runs all the same: duckdb is not installed: pip install 'unskew[platform]'" in done.stderr


@pytest.mark.slow
def test_a_run_that_cannot_be_summed_up_ends_as_its_command_did(tmp_path: Path) -> None:
    """The user's job ended with an exit code of ours, which a scheduler may start it again for."""
    manifest = str(tmp_path / "store" / "manifest.json")
    words = f"{ONE_STEP}; import sys, time; time.sleep(1); open({manifest!r}, 'w').write('{{'); sys.exit(7)"
    done = watched(tmp_path, sys.executable, "-c", words)
    assert (done.returncode, done.stdout) == (7, ""), done.stderr
    assert "is not summed up" in done.stderr
    assert "Traceback" not in done.stderr


UNMEASURED = """
import time
import torch
import unskew

session = unskew.attach()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(80):
    if step == 20:
        session.failed(RuntimeError("a seam broke"))
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.limit(120)
def test_a_rank_whose_measuring_ends_does_not_hang_and_its_run_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains on for three seconds; a rank that is silent for one would be a hanging one here."""
    monkeypatch.setattr(stalled, "LEAST_HUNG_S", 1.0)
    (tmp_path / "train.py").write_text(UNMEASURED)
    store, answer = str(tmp_path / "store"), tmp_path / "w.json"
    train = [sys.executable, str(tmp_path / "train.py")]
    done = CliRunner().invoke(app, ["watch", "--store", store, "--json", str(answer), "--", *train])
    assert done.exit_code == 0, done.output
    summary = json.loads(answer.read_text())
    assert [one["cause"] for one in summary["verdicts"]] == []
    assert summary["status"] == "incomplete"
    assert "rank 0 is not measured since iteration" in summary["reason"]
    assert "a seam broke" in summary["reason"]


def test_of_one_process_the_first_batch_has_lengths_too(tmp_path: Path) -> None:
    """Its loader gives it before anybody knows which thread trains."""
    done = watched(tmp_path, sys.executable, "-c", ALONE)
    assert "what its batches hold is not known" not in done.stderr, done.stderr
    assert "on 1 rank," in done.stderr
    with open_store(Store(tmp_path / "store")) as reader:
        lengths = reader.sql("select lengths from micro_batches order by iteration")["lengths"].to_list()
    assert lengths == [[16 * 128]] * 3
