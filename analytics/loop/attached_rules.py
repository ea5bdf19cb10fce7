"""What is decided on a training that is not ours, while it runs: the predictor, the Detector and the verdicts are those of our
own runs; the plan is not issued but found.

1. the ranks say who they are; with the first iteration of all of them it is known how many micro-batches each has. Ranks of
   one process group with equal numbers are taken for replicas of one model, each with a micro-batch of its own;
2. each iteration goes to the Monitor, and every few iterations the last ones are compared side by side (side_by_side.py);
3. where ranks are in several groups, or their times are no measure of their work, nobody is judged, and the log says why.

Pure: a state and what came in, a state and events out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.outcome import Sight
from unskew.analytics.core.plan import Hop, Plan, Role, Route
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.health.liveness import WAITING, Suspect
from unskew.analytics.loop.detection_limit import LimitState
from unskew.analytics.loop.monitor import Monitor
from unskew.analytics.loop.side_by_side import compare, window_of
from unskew.analytics.predictor.retraining import Retraining
from unskew.collector.events import DetectionLimit, Event, Heartbeat, IterationJudged, RankAttached, Verdict, VerdictClosed

WINDOW, COMPARE_EVERY = 64, 8
MISSED = 2
"""So many comparisons in a row that do not find a verdict again end it."""
MOST_WITHOUT_CORE, CROWDED_SLOWDOWN, CROWDED_OVER = 0.5, 2.0, 16
"""A rank that is without a core for so much of its time may take nearly twice as long beyond that though it is healthy: whoever
has its core meanwhile empties the caches. A verdict on less than this slowdown of it then waits until it has its core."""
HUNG_FACTOR, LEAST_HUNG_S = 20.0, 10.0
"""No rank has finished a step for so many usual ones, and at least so long."""


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
    -> a verdict that waits for better evidence; `beside`: what the last comparison would have seen, None = nobody is beside."""

    monitor: Monitor
    plan: Plan
    why_not: str = ""
    seen: tuple[IterationTelemetry, ...] = ()
    compared: dict[tuple[int | None, str], OpenVerdict] = {}
    held_back: dict[int, Verdict] = {}
    beside: Sight | None = NOT_COMPARED
    limit: LimitState = LimitState()

    @property
    def sights(self) -> tuple[Sight, ...]:
        """What would have been named up to now."""
        if self.why_not:
            return (Sight(scope="device", smallest_slowdown=None, why=self.why_not),)
        *of_device, of_job = self.monitor.sights
        crowded = [CROWDED] if _crowded(self) else []
        # The comparison sees a rank that turned slow too; the Detector none that was slow from the first step on.
        return (*([self.beside] if self.beside else of_device), *crowded, of_job)


def plan_of(attached: Mapping[int, RankAttached], micro_batches: Mapping[int, int]) -> tuple[Plan, str]:
    """What the ranks do, as a plan: replicas of a model of one layer; and why nobody can be judged by it ("" = they can)."""
    ranks = sorted(attached)
    most = max(micro_batches.values())
    roles = tuple(Role(rank=rank, replica=place, stage=0, first_layer=0, n_layers=1) for place, rank in enumerate(ranks))
    routes = tuple(
        Route(
            micro_batch=number, replica=number % len(ranks),
            hops=(Hop(first_layer=0, n_layers=1, ranks=(ranks[number % len(ranks)],)),),
        )
        for number in range(most * len(ranks))
    )  # fmt: skip
    return Plan(plan_version=0, n_layers=1, schedule="1f1b", roles=roles, routes=routes), _why_not(attached, micro_batches)


def _why_not(attached: Mapping[int, RankAttached], micro_batches: Mapping[int, int]) -> str:
    if any(one.on_gpu for one in attached.values()):
        return "the ranks use GPUs, whose times are not measured yet: what the host takes is no measure of their work"
    if groups := {group for one in attached.values() for group in one.groups}:
        some = ", ".join(str(list(group)) for group in sorted(groups)[:3])
        return f"the ranks are in several process groups ({some}), and which of them do the same work is not known"
    if len(set(micro_batches.values())) > 1:
        return f"the ranks have different numbers of micro-batches in an iteration ({sorted(set(micro_batches.values()))})"
    missing = sorted({sentence for one in attached.values() for sentence in one.off})
    return "; ".join(missing)


def begin(plan: Plan, why_not: str, options: DetectorOptions) -> tuple[AttachedState, tuple[Event, ...]]:
    """The plan is known."""
    monitor = Monitor(options=options, retraining=Retraining(classes={"": plan.ranks}))
    state = AttachedState(monitor=monitor, plan=plan, why_not=why_not)
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
    monitor, learned = monitor.learn(judged.sample, judged.verdicts)
    # The first iteration pays for start-up, and began before its data was seen.
    seen = (*state.seen, released)[-WINDOW:] if one.iteration else ()
    state = msgspec.structs.replace(state, monitor=monitor, seen=seen)
    state, replaced = _named_by_detector(state, judged.verdicts, one.iteration)
    events: list[Event] = [judged.judged, *judged.verdicts, *replaced, *learned]
    if len(seen) >= monitor.options.least_iterations and one.iteration % COMPARE_EVERY == 0:
        state, found = _compared(state, one.iteration)
        events += found
    limit, limits = state.limit.judged(state.sights, one.iteration, monitor.unexplained)
    events += limits
    state = msgspec.structs.replace(state, limit=limit)
    return _held_back(state, events)


def _uneven_us(released: IterationTelemetry) -> float:
    """What the rank that does most beside its chunks does more than most ranks: the job is not slow for it."""
    beside: Counter[int] = Counter()
    for one in released.beside:
        beside[one.rank] += round(one.us)
    by_time = sorted(beside.values())
    return float(by_time[-1] - by_time[(len(by_time) - 1) // 2]) if by_time else 0.0


def _named_by_detector(state: AttachedState, verdicts: Sequence[Event], iteration: int) -> tuple[AttachedState, list[Event]]:
    """A rank that a comparison has named already, and the Detector now does, has one verdict: the Detector's."""
    compared, events = dict(state.compared), list[Event]()
    for verdict in verdicts:
        if not isinstance(verdict, Verdict) or verdict.cause != "slow_device":
            continue
        before = compared.get((verdict.culprits[0].rank, "slow_device"))
        if before is not None and not before.verdict.speed.keys() - verdict.speed.keys():
            del compared[verdict.culprits[0].rank, "slow_device"]
            reason = f"verdict {verdict.verdict} goes on with it"
            over = VerdictClosed(
                verdict=before.verdict.verdict, until_iteration=iteration, at_iteration=iteration, reason=reason
            )
            events.append(over)
    return msgspec.structs.replace(state, compared=compared), events


def _crowded(state: AttachedState) -> set[int]:
    """The ranks that lately were without a core for most of the time."""
    last = [one.without_core for one in state.seen[-CROWDED_OVER:]]
    return {rank for rank in state.plan.ranks if last and median(of.get(rank, 0.0) for of in last) > MOST_WITHOUT_CORE}


def _held_back(state: AttachedState, events: Sequence[Event]) -> tuple[AttachedState, tuple[Event, ...]]:
    """Without the verdicts that a rank's lack of a core may explain, and with those that have waited, once it is over."""
    crowded, waiting = _crowded(state), dict(state.held_back)
    found: list[Event] = []
    for event in events:
        if isinstance(event, VerdictClosed) and waiting.pop(event.verdict, None) is not None:
            continue
        slow = isinstance(event, Verdict) and event.cause == "slow_device" and event.culprits[0].rank in crowded
        if slow and isinstance(event, Verdict) and min(event.speed.values()) > 1 / CROWDED_SLOWDOWN:
            waiting[event.verdict] = event
        else:
            found.append(event)
    over = [waiting.pop(one.verdict) for one in [*waiting.values()] if one.culprits[0].rank not in crowded]
    return msgspec.structs.replace(state, held_back=waiting), (*over, *found)


def _compared(state: AttachedState, iteration: int) -> tuple[AttachedState, tuple[Event, ...]]:
    """The last iterations side by side: what is new, what has become worse or better, what is over; and what was seen."""
    monitor = state.monitor
    cost = None if monitor.fitted is None else monitor.fitted.model
    found = compare(window_of(state.seen, state.plan.ranks, cost), monitor.options)
    events: list[Event] = []
    still: dict[tuple[int | None, str], OpenVerdict] = {}
    for verdict in found.verdicts:
        rank = verdict.culprits[0].rank if len(verdict.culprits) == 1 else None
        key: tuple[int | None, str] = (rank, verdict.cause)
        before = state.compared.get(key)
        if before is not None:
            still[key] = msgspec.structs.replace(before, missed=0)
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
    beside = found.sight if len(state.plan.ranks) > 1 else None
    return msgspec.structs.replace(state, monitor=monitor, compared=still, beside=beside), tuple(events)


def lost(state: AttachedState, suspect: Suspect, iteration: int) -> tuple[AttachedState, tuple[Event, ...]]:
    """A rank is dead or hangs."""
    monitor, verdicts = state.monitor.lost(suspect, iteration)
    return msgspec.structs.replace(state, monitor=monitor), tuple(verdicts)


def hung(still_s: float, usual_s: float | None, beats: Mapping[int, Heartbeat]) -> Suspect | None:
    """Who holds up a job of which no rank has finished a step for `still_s`: of those that do not wait for others the one that
    has moved least lately; nobody while it may only be slow."""
    if usual_s is None or still_s < max(LEAST_HUNG_S, HUNG_FACTOR * usual_s):
        return None
    working = [one for one in beats.values() if one.activity not in WAITING and one.stalled_us > 0]
    if not working:
        return None
    culprit = max(working, key=lambda one: (-one.iteration, one.stalled_us))
    victims = tuple(sorted(rank for rank, one in beats.items() if one.activity in WAITING))
    detail = f"no rank has finished a step for {still_s:.0f} s, one takes {usual_s:.2g} s; it waits for nobody"
    return Suspect(rank=culprit.rank, how="hung", detail=detail, victims=victims)


def usual_s(seen: Sequence[IterationTelemetry]) -> float | None:
    """The median of the last iterations; None before the first."""
    times = sorted(one.committed.measured_us for one in seen)
    return times[len(times) // 2] / 1e6 if times else None


def micro_batches_of(packed: Sequence[tuple[int, int]]) -> dict[int, int]:
    """rank -> its micro-batches, from (rank, micro-batch) of one iteration."""
    return dict(Counter(rank for rank, _ in packed))
