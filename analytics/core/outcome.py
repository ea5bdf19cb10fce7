"""What watching a run amounts to: something is wrong; all is well, down to a stated slowdown; or it cannot be judged, and why.

Calm is a claim, and needs evidence: that something wrong would have been seen. Every way of judging therefore hands over its
verdicts and its `Sight`. Only where the one that looks closest and the one that looks at the whole job would have named
something, the log is whole, and the time lost is explained, is a run without a verdict called well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from unskew.analytics.core.run_state import RunState
from unskew.collector import outcome_words as words
from unskew.collector.events import MOST_SLOWDOWN, Diagnosed, RunFinished, Verdict
from unskew.collector.log_gap import dropped_sentence

Scope = Literal["device", "replica", "job"]
OutcomeWord = Literal["wrong", "well", "cannot_be_judged"]

CLOSEST_FIRST: tuple[Scope, ...] = ("device", "replica", "job")
LEAST_LOST_SHARE = 0.05
"""What costs so much of the time would be named if its cause were known: without one, nothing is well."""
MOST_UNEXPLAINED_SHARE = 0.5
LEAST_STATED_SHARE = 0.01
"""So much of all time, lost without a cause, is stated in any case."""
_ANY: dict[Scope, str] = {"device": "any device", "replica": "any replica", "job": "the whole job"}
_AGAINST: dict[Scope, str] = {"device": "", "replica": "", "job": " against its first iterations"}
"""What the slowdown is of, where nobody sees one that has always been there."""


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest lasting slowdown that one way of judging would have named, None where it has not looked; `why`: what keeps
    it from seeing, or what else it would have named. `compares`: it holds devices against each other, and would have named one
    that was slow from the first iteration on as well."""

    scope: Scope
    smallest_slowdown: float | None
    why: str = ""
    compares: bool = False

    @property
    def sees(self) -> bool:
        """Whether it has looked at all."""
        return is_close(self.smallest_slowdown)


class UnexplainedTime(msgspec.Struct, frozen=True, kw_only=True):
    """Lost time of which no cause is known, as parts of the time lost and of all time (0 to 1); `of_lost` is None where nobody
    has added up what known causes took; `where`: the place it was lost at, as the end of a sentence."""

    of_lost: float | None = None
    of_measured: float = 0.0
    where: str = ""

    @property
    def too_much(self) -> bool:
        """Whether something costs much that nobody can name."""
        mostly = self.of_lost is None or self.of_lost > MOST_UNEXPLAINED_SHARE
        return mostly and self.of_measured >= LEAST_LOST_SHARE

    @property
    def words(self) -> str:
        of_lost = "" if self.of_lost is None else f"{100 * self.of_lost:.0f} % of the time lost, "
        return f"no cause explains {of_lost}{100 * self.of_measured:.1f} % of all time{self.where}"


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What one way of judging hands over; `of_job`, `long_ones`: what it saw of the whole job and what long iterations
    took, where it judged that too; `suspects`: ranks of which a single measurement says that they were slow when the run
    began."""

    verdicts: tuple[Verdict, ...] = ()
    sight: Sight
    of_job: Sight | None = None
    long_ones: UnexplainedTime | None = None
    suspects: frozenset[int] = frozenset()

    @property
    def undecided(self) -> str:
        """What nobody knows of the suspects, unless the stage of somebody was named; "" = nothing."""
        named = any(verdict.cause == "stage_imbalance" for verdict in self.verdicts)
        return self.sight.why if self.suspects and not named else ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`why`: what is wrong, what would have been seen, or why nothing can be said; a sentence without its end.
    `smallest_slowdown` of what cannot be judged: no device is slower than the others by so much, which `why` then says first.
    """

    outcome: OutcomeWord
    smallest_slowdown: float | None
    why: str

    @property
    def sentence(self) -> str:
        """The headline of a screen."""
        if self.outcome == "cannot_be_judged" and self.smallest_slowdown is None:
            return f"Cannot be judged: {self.why}."
        return f"Well: {self.why}." if self.outcome == "well" else f"{self.why[:1].upper()}{self.why[1:]}."


def outcome_of(
    verdicts: Sequence[Verdict],
    sights: Sequence[Sight],
    *,
    failure: str = "",
    lacks: Sequence[str] = (),
    gaps: Sequence[str] = (),
    dropped: Mapping[str, int] = {},
    unexplained: UnexplainedTime | None = None,
    costs: Sequence[str] = (),
    ended: int = 0,
) -> Outcome:
    """The outcome of a run. `failure`: how it ended, where that alone is wrong; `lacks`: what its log lacks by its own word,
    `gaps`: what else it lacks for a judgement, a sentence each; `dropped`: type -> events it lacks; `costs`: what time is lost
    for though nothing is wrong, a sentence each; `ended`: how many verdicts of a run that goes on hold no longer. All but
    `gaps`, which are a reason of not judging alone, are stated whatever the outcome."""
    decisive, job = closest(sights), [sight for sight in sights if sight.scope == "job"]
    smallest = decisive.smallest_slowdown if decisive.sees else None
    judged = [decisive, *(sight for sight in job if sight != decisive)]
    without_cause = unexplained is not None and unexplained.of_measured >= LEAST_STATED_SHARE
    stated = [one.removesuffix(".") for one in costs] + ([unexplained.words] if unexplained and without_cause else [])
    drops = [dropped_sentence(dropped)] if dropped else []
    wrong, failed = [since_and_until(verdict) for verdict in verdicts], [failure] if failure else []
    if wrong or failed:
        more = [f"{len(wrong) - 1} more verdict{'s' * (len(wrong) > 2)}"] if len(wrong) > 1 else []
        wrong = [*wrong[:1], *more, *failed]
        return Outcome(outcome="wrong", smallest_slowdown=smallest, why="; ".join([*wrong, *stated, *lacks, *drops]))
    bounds = [one.why for one in judged if one.why]
    blind = [blindness(one) for one in judged if not one.sees]
    too_much = unexplained is not None and unexplained.too_much
    if lacks or gaps or blind or too_much:
        calm = decisive.compares and smallest is not None and not (lacks or gaps or too_much)
        first = words.NONE_SLOWER.format(percent(smallest)) if calm and smallest is not None else ""
        why = "; ".join([*lacks, *gaps, *blind, *([decisive.why] if calm and decisive.why else []), *stated, *drops])
        return Outcome(outcome="cannot_be_judged", smallest_slowdown=smallest if calm else None, why=first + why)
    before = [f"{ended} verdict{'s' * (ended > 1)} before, no longer open"] if ended else []
    return Outcome(
        outcome="well", smallest_slowdown=smallest, why="; ".join([seen(*judged), *bounds, *stated, *drops, *before])
    )


def since_and_until(verdict: Verdict) -> str:
    """Its sentence, which ends with the onset, and the end of what is over."""
    until = "" if verdict.until_iteration is None else f", until iteration {verdict.until_iteration}"
    return verdict.sentence.removesuffix(".") + until


def outcome_of_run(state: RunState, *, controlled: bool) -> Outcome:
    """What the control events of a run amount to: its last diagnosis where that read the log to the run's end, else what its
    controller named and would have named: of a run that goes on what is wrong now, of one that is over what ever was.
    `controlled`: a living controller holds it. The view `outcomes` says the same to the letter."""
    over, found = state.finished, state.diagnosed
    if over is not None and found is not None and _holds(found, over):
        return _diagnosed(found)
    lacks = [state.log_gap] if state.log_gap else [over.reason] if over is not None and over.status == "incomplete" else []
    if state.started is not None and over is None and not controlled:
        lacks.append(words.NO_END)
    failure = f"the run failed: {over.reason or 'no reason given'}" if over is not None and over.status == "failed" else ""
    named = [judged.verdict for judged in (state.by_urgency if over is None else (*state.by_urgency, *state.ended_verdicts))]
    ended = len(state.verdicts) - len(named)
    return outcome_of(
        named, _live_sights(state, controlled=controlled), failure=failure, lacks=lacks, dropped=state.dropped, ended=ended
    )


def _holds(found: Diagnosed, over: RunFinished) -> bool:
    """Whether a diagnosis is about the run as it ended: what came later outranks it. Of versions that did not say how far they
    read, all but calm counts."""
    return found.status == over.status or (not found.status and found.outcome != "well")


def _diagnosed(found: Diagnosed) -> Outcome:
    """Of a version that did not state what it would have seen, the verdicts alone count."""
    word = found.outcome or ("wrong" if found.verdicts else "cannot_be_judged")
    why = found.why or words.OLD_DIAGNOSIS
    if word == "wrong" and found.verdicts and not found.why:
        why = str(found.verdicts[0]["sentence"])
    return Outcome(outcome=msgspec.convert(word, OutcomeWord), smallest_slowdown=found.smallest_slowdown, why=why)


def _live_sights(state: RunState, *, controlled: bool) -> list[Sight]:
    started, limit = state.started, state.limit
    if limit is not None and limit.of_devices is not None:
        of_devices = Sight(scope="device", smallest_slowdown=limit.of_devices, compares=True)
        return [of_devices, Sight(scope="job", smallest_slowdown=None, why=limit.why)]
    if limit is not None:
        return [Sight(scope="device", smallest_slowdown=limit.smallest_slowdown, why=limit.why)]
    if started is None:
        why = "the run has not started yet"
    elif started.clock == "imported":
        why = words.NOT_IMPORTED
    elif started.device == "simulated":
        why = words.SIMULATED
    elif state.finished is not None or not controlled:
        why = words.TOO_SHORT
    else:
        why = words.WARM_UP
    return [Sight(scope="device", smallest_slowdown=None, why=why)]


def closest(sights: Sequence[Sight]) -> Sight:
    """The one that decides: of those that look closest the one that sees least."""
    if not sights:
        return Sight(scope="job", smallest_slowdown=None, why=words.NOTHING)
    scope = min((sight.scope for sight in sights), key=CLOSEST_FIRST.index)
    return max((sight for sight in sights if sight.scope == scope), key=lambda one: one.smallest_slowdown or float("inf"))


def is_close(smallest: float | None) -> bool:
    """Whether who would have named such a slowdown has looked closely enough to call anything well."""
    return smallest is not None and smallest <= MOST_SLOWDOWN


def blindness(sight: Sight) -> str:
    """Why it has not looked."""
    if sight.smallest_slowdown is None:
        return sight.why or words.NOTHING
    hidden = sight.smallest_slowdown > words.MOST_STATED
    how = words.HIDDEN.format(_ANY[sight.scope]) if hidden else f"only {seen(sight)}"
    return "; ".join([how, *([sight.why] if sight.why else [])])


def seen(*sights: Sight) -> str:
    """What would have been named, for sights that see.

    >>> seen(Sight(scope="device", smallest_slowdown=1.07))
    'a lasting slowdown of any device by 7 % or more would have been named'
    """
    bounds = (
        f"of {_ANY[sight.scope]} by {percent(sight.smallest_slowdown or 1.0)} or more{_AGAINST[sight.scope]}"
        for sight in sights
    )
    return f"a lasting slowdown {' and '.join(bounds)} would have been named"


def percent(slowdown: float) -> str:
    """A ratio of times as what it adds.

    >>> percent(1.155), percent(2.0)
    ('15.5 %', '100 %')
    """
    return f"{100 * (slowdown - 1):.3g} %"


def times_as_long(ratio: float) -> str:
    """To two places, or three digits.

    >>> times_as_long(1.2), times_as_long(1234.5)
    ('1.20 times as long', '1,230 times as long')
    """
    return f"{ratio:.2f} times as long" if ratio < 100 else f"{float(f'{ratio:.3g}'):,.0f} times as long"
