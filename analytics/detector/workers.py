"""Only each worker's time per iteration: workers of equal role, compared with the others and with their own past.

No lengths and no stages are known, so a worker's healthy time is a constant, the median of its first rows; what changes slowly
is learned as bias. The detector is the one that chunks are judged by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from unskew.analytics.core.outcome import Sight
from unskew.analytics.detector.detector import Detector, sight_of
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.peer_groups import equal_roles
from unskew.analytics.detector.residuals import Floats, UnitTimes
from unskew.collector.events import Verdict, VerdictClosed

KINDS = ("F",)  # a worker's iteration is one piece of work of one kind


def judge_workers(
    times: Floats,
    options: DetectorOptions | None = None,
    *,
    iterations: Sequence[int] | None = None,
    role_of: Mapping[int, int] | None = None,
) -> tuple[list[Verdict | VerdictClosed], Sight]:
    """Verdicts, and what would have been seen, on `times` [iteration, worker] (any unit; nan = not seen). `iterations` number
    the rows, the keys of `role_of` the columns; without it the workers are 0, 1, ... and all have one role."""
    n_rows, n_workers = times.shape
    roles = dict.fromkeys(range(n_workers), 0) if role_of is None else role_of
    detector = Detector(options)
    own = np.nanmedian(times[: detector.options.own_past], axis=0)
    workers, kind = np.array(list(roles)), np.zeros(n_workers, np.int64)
    company = equal_roles(roles)
    found: list[Verdict | VerdictClosed] = []
    for row, number in enumerate(iterations if iterations is not None else range(n_rows)):
        found += detector.observe_units(int(number), UnitTimes(KINDS, workers, kind, times[row], own), company)
    return found, _sight(detector, own, roles)


def _sight(detector: Detector, own: Floats, roles: Mapping[int, int]) -> Sight:
    """A worker that differs from its peers from the first rows on may be slow or have more to do: then nobody can be judged."""
    sight = sight_of(detector.state, detector.options)
    if sight.smallest_slowdown is None:
        return sight
    role = np.array(list(roles.values()))
    usual = np.array([np.nanpercentile(own[role == one], 50, method="lower") for one in role])
    furthest = int(np.nanargmax(own / usual))
    if (ratio := float(own[furthest] / usual[furthest])) < sight.smallest_slowdown:
        return sight
    why = (
        f"rank {list(roles)[furthest]} takes {ratio:.2f} times as long as its peers from the first iterations on: it is slow "
        "or has more to do, and the log does not show which"
    )
    return Sight(scope=sight.scope, smallest_slowdown=None, why=why)
