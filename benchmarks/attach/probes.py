"""A DDP training that is not ours, watched: is the late rank named, with its cause, and how soon; and nobody where none is?

Two forked ranks on real CPU cores (tests/support/jobs/attached_job.py), other data for each seed. Beside it what two published
rules say of the same forward and backward times, the only ones that they are given here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median

import msgspec
from support.jobs import attached_job

from unskew.analytics.core.plan import Plan
from unskew.analytics.lab.baselines.nvrx import NvrxDetector
from unskew.analytics.lab.baselines.traceml import TracemlDetector
from unskew.analytics.loop.intake import Intake
from unskew.analytics.replay.method import MethodInput
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench
from unskew.collector.events import DetectionLimit, Event, PlanApplied, Verdict
from unskew.collector.paths import Store
from unskew.runtime.attach.outside.watcher import JobWatcher

SEEDS = 20
SOON, RIGHT = 10, 95
LATER = attached_job.LATE_FROM
CAUSES = {"loader": "input_bound", "forward": "slow_device", "backward": "slow_device", "optimizer": "slow_device",
          "other": "slow_device"}  # fmt: skip
DEVICE = ("device", f"device@{LATER}")
LATE = (*CAUSES, *(f"{part}@{LATER}" for part in ("forward", "backward", "optimizer")))
EVEN, LONGER = ("nothing", "random"), "longer"
LENGTHS = ("long_sequences", None)
BASELINES = (NvrxDetector, TracemlDetector)
POLLS = 25
"""Beyond the patience of the intake."""


class JobVerdict(msgspec.Struct, frozen=True):
    """What was said of one job: cause and rank of each verdict, the iteration of the first one, whether at its end something
    wrong would have been seen, and the ranks that each baseline names."""

    case: str
    named: frozenset[tuple[str, int | None]]
    first_at: int | None
    sees: bool
    baselines: dict[str, frozenset[int]]

    @property
    def kind(self) -> str:
        return self.case.partition("~")[0]

    @property
    def right(self) -> bool:
        """Rank 1, for what it is late in, and nothing else."""
        return self.named == {(CAUSES.get(self.kind.partition("@")[0], "slow_device"), 1)}

    @property
    def delay(self) -> int:
        """Iterations from the first late one to the first verdict."""
        return (self.first_at or 0) - int(self.kind.partition("@")[2] or 0)


def figures(bench: Bench, seeds: int = SEEDS) -> list[Figure]:
    of_seeds = bench.kept("DDP trainings of two ranks, watched", range(seeds), _watched, list[JobVerdict])
    jobs = [*chain(*of_seeds)]
    late, rest = [one for one in jobs if one.kind in LATE], [one for one in jobs if one.kind not in LATE]
    even, longer = [one for one in rest if one.kind in EVEN], [one for one in rest if one.kind == LONGER]
    missed = [one.case for one in late if not one.right]
    accused = [one.case for one in rest if one.named - {LENGTHS}]
    delays = [one.delay for one in late if one.right]
    where = f"{attached_job.STEPS} steps of two ranks on real CPU cores, {seeds} seeds each of"
    return [
        figure("attach: the late rank and its cause, and nothing else", percent(len(late) - len(missed), late), "%",
               bar=RIGHT, better="higher", note=f"{where} {', '.join(LATE)}; not: {', '.join(missed) or 'none'}"),
        figure("attach: iterations until it is named", median(delays) if delays else None, "", bar=SOON, better="lower",
               note=f"median; longest {max(delays, default=0)}"),
        figure("attach: jobs in which a healthy rank is accused", len(accused), "", bar=0, better="lower",
               note=f"{where} {', '.join((*EVEN, LONGER))}; {', '.join(accused) or 'none'}"),
        figure("attach: longer sequences said to be that", percent(sum(LENGTHS in one.named for one in longer), longer), "%",
               bar=RIGHT, better="higher"),
        figure("attach: healthy jobs called well", percent(sum(one.sees and not one.named for one in even), even), "%",
               better="higher", note="at their end, down to a slowdown that is stated; the others: cannot be judged"),
        *of_baselines("attach", late, rest, 1),
    ]  # fmt: skip


def of_baselines(title: str, late: Sequence[JobVerdict], rest: Sequence[JobVerdict], rank: int) -> Iterator[Figure]:
    """What published rules say of the same jobs, in which this rank is late, or nobody."""
    for name in (make().name for make in BASELINES):
        accused = sum(bool(one.baselines[name]) for one in rest)
        note = f"by forward and backward times; somebody accused in {accused} of {len(rest)} jobs without a late rank"
        right = sum(one.baselines[name] == {rank} for one in late)
        yield figure(f"{title}: the late rank alone, by {name}", percent(right, late), "%", better="higher", note=note)


def percent(some: int, of: Sequence[JobVerdict]) -> float:
    return 100 * some / len(of)


def _watched(seed: int) -> list[JobVerdict]:
    cases = [f"{case}~{seed}" for case in (*LATE, *EVEN, LONGER)]
    with tempfile.TemporaryDirectory(prefix="unskew-attach-") as folder:
        store = Store(Path(folder) / "store")
        subprocess.run([sys.executable, attached_job.__file__, str(store.root), folder, *cases], check=True)
        return [judged(store, case, attached_job.run_of(case)) for case in cases]


def judged(store: Store, case: str, run: str) -> JobVerdict:
    """By the watcher, of the log of a job that has ended, and by the baselines."""
    events: list[Event] = []
    watcher = JobWatcher(store, run, ["bench"], lambda entry: events.append(entry.event) if entry.event else None)
    watcher.finish(0)
    watcher.close()
    return watched(case, events, _by_baselines(events))


def watched(case: str, events: Sequence[Event], baselines: Mapping[str, frozenset[int]] = {}) -> JobVerdict:
    """What was decided on the job."""
    verdicts = [one for one in events if isinstance(one, Verdict)]
    limits = [one for one in events if isinstance(one, DetectionLimit)]
    return JobVerdict(
        case=case,
        named=frozenset((one.cause, rank) for one in verdicts for rank in _ranks(one) or (None,)),
        first_at=min((one.at_iteration for one in verdicts), default=None),
        sees=bool(limits) and limits[-1].smallest_slowdown is not None,
        baselines=dict(baselines),
    )


def _ranks(verdict: Verdict) -> tuple[int, ...]:
    return tuple(party.rank for party in verdict.culprits if party.rank is not None)


def _by_baselines(events: Sequence[Event]) -> dict[str, frozenset[int]]:
    """Method -> the ranks that it names."""
    plan = Plan.from_data(next(one for one in events if isinstance(one, PlanApplied)).plan)
    intake, plans = Intake(marks_suffice=True), {plan.plan_version: plan}
    released = [*intake.take(events, plans), *(one for _ in range(POLLS) for one in intake.take([], plans))]
    named: dict[str, frozenset[int]] = {}
    for make in BASELINES:
        method = make()
        verdicts = [one for of in released for one in method.observe(MethodInput(committed=of.committed, plan=plan)).verdicts]
        named[method.name] = frozenset(rank for one in verdicts if isinstance(one, Verdict) for rank in _ranks(one))
    return named
