"""Who watches a training: with the command that it starts, unchanged, and whose end it passes on; or beside ranks of others."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType

from unskew.collector.events import RunFinished
from unskew.collector.files import manifest
from unskew.collector.files.segment import first_seq, segment_name, segment_names
from unskew.collector.files.tail import Entry
from unskew.collector.locks import HeldLock
from unskew.collector.paths import Store, StoreError
from unskew.collector.service.process import KeptCollector
from unskew.collector.write.commands import CommandError, controller_alive, hold_controller_lock
from unskew.runtime.attach.acting import ActOptions
from unskew.runtime.attach.asked.plan_file import ACTS
from unskew.runtime.attach.outside.watcher import STOPPED, JobWatcher

BOOT = Path(__file__).parents[1] / "boot"
POLL_S = 0.05


class NotWatchedError(Exception):
    """Nothing was started, as it could not have been watched; why."""


class NotStartedError(Exception):
    """The command itself cannot be started; one sentence."""


def environment(store: Store, run: str, given: Mapping[str, str]) -> dict[str, str]:
    """That of a command whose Python processes are to be measured."""
    path = os.pathsep.join(part for part in (str(BOOT), given.get("PYTHONPATH", "")) if part)
    return {**given, "PYTHONPATH": path, "UNSKEW_STORE": str(store.root), "UNSKEW_RUN": run, ACTS: "1"}


def claim(store: Store, asked: str) -> tuple[str, HeldLock | None]:
    """Which run a command is that is started as `asked`, and its controller's lock: None where somebody holds it already, who
    sees these ranks too (a watch around this one, or another node's).

    A name that an earlier start has is followed by NAME-2 and so on, as a scheduler starts a job again. All nodes of a job go
    through the same names, so whoever comes to one that is watched has found its own job.
    """
    for number in count(1):
        run = asked if number == 1 else f"{asked}-{number}"
        earlier = _begun(store, run)  # asked before the lock is: a node that holds it may have begun meanwhile
        if controller_alive(store, run):
            return run, None
        if not earlier:
            try:
                return run, hold_controller_lock(store, run)
            except CommandError:
                return run, None
    raise AssertionError


def _begun(store: Store, run: str) -> bool:
    """Whether the store has the run already, and not only of ranks that wait to be judged."""
    known = store.spool(run).is_dir() or any(one.run == run for one in manifest.load(store).sealed)
    return known and not unwatched(store, run)


def watch_command(
    store: Store,
    run: str,
    command: Sequence[str],
    *,
    act: ActOptions | None = None,
    on_entry: Callable[[Entry], None] = lambda _: None,
    on_tick: Callable[[], None] = lambda: None,
    on_problem: Callable[[str], None] = lambda _: None,
) -> tuple[int, RunFinished | None]:
    """Run `command` to its end, while the caller holds its run's lock; its exit code (128 + n for signal n), and how the run
    ended: None when no rank was seen, or it could not be watched to its end, of which `on_problem` hears why. Raises
    `NotWatchedError` before it is started, and `NotStartedError`; once it is there, nothing of ours."""
    with ExitStack() as stack:
        try:
            watcher = stack.enter_context(_watcher(store, run, command, on_entry, act))
            end, collector = None, KeptCollector(store)
        except Exception as error:
            raise NotWatchedError(in_words(error)) from error
        with _SignalRelay(watcher.asked_to_stop) as relay:
            try:
                process = subprocess.Popen(command, env=environment(store, run, os.environ))
            except OSError as error:
                raise NotStartedError(cannot_start(command, error)) from error
            try:
                relay.to(process)
                watcher.started(process.pid)
                while process.poll() is None:
                    collector.keep()
                    watcher.look()
                    on_tick()
                    time.sleep(POLL_S)
                collector.keep(at_once=True)
                end = watcher.finish(_code_of(process))
                on_tick()
            except Exception as error:  # a full disk, a fault of our own: that is ours, and costs the training nothing
                with suppress(Exception):  # a closed terminal
                    on_problem(in_words(error))
            while process.returncode is None:  # whoever started it again now would have it twice
                with suppress(Exception):
                    process.wait()
    return _code_of(process), end


def unwatched(store: Store, run: str) -> bool:
    """Whether ranks that somebody else has started write this run, from its beginning, and nobody has judged it. While they
    write, the spool keeps what a collector has sealed of it."""
    folder = store.spool(run)
    writers = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    ranks = [path for path in writers if path.name.startswith("rank-")]
    whole = all(first_seq(name) == 0 for path in ranks for name in segment_names(path)[:1])
    judged = any("@" in path.name for path in writers)
    kept = all(
        one.replaces and all((folder / file.writer / segment_name(file.segment)).is_file() for file in one.replaces)
        for one in manifest.load(store).sealed
        if one.run == run
    )
    return bool(ranks) and whole and kept and not judged


def watch_ranks(
    store: Store,
    run: str,
    *,
    on_entry: Callable[[Entry], None] = lambda _: None,
    on_tick: Callable[[], None] = lambda: None,
    on_problem: Callable[[str], None] = lambda _: None,
) -> tuple[int, RunFinished | None]:
    """Judge a run of ranks that somebody else has started, until all of them have ended, or to Ctrl-C: 0 where they ended well;
    and how it ended, None where it could not be watched to its end."""
    with hold_controller_lock(store, run), _watcher(store, run, (), on_entry, None) as watcher:
        collector, code = KeptCollector(store), 0
        try:
            try:
                while not watcher.over:
                    collector.keep()
                    watcher.look()
                    on_tick()
                    time.sleep(POLL_S)
                code = 0 if watcher.well else 1
            except KeyboardInterrupt:
                code = STOPPED[0]
            collector.keep(at_once=True)
            end = watcher.finish(code)
            on_tick()
        except Exception as error:
            on_problem(in_words(error))
            return code, None
    return code, end


@contextmanager
def _watcher(
    store: Store, run: str, command: Sequence[str], on_entry: Callable[[Entry], None], act: ActOptions | None
) -> Iterator[JobWatcher]:
    """Before the command, so that what is wrong here is not found while it trains."""
    watcher = JobWatcher(store, run, command, on_entry, act)
    try:
        yield watcher
    finally:
        with suppress(Exception):  # whatever it is, the command's own end counts
            watcher.close()


def cannot_start(command: Sequence[str], error: OSError) -> str:
    return f"{command[0]} cannot be started: {error.strerror or error}"


def in_words(error: Exception) -> str:
    """What went wrong; of what nobody foresaw also where."""
    if isinstance(error, (OSError, StoreError)):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install 'unskew[platform]'"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"an error of Unskew's own, {type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"


def _code_of(process: subprocess.Popen[bytes]) -> int:
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


class _SignalRelay:
    """Ctrl-C reaches the command by itself, as it shares the terminal; SIGTERM and SIGHUP are passed on, also what comes while
    it is started, but a closed terminal's SIGHUP only by whom the terminal was opened for: else the shell tells both, and
    torchrun, told twice, may leave its ranks behind. None of them ends the watching; `on_stop` hears of each. Under nohup
    SIGHUP stays ignored."""

    def __init__(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop
        self._process: subprocess.Popen[bytes] | None = None
        self._early = 0
        self._terminal = _has_terminal()

    def to(self, process: subprocess.Popen[bytes]) -> None:
        """From now on; what has come before goes there too."""
        self._process = process
        if self._early:
            self._pass_on(self._early, None)

    def __enter__(self) -> _SignalRelay:
        self._before = {
            signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: self._on_stop()),
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._pass_on),
        }
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hung_up)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hung_up(self, number: int, frame: FrameType | None) -> None:
        if self._terminal and not _has_terminal() and os.getsid(0) != os.getpid():
            self._on_stop()
        else:
            self._pass_on(number, frame)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's arguments
        self._on_stop()
        if self._process is None:
            self._early = number
            return
        with suppress(OSError):  # it has ended, or has become another user's
            self._process.send_signal(number)


def _has_terminal() -> bool:
    """Whether the process has a terminal that can end it; one that was closed is none."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
