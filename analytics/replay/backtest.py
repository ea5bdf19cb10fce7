"""Another detector over the log of a run that was: what it would have reported beside what was reported, and which of both
was right.

The run is rehearsed (rehearsal.py), so at each iteration the other detector is given what the live one was given: the same
chunks, plan and predictor of that moment, and the iteration's time as predicted at the live run's estimated speeds. It sees the
run as it went: a plan that came because of a live verdict stays. Only verdicts on the slowness of somebody are compared: a loss
is seen, not detected, and the whole job is judged beside the detector.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Literal

import msgspec

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.iteration import CommittedIteration, IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.loop.scoring import score_verdict
from unskew.analytics.predictor.fit import Fit
from unskew.analytics.replay.method import Method, MethodInput
from unskew.analytics.replay.recorded_run import RecordedRun
from unskew.analytics.replay.watched import rehearsal_of
from unskew.collector.events import Control, FaultInjected, IterationJudged, Verdict, VerdictScored

Change = Literal["same", "earlier", "later", "fewer", "more"]
"""Of the other detector against the live one, per verdict: `fewer` = only the live one reported it, `more` = only the other."""


class DetectorVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One detector's verdict: first revision, with the speeds of the newest. `correct` None = there is no truth to judge it
    by."""

    verdict: int
    at_iteration: int
    since_iteration: int
    speed: dict[str, float]
    sentence: str
    correct: bool | None


class VerdictPair(msgspec.Struct, frozen=True, kw_only=True):
    """What both reported about the same culprits and cause, nearest in time; None = nothing."""

    cause: str
    culprits: str
    live: DetectorVerdict | None
    other: DetectorVerdict | None
    change: Change
    iterations: int = 0
    """How much earlier or later."""


class DetectorTally(msgspec.Struct, frozen=True, kw_only=True):
    """A detector against the injected slowdowns: how many of them it named, how many verdicts were false, how long it took."""

    verdicts: int
    injected: int
    found: int
    false: int
    delay_iterations: float | None


class DetectorBacktest(msgspec.Struct, frozen=True, kw_only=True):
    """`alarms`: moments at which the other took the run for failing, before validation (method.py)."""

    run: str
    iterations: int
    pairs: tuple[VerdictPair, ...]
    live: DetectorTally
    other: DetectorTally
    alarms: tuple[tuple[int, str], ...]


def backtest(recorded: RecordedRun, method: Method) -> DetectorBacktest:
    """Run `method`, a fresh one, over a recorded run. Raises `ReplayError` when the log cannot be rehearsed."""
    rehearsal, plans = rehearsal_of(recorded), recorded.plans
    beside = Beside(method)

    def look(released: IterationTelemetry, fitted: Fit | None, judged: IterationJudged) -> None:
        plan = plans[released.committed.plan_version]
        beside.observe(released.committed, plan, None if fitted is None else fitted.model, judged.predicted_us)

    rehearsal.onlooker = look
    rehearsal.run()
    faults = [noted.event for noted in recorded.control if isinstance(noted.event, FaultInjected)]
    live = [noted.event for noted in recorded.control]
    return compared(recorded.run, live, beside, faults, truth_known=rehearsal.truth_known)


class Beside:
    """Another detector, shown one iteration after the other, and what it said."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self.observed = 0
        self.verdicts: list[Control] = []
        self.alarms: list[tuple[int, str]] = []

    def observe(self, committed: CommittedIteration, plan: Plan, cost: CostModel | None, predicted_us: float | None) -> None:
        """The next one; `cost`: the predictor of that moment."""
        outcome = self._method.observe(MethodInput(committed=committed, plan=plan, cost=cost, predicted_us=predicted_us))
        self.observed += 1
        self.verdicts += outcome.verdicts
        if outcome.alarm:
            self.alarms.append((committed.iteration, outcome.alarm))


def compared(
    run: str, live: Iterable[Control], beside: Beside, faults: Sequence[FaultInjected] = (), *, truth_known: bool = False
) -> DetectorBacktest:
    """What was said of a run beside what another detector says of it."""
    reported = [_scored_verdict(verdict, faults, truth_known=truth_known) for verdict in _first(live)]
    other = [_scored_verdict(verdict, faults, truth_known=truth_known) for verdict in _first(beside.verdicts)]
    return DetectorBacktest(
        run=run,
        iterations=beside.observed,
        pairs=_pairs(reported, other),
        live=_tally(reported, faults),
        other=_tally(other, faults),
        alarms=tuple(beside.alarms),
    )


class _One(msgspec.Struct, frozen=True):
    verdict: Verdict
    reported: DetectorVerdict
    scored: VerdictScored | None

    @property
    def about(self) -> tuple[str, str]:
        return self.verdict.cause, culprits_of(self.verdict)


def culprits_of(verdict: Verdict) -> str:
    """Who is meant, in words."""
    words = []
    for party in verdict.culprits:
        if party.kind == "device":
            words.append(f"rank {party.rank}")
        elif party.kind == "link" and party.link is not None:
            words.append(f"link {party.link[0]}-{party.link[1]}")
        elif party.kind == "stage":
            words.append(f"stage {party.stage}")
        else:
            words.append(f"replica {party.replica}")
    return ", ".join(words) or "the job"


def _first(events: Iterable[Control]) -> list[tuple[Verdict, Verdict]]:
    """First and newest revision of each verdict on the slowness of somebody."""
    found: dict[int, tuple[Verdict, Verdict]] = {}
    for event in events:
        if isinstance(event, Verdict) and event.culprits and event.cause not in ("dead", "hung"):
            found[event.verdict] = (found.get(event.verdict, (event, event))[0], event)
    return list(found.values())


def _scored_verdict(revisions: tuple[Verdict, Verdict], faults: Sequence[FaultInjected], *, truth_known: bool) -> _One:
    first, newest = revisions
    scored = score_verdict(first, faults, truth_known=truth_known)
    reported = DetectorVerdict(
        verdict=first.verdict,
        at_iteration=first.at_iteration,
        since_iteration=first.since_iteration,
        speed=newest.speed,
        sentence=newest.sentence,
        correct=None if scored is None else scored.correct,
    )
    return _One(first, reported, scored)


def _pairs(live: Sequence[_One], other: Sequence[_One]) -> tuple[VerdictPair, ...]:
    """Each live verdict with the other's nearest on the same cause and culprits, then what is left; by iteration."""
    left, pairs = list(other), []
    for one in live:
        same = [candidate for candidate in left if candidate.about == one.about]
        found = min(same, key=lambda candidate: abs(candidate.reported.at_iteration - one.reported.at_iteration), default=None)
        if found is not None:
            left.remove(found)
        pairs.append(_pair(one, found))
    pairs += [_pair(None, one) for one in left]
    return tuple(sorted(pairs, key=lambda pair: min(reported.at_iteration for reported in (pair.live, pair.other) if reported)))


def _pair(live: _One | None, other: _One | None) -> VerdictPair:
    known = live or other
    assert known is not None
    change: Change = "fewer" if other is None else "more"
    moved = 0
    if live is not None and other is not None:
        moved = other.reported.at_iteration - live.reported.at_iteration
        change = "same" if moved == 0 else "later" if moved > 0 else "earlier"
    return VerdictPair(
        cause=known.about[0],
        culprits=known.about[1],
        live=live.reported if live else None,
        other=other.reported if other else None,
        change=change,
        iterations=abs(moved),
    )


def _tally(verdicts: Sequence[_One], faults: Sequence[FaultInjected]) -> DetectorTally:
    right = [one for one in verdicts if one.scored is not None and one.scored.correct]
    delays = [one.scored.delay_iterations for one in right if one.scored and one.scored.delay_iterations is not None]
    return DetectorTally(
        verdicts=len(verdicts),
        injected=sum(fault.kind == "slow" for fault in faults),
        found=len({one.scored.truth for one in right if one.scored}),
        false=sum(one.reported.correct is False for one in verdicts),
        delay_iterations=median(delays) if delays else None,
    )
