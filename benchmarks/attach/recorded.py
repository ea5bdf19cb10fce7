"""The watched trainings of tests/support/recorded, judged again by today's rules: minutes of training in seconds.

They were recorded on two real CPU cores beside other work: what is late and what healthy here was so at that load. A rank that
has no core for more than half of its time is named from a slowdown of 2 on only.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from support.jobs import recorded_jobs

from unskew.benchmarks.attach.probes import DEVICE, LATE, RIGHT, SOON, JobVerdict, watched
from unskew.benchmarks.report import Figure, figure
from unskew.benchmarks.runs import Bench


def figures(bench: Bench, every: int = 1) -> list[Figure]:
    jobs = list(recorded_jobs.recorded())[::every]
    found = [watched(job.case, job.judged()) for job in bench.steps("recorded trainings, judged again", jobs)]
    late, device = ([one for one in found if one.kind in kinds] for kinds in (LATE, DEVICE))
    even = [one for one in found if one.kind not in {*LATE, *DEVICE}]
    missed = [one.case for one in late if not one.right]
    accused = [one.case for one in even if any(rank is not None for _, rank in one.named)]
    well = [one for one in even if one.sees and not one.named]
    slow = [one.delay for one in device if one.right]
    delays = [one.delay for one in late if one.right]
    return [
        figure("recorded: the late rank and its cause, and nothing else", _percent(len(late) - len(missed), late), "%",
               bar=RIGHT, better="higher", note=f"{len(late)} jobs; not: {', '.join(missed) or 'none'}"),
        figure("recorded: iterations until it is named", median(delays) if delays else None, "", bar=SOON, better="lower",
               note=f"median; longest {max(delays, default=0)}"),
        figure("recorded: the same, of a rank that takes 1.5 times as long", median(slow) if slow else None, "", bar=SOON,
               better="lower", note=f"median; {len(slow)} of {len(device)} named, longest {max(slow, default=0)}"),
        figure("recorded: jobs in which a healthy rank is accused", len(accused), "", bar=0, better="lower",
               note=f"of {len(even)}; {', '.join(accused) or 'none'}"),
        figure("recorded: healthy jobs called well", _percent(len(well), even), "%", better="higher"),
    ]  # fmt: skip


def _percent(some: int, of: Sequence[JobVerdict]) -> float | None:
    return 100 * some / len(of) if of else None
