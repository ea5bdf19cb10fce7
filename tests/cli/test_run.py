"""`unskew run` as a person meets it: real processes, on the virtual device so that it takes seconds."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest
from support.processes import processes_of
from support.training.runtime_runs import wait_until
from support.training.warm_processes import warm_process
from typer.testing import CliRunner

from unskew.cli import app

pytestmark = pytest.mark.slow

Processes = Callable[[], dict[int, str]]
SMALL = [
    "run", "--device", "virtual", "--pp", "2", "--dp", "1", "--layers", "2", "--dim", "16", "--heads", "2", "--tokens", "64",
    "--micro-batches", "2", "--no-faults",
]  # fmt: skip


def unskew(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "unskew", *arguments]


def output(*arguments: str, exit_code: int = 0) -> str:
    """What a command that reads prints, called in this process."""
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == exit_code, ended.output
    return ended.stdout


@pytest.mark.limit(120)
def test_a_run_ends_with_its_facts_and_others_can_ask_the_store(tmp_path: Path) -> None:
    store, answer = ["--store", str(tmp_path / "store")], tmp_path / "out" / "run.json"
    for name in ("torch", "numpy", "streamlit", "unskew"):  # where a person works on these: none of our processes takes them
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('the foreign folder was imported')")
    command = unskew(*SMALL, "--iterations", "5", "--no-dashboard", "--json", str(answer), *store)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    facts = json.loads(answer.read_text())
    assert {
        "run_id",
        "status",
        "reason",
        "device",
        "detector",
        "iterations",
        "committed",
        "losses",
        "iteration_s",
        "faults",
        "verdicts",
        "plans",
        "proposals",
        "events",
        "outcome",
        "policy",
        "verify",
        "resumed_from",
        "resumed_at",
    } == set(facts)
    assert (facts["device"], facts["iterations"], len(facts["losses"])) == ("virtual", 5, 5)
    assert (facts["status"], facts["committed"], facts["events"]["log_complete"]) == ("done", 5, True)
    assert facts["events"]["written"] == facts["events"]["stored"]
    assert str(tmp_path / "store") in ended.stdout
    assert facts["run_id"] in ended.stdout
    rows = json.loads(output("sql", "select iteration, loss from iterations order by 1", "--format", "json", *store))
    assert [row["loss"] for row in rows] == pytest.approx(facts["losses"])
    watched = output("watch", *store)
    assert facts["run_id"] in watched
    assert "5 of 5 done  iteration 4: loss" in watched


@pytest.mark.limit(120)
def test_a_run_that_the_disk_did_not_take_whole_fails_and_is_said_to_be_incomplete_wherever_it_is_shown(tmp_path: Path) -> None:
    """No file may grow beyond a size that the decisions fit, the page of heartbeats and the telemetry of some iterations."""

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (66_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    store = ["--store", str(tmp_path)]
    command = unskew(*SMALL, "--iterations", "90", "--no-dashboard", *store)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, preexec_fn=small_disk)
    assert ended.returncode == 1
    words = r"the log holds (\d+) of the 90 iterations that were committed, [\d,]+ events could not be written"
    lacks = re.search(words, ended.stderr)
    assert lacks is not None, ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "training is done after 90 iterations, its log is incomplete" in ended.stdout
    assert f"{lacks[1]} in the log, of 90 that were committed" in ended.stdout
    assert "log complete" not in ended.stdout
    assert "its log is incomplete" in output("watch", *store)
    (row,) = json.loads(output("sql", "select status, iterations from runs", "--format", "json", *store))
    assert row == {"status": "incomplete", "iterations": int(lacks[1])}
    assert lacks[0] in output("store", "check", *store, exit_code=1)


@pytest.mark.limit(120)
@pytest.mark.parametrize(
    "options", [("--device", "sleep", "--micro-batches", "8", "--iterations", "40"), ("--iterations", "5")]
)
def test_a_run_that_is_over_is_called_the_same_by_its_summary_sql_and_diagnosis(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """Whatever the machine is like: on a busy one the summary said well, the diagnosis that it cannot be judged."""
    store, answer = ["--store", str(tmp_path / "store")], tmp_path / "run.json"
    assert warm_process().start_command(*SMALL, *options, "--no-dashboard", "--json", str(answer), *store).wait(60) == 0
    stated = [json.loads(answer.read_text())["outcome"]]
    question = "select outcome, smallest_slowdown, why from outcomes"
    stated += json.loads(output("sql", question, "--format", "json", *store))
    output("diagnose", "--json", str(answer), *store)
    (diagnosed,) = json.loads(answer.read_text())["runs"]
    stated.append({name: diagnosed[name] for name in ("outcome", "smallest_slowdown", "why")})
    assert stated[0] == stated[1] == stated[2]


PAGE = "from unskew.dashboard import data; print(data.snapshot(data.runs()['run'][0]).outcome.sentence)"


@pytest.mark.limit(180)
def test_on_a_disk_of_600_kb_a_run_is_not_done_and_everything_says_so(tmp_path: Path) -> None:
    """A tmpfs in a namespace of its own, which needs no rights: where the kernel lets nobody have one, the test is skipped.

    All share the disk, so at its end the controller cannot log its decisions either, nor how the run ended.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    store = ["--store", str(disk / "store")]
    commands = {
        "run": unskew(*SMALL, "--iterations", "400", "--no-dashboard", "--json", str(tmp_path / "run.json"), *store),
        "check": unskew("store", "check", *store),
        "diagnose": unskew("diagnose", "--json", str(tmp_path / "diagnosis.json"), *store),
        "page": ["env", f"UNSKEW_STORE={disk / 'store'}", sys.executable, "-P", "-c", PAGE],
    }
    script = [f"mount -t tmpfs -o size=600k none {shlex.quote(str(disk))} || exit 77"]
    for name, command in commands.items():
        into = shlex.quote(str(tmp_path / name))
        script.append(f"{shlex.join(command)} >{into}.out 2>{into}.err; echo $? >{into}.rc")
    if (unshare := shutil.which("unshare")) is None:
        pytest.skip("there is no unshare here, which makes the disk")
    inside = [unshare, "--user", "--map-root-user", "--mount", "sh", "-c", "\n".join(script)]
    ended = subprocess.run(inside, capture_output=True, text=True, timeout=170, check=False)
    if not (tmp_path / "run.rc").exists():
        pytest.skip(f"no disk of one's own can be mounted here: {ended.stderr.strip()}")
    codes = {name: int((tmp_path / f"{name}.rc").read_text()) for name in commands}
    shown = {name: [(tmp_path / f"{name}.{end}").read_text() for end in ("out", "err")] for name in commands}
    printed = {name: " ".join(" ".join(both).split()) for name, both in shown.items()}
    assert codes == {"run": 1, "check": 1, "diagnose": 0, "page": 0}, printed
    facts = json.loads((tmp_path / "run.json").read_text())
    # It fails when a decision cannot be logged, which may be before a rank lost a line; with none to log it goes on to its
    # end, of which the log lacks the most.
    outcome, why = {
        "failed": ("wrong", "the disk is full"), "incomplete": ("cannot_be_judged", "No space left on device"),
    }[facts["status"]]  # fmt: skip
    assert facts["iterations"] <= facts["committed"] <= 400
    assert facts["status"] == "failed" or facts["iterations"] < facts["committed"]
    assert facts["events"]["log_complete"] is False
    assert facts["outcome"]["outcome"] == outcome
    assert "log complete" not in printed["run"]
    assert f"{facts['iterations']} in the log, of {facts['committed']} that were committed" in printed["run"]
    assert why in printed["run"]
    assert "the store is not as it was written, or not whole" in printed["check"]
    (diagnosed,) = json.loads((tmp_path / "diagnosis.json").read_text())["runs"]
    # Ranks that have ended may have left room for the end of the run: then all say what the summary says.
    if "the end of the run is not in the log" in facts["reason"]:
        outcome = "cannot_be_judged"
    assert diagnosed["outcome"] == outcome
    assert printed["page"].startswith("Cannot be judged: ") is (outcome == "cannot_be_judged")


LOOK = """
import os, sys
from typer.testing import CliRunner
from unskew.cli import app
from unskew.dashboard import data
from unskew.dashboard.panels.headline import decide

store, answer = ["--store", os.environ["UNSKEW_STORE"]], sys.argv[1]
asked = ["store", "check", *store], ["diagnose", "--json", answer, *store]
codes = [CliRunner().invoke(app, words).exit_code for words in asked]
(run,) = data.runs().iter_rows(named=True)
headline = decide(data.snapshot(run["run"]))
print(*codes, run["status"], run["outcome"], headline.tone, headline.sentence, *headline.notes, sep="|")
"""


@pytest.mark.limit(180)
@pytest.mark.parametrize("killed", ["controller", "collector"])
def test_who_is_killed_while_the_disk_is_full_leaves_no_run_that_is_done(killed: str, tmp_path: Path) -> None:
    """Looked at with the disk full, then with room on it, when another collector has been there. Of ranks:
    tests/runtime/node/test_full_disk.py."""
    disk, into = tmp_path / "disk", {name: tmp_path / name for name in ("full", "go", "rc", "err", "looked")}
    disk.mkdir()
    store = f"{disk}/store"
    look = f"UNSKEW_STORE={store} {sys.executable} -P -c {shlex.quote(LOOK)} {tmp_path}/diagnosis.json"
    options = "--iterations 300 --checkpoint-every 0 --controller-wait 0 --no-dashboard --store"
    run = unskew(*SMALL, *options.split(), store)
    collect = [sys.executable, "-P", "-m", "unskew.collector.service.process", "--store", store]
    script = f"""
        mount -t tmpfs -o size=4m none {disk} || exit 77
        {shlex.join(run)} >/dev/null 2>{into["err"]} &
        until [ $(cat {store}/spool/*/rank*/*.jsonl 2>/dev/null | wc -c) -gt 40000 ]; do sleep 0.02; done
        dd if=/dev/zero of={disk}/ballast bs=4k 2>/dev/null; touch {into["full"]}
        until [ -e {into["go"]} ]; do sleep 0.02; done
        wait $!; echo $? >{into["rc"]}
        {look} >>{into["looked"]} 2>>{into["err"]}
        rm {disk}/ballast; timeout 4 {shlex.join(collect)} >/dev/null 2>>{into["err"]}
        {look} >>{into["looked"]} 2>>{into["err"]}
    """
    if (unshare := shutil.which("unshare")) is None:
        pytest.skip("there is no unshare here, which makes the disk")
    with subprocess.Popen([unshare, "--user", "--map-root-user", "--mount", "sh", "-c", script]) as inside:
        if not wait_until(lambda: into["full"].exists() or inside.poll() is not None, 60) or inside.poll() is not None:
            inside.kill()
            pytest.skip("no disk of one's own can be mounted here")
        module = {"controller": "unskew", "collector": "unskew.collector.service.process"}[killed]
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in processes_of(store)}
        victims = [pid for pid, words in commands.items() if words[:4] == [sys.executable, "-P", "-m", module]]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        into["go"].touch()
        inside.wait(120)
    assert len(victims) == 1
    assert int(into["rc"].read_text()) == {"controller": 137, "collector": 1}[killed]
    assert "Traceback" not in into["err"].read_text()
    looked = into["looked"].read_text().splitlines()
    assert len(looked) == 2
    for line in looked:
        check, diagnosis, status, outcome, tone, *words = line.split("|")
        assert (check, diagnosis, tone) == ("1", "0", "bad"), line
        assert status in ("unfinished", "failed", "incomplete"), line
        assert outcome in ("cannot_be_judged", "wrong"), line
        stated = "controller is gone|controller was gone without a word|disk is full|log is incomplete"
        assert re.search(stated, " ".join(words)), line


@pytest.mark.limit(120)
def test_ctrl_c_ends_every_process_and_leaves_a_usable_store(tmp_path: Path, processes: Processes) -> None:
    """SIGTERM and SIGKILL: tests/runtime/node/test_processes.py."""
    command = unskew(*SMALL, "--iterations", "1000000", "--store", str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "iteration" not in process.stdout.readline():
            pass
        assert len(processes()) > 2
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 1
        assert process.stderr.read().splitlines() == [f"stopped; what was logged until then is in {tmp_path}"]

    def left() -> list[str]:
        """The collector ends by itself when it has nothing left to do (tests/runtime/test_processes.py)."""
        return [line for line in processes().values() if "collector.service" not in line]

    wait_until(lambda: not left(), 30)
    assert not left()
    (row,) = json.loads(output("sql", "select status, iterations from runs", "--format", "json", "--store", str(tmp_path)))
    assert row["status"] == "stopped"
    assert row["iterations"] > 0


@pytest.mark.limit(120)
def test_in_a_terminal_the_dashboard_stays_until_ctrl_c(tmp_path: Path, processes: Processes) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, unskew(*SMALL, "--iterations", "5", "--store", str(tmp_path)))
    shown = read_until(terminal, "until Ctrl-C")
    (url,) = set(re.findall(r"http://127\.0\.0\.1:\d+", shown))
    with urlopen(f"{url}/_stcore/health", timeout=10) as answer:
        assert answer.status == 200
    os.kill(pid, signal.SIGINT)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not any("streamlit" in line for line in processes().values())


def read_until(terminal: int, words: str) -> str:
    """What the program draws until `words` appear; a terminal that closes first fails the test."""
    shown = ""
    while words not in shown:
        shown += os.read(terminal, 65536).decode(errors="replace")
    return shown
