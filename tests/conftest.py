"""What every test obeys: a hard time limit, and no process left behind.

The limit is `@pytest.mark.limit(seconds)` (60 without), for each of setup, call and teardown. A main thread that is stuck where
no Python runs cannot be interrupted: then all threads' stacks are printed and the whole session ends.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import typer.testing
from hypothesis import settings
from support.processes import all_collectors
from support.training.warm_processes import forked_agents, warm_pids

DEFAULT_LIMIT_S = 60.0
STUCK_AFTER_S = 30.0
GONE_WITHIN_S = 10.0
MARK = "UNSKEW_TEST_SESSION"
FAST = "not slow and not alone"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""While tests are collected, which imports torch and numpy: their threads would spin longer than they compute, on cores that
others need. What tests start has the environment that people have."""
NONE_FAST = re.compile(r"^pytestmark = (\[[^\]]*?)?pytest\.mark\.(slow|alone)\b", re.MULTILINE)
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    # An example's time is the machine's: who shares its cores is not slower code.
    here = settings.get_profile(settings.get_current_profile_name())
    settings.register_profile("no deadline", here, deadline=None)
    settings.load_profile("no deadline")
    os.environ |= ONE_THREAD
    config.stash[STDERR] = os.dup(2)  # the real one: pytest captures 2 itself while a test runs
    # A runner makes the commands of an app anew for each call, which takes longer than most of them do.
    typer.testing._get_command = cache(typer.testing._get_command)  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would its children


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files are not even imported that cannot hold what is wanted: a test that runs alone, or one that is not slow."""
    if collection_path.suffix != ".py":
        return None
    if config.option.markexpr == "alone":
        return "mark.alone" not in collection_path.read_text() or None
    if config.option.markexpr == FAST:
        return NONE_FAST.search(collection_path.read_text()) is not None or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose slow tests may take longest first: what goes on when the other worker has nothing left is short then."""
    longest_s = Counter[Path]()
    for item in items:
        if item.get_closest_marker("slow"):
            longest_s[item.path] += _limit_s(item)
    items.sort(key=lambda item: -longest_s[item.path])


def pytest_collection_finish() -> None:
    for name in ONE_THREAD:
        os.environ.pop(name, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _limited(item, "setup")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _limited(item, "call")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield from _limited(item, "teardown")


def _limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("limit")
    return float(marker.args[0]) if marker else DEFAULT_LIMIT_S


def _limited(item: pytest.Item, phase: str) -> Iterator[None]:
    limit_s = _limit_s(item)

    def stop(_signal: int, _frame: object) -> None:
        pytest.fail(f"{phase} took longer than its limit of {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + STUCK_AFTER_S, exit=True, file=item.config.stash[STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module", autouse=True)
def no_process_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the module, and kill them, when processes that its tests started are still there some time after its end.

    Collectors are killed at once: they would wait for news for some seconds more, and for a core behind all other tests.
    """
    folder = str(tmp_path_factory.getbasetemp())
    os.environ[MARK] = folder
    yield
    until = time.monotonic() + GONE_WITHIN_S
    while left := started_from(folder):
        for pid in all_collectors() & left.keys():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "processes left behind: " + "; ".join(f"{pid} {command}" for pid, command in left.items())


@pytest.fixture
def forked() -> Iterator[None]:
    """Runs that the test begins in this process have forked agents."""
    with forked_agents():
        yield


@pytest.fixture
def processes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[int, str]]:
    """Call it for the processes that tests of this session started and that live now: pid -> command line."""
    return lambda: started_from(str(tmp_path_factory.getbasetemp()))


def started_from(folder: str) -> dict[int, str]:
    """pid -> command line of the living processes that name `folder` or carry this session's mark, but this one and the one
    that forks agents.

    A process that was forked keeps the arguments and environment its ancestor was started with, so ranks are found as well.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in {os.getpid(), *warm_pids()}:
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            environment = (entry / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if command and (folder in command or f"{MARK}={folder}\0" in environment):
            found[int(entry.name)] = command
    return found
