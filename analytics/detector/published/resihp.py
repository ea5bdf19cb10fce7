"""ResiHP's Detector (arXiv 2605.06374, section 4) as the one of a run: `unskew run --detector resihp`.

In place of the Detector's own tests (detector.py): change points of the iteration time, verified by 10 %; an iteration of up to
1.25 times its prediction, at the speeds validated so far, is benign and deleted from the series; else who computes 10 % longer
than its role is suspected, all are when nobody does, and the suspects are validated by a probe: a product 10 % longer than when
the run began makes a verdict. When the job becomes faster, who is named is validated again. Where nobody can be validated (no
probes on this device, training is not to be held up) the profile decides.

It finds no links, stages or kinds of work, and nothing that makes no change point. The first iterations of a benign change were
in the series before it was seen and stay there, as only the iteration that shows it is deleted: a slowdown after it is dated to
them, and its size too small, until it is found to be another. The paper's validation stops training for
seconds at once; here it comes with the next plan record, as every probe does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import log

import msgspec

from unskew.analytics.core.iteration import CommittedIteration
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.detector_state import DetectorState, Verdicts, waiting_for
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.products import acquit, flag_by_ratio
from unskew.analytics.detector.published.change_point import ChangePointOptions
from unskew.analytics.detector.published.changes import ChangeAlarm
from unskew.analytics.detector.published.validation import ABOVE, comparable
from unskew.collector.events import Verdict, VerdictClosed

FILTER = 1.25
PATIENCE = 10
"""After so many iterations in which nobody could be validated the profile decides."""
CHANGES = ChangePointOptions()


def step(
    state: DetectorState, committed: CommittedIteration, plan: Plan, options: DetectorOptions, predicted_us: float | None
) -> tuple[DetectorState, Verdicts]:
    """One iteration further, of which `state` knows what chunks took; `predicted_us`: at the estimated speeds."""
    expected_us = committed.measured_us if predicted_us is None else predicted_us
    changes, alarm = state.changes.observe(
        committed, plan, CHANGES, lambda change: change.slower and committed.measured_us <= FILTER * expected_us
    )
    state = msgspec.structs.replace(state, changes=changes, alarm=alarm or state.alarm)
    if state.alarm is None:
        return state, ()
    waited = committed.iteration - state.alarm.at
    if options.probes and waited < PATIENCE and to_validate(state):
        return state, ()
    suspects, slower = state.alarm.suspects, state.alarm.change.slower
    known = comparable(changes.recent, plan)
    slow, sound = (suspects, ()) if slower else ({}, (state.open.keys() & known) - suspects.keys())
    return _decided(state, slow, sound, committed.iteration, options, test="profile")


def to_validate(state: DetectorState) -> tuple[int, ...]:
    """The ranks that a probe is to measure: the suspects, all when there are none; who is named when the job became faster."""
    if state.alarm is None:
        return ()
    if not state.alarm.change.slower:
        return tuple(sorted(state.open))
    return tuple(sorted(state.alarm.suspects)) or tuple(rank for rank in state.tracks.ranks if rank not in state.lost)


def validated(
    state: DetectorState, slowdowns: Mapping[int, float], iteration: int, options: DetectorOptions
) -> tuple[DetectorState, Verdicts]:
    """A probe was made: rank -> its product's time over the one when the run began."""
    alarm = None if slowdowns.keys() >= {*to_validate(state)} else state.alarm  # somebody asked for another probe
    slow = {rank: ratio for rank, ratio in slowdowns.items() if ratio > ABOVE}
    state, verdicts = _decided(state, slow, slowdowns.keys() - slow.keys(), iteration, options, test="probe")
    return msgspec.structs.replace(state, alarm=alarm), verdicts


def _decided(
    state: DetectorState, slow: Mapping[int, float], sound: Collection[int], now: int, options: DetectorOptions, *, test: str
) -> tuple[DetectorState, Verdicts]:
    """The alarm is over: verdicts on who is `slow` and not named yet, or by 10 % more or less; the end of those on who is
    `sound`."""
    alarm, found = state.alarm, list[Verdict | VerdictClosed]()
    since = now if alarm is None else alarm.since
    state = msgspec.structs.replace(state, alarm=None)
    for rank in sorted(state.open.keys() & sound):
        how = "was validated as healthy again" if test == "probe" else "computes like the others of its role again"
        state, closed = acquit(state, rank, since, now, f"rank {rank} {how} since iteration {since}")
        found += closed
    for rank, ratio in sorted(slow.items()):
        named = 1.0 / min(state.speeds.get(rank, {}).values(), default=1.0)
        if rank in state.tracks.ranks and rank not in state.lost and max(ratio / named, named / ratio) > ABOVE:
            state, verdicts = flag_by_ratio(
                state, rank, log(ratio), options,
                test=test, since=since, at=now, iterations=CHANGES.recent, sigma=options.sigma_floor,
                victims=waiting_for(state, rank),
            )  # fmt: skip
            found += [_with_reasons(one, alarm) if isinstance(one, Verdict) else one for one in verdicts]
    return state, tuple(found)


def _with_reasons(verdict: Verdict, alarm: ChangeAlarm | None) -> Verdict:
    """With what led to it."""
    if alarm is None:
        return verdict
    change = {**msgspec.structs.asdict(alarm.change), "at": alarm.since}
    suspects = {str(rank): round(ratio, 3) for rank, ratio in alarm.suspects.items()}
    return msgspec.structs.replace(
        verdict, evidence={**verdict.evidence, "detector": "resihp", "change_point": change, "suspects": suspects}
    )
