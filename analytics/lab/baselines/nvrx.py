"""NVIDIA Resiliency Extension's straggler detection: scores of code sections.

Per report, per section (here forward and backward chunks), own = the median of the rank's durations since the last report:

* relative score = (minimum over ranks of the median) / own;
* individual score = (the rank's own lowest median so far) / own;

1.0 is as good as the best; below 0.75 (the API's default; 0.7 in its Lightning callback) the rank is a straggler. GPU scores
(averages over kernels weighted by their time) need a kernel profiler and are not built; scores of sections that not all
ranks run are skipped, as in the original. It reports every 300 s; here every `EVERY` iterations, which is kinder in short jobs.
"""

from __future__ import annotations

from statistics import median

import msgspec

from unskew.analytics.detector.published.validation import Probe
from unskew.analytics.lab.baselines.naming import VerdictNames
from unskew.analytics.replay.method import MethodInput, MethodOutput
from unskew.collector.events import Verdict, VerdictClosed

EVERY = 10
THRESHOLD = 0.75


class SectionScores(msgspec.Struct, frozen=True):
    """rank -> section -> score."""

    relative: dict[int, dict[str, float]]
    individual: dict[int, dict[str, float]]
    lowest: dict[int, dict[str, float]]


def scores(medians: dict[int, dict[str, float]], lowest: dict[int, dict[str, float]]) -> SectionScores:
    """Scores from each rank's median duration per section, and from the lowest medians of its earlier reports.

    >>> scores({0: {"F": 10.0}, 1: {"F": 20.0}}, {}).relative[1]
    {'F': 0.5}
    """
    common = set.intersection(*(set(own) for own in medians.values())) if medians else set()
    best = {section: min(own[section] for own in medians.values()) for section in common}
    now_lowest = {
        rank: {section: min(value, lowest.get(rank, {}).get(section, value)) for section, value in own.items()}
        for rank, own in medians.items()
    }
    return SectionScores(
        {rank: {section: best[section] / own[section] for section in sorted(common)} for rank, own in medians.items()},
        {
            rank: {section: now_lowest[rank][section] / value for section, value in sorted(own.items())}
            for rank, own in medians.items()
        },
        {**lowest, **now_lowest},
    )


class NvrxDetector:
    """Published settings."""

    name = "nvrx"

    def __init__(self) -> None:
        self._durations: dict[int, dict[str, list[float]]] = {}
        self._lowest: dict[int, dict[str, float]] = {}
        self._names = VerdictNames(self.name)
        self._since: int | None = None
        self._n = 0

    def observe(self, observed: MethodInput, probe: Probe | None = None) -> MethodOutput:  # noqa: ARG002  # it never validates
        committed = observed.committed
        self._since = committed.iteration if self._since is None else self._since
        for chunk in committed.chunks:
            self._durations.setdefault(chunk.rank, {}).setdefault(chunk.kind, []).append(max(chunk.us, 1.0))  # its clock's tick
        self._n += 1
        if self._n < EVERY:
            return MethodOutput()
        outcome = self._report(committed.iteration, self._since)
        self._durations, self._n, self._since = {}, 0, None
        return outcome

    def _report(self, at: int, since: int) -> MethodOutput:
        medians = {
            rank: {section: median(values) for section, values in own.items()} for rank, own in sorted(self._durations.items())
        }
        found = scores(medians, self._lowest)
        self._lowest = found.lowest
        verdicts: list[Verdict | VerdictClosed] = []
        for rank in medians:
            relative, individual = found.relative[rank], found.individual[rank]
            low = {section for scored in (relative, individual) for section, score in scored.items() if score < THRESHOLD}
            if not low:
                verdicts += self._names.acquit(rank, at, "its scores are above the thresholds again")
                continue
            speed = {section: round(min(relative.get(section, 1.0), individual[section]), 4) for section in sorted(low)}
            verdicts += self._names.flag(
                rank,
                speed,
                since=since,
                at=at,
                sentence=f"rank {rank} is a straggler: score {min(speed.values()):.2f}",
                evidence={"relative": relative, "individual": individual},
            )
        alarm = "; ".join(verdict.sentence for verdict in verdicts if isinstance(verdict, Verdict))
        return MethodOutput(verdicts=tuple(verdicts), alarm=alarm)
