"""The whole job of a log whose devices nobody judged live, by the rule that is live (analytics/detector/job_wide.py).

Judged are the times of the iterations in which nobody is named.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unskew.analytics.core.outcome import Findings
from unskew.analytics.detector import job_wide
from unskew.analytics.detector.job_wide import NEXT_STEP, JobWideOptions
from unskew.analytics.diagnosis.failslow import settled
from unskew.analytics.diagnosis.runlog import RunLog
from unskew.collector.events import Verdict

OF_SOMEBODY = ("slow_device", "slow_link", "dead", "hung", "unknown")
Times = list[tuple[int, float]]


def times_of(run: RunLog, verdicts: Sequence[Verdict]) -> Times:
    """(iteration, its time in us) where nobody is named."""
    spans = [(one.since_iteration, one.until_iteration) for one in verdicts if one.cause in OF_SOMEBODY]
    return [
        (int(iteration), float(us))
        for iteration, us in run.iterations.drop_nulls().iter_rows()
        if not any(since <= iteration and (until is None or iteration < until) for since, until in spans)
    ]


def judge_job(times: Times, number: int, *, alone: bool, options: JobWideOptions | None = None) -> Findings:
    """What the whole job shows, its verdicts numbered from `number` on. `alone`: the log has nothing else to judge anybody
    by."""
    options = options or JobWideOptions()
    state, changes = job_wide.follow(times, options)
    more = {"missing": ["chunk times", "collective times"]} if alone else {"next_step": NEXT_STEP}
    verdicts = (msgspec.structs.replace(one, evidence={**one.evidence, **more}) for one in settled(changes))
    numbered = tuple(msgspec.structs.replace(one, verdict=number + i) for i, one in enumerate(verdicts))
    sight = job_wide.sight_of(state, options)
    return Findings(verdicts=numbered, sight=sight, of_job=sight, long_ones=state.unexplained)
