"""Each fault in trainings under six frameworks: is the rank named, with its cause, and nobody where nobody is late?

Ranks are forked (tests/support/jobs/grid_job.py) and run on real CPU cores: two of them, of tensor parallelism and pipelines
four. A cell that has no meaning is left out: stages of a pipeline are given one shape, and only DDP lets a sum be late though
no rank computes. Ranks that die or hang are watched by the command while they train.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median

from support.jobs import attached_job, grid_job
from support.processes import send_signal, wait_for_collectors

from unskew.benchmarks.attach.probes import CAUSES, LENGTHS, RIGHT, SOON, JobVerdict, judged, of_baselines, percent, watched
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.collector.events import DeviceJoined, Event, Verdict
from unskew.collector.files.tail import Tail
from unskew.collector.paths import Store

SEEDS, FULL_SEEDS = 1, 3
LIMIT_S, LOOK_S = 90.0, 0.1
FRAMEWORKS = tuple(grid_job.RANKS)
LATE = (*CAUSES, "gc")
EVEN, LONGER = ("nothing", "random", "link"), "longer"
ENDS = {"dies": "dead", "hangs": "hung"}
ENDS_AT = (3, 24, 56)
NAMED = "the rank and its cause, and nothing else"
MEANINGLESS = {*((one, "link") for one in FRAMEWORKS if one != "ddp"), ("pp", "random")}


def figures(bench: Bench, seeds: int | None = None, frameworks: Sequence[str] = FRAMEWORKS) -> list[Figure]:
    found: list[Figure] = []
    asked = range((FULL_SEEDS if bench.full else SEEDS) if seeds is None else seeds)
    for framework in frameworks:
        if not grid_job.here(framework):
            missing = f"{grid_job.NEEDS[framework]} is not installed: pip install 'unskew[frameworks]'"
            found.append(figure(f"{framework}: {NAMED}", None, "%", bar=RIGHT, better="higher", note=missing))
            continue
        of_seeds = bench.kept(f"trainings under {framework}, watched", asked, partial(_jobs, framework), list[JobVerdict])
        found += _figures(framework, [*chain(*of_seeds)])
    return found


def _jobs(framework: str, seed: int) -> list[JobVerdict]:
    recorded = _recorded([f"{framework}:{probe}~{seed}" for probe in probes(framework, seed)])
    return recorded + [_lived(f"{framework}:{probe}~{seed}") for probe in ends(framework, seed)]


def probes(framework: str, seed: int) -> list[str]:
    """Every fault is there from the first step on with one seed, from the 32nd on with the next."""
    late = [f"{part}@{attached_job.LATE_FROM}" if (seed + number) % 2 else part for number, part in enumerate(LATE)]
    return [*late, *(one for one in (*EVEN, LONGER) if (framework, one) not in MEANINGLESS)]


def ends(framework: str, seed: int) -> list[str]:
    """In the first second, in the middle, late: each framework begins with another, each seed goes on with the next."""
    at = ENDS_AT[(FRAMEWORKS.index(framework) + seed) % len(ENDS_AT)]
    return [f"{how}@{at}" for how in ENDS]


def _figures(framework: str, jobs: Sequence[JobVerdict]) -> list[Figure]:
    part_of = {one.case: one.kind.partition(":")[2].partition("@")[0] for one in jobs}
    late, ended = ([one for one in jobs if part_of[one.case] in parts] for parts in (LATE, ENDS))
    rest, last = [one for one in jobs if one not in (*late, *ended)], grid_job.RANKS[framework] - 1
    right = [one for one in (*late, *ended) if one.named == {(_cause_of(part_of[one.case]), last)}]
    longer = [one for one in rest if part_of[one.case] == LONGER]
    accused = [f"{one.case} {sorted(map(str, one.named))}" for one in rest if one.named - {LENGTHS}]
    delays = [one.delay for one in right if one in late]
    wrong = [f"{one.case} {sorted(map(str, one.named)) or 'nobody'}" for one in (*late, *ended) if one not in right]
    return [
        figure(f"{framework}: {NAMED}", percent(len(right), [*late, *ended]), "%", bar=RIGHT,
               better="higher", note=f"{len(late)} jobs with a late rank, {len(ended)} in which one dies or hangs; not: "
                                     f"{', '.join(wrong) or 'none'}"),
        figure(f"{framework}: iterations until a late rank is named", median(delays) if delays else None, "", bar=SOON,
               better="lower", note=f"median; longest {max(delays, default=0)}"),
        figure(f"{framework}: jobs in which a rank that is well is accused", len(accused), "", bar=0, better="lower",
               note=f"of {len(rest)}: {', '.join(dict.fromkeys(part_of[one.case] for one in rest))}; "
                    f"{', '.join(accused) or 'none'}"),
        figure(f"{framework}: longer sequences said to be that", percent(sum(LENGTHS in one.named for one in longer), longer),
               "%", better="higher"),
        *of_baselines(framework, late, rest, last),
    ]  # fmt: skip


def _cause_of(part: str) -> str:
    return {**CAUSES, **ENDS, "gc": "gc_pause"}[part]


def _recorded(cases: Sequence[str]) -> list[JobVerdict]:
    with tempfile.TemporaryDirectory(prefix="unskew-grid-") as folder:
        store = Store(Path(folder) / "store")
        quiet = subprocess.DEVNULL  # the frameworks have much to say
        command = [sys.executable, grid_job.__file__, str(store.root), folder, *cases]
        subprocess.run(command, check=True, stdout=quiet, stderr=quiet)
        return [judged(store, case, grid_job.run_of(case)) for case in cases]


def _lived(case: str) -> JobVerdict:
    """Watched while it trains, until somebody is named for having died or hung, or for `LIMIT_S`."""
    with tempfile.TemporaryDirectory(prefix="unskew-grid-") as folder:
        store, events, tail = Store(Path(folder) / "store"), list[Event](), None
        command = [sys.executable, grid_job.__file__, "", folder, case]
        watch = subprocess.Popen(
            [sys.executable, "-m", "unskew", "watch", "--store", str(store.root), "--", *command],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            until = time.monotonic() + LIMIT_S
            ended = False
            while not ended and time.monotonic() < until and not any(map(_ends, events)):
                time.sleep(LOOK_S)
                ended = watch.poll() is not None  # asked first: what it wrote before is read below
                if tail is None and (runs := store.spooled_runs()):
                    tail = Tail(store, runs[0])
                events += [entry.event for entry in (tail.poll() if tail else ()) if entry.event is not None]
        finally:
            for joined in (one for one in events if isinstance(one, DeviceJoined)):  # who hangs would do so for ever
                send_signal(joined.pid, signal.SIGKILL)
            try:
                watch.wait(LIMIT_S)
            finally:
                watch.kill()
                watch.wait()
                wait_for_collectors(store)
        return watched(case, events)


def _ends(event: Event) -> bool:
    return isinstance(event, Verdict) and event.cause in ENDS.values()
