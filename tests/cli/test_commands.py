"""The command line: exit codes, refusals, and decisions that reach a controller and bring its answer back."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

import unskew
from unskew.analytics.health.rejoining import Rejoining
from unskew.cli import app
from unskew.collector.command import Command
from unskew.collector.events import CommandRefused, ModeChanged, Note, PlanApproved, RankAdded, RunStarted
from unskew.collector.files.manifest import Manifest, publish
from unskew.collector.paths import Store
from unskew.collector.write.commands import Inbox, hold_controller_lock
from unskew.collector.write.control_stream import ControlStream
from unskew.commands.log import sql
from unskew.commands.train.decide import answers
from unskew.commands.train.run import default_faults
from unskew.runtime.options import RunOptions

OPTIONS_OF_RUN = {
    "--tp", "--pp", "--dp", "--layers", "--dim", "--heads", "--ends", "--tokens", "--micro-batches", "--iterations", "--seed",
    "--schedule", "--device", "--profile", "--corpus", "--store", "--mode", "--fault", "--no-faults", "--dtype", "--dashboard",
    "--no-dashboard", "--json", "--verify", "--shared",
    "--checkpoint-every", "--controller-wait", "--costs-of", "--recovery", "--resume", "--respawns", "--when-stuck",
    "--model", "--data", "--link-us", "--link-mbps", "--sends", "--policy", "--rank-mib", "--detector", "--degrees",
}  # fmt: skip
HELP = """
import sys, unskew.cli
try: unskew.cli.app(['run', '--help'])
except SystemExit: pass
assert not {'torch', 'duckdb', 'polars', 'numpy'} & set(sys.modules)
"""
DIAGNOSIS = """
import sys, unskew.analytics.diagnosis.diagnose, unskew.edge.load_run
assert not {'torch', 'pandas', 'scipy.optimize', 'scipy.stats'} & set(sys.modules)
"""
SMALLEST_HELP = """
import typer
app = typer.Typer()
@app.command()
def run(one: int = 1): pass
try: app(['--help'])
except SystemExit: pass
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_the_public_names_are_these() -> None:
    assert sorted(unskew.__all__) == ["Store", "__version__", "attach", "open", "train"]
    assert all(hasattr(unskew, name) for name in unskew.__all__)


@pytest.mark.slow
def test_help_is_instant_and_without_torch() -> None:
    def cpu_s(code: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Against the smallest program that has a help, at the same load of the same machine.
    ratios = [cpu_s(HELP) / cpu_s(SMALLEST_HELP) for _ in range(3)]
    assert median(ratios) < 4, ratios


@pytest.mark.slow
def test_a_diagnosis_loads_nothing_that_takes_as_long_as_itself() -> None:
    subprocess.run([sys.executable, "-c", DIAGNOSIS], check=True)


def test_the_options_of_run_are_these() -> None:
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert options == OPTIONS_OF_RUN


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("run", "--device", "tpu"), "unskew run: invalid value for '--device': 'tpu' is not one of 'auto', 'real', 'gpu'"),
        (("run", "--devise", "sleep"), "unskew run: no such option: --devise (Possible options: --device, --dim, --resume)"),
        (("mode", "r"), "unskew mode: missing argument 'mode'. Choose from: observe, approve, auto"),
        (("approve", "p1", "--by", "ann"), "unskew approve: missing option '--reason'"),
        (("store", "chekc"), "there is no command unskew store chekc, allowed: check, rebuild, compact, prune"),
        (("wach",), "there is no command unskew wach, allowed: run, watch, "),
        (("--bogus",), "unskew: no such option: --bogus"),
        (("store", "duckdb", "\udcff"), "\ufffd is not UTF-8, which names and paths must be"),
        (("run", "--pp", "four"), "unskew run: invalid value for '--pp': a whole number is needed"),
        (("sql", "select 1", "--timeout", "1e9"), "unskew sql: invalid value for '--timeout': it must be less than or equal"),
        (("sql", "select 1", "--timeout", "inf"), "unskew sql: invalid value for '--timeout'"),
        (("sql", "select 1", "--timeout", "nan"), "unskew sql: invalid value for '--timeout'"),
    ],
)  # fmt: skip
def test_bad_usage_ends_in_one_sentence_that_says_what_is_allowed(arguments: tuple[str, ...], sentence: str) -> None:
    done = CliRunner().invoke(app, list(arguments), prog_name="unskew")
    assert done.exit_code == 2
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1


def test_a_group_without_a_command_shows_its_help() -> None:
    assert "Usage" in call("store").output


@pytest.mark.parametrize("command", ["watch", "diagnose"])
def test_the_newest_run_is_the_last_one_started_whatever_its_name(command: str, tmp_path: Path) -> None:
    for run in ("zebra", "20260101-early"):
        started = RunStarted(run=run, device="sleep", clock="monotonic", mode="auto", ranks=1, options={}, code="", version="0")
        stream = ControlStream(Store(tmp_path), run, "control", "controller.1")
        stream.append(0, [started], actor="controller")
        stream.close()
        time.sleep(0.01)
    assert "20260101-early" in call(command, "--store", str(tmp_path)).output


def test_without_a_fault_option_one_rank_is_slow_and_one_that_can_be_replaced_dies() -> None:
    assert default_faults(RunOptions(iterations=180)) == ["slow:rank=3,factor=1.8,at=30", "kill:rank=6,at=90"]
    assert default_faults(RunOptions(dp=1, pp=2, iterations=12)) == ["slow:rank=0,factor=1.8,at=9"]
    assert default_faults(RunOptions(dp=1, pp=2, iterations=9)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--fault", "melt:rank=1,at=2"], "allowed: slow, slow_link, kill, hang, freeze"),
        (["run", "--fault", "kill:rank=9,at=2"], "rank=9"),
        (["run", "--fault", "kill:rank=1,at=2", "--no-faults"], "--no-faults"),
        (["run", "--pp", "0"], "--pp 0 is too small, allowed: 1 or more"),
        (["run", "--tokens", "99999999999999999999"], "--tokens"),
        (["run", "--seed", str(2**70)], "--seed"),
        (["run", "--seed", str(2**40)], f"--seed {2**40} is too large, allowed: {2**32 - 1} or less"),
        (["run", "--seed", "-1"], "--seed -1 is too small, allowed: 0 or more"),
        (["run", "--pp", "64", "--dp", "64"], "are 4,096 ranks, allowed on one node: 1,024"),
        (["run", "--fault", "slow:rank=1,factor=1e308,at=2"], "rank 1 is slowed 1e+308 times by all its faults, allowed: 1000"),
        (["run", *["--fault", "slow:rank=0,factor=1.8,at=1"] * 20], "rank 0 is slowed 1.27e+05 times by all its faults"),
        (["run", *["--fault", "slow:rank=0,factor=1.001,at=1"] * 3_000], "3,000 faults are given, allowed: 200"),
        (["run", "--layers", "3"], "--layers 3 cannot fill --pp 4"),
        (["run", "--degrees", "2,,1"], "--degrees 2,,1: nothing is no number of shards, allowed: such as 2,1 or 2,1/1,1"),
        (["run", "--degrees", "2,0"], "--degrees 2,0: 0 is no number of shards"),
        (["run", "--degrees", "3,2"], "--degrees 3,2 leaves a shard without a head, allowed with --heads 2: 2 or less"),
        (["run", "--degrees", "2/1", "--policy", "resihp"], "--degrees 2/1 is not for --policy resihp, which plans for stages"),
        (["run", "--degrees", "1/1,1", "--schedule", "searched"], "--degrees 1/1,1 is not for --schedule searched"),
        (["run", "--degrees", "1,2,1", "--layers", "2"], "--degrees 1,2,1: --layers 2 cannot fill the 3 stages"),
        (["run", "--degrees", "1/2/1", "--micro-batches", "2"], "--micro-batches 2 cannot feed the 3 replicas"),
        (["run", "--degrees", "2000,1"], "--degrees 2000,1 are 2,001 ranks, allowed on one node: 1,024"),
        (["run", "--degrees", "2,1", "--dp", "4"], "--dp and --degrees contradict each other: give one of them"),
        (["run", "--degrees", "2,1/1", "--fault", "kill:rank=4,at=9"], "rank=4"),
        (
            ["run", "--layers", "32", "--rank-mib", "1", "--no-dashboard"],
            "--rank-mib 1: plan 0 does not fit: rank 0 would need",
        ),
        (["run", "--schedule", "zigzag"], "allowed: gpipe, 1f1b, interleaved, zb-h1, zb-v, searched"),
        (["run", "--dim", "7"], "--dim 7"),
        (["run", "--profile", "none"], "none"),
        (["run", "--corpus", "nowhere"], "--corpus nowhere is not a folder"),
        (["run", "--json", "/proc/none/f.json"], "--json /proc/none/f.json"),
        (["watch"], "there is no store in"),
        (["watch", "r9"], "there is no store in"),
        (["mode", "r9", "auto", "--by", "ann"], "there is no store in"),
        (["approve", "p-1", "--by", "ann", "--reason", "ok"], "there is no store in"),
        (["diagnose"], "there is no store in"),
        (["sql", "select 1"], "there is no store in"),
        (["dashboard"], "there is no store in"),
        (["bench", "nothing"], "no benchmark 'nothing'"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_before_anything_starts(arguments: list[str], words: str, tmp_path: Path) -> None:
    result = call(*arguments, "--store", str(tmp_path / "store"))
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not result.stdout
    assert not (tmp_path / "store").exists()


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = call("watch", "--store", str(tmp_path / "file"))
    assert (result.exit_code, "is a file" in result.stderr) == (2, True)


def test_a_store_that_cannot_be_made_is_refused() -> None:
    result = call("run", "--store", "/proc/none")
    assert (result.exit_code, "cannot create /proc/none" in result.stderr) == (2, True)


@contextmanager
def controller(store: Store, run: str) -> Iterator[None]:
    """A controller that approves p-1, refuses every other proposal, obeys modes, and has a place for a second rank."""
    stop = threading.Event()
    stream = ControlStream(store, run, "control", "controller.1")
    version = stream.append(
        0,
        [RunStarted(run=run, device="sleep", clock="monotonic", mode="approve", ranks=1, options={}, code="", version="0")],
        actor="controller",
    )

    def obey() -> None:
        nonlocal version
        inbox = Inbox(store, run)
        while not stop.wait(0.02):
            for command in inbox.poll()[0]:
                if command.kind == "mode":
                    answer = ModeChanged(mode=command.target, by=command.by, reason=command.reason)
                elif command.kind == "rank":
                    answer = Rejoining(processes={0: 1}).command(command, 3, iterations=9, most_ranks=2)
                elif command.target == "p-1":
                    answer = PlanApproved(proposal="p-1", by=command.by, reason=command.reason)
                else:
                    answer = CommandRefused(command=command.target, by=command.by, reason="there is no such proposal")
                version = stream.append(version, [answer], actor=command.by)

    thread = threading.Thread(target=obey)
    with hold_controller_lock(store, run):
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            stream.close()


@pytest.fixture
def holed(tmp_path: Path) -> Store:
    """A store in which the collector found a hole."""
    store = Store.locate(tmp_path)
    stream = ControlStream(store, "r1", "control", "controller.1")
    stream.append(0, [Note(text="half a million", by="ann")], actor="c")
    stream.close()
    publish(store, Manifest(problems=("run r1: writer rank-0000.1 lacks 3 lines", "run r2: 1 lines could not be read")))
    return store


def test_what_is_wrong_with_the_log_is_said_beside_every_answer_from_it(holed: Store) -> None:
    where = ("--store", str(holed.root))
    asked = call("sql", "select 7 as seven", "--format", "csv", *where)
    assert (asked.exit_code, asked.stdout) == (0, "seven\n7\n")
    assert asked.stderr.splitlines() == [
        "warning: run r1: writer rank-0000.1 lacks 3 lines", "warning: run r2: 1 lines could not be read",
    ]  # fmt: skip
    watched = call("watch", "r1", *where)
    assert watched.exit_code == 0
    assert watched.stderr.splitlines() == [
        "warning: the controller of run r1 is gone: the run ended without saying so",
        "warning: run r1: writer rank-0000.1 lacks 3 lines",
    ]


@pytest.mark.slow
def test_a_cut_answer_says_so_and_a_file_gets_all_rows(holed: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sql, "COUNTED_ROWS", 300)
    where = ("--store", str(holed.root))
    assert "more than 300 rows, the first 200 shown" in call("sql", "select range from range(500)", *where).stdout
    assert "\n300 rows, the first 200 shown" in call("sql", "select range from range(300)", *where).stdout
    assert "\n1 row\n" in call("sql", "select 1 as one", *where).stdout
    assert len(call("sql", "select range from range(500)", "--format", "csv", *where).stdout.splitlines()) == 501
    call("sql", "select range from range(500)", "--json", str(tmp_path / "all.json"), *where)
    assert len(msgspec.json.decode((tmp_path / "all.json").read_bytes())) == 500


@pytest.mark.slow
@pytest.mark.parametrize("query", ["select 1 as one; --", "select 1 as one ;; /* ; */ -- é;", "select 1 as one -- x;\n"])
def test_what_stands_behind_a_query_is_no_other_query(holed: Store, query: str) -> None:
    assert call("sql", query, "--format", "csv", "--store", str(holed.root)).stdout == "one\n1\n"


@pytest.mark.slow
@pytest.mark.parametrize("query", ["select [1, 2] as list", "select date 'infinity' as late"])
def test_what_a_format_cannot_hold_is_refused_in_one_sentence(holed: Store, query: str) -> None:
    result = call("sql", query, "--format", "csv", "--store", str(holed.root))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--format csv cannot hold" in result.stderr.splitlines()[-1]


def test_a_decision_comes_back_with_what_the_controller_made_of_it(tmp_path: Path) -> None:
    store = Store.locate(tmp_path)
    where = ("--store", str(tmp_path))
    with controller(store, "r1"):
        approved = call("approve", "p-1", "--by", "ann", "--reason", "looks right", *where)
        refused = call("reject", "p-7", "--by", "ann", "--reason", "no", "--run", "r1", *where)
        mode = call("mode", "r1", "observe", "--by", "bob", *where)
        added = call("rank", "add", "r1", "--by", "bob", *where)
        lives = call("rank", "add", "r1", "--by", "bob", "--rank", "0", *where)
    assert (approved.exit_code, approved.stdout) == (0, "ann approves p-1: looks right\n")
    assert (refused.exit_code, "there is no such proposal" in refused.stderr) == (1, True)
    assert (mode.exit_code, mode.stdout) == (0, "bob sets the mode to observe\n")
    assert (added.exit_code, added.stdout.endswith(" lets rank 1 be started\n")) == (0, True)
    assert (lives.exit_code, lives.stderr.endswith(": rank 0 lives\n")) == (1, True)
    orphaned = call("mode", "r1", "auto", "--by", "bob", *where)
    assert (orphaned.exit_code, "no living controller" in orphaned.stderr) == (2, True)


def test_of_two_who_ask_for_the_same_each_hears_its_own_answer() -> None:
    one, other = (Command(kind="rank", run="r1", by="ann") for _ in range(2))
    before = Rejoining(processes={0: 1})
    added = before.command(one, 3, iterations=9, most_ranks=2)
    refused = before.take(added).command(other, 3, iterations=9, most_ranks=2)
    assert (type(added), type(refused)) == (RankAdded, CommandRefused)
    assert [answers(event, command) for event in (added, refused) for command in (one, other)] == [True, False, False, True]


def test_who_asks_a_run_that_ends_meanwhile_hears_so_at_once(tmp_path: Path) -> None:
    store = Store.locate(tmp_path)
    ControlStream(store, "r1", "run/r1", "controller").close()
    held = hold_controller_lock(store, "r1")
    threading.Timer(0.3, held.release).start()
    start_s = time.monotonic()
    added = call("rank", "add", "r1", "--by", "bob", "--store", str(tmp_path))
    assert (added.exit_code, added.stderr) == (1, "the controller of r1 ended and had not answered\n")
    assert time.monotonic() - start_s < 10


def test_the_version_is_the_package_s() -> None:
    answer = CliRunner().invoke(app, ["--version"])
    assert (answer.exit_code, answer.output) == (0, f"unskew {unskew.__version__}\n")
