"""TraceML's rule for a straggling rank: under a barrier the culprit is the rank that waits least.

Over a window of iterations, per rank: wait = iteration time - its own compute. Impact = (median of the waits - the least) /
mean iteration time: below 10 % nothing is reported, from 10 % on a warning, from 20 % on it is critical. A kind of work is
named as the cause only where its excess over the median rank covers 80 % of the excess wait. Sequence lengths do not enter,
nor who holds how many layers. It knows no change of plan; here the window begins anew at one, so that it never mixes two
plans.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

import msgspec

from unskew.analytics.detector.published.validation import Probe
from unskew.analytics.lab.baselines.naming import VerdictNames
from unskew.analytics.replay.method import MethodInput, MethodOutput
from unskew.collector.events import Verdict

WINDOW = 20  # iterations
WARN, CRITICAL = 0.1, 0.2  # of an iteration
COVERS = 0.8


class Straggler(msgspec.Struct, frozen=True):
    """The rank that waits least; `impact` = excess over an iteration, `kinds` = the work that explains it."""

    rank: int
    impact: float
    kinds: tuple[str, ...]


def least_waiting(spent_us: dict[int, dict[str, float]], iteration_us: float) -> Straggler | None:
    """From mean times per iteration: rank -> kind -> us. None when the impact is below the warning."""
    wait = {rank: iteration_us - sum(own.values()) for rank, own in spent_us.items()}
    rank = min(wait, key=lambda r: (wait[r], r))
    excess = median(wait.values()) - wait[rank]
    if excess < WARN * iteration_us:
        return None
    kinds = sorted(spent_us[rank])
    over = {kind: spent_us[rank][kind] - median(own.get(kind, 0.0) for own in spent_us.values()) for kind in kinds}
    return Straggler(rank, excess / iteration_us, tuple(kind for kind in kinds if over[kind] >= COVERS * excess))


class TracemlDetector:
    """Published settings."""

    name = "traceml"

    def __init__(self) -> None:
        self._spent: deque[dict[int, dict[str, float]]] = deque(maxlen=WINDOW)
        self._iteration_us: deque[float] = deque(maxlen=WINDOW)
        self._names = VerdictNames(self.name)
        self._plan_version: int | None = None

    def observe(self, observed: MethodInput, probe: Probe | None = None) -> MethodOutput:  # noqa: ARG002  # it never validates
        committed = observed.committed
        if committed.plan_version != self._plan_version:
            self._plan_version = committed.plan_version
            self._spent.clear()
            self._iteration_us.clear()
        spent: dict[int, dict[str, float]] = {}
        for chunk in committed.chunks:
            own = spent.setdefault(chunk.rank, {})
            own[chunk.kind] = own.get(chunk.kind, 0.0) + chunk.us
        self._spent.append(spent)
        self._iteration_us.append(committed.measured_us)
        if len(self._spent) < WINDOW or not spent:
            return MethodOutput()
        ranks = set.intersection(*(set(one) for one in self._spent))
        means = {r: {k: fmean(one[r].get(k, 0.0) for one in self._spent) for k in spent[r]} for r in sorted(ranks)}
        found = least_waiting(means, fmean(self._iteration_us)) if ranks else None
        at = committed.iteration
        verdicts = [
            v for r in self._names.ranks if not found or r != found.rank for v in self._names.acquit(r, at, "waits again")
        ]
        if found is None:
            return MethodOutput(verdicts=tuple(verdicts))
        grade = "critical" if found.impact >= CRITICAL else "warning"
        speed = {
            kind: round(median(own[kind] for own in means.values() if kind in own) / means[found.rank][kind], 4)
            for kind in found.kinds
        }
        new = self._names.flag(
            found.rank,
            speed,
            since=at - WINDOW + 1,
            at=at,
            sentence=f"rank {found.rank} waits least: it costs {100 * found.impact:.0f} % of an iteration ({grade})",
            evidence={"impact": round(found.impact, 4), "grade": grade, "kinds": list(found.kinds)},
        )
        alarm = "; ".join(verdict.sentence for verdict in new if isinstance(verdict, Verdict))
        return MethodOutput(verdicts=(*verdicts, *new), alarm=alarm)
