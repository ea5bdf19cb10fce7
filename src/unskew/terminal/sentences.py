"""A control event as one sentence for people: the terminal's running text and `unskew watch`."""

from __future__ import annotations

from functools import singledispatch
from typing import Literal

import msgspec

from unskew.analytics.core.outcome import percent
from unskew.collector import events as ev
from unskew.collector.log_gap import dropped_sentence, with_dropped

Tone = Literal["plain", "good", "bad", "ask", "quiet"]


class Sentence(msgspec.Struct, frozen=True):
    """`topic` is one word for the left margin; `tone` is how loud it is; `then`: what to do about it."""

    topic: str
    text: str
    tone: Tone = "plain"
    then: str = ""


@singledispatch
def sentence_of(_event: object) -> Sentence | None:
    """The sentence for an event; None for what people need not read (telemetry, unknown types)."""
    return None


def because(reason: str) -> str:
    """A reason as the end of a sentence; nothing when none was given."""
    return f": {reason}" if reason else ""


def _who(event: ev.ModeChanged | ev.Note | ev.CommandRefused | ev.PlanApproved | ev.PlanRejected | ev.RankAdded) -> str:
    """Who decided, with the operating system's name where that is another."""
    return f"{event.by} (user {event.user})" if event.user not in ("", event.by) else event.by


@sentence_of.register
def _(event: ev.RunStarted) -> Sentence:
    since = f", goes on with {event.resumed_from} after {event.first_iteration} iterations" if event.resumed_from else ""
    ranks = f"{event.ranks} rank{'s' * (event.ranks != 1)}"
    return Sentence("run", f"{event.run} on {ranks}, mode {event.mode}, device {event.device}{since}", "quiet")


@sentence_of.register
def _(event: ev.RunFinished) -> Sentence:
    iterations = f"after {event.iterations if event.committed is None else event.committed} iterations"
    text = {
        "done": f"training is done {iterations}",
        "incomplete": f"training is done {iterations}, its log is incomplete",
        "failed": f"the run failed {iterations}",
        "stopped": f"the run was stopped {iterations}",
    }[event.status]
    tones: dict[str, Tone] = {"done": "good", "stopped": "plain"}
    return Sentence("run", f"{text}{because(event.reason)}", tones.get(event.status, "bad"))


@sentence_of.register
def _(event: ev.RankAdded) -> Sentence:
    again = "started" if event.process == 1 else "started again"
    return Sentence("rank", f"{_who(event)} lets rank {event.rank} be {again}{because(event.reason)}")


@sentence_of.register
def _(event: ev.Suspected) -> Sentence:
    return Sentence("suspect", f"rank {event.rank} is {event.how} and will be killed: {event.detail}", "bad")


@sentence_of.register
def _(event: ev.Probed) -> Sentence:
    than = "times as long as the others for a product" if event.beside else "of its healthy time"
    found = ", ".join(f"rank {rank} takes {slowdown:.2f} {than}" for rank, slowdown in event.slowdowns.items())
    return Sentence("probe", f"{found or 'nothing could be compared'}; it held up training for {event.cost_us / 1e6:.2f} s")


@sentence_of.register
def _(event: ev.StandbyMeasured) -> Sentence:
    found = "could not be compared" if event.slowdown is None else f"takes {event.slowdown:.2f} times its healthy time"
    return Sentence("standby", f"rank {event.rank}, measured on standby, {found}", "quiet")


@sentence_of.register
def _(event: ev.DeviceLost) -> Sentence:
    how = {"exit": "is dead", "hung": "hangs", "frozen": "is frozen"}[event.how]
    return Sentence("lost", f"rank {event.rank} {how}{because(event.detail)}", "bad")


@sentence_of.register
def _(event: ev.ProcessEnded) -> Sentence:
    return Sentence("lost", f"the process of rank {event.rank}, which was lost, has ended{because(event.detail)}", "quiet")


@sentence_of.register
def _(event: ev.Regrouped) -> Sentence:
    moved = f", {event.moved_bytes / 1e6:.1f} MB moved in {event.migrate_seconds:.2f} s" if event.moved_bytes else ""
    again = " again" if event.plan_version else ""
    kept = "" if event.kept is None else f", {event.kept:.0%} of the gradients of iteration {event.iteration} kept"
    return Sentence("regroup", f"the ranks work together{again} after {event.seconds:.2f} s{moved}{kept}")


@sentence_of.register
def _(event: ev.FaultInjected) -> Sentence:
    what = {
        "slow": "is slowed", "slow_link": f"has a slow link to rank {event.peer}", "kill": "is killed",
        "hang": "is made to hang", "freeze": "is frozen", "exception": "meets an error",
        "segfault": "ends by SIGSEGV", "full_disk": "has a full disk",
        "rejoin": "is started again",
    }[event.kind]  # fmt: skip
    factor = f" {event.factor:g} times" if event.factor else ""
    factor += f", messages arrive {event.delay_ms:g} ms later" if event.delay_ms else ""
    factor += f", for {event.seconds:g} s" if event.seconds else ""
    factor += " in memory" if event.of == "memory" else ""
    factor += f", rising over {event.ramp} iterations" if event.ramp else ""
    factor += f", in {event.on} of {event.every} iterations" if event.every else ""
    phase = f" in {event.phase} only" if event.phase else ""
    until = f" until iteration {event.until_iteration}" if event.until_iteration is not None else ""
    return Sentence("fault", f"on purpose: rank {event.rank} {what}{factor}{phase}{until}", "quiet")


@sentence_of.register
def _(event: ev.ModeChanged) -> Sentence:
    return Sentence("mode", f"{_who(event)} sets the mode to {event.mode}{because(event.reason)}")


@sentence_of.register
def _(event: ev.Note) -> Sentence:
    return Sentence("note", f"{_who(event)}: {event.text}")


@sentence_of.register
def _(event: ev.CommandRefused) -> Sentence:
    return Sentence("refused", f"{event.command} by {_who(event)}{because(event.reason)}", "bad")


@sentence_of.register
def _(event: ev.PredictorFitted) -> Sentence:
    errors = event.error_percent
    later = [_off(what, errors[key], errors.get(f"{key}, before")) for key, what in LATER if key in errors]
    fitted = [f"{kind} {percent:.1f} % off" for kind, percent in errors.items() if "later" not in kind]
    text = f"predictor {event.predictor}, fitted on {event.n_chunks:,} chunks: {', '.join(later or fitted)}"
    return Sentence("predict", text, "quiet")


LATER = (("iteration, later", "later iterations"), ("chunks, later", "later chunks"))
"""How well a fit predicts iterations that it has not seen, in words."""


def _off(what: str, percent: float, before: float | None) -> str:
    return f"{what} {percent:.1f} % off" + ("" if before is None else f" (before {before:.1f} %)")


@sentence_of.register
def _(event: ev.Verdict) -> Sentence:
    return Sentence("verdict", event.sentence, "bad", str(event.evidence.get("next_step", "")))


@sentence_of.register
def _(event: ev.DetectionLimit) -> Sentence:
    smallest = event.of_devices if event.smallest_slowdown is None else event.smallest_slowdown
    if smallest is None:
        return Sentence("sight", f"from now on nobody can be called well{because(event.why)}", "quiet")
    named = f"from now on a lasting slowdown of any device by {percent(smallest)} or more is named"
    blind = "" if event.of_devices is None else f"; the whole job cannot be judged{because(event.why)}"
    return Sentence("sight", named + blind, "quiet")


@sentence_of.register
def _(event: ev.VerdictClosed) -> Sentence:
    return Sentence(
        "verdict", f"verdict {event.verdict} is over at iteration {event.until_iteration}{because(event.reason)}", "good"
    )


@sentence_of.register
def _(event: ev.VerdictScored) -> Sentence:
    if not event.correct:
        truth = f"the truth was {event.truth}" if event.truth else "nothing was wrong there"
        return Sentence("score", f"verdict {event.verdict} was wrong: {truth}", "bad")
    n = event.delay_iterations
    delay = "" if n is None else ", at its onset" if n == 0 else f", {n} iteration{'s' * (n != 1)} after the onset"
    return Sentence("score", f"verdict {event.verdict} was right{delay}", "quiet")


@sentence_of.register
def _(event: ev.PlanProposed) -> Sentence:
    if not event.optional:
        return Sentence("propose", f"{event.proposal}: {event.reason}")
    gain = "" if event.gain_percent is None else f", {event.gain_percent:.0f} % less time"
    now = "" if event.baseline_us is None else f" instead of {event.baseline_us / 1e6:.2f} s"
    predicted = "" if event.predicted_us is None else f"; predicted {event.predicted_us / 1e6:.2f} s{now}{gain}"
    return Sentence("propose", f"{event.proposal}: {event.change or event.reason}{predicted}", "ask")


@sentence_of.register
def _(event: ev.PlanApproved) -> Sentence:
    return Sentence("approve", f"{_who(event)} approves {event.proposal}{because(event.reason)}")


@sentence_of.register
def _(event: ev.PlanRejected) -> Sentence:
    return Sentence("reject", f"{_who(event)} rejects {event.proposal}{because(event.reason)}")


@sentence_of.register
def _(event: ev.PlanKept) -> Sentence:
    return Sentence("plan", f"plan {event.plan_version} stays: {event.reason}", "quiet")


@sentence_of.register
def _(event: ev.PlanExpired) -> Sentence:
    return Sentence("expire", f"{event.proposal} is void{because(event.reason)}", "quiet")


@sentence_of.register
def _(event: ev.PlanApplied) -> Sentence | None:
    if not event.proposal:
        return None
    return Sentence(
        "plan", f"plan {event.plan_version} is in force from iteration {event.iteration}{because(event.reason)}", "good"
    )


@sentence_of.register
def _(event: ev.PlanFailed) -> Sentence:
    return Sentence("plan", f"plan {event.plan_version} could not be applied{because(event.reason)}", "bad")


@sentence_of.register
def _(event: ev.PlanScored) -> Sentence:
    if event.void or event.effect_s is None:
        return Sentence("score", f"the effect of plan {event.plan_version} is void{because(event.void or '')}", "quiet")
    low, high = event.interval_s or (event.effect_s, event.effect_s)
    scale, unit = (1000, "ms") if max(map(abs, (event.effect_s, low, high))) < 0.1 else (1, "s")
    interval = f"(95 %: {scale * low:+.2f} to {scale * high:+.2f} {unit}, n = {event.n})"
    verdict, tone = _worth(low, high)
    return Sentence(
        "score",
        f"plan {event.plan_version} {verdict}: {scale * event.effect_s:+.2f} {unit} saved an iteration {interval}",
        tone,
    )


def _worth(low: float, high: float) -> tuple[str, Tone]:
    """What an interval of the time saved means."""
    if low > 0:
        return "pays", "good"
    return ("does harm", "bad") if high < 0 else ("makes no certain difference", "plain")


@sentence_of.register
def _(event: ev.Dropped) -> Sentence:
    return Sentence("dropped", dropped_sentence(with_dropped({}, event)), "bad")


@sentence_of.register
def _(event: ev.AlertOpened) -> Sentence:
    return Sentence("alert", f"{event.alert} opened: {event.text}", "bad")


@sentence_of.register
def _(event: ev.AlertClosed) -> Sentence:
    return Sentence("alert", f"{event.alert} closed{because(event.reason)}", "good")
