"""Only each worker's time per iteration: workers of equal role, compared with the others and with their own past.

No lengths and no stages are known, so a worker's healthy time is a constant, the median of its first rows; what changes slowly
is learned as habit. The detector is the one that chunks are judged by.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unskew.analytics.core.cost import ChunkCost, CostModel
from unskew.analytics.core.iteration import Chunk, CommittedIteration
from unskew.analytics.core.plan import uniform_plan
from unskew.analytics.core.workload import Work
from unskew.analytics.detector.detector import Detector
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.residuals import Floats
from unskew.collector.events import Verdict, VerdictClosed

KIND = "F"  # a worker's iteration is one chunk of one kind


def judge_workers(
    times: Floats, options: DetectorOptions | None = None, *, iterations: Sequence[int] | None = None
) -> list[Verdict | VerdictClosed]:
    """Verdicts on `times` [iteration, worker] (any unit; nan = not seen), culprits by column; `iterations` number the rows."""
    n_rows, n_workers = times.shape
    detector = Detector(options)
    least = detector.options.own_past
    own = np.nanmedian(times[:least], axis=0)
    plan = uniform_plan(tp=1, pp=1, dp=n_workers, n_layers=1, micro_batches=n_workers)
    cost = CostModel(chunks={KIND: ChunkCost(layer_us=1.0, token_us=0.0, token2_us=0.0)})
    works = tuple(Work(1, 1) for _ in range(n_workers))
    found: list[Verdict | VerdictClosed] = []
    for row, number in enumerate(iterations if iterations is not None else range(n_rows)):
        relative = times[row] / own
        chunks = tuple(Chunk(w, KIND, 1, False, works[w], float(x)) for w, x in enumerate(relative) if x > 0)
        committed = CommittedIteration(
            iteration=int(number),
            plan_version=0,
            chunks=chunks,
            works=works,
            measured_us=float(np.nanmax(relative)),
            log_complete=True,
        )
        found += detector.observe(committed, plan, cost).verdicts
    return found
