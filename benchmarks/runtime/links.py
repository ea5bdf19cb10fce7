"""What messages cost on emulated devices: predicted against measured iterations, for each schedule and kind of links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from unskew.analytics.core.plan import SCHEDULES
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import EIGHT_RANKS, Bench, FinishedRun
from unskew.collector.events import IterationCommitted, IterationJudged
from unskew.runtime.options import AskedDevice, Sends

OPTIONS = msgspec.structs.replace(EIGHT_RANKS, dp=1, mode="observe", iterations=32)
AT, FROM = 19, 24
"""The link turns slow at `AT`; iterations count from `FROM` on, when it has been named."""
SLOW = {"link_us": 4_000, "link_mbps": 10}
"""A message of 8 KiB then takes 4 + 6.5 ms, chunks 15 and 30."""
FAULT = f"slow_link:rank=1,peer=2,delay_ms=20,at={AT}"
CASES: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "free links": ({}, ()),
    "one link 20 ms slower": ({"link_us": 100}, (FAULT,)),
    "every link slow": (SLOW, ()),
}


def figures(bench: Bench, schedules: Sequence[str] = SCHEDULES, cases: Sequence[str] | None = None) -> Iterator[Figure]:
    """The live predictor's error on the last iterations of a run, by schedule and kind of links: those that cost, and with
    `--full` free ones, too."""
    chosen = tuple(CASES) if cases is None else cases
    yield from _figures(bench, "sleep", "overlapped", schedules, chosen if bench.full or cases is not None else chosen[1:])


def figures_of_blocking_sends(bench: Bench, schedules: Sequence[str] = SCHEDULES) -> Iterator[Figure]:
    """The same where who sends waits until its message has arrived: over slow links, and with `--full` over one of them."""
    yield from _figures(bench, "sleep", "blocking", schedules, tuple(CASES)[1 if bench.full else 2 :])


def figures_by_logical_clock(bench: Bench, schedules: Sequence[str] = SCHEDULES) -> Iterator[Figure]:
    """Both on the virtual device, where no load disturbs."""
    yield from _figures(bench, "virtual", "overlapped", schedules, tuple(CASES))
    yield from _figures(bench, "virtual", "blocking", schedules, tuple(CASES)[1:])


def _figures(
    bench: Bench, device: AskedDevice, sends: Sends, schedules: Sequence[str], cases: Sequence[str]
) -> Iterator[Figure]:
    tried = [(schedule, case) for case in cases for schedule in schedules]
    for schedule, case in bench.steps(f"predicted against measured, {device}, sends {sends}", tried):
        options, faults = CASES[case]
        run = bench.run(msgspec.structs.replace(OPTIONS, device=device, schedule=schedule, sends=sends, **options), *faults)
        errors = errors_of(run)
        worst = f"{len(errors)} iterations of {iteration_ms(run):.0f} ms, worst {100 * max(errors, default=0.0):.1f} %"
        yield figure(
            f"predicted against measured iteration, {device}, {schedule}, {case}, sends {sends}: median error",
            100 * median(errors) if errors else None, "%", bar=3.0, better="lower",
            note=run.failure or worst,
        )  # fmt: skip


def errors_of(run: FinishedRun) -> list[float]:
    """By how much the prediction of each iteration from `FROM` on was off, relative."""
    judged = [one for one in run.of(IterationJudged) if one.iteration >= FROM and one.predicted_us is not None]
    return [abs((one.predicted_us or 0) / one.measured_us - 1) for one in judged]


def iteration_ms(run: FinishedRun) -> float:
    """The median iteration."""
    return median(commit.wall_us for commit in run.of(IterationCommitted) if commit.iteration >= FROM) / 1e3
