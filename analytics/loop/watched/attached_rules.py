"""What is decided on a training that is not ours, while it runs: the predictor, the Detector and the verdicts are those of our
own runs; the plan is not issued but found.

1. the ranks say who they are; with the first iteration of all of them it is known how many micro-batches each has. Ranks of
   one process group, or of one mesh without stages, with equal numbers do the same work: they are taken for replicas of one
   model, each with a micro-batch of its own;
2. each iteration goes to the Monitor, and every few iterations the last ones are compared side by side (side_by_side.py);
3. where ranks are in several groups, or their times are no measure of their work, nobody is judged, and the log says why.

Pure: a state and what came in, a state and events out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import exp, log
from statistics import median

import msgspec

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.outcome import Sight
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.next_steps import with_next_step
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.workers import level_of_few
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.loop.detection_limit import LimitState
from unskew.analytics.loop.monitor import Monitor
from unskew.analytics.loop.watched.side_by_side import FEW, LOOKED_AT, at_a_glance, compare, took_longer, window_of
from unskew.analytics.loop.watched.sizing import costs_more, sized_anew, without_named
from unskew.analytics.predictor.retraining import IterationSample, Retraining
from unskew.collector.events import (
    CHUNK_KINDS,
    PAUSES,
    DetectionLimit,
    Event,
    IterationJudged,
    Verdict,
    VerdictClosed,
)

WINDOW, COMPARE_EVERY, COMPARE_AGAIN = 64, 8, 3
"""Side by side are so many iterations, compared after so many more; after so many where a rank seems late."""
MISSED = 2
"""So many comparisons in a row that do not find a verdict again end it."""
MOST_WITHOUT_CORE, CROWDED_SLOWDOWN, CROWDED_OVER = 0.5, 2.0, 16
"""A rank that is without a core for so much of its time may take nearly twice as long beyond that though it is healthy: whoever
has its core meanwhile empties the caches. A verdict on less than this slowdown of it then waits until it has its core."""
SETTLED_S, BRIEF = 2.0, 0.2
"""Cores are disturbed for a time, not for a number of iterations: of 43 healthy jobs whose steps take 8 to 70 ms the median of
one rank was 1.65 times that of the other for 0.14 s, 1.56 for 0.3 s, 1.5 for 0.6 to 0.9 s, 1.25 for 1.8 s. So whoever has been
late for less than `SETTLED_S` is named only where it took longer than the least slowdown, by this power of the ratio."""
MORE_THAN_OTHERS, CROWDED_LASTS = 0.1, 2
"""Or until it has lasted for so many times the least iterations, where the others lack their cores as much, give or take this:
what healthy ranks took longer so was over before."""


CROWDED = Sight(
    scope="device", smallest_slowdown=CROWDED_SLOWDOWN, why="ranks are without a core for more than half of their time"
)


NOT_COMPARED = Sight(scope="device", smallest_slowdown=None, why="the ranks have not been compared side by side yet")


class OpenVerdict(msgspec.Struct, frozen=True):
    """A verdict of a comparison, and how many comparisons in a row have not found it again."""

    verdict: Verdict
    missed: int = 0


class AttachedState(msgspec.Struct, frozen=True, kw_only=True):
    """Never changed, only replaced. `compared`: (rank or None, cause) -> the open verdict of a comparison; `held_back`: number
    -> a verdict that waits for better evidence, `stated`: the numbers of those that do not; `beside`: what the last comparison,
    at iteration `compared_at`, would have seen, None = nobody is beside; `known_since`: rank that is given less -> from
    which iteration on it is predicted by its speed; `can_be_probed`: its ranks answer `unskew probe`."""

    monitor: Monitor
    plan: Plan
    why_not: str = ""
    seen: tuple[IterationTelemetry, ...] = ()
    compared: dict[tuple[int | None, str], OpenVerdict] = {}
    held_back: dict[int, Verdict] = {}
    stated: frozenset[int] = frozenset()
    beside: Sight | None = NOT_COMPARED
    compared_at: int = -COMPARE_AGAIN
    known_since: dict[int, int] = {}
    limit: LimitState = LimitState()
    can_be_probed: bool = False

    @property
    def sights(self) -> tuple[Sight, ...]:
        """What would have been named up to now."""
        if self.why_not:
            return (Sight(scope="device", smallest_slowdown=None, why=self.why_not),)
        *of_device, of_job = self.monitor.sights
        crowded = [CROWDED] if _crowded(self) else []
        # The comparison sees a rank that turned slow too; the Detector none that was slow from the first step on.
        found = (*([self.beside] if self.beside else of_device), *_brief(self), *crowded)
        compares = self.beside is not None or of_device[0].compares
        return (*(msgspec.structs.replace(one, compares=compares) for one in found), of_job)


def begin(
    plan: Plan, why_not: str, options: DetectorOptions, *, can_be_probed: bool = False
) -> tuple[AttachedState, tuple[Event, ...]]:
    """The plan is known."""
    stages: dict[int, list[int]] = {}
    for role in plan.roles:
        stages.setdefault(role.stage, []).append(role.rank)
    classes = {"" if len(stages) == 1 else f"stage {stage}": tuple(of) for stage, of in stages.items()}
    monitor = Monitor(options=options, retraining=Retraining(classes=classes), side_by_side=True)
    state = AttachedState(monitor=monitor, plan=plan, why_not=why_not, can_be_probed=can_be_probed)
    if not why_not:
        return state, ()
    limit = DetectionLimit(at_iteration=0, smallest_slowdown=None, why=why_not)
    return msgspec.structs.replace(state, limit=LimitState(logged=limit)), (limit,)


def committed(state: AttachedState, released: IterationTelemetry) -> tuple[AttachedState, tuple[Event, ...]]:
    """The next iteration of all ranks."""
    one = released.committed
    if state.why_not or not one.log_complete:
        plain = IterationJudged(
            iteration=one.iteration, plan_version=0, measured_us=round(one.measured_us), log_complete=one.log_complete
        )
        limit, limits = (state.limit, []) if state.why_not else state.limit.passed_over(one.iteration)
        return msgspec.structs.replace(state, limit=limit), (plain, *limits)
    monitor, judged = state.monitor.judge(released, state.plan, uneven_us=_uneven_us(released))
    # Where a slow rank is given less, a predictor could not tell its slowness from what little work takes: none is fitted.
    monitor, learned = (monitor, ()) if _fewer(state) else monitor.learn(_with_cores(judged.sample), judged.verdicts)
    # The first iteration pays for start-up, and began before its data was seen.
    seen = (*state.seen, released)[-WINDOW:] if one.iteration else ()
    state = msgspec.structs.replace(state, monitor=monitor, seen=seen)
    state, replaced, going_on = _named_by_detector(state, judged.verdicts, one.iteration)
    events: list[Event] = [judged.judged, *judged.verdicts, *replaced, *learned]
    if _to_be_compared(state, one.iteration):
        state, found = _compared(state, one.iteration)
        events += found
    named = [open_.verdict for open_ in state.compared.values() if open_.verdict.verdict in state.stated]
    known_since = {**state.known_since, **dict.fromkeys(state.monitor.detector.speeds, 0)}
    unexplained = without_named(state.monitor.unexplained, named, known_since, one.iteration)
    limit, limits = state.limit.judged(state.sights, one.iteration, unexplained)
    events += limits
    state = msgspec.structs.replace(state, limit=limit)
    state, stated = _held_back(state, events, going_on)
    return state, _in_words(state, stated)


def ended(state: AttachedState) -> tuple[AttachedState, tuple[Event, ...]]:
    """The training is over."""
    limit, limits = state.limit.ended()
    return msgspec.structs.replace(state, limit=limit), tuple(limits)


def applied(state: AttachedState, plan: Plan, iteration: int) -> tuple[AttachedState, tuple[Event, ...]]:
    """The ranks follow `plan` from `iteration` on: what was seen before is not compared with what comes, and where a slow rank
    is given less, what it takes is predicted by its speed."""
    state = msgspec.structs.replace(state, plan=plan, seen=())
    found = [one.verdict for one in state.compared.values() if one.verdict.cause == "slow_device"]
    speeds: dict[int, dict[str, float]] = {
        rank: {str(kind): speed for kind, speed in one.speed.items() if kind in CHUNK_KINDS}
        for one in found
        if (rank := one.culprits[0].rank) is not None and rank in _fewer(state)
    }
    monitor, events = state.monitor.knowing(speeds, iteration)
    known_since = {rank: state.known_since.get(rank, iteration) for rank in speeds}
    return msgspec.structs.replace(state, monitor=monitor, known_since=known_since), events


def _to_be_compared(state: AttachedState, iteration: int) -> bool:
    """Every few iterations; and as soon as a rank that nobody has named seems late. Lengths count only once it is known what
    they cost."""
    monitor, n = state.monitor, len(state.seen)
    if n < FEW or (monitor.fitted is None and n < monitor.options.least_iterations):
        return False
    if iteration % COMPARE_EVERY == 0 or iteration < state.compared_at + COMPARE_AGAIN:
        return iteration % COMPARE_EVERY == 0
    return bool(_late(state) - {rank for rank, _ in state.compared} - monitor.detector.open.keys())


def _late(state: AttachedState) -> set[int]:
    """The ranks that seem late over the last iterations."""
    cost = None if state.monitor.fitted is None else state.monitor.fitted.model
    return at_a_glance(window_of(state.seen[-max(LOOKED_AT) :], state.plan, cost), state.monitor.options)


def _with_cores(sample: IterationSample) -> IterationSample:
    """As it would have been learned from had no rank waited for its core: the whole job is judged by that, and where the end of
    an iteration is learned with such waits, a rank that is slow by that much more makes the job look slow beside it."""
    released = sample.released
    own_us = max(released.committed.measured_us - released.coreless_us, 0.0)
    committed = msgspec.structs.replace(released.committed, measured_us=own_us)
    return msgspec.structs.replace(sample, released=msgspec.structs.replace(released, committed=committed, coreless_us=0.0))


def _uneven_us(released: IterationTelemetry) -> float:
    """What the rank that does most beside its chunks does more than most ranks, and pauses such as a checkpoint: the job is not
    slow for them."""
    beside, paused = Counter[int](), Counter[int]()
    for one in released.beside:
        (paused if one.kind in PAUSES else beside)[one.rank] += round(one.us)
    by_time = sorted(beside.values())
    uneven = by_time[-1] - by_time[(len(by_time) - 1) // 2] if by_time else 0
    return float(uneven + max(paused.values(), default=0))


def _named_by_detector(
    state: AttachedState, verdicts: Sequence[Event], iteration: int
) -> tuple[AttachedState, list[Event], set[int]]:
    """A rank that a comparison has named already, and the Detector now does, has one verdict: the Detector's, which sees passes
    only. Those that go on so are named last."""
    compared, events, going_on = dict(state.compared), list[Event](), set[int]()
    for verdict in verdicts:
        if not isinstance(verdict, Verdict) or verdict.cause != "slow_device":
            continue
        before = compared.get((verdict.culprits[0].rank, "slow_device"))
        if before is not None and _covers(verdict, before.verdict):
            del compared[verdict.culprits[0].rank, "slow_device"]
            reason = f"verdict {verdict.verdict} goes on with it"
            over = VerdictClosed(
                verdict=before.verdict.verdict, until_iteration=iteration, at_iteration=iteration, reason=reason
            )
            events.append(over)
            if before.verdict.verdict in state.stated:
                going_on.add(verdict.verdict)
    return msgspec.structs.replace(state, compared=compared), events, going_on


def _covers(verdict: Verdict, before: Verdict) -> bool:
    """Whether the Detector's verdict on a rank leaves out only passes that are less slow than those that it names. It does not
    see at all what was slow from the first iterations on."""
    left_out = {kind: speed for kind, speed in before.speed.items() if kind not in verdict.speed}
    return not left_out or (left_out.keys() <= {*CHUNK_KINDS} and min(left_out.values()) > min(verdict.speed.values()))


def _crowded(state: AttachedState) -> set[int]:
    """The ranks that lately were without a core for most of the time."""
    return {rank for rank, part in _without_core(state).items() if part > MOST_WITHOUT_CORE}


def _without_core(state: AttachedState) -> dict[int, float]:
    """rank -> the part of its chunks' time in which it had none, lately."""
    last = [one.without_core for one in state.seen[-CROWDED_OVER:]]
    return {rank: median(of.get(rank, 0.0) for of in last) for rank in state.plan.ranks} if last else {}


def _lasts(state: AttachedState, verdict: Verdict) -> bool:
    """Whether the slowness of a crowded rank has lasted for too long to be that of others on its core."""
    rank, parts = verdict.culprits[0].rank or 0, _without_core(state)
    others = [part for other, part in parts.items() if other != rank]
    lasted = state.seen[-1].committed.iteration - verdict.since_iteration + 1 if state.seen else 0
    alike = bool(others) and parts[rank] <= median(others) + MORE_THAN_OTHERS
    return alike and lasted >= CROWDED_LASTS * state.monitor.options.least_iterations


def _least_level(state: AttachedState, iterations: int) -> float:
    """Log of the least slowdown that is named by so many iterations, by the time that they took."""
    lasted_s = iterations * (usual_s(state.seen) or 0.0)
    level = state.monitor.options.least_level()
    return level + (BRIEF * max(log(SETTLED_S / lasted_s), 0.0) if lasted_s else 0.0)


def _brief(state: AttachedState) -> list[Sight]:
    """What the time that the ranks have been seen for lets see."""
    level = _least_level(state, state.seen[-1].committed.iteration if state.seen else 0)
    if level <= state.monitor.options.least_level():
        return []
    why = f"cores are disturbed for a while: a smaller slowdown is named once it has lasted for {SETTLED_S:g} s"
    return [Sight(scope="device", smallest_slowdown=round(exp(level), 3), why=why)]


def _borne_out(state: AttachedState, verdict: Verdict) -> bool:
    """Whether by plain medians the rank has taken so much longer than the others, since its onset, as the time since then
    demands; where nobody is beside it, by what the verdict says."""
    onset, rank = verdict.since_iteration, verdict.culprits[0].rank
    since = [one for one in state.seen if one.committed.iteration >= onset]
    if rank is None or not since:
        return False
    cost = None if state.monitor.fitted is None else state.monitor.fitted.model
    window = window_of(since, state.plan, cost)
    level = max((took_longer(window, kind, rank) or -log(speed) for kind, speed in verdict.speed.items()), default=0.0)
    return level >= _least_level(state, state.seen[-1].committed.iteration - onset + 1)


def _fewer(state: AttachedState) -> frozenset[int]:
    """The ranks that are given less than the others, on purpose."""
    division = state.plan.division
    return frozenset() if division is None else division.fewer.intersection(state.plan.ranks)


def _held_back(state: AttachedState, events: Sequence[Event], going_on: set[int]) -> tuple[AttachedState, tuple[Event, ...]]:
    """Without the verdicts that a rank's lack of a core or a disturbance of it may explain, and with those that have waited,
    once it has its core and is still late, for long enough; one in which another goes on does not wait."""
    crowded, waiting, stated = _crowded(state), dict(state.held_back), set(state.stated)
    fewer = state.plan.division.fewer if state.plan.division is not None else frozenset()
    found: list[Event] = []
    for event in events:
        if isinstance(event, VerdictClosed) and waiting.pop(event.verdict, None) is not None and event.verdict not in stated:
            continue
        if not isinstance(event, Verdict) or event.cause != "slow_device":
            found.append(event)
            continue
        rank, known = event.culprits[0].rank, event.verdict in going_on | stated
        mild = min(event.speed.values(), default=1.0) > 1 / CROWDED_SLOWDOWN
        # What a batch takes however small it is looks like slowness where it is small: nothing new is named there.
        small = rank in fewer and event.verdict not in going_on
        if small or (rank in crowded and mild) or not (known or _borne_out(state, event)):
            waiting[event.verdict] = event
        else:
            stated.add(event.verdict)
            found.append(event)
    apart = [one for one in waiting.values() if one.culprits[0].rank not in fewer]
    has_core = [one for one in apart if one.culprits[0].rank not in crowded or _lasts(state, one)]
    late = _late(state) if has_core else set()
    due = [one for one in has_core if one.culprits[0].rank in late and (one.verdict in stated or _borne_out(state, one))]
    over = [msgspec.structs.replace(waiting.pop(one.verdict), at_iteration=state.seen[-1].committed.iteration) for one in due]
    stated |= {one.verdict for one in over}
    return msgspec.structs.replace(state, held_back=waiting, stated=frozenset(stated)), (*over, *found)


def _compared(state: AttachedState, iteration: int) -> tuple[AttachedState, tuple[Event, ...]]:
    """The last iterations side by side: what is new, what has become worse or better, what is over; and what was seen."""
    monitor = state.monitor
    cost = None if monitor.fitted is None else monitor.fitted.model
    found = compare(window_of(state.seen, state.plan, cost), monitor.options, uneven=bool(_fewer(state)))
    events: list[Event] = []
    still: dict[tuple[int | None, str], OpenVerdict] = {}
    for verdict in found.verdicts:
        rank = verdict.culprits[0].rank if len(verdict.culprits) == 1 else None
        key: tuple[int | None, str] = (rank, verdict.cause)
        before = state.compared.get(key)
        if before is not None:
            anew = _sized_anew(state, before.verdict, verdict)
            still[key] = OpenVerdict(anew or before.verdict)
            events += [anew] if anew is not None else []
        elif verdict.cause != "slow_device" or rank not in monitor.detector.open:  # whom the Detector has not named already
            number = monitor.detector.next_verdict
            detector = msgspec.structs.replace(monitor.detector, next_verdict=number + 1)
            monitor = msgspec.structs.replace(monitor, detector=detector)
            still[key] = OpenVerdict(msgspec.structs.replace(verdict, verdict=number))
            events.append(still[key].verdict)
    for place, one in state.compared.items():
        if place in still:
            continue
        if one.missed + 1 < MISSED:
            still[place] = msgspec.structs.replace(one, missed=one.missed + 1)
            continue
        reason = "the ranks take alike again" if one.verdict.culprits else "the ranks are given alike again"
        events.append(
            VerdictClosed(verdict=one.verdict.verdict, until_iteration=iteration, at_iteration=iteration, reason=reason)
        )
    beside = found.sight if len({role.stage for role in state.plan.roles}) < len(state.plan.roles) else None
    after = msgspec.structs.replace(state, monitor=monitor, compared=still, beside=beside, compared_at=iteration)
    return after, tuple(events)


def _sized_anew(state: AttachedState, open_: Verdict, found: Verdict) -> Verdict | None:
    """The open verdict as it has become since it was given, `found` again by the last comparison; None = it is what it was."""
    if found.cause != "slow_device":
        return costs_more(open_, found)
    options, cost = state.monitor.options, None if state.monitor.fitted is None else state.monitor.fitted.model
    since = [one for one in state.seen if one.committed.iteration > open_.at_iteration]
    for n in (n for n in reversed(LOOKED_AT) if n <= len(since)):
        least = max(level_of_few(options, n), _least_level(state, n))
        window = window_of(since[-n:], state.plan, cost)
        if (anew := sized_anew(open_, found, window, options, least=least, uneven=bool(_fewer(state)))) is not None:
            return anew
    return None


def lost(state: AttachedState, suspect: Suspect, iteration: int) -> tuple[AttachedState, tuple[Event, ...]]:
    """A rank is dead or hangs."""
    monitor, verdicts = state.monitor.lost(suspect, iteration)
    return msgspec.structs.replace(state, monitor=monitor), _in_words(state, verdicts)


def _in_words(state: AttachedState, events: Sequence[Event]) -> tuple[Event, ...]:
    """Each verdict with what to do about it."""
    return tuple(
        with_next_step(one, can_be_probed=state.can_be_probed, watched=True) if isinstance(one, Verdict) else one
        for one in events
    )


def usual_s(seen: Sequence[IterationTelemetry]) -> float | None:
    """The median of the last iterations; None before the first."""
    times = sorted(one.committed.measured_us for one in seen)
    return times[len(times) // 2] / 1e6 if times else None


def micro_batches_of(packed: Sequence[tuple[int, int]]) -> dict[int, int]:
    """rank -> its micro-batches, from (rank, micro-batch) of one iteration."""
    return dict(Counter(rank for rank, _ in packed))
