"""A job, a policy and what happens to the cluster -> what came of it. Pure: no clock, no files; a seed gives the same outcome.

Between two happenings an iteration's time is constant up to noise, so a segment of them is drawn in one array operation. A
failure stops the job until it is detected; the policy answers with a layout and pauses; a failure during the pauses starts
detection anew. A slow phase changes the iteration's time at once and is answered after the detector's delay, with the speed
that the detector believes. A node that a spare has replaced becomes a spare itself when it is repaired.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np

from unskew.analytics.cluster.accounting import Account, Lost
from unskew.analytics.cluster.happening import Happening
from unskew.analytics.cluster.job import Job
from unskew.analytics.cluster.timing import Links, Speeds, capacity, fault_free_s, iteration_s
from unskew.analytics.constants import constant
from unskew.analytics.policies.base import Cluster, Policy, Reaction

_FATAL = {"failed", "maintenance"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`noise_cv`: of one iteration; `spares`: whole nodes; `belief_error`: speeds, delays and costs as the policy believes them
    are wrong by up to this share, without its knowing."""

    hours: float
    seed: int = 0
    spares: int = 0
    noise_cv: float = constant("iteration_cv")
    belief_error: float = 0.0


class Segment(msgspec.Struct, frozen=True):
    """Iterations in a row under one layout: `start_s` and `seconds` are arrays [iteration]; `epoch` counts layouts from 0.

    `micro_batches` of each; a policy that leaves replicas out may train fewer than the job's.
    """

    epoch: int
    micro_batches: int
    first_iteration: int
    start_s: np.ndarray
    seconds: np.ndarray
    predicted_s: float


class Change(msgspec.Struct, frozen=True):
    """A reaction: `epoch` is in force from `iteration` on."""

    at_s: float
    resumed_s: float
    epoch: int
    iteration: int
    event: Happening
    reaction: Reaction
    predicted_s: float
    before_s: float


class Outcome(msgspec.Struct, kw_only=True):
    """What came of it. `lost_s` + `useful_s` + `unexplained_s` = `whole_s`; `rates` are of the whole time."""

    job: Job
    policy: str
    whole_s: float
    useful_s: float
    lost_s: dict[str, float]
    unexplained_s: float
    tokens: float
    iterations: int
    failures: int
    aborted_s: float | None
    fault_free_s: float
    capacity: float
    segments: list[Segment]
    changes: list[Change]

    @property
    def effective(self) -> float:
        """Effective training time: the share of the whole that was useful."""
        return self.useful_s / self.whole_s

    @property
    def samples_per_s(self) -> float:
        return self.tokens / self.job.seq / self.whole_s

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak of all the job's devices."""
        return self.tokens / self.job.tokens * self.job.flops / (self.whole_s * self.job.devices * constant(self.job.peak))

    def facts(self) -> dict[str, object]:
        """The numbers without the series: what is printed and stored."""
        return {
            "job": self.job.name, "policy": self.policy, "hours": self.whole_s / 3600.0, "devices": self.job.devices,
            "iterations": self.iterations, "failures": self.failures, "effective_training_time": self.effective,
            "goodput": self.effective, "samples_per_s": self.samples_per_s, "tokens": self.tokens, "mfu": self.mfu,
            "fault_free_iteration_s": self.fault_free_s, "surviving_capacity": self.capacity, "aborted_s": self.aborted_s,
            "changes": len(self.changes), "useful_s": self.useful_s, "lost_s": dict(self.lost_s),
            "unexplained_s": self.unexplained_s,
        }  # fmt: skip


_State = Literal["running", "detecting", "pausing", "waiting", "stopped"]


class _Simulation:
    def __init__(self, job: Job, policy: Policy, options: Options) -> None:
        self.job, self.policy, self.options = job, policy, options
        self.random = np.random.default_rng(options.seed)
        self.end_s = options.hours * 3600.0
        self.truth: Speeds = np.ones(job.devices)
        self.belief: Speeds = np.ones(job.devices)
        self.links: Links = {}
        self.layout = policy.start(job)
        self.ideal_s = fault_free_s(job)
        self.account = Account()
        self.now, self.spares = 0.0, options.spares
        self.state: _State = "running"
        self.pauses: list[tuple[Lost, float]] = []
        self.queue: list[tuple[float, int, str, Happening, int]] = []
        self.counter = itertools.count()
        self.turn = 0  # a resumption of an earlier turn is void
        self.epoch, self.iteration, self.saved_iteration = 0, 0, 0
        self.progress, self.saved_tokens, self.tokens = 0.0, 0.0, 0.0
        self.segments: list[Segment] = []
        self.changes: list[Change] = []
        self.failures = 0
        self.aborted_s: float | None = None
        self.capacity_s, self.noise_s = 0.0, 0.0
        self.slow_since: dict[int, float] = {}
        self.on_spares: set[int] = set()  # slots that a spare's hardware serves

    # --- the queue

    def push(self, at_s: float, what: str, event: Happening, turn: int = 0) -> None:
        if at_s < self.end_s:
            heapq.heappush(self.queue, (at_s, next(self.counter), what, event, turn))

    def run(self, happenings: Iterable[Happening]) -> Outcome:
        for event in happenings:
            self.push(event.at_s, "truth", event)
        if self.policy.checkpoint_s:
            self.push(self.policy.checkpoint_s, "save", Happening(kind="review", at_s=0.0))
        while self.queue:
            at_s, _, what, event, turn = heapq.heappop(self.queue)
            self.advance(at_s)
            if what == "truth":
                self.happen(event)
            elif self.state == "stopped":
                continue
            elif what == "save":
                self.save(event)
            elif what == "react":
                self.react(event)
            elif what == "resume" and turn == self.turn:
                self.state = self.able()
        self.advance(self.end_s)
        self.account.save()
        return self.outcome()

    # --- time passes

    def advance(self, until_s: float) -> None:
        """Book the time from now to `until_s`."""
        span = until_s - self.now
        if span <= 0:
            return
        self.capacity_s += span * capacity(self.job, self.truth)
        if self.state == "running":
            self.train(span)
        elif self.state == "detecting":
            self.account.lose("detection", span)
        elif self.state == "pausing":
            self.pause(span)
        elif self.state == "waiting":
            self.account.lose("stall", span)
        else:
            self.account.lose("stopped", span)
        self.now = until_s

    def train(self, span: float) -> None:
        """`span` seconds of iterations under the present layout, the last of them perhaps unfinished."""
        expected = iteration_s(self.job, self.layout, self.truth, self.links)
        if math.isinf(expected):
            self.account.lose("stall", span)
            return
        count = int(span / expected) + 4
        count += int(8 * self.options.noise_cv * count**0.5)
        seconds = np.full(count, expected)
        if self.options.noise_cv:
            seconds *= np.maximum(0.5, 1.0 + self.random.standard_normal(count) * self.options.noise_cv)
        ends = np.cumsum(seconds) - self.progress * seconds[0]
        done = int(np.searchsorted(ends, span, side="right"))
        if done:
            starts = self.now + np.concatenate([[ends[0] - seconds[0]], ends[: done - 1]])
            self.segments.append(
                Segment(self.epoch, self.layout.micro_batches, self.iteration, starts, seconds[:done], expected)
            )
        # Named by the model: iterations at their expected time. What the noise did to the clock stays unexplained.
        begun = float((span - ends[done - 1]) / seconds[done] if done else self.progress + span / seconds[0])
        worked = (done + begun - self.progress) * expected
        share = self.layout.micro_batches / self.job.micro_batches
        self.account.work(worked, share * self.ideal_s / expected, capacity(self.job, self.truth))
        self.noise_s += span - worked
        self.progress = min(begun, 1.0)
        self.iteration += done
        self.tokens += done * share * self.job.tokens

    def pause(self, span: float) -> None:
        """The pauses of the last reaction, in their order."""
        for position, (cause, seconds) in enumerate(self.pauses):
            part = min(span, seconds)
            self.account.lose(cause, part)
            self.pauses[position] = (cause, seconds - part)
            span -= part

    # --- what happens

    def happen(self, event: Happening) -> None:
        """The truth changes; the policy hears of it after its delay."""
        devices = list(event.devices)
        hit = False
        if event.kind in _FATAL:
            self.failures += event.kind == "failed"
            hit = bool(self.layout.devices & set(devices))
            self.truth[devices] = 0.0
        elif event.kind == "slowed":
            self.truth[devices] = np.where(self.truth[devices] > 0, event.speed or 0.0, 0.0)
        elif event.kind == "recovered":
            self.truth[devices] = np.where(self.truth[devices] > 0, 1.0, 0.0)
        elif event.kind == "joined":
            if self.on_spares.issuperset(devices) and (self.truth[devices] > 0).all():
                self.spares += len({self.job.node(device) for device in devices})
                self.on_spares -= set(devices)
                if self.state == "waiting":
                    self.push(self.now, "react", Happening(kind="review", at_s=self.now))
                return
            self.truth[devices] = 1.0
        elif event.link is not None:
            links = {link: delay for link, delay in self.links.items() if link != event.link}
            self.links = links | ({event.link: event.delay_s or 0.0} if event.kind == "link_slowed" else {})
        if self.state == "stopped":
            return
        if event.kind == "slowed" and self.random.random() > self.policy.slow_recall:
            return
        if event.kind not in self.policy.sees and not hit:
            return
        delay = self.policy.delay_s(event, self.ideal_s) * self.wrong()
        if hit:
            self.state = "detecting"
            self.turn += 1
        self.push(self.now + delay, "react", event)

    def believe(self, event: Happening) -> None:
        """What the policy takes from the event: a speed that was measured, not given."""
        devices = list(event.devices)
        if event.kind in _FATAL:
            self.belief[devices] = 0.0
        elif event.kind == "slowed":
            error = 1.0 + constant("speed_error") * float(self.random.standard_normal())
            self.belief[devices] = np.clip(self.truth[devices] * error * self.wrong(), 0.02, 1.0) * (self.truth[devices] > 0)
            self.slow_since |= dict.fromkeys(devices, event.at_s)
        elif event.kind in {"recovered", "joined"}:
            self.belief[devices] = self.truth[devices]
            for device in devices:
                self.slow_since.pop(device, None)

    def wrong(self) -> float:
        error = self.options.belief_error
        return 1.0 if error == 0 else float(1.0 + self.random.uniform(-error, error))

    def react(self, event: Happening) -> None:
        if self.state in {"detecting", "pausing"} and event.kind not in _FATAL:
            self.push(self.now + max(1.0, sum(seconds for _, seconds in self.pauses)), "react", event)
            return
        self.believe(event)
        cluster = Cluster(self.job, self.now, self.belief.copy(), self.links, self.layout, self.spares, dict(self.slow_since))
        before = iteration_s(self.job, self.layout, self.belief, self.links)
        self.apply(event, self.policy.react(cluster, event), before)

    def apply(self, event: Happening, reaction: Reaction, before_s: float) -> None:
        fatal = bool(self.layout.devices & set(event.devices)) and event.kind in _FATAL
        if reaction.layout is None:
            self.state, self.aborted_s = "stopped", self.now
            self.note(event, reaction, before_s, math.inf)
            return
        if event.kind == "failed" and fatal:
            self.throw_away(reaction)
        self.spares -= reaction.spares
        replaced = list(reaction.replaced)
        self.truth[replaced] = self.belief[replaced] = 1.0
        self.on_spares |= set(replaced)
        for later in reaction.later:
            self.push(later.at_s, "react" if later.kind == "review" else "truth", later)
        changed = reaction.layout != self.layout
        self.layout = reaction.layout
        self.epoch += changed
        predicted = iteration_s(self.job, self.layout, self.belief, self.links)
        self.pauses = [(cause, seconds * self.wrong()) for cause, seconds in reaction.pauses if seconds > 0]
        total = sum(seconds for _, seconds in self.pauses)
        self.turn += 1
        self.state = "pausing" if total > 0 else self.able()
        if total > 0:
            self.push(self.now + total, "resume", event, self.turn)
        if changed or reaction.pauses:
            self.note(event, reaction, before_s, predicted)

    def able(self) -> _State:
        """Running; or waiting for devices that the layout needs and that are known to be dead, detecting if it is not known."""
        needed = self.layout.members[0]
        gone = needed[self.truth[needed] == 0]
        if not len(gone):
            return "running"
        return "detecting" if (self.belief[gone] > 0).any() else "waiting"

    def throw_away(self, reaction: Reaction) -> None:
        if reaction.redo == "checkpoint":
            self.account.fall_back()
            self.iteration, self.tokens, self.progress = self.saved_iteration, self.saved_tokens, 0.0
            self.segments = _until(self.segments, self.iteration)
        elif reaction.redo == "iteration":
            whole = self.under_way_s()
            self.account.since_save["useful"] = self.account.since_save.get("useful", 0.0) - whole
            self.account.lose("redo", whole)
            self.progress = 0.0

    def under_way_s(self) -> float:
        """What of `useful` belongs to the iteration that has begun."""
        return self.ideal_s * self.layout.micro_batches / self.job.micro_batches * self.progress

    def save(self, event: Happening) -> None:
        """A checkpoint: a short stall, then nothing before it can be lost."""
        assert self.policy.checkpoint_s is not None
        if self.state == "running":
            self.account.save(under_way_s=self.under_way_s())
            self.saved_iteration, self.saved_tokens = self.iteration, self.tokens
            self.turn += 1
            self.state, self.pauses = "pausing", [("checkpoint", constant("checkpoint_stall_s"))]
            self.push(self.now + constant("checkpoint_stall_s"), "resume", event, self.turn)
        self.push(self.now + self.policy.checkpoint_s, "save", event)

    def note(self, event: Happening, reaction: Reaction, before_s: float, predicted_s: float) -> None:
        resumed = self.now + sum(seconds for _, seconds in self.pauses) if reaction.layout is not None else self.end_s
        self.changes.append(Change(self.now, resumed, self.epoch, self.iteration, event, reaction, predicted_s, before_s))

    def outcome(self) -> Outcome:
        alarms = self.policy.false_alarms_per_hour * self.policy.false_alarm_s * self.end_s / 3600.0
        lost = dict(self.account.lost_s)
        useful = self.account.useful_s
        running = 1.0 - lost["stopped"] / self.end_s
        wasted = alarms * running * useful / self.end_s  # false alarms stop a job that would have worked
        lost["detection"] += wasted
        useful -= wasted
        return Outcome(
            job=self.job, policy=self.policy.name, whole_s=self.end_s, useful_s=useful, lost_s=lost,
            unexplained_s=self.end_s - useful - sum(lost.values()),
            tokens=self.tokens * (1 - wasted / max(useful + wasted, 1e-9)),
            iterations=self.iteration, failures=self.failures, aborted_s=self.aborted_s, fault_free_s=self.ideal_s,
            capacity=self.capacity_s / self.end_s, segments=self.segments, changes=self.changes,
        )  # fmt: skip


def _until(segments: Sequence[Segment], iteration: int) -> list[Segment]:
    """The segments without iterations from `iteration` on."""
    kept = []
    for part in segments:
        n = min(len(part.seconds), iteration - part.first_iteration)
        if n > 0:
            kept.append(msgspec.structs.replace(part, start_s=part.start_s[:n], seconds=part.seconds[:n]))
    return kept


def simulate(job: Job, policy: Policy, happenings: Iterable[Happening], options: Options) -> Outcome:
    """Play `happenings` (any order) against `policy` for `options.hours`."""
    return _Simulation(job, policy, options).run(sorted(happenings, key=lambda event: event.at_s))
