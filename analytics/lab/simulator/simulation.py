"""A job, a policy and what happens to the cluster -> what came of it. Pure: no clock, no files; a seed gives the same outcome.

Between two happenings an iteration's time is constant up to noise, so a segment of them is drawn in one array operation. A
failure stops the job until it is detected; the policy answers with a layout and pauses; a failure during the pauses starts
detection anew, and the restart that it hits. A slow phase changes the iteration's time at once and is answered after the
detector's delay, with the speed that the detector estimates. A node that a spare has replaced becomes a spare itself when it is
repaired.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from unskew.analytics.cluster.accounting import Account, Lost
from unskew.analytics.cluster.event import ClusterEvent
from unskew.analytics.cluster.job import Job
from unskew.analytics.cluster.timing import capacity, iteration_s
from unskew.analytics.core.constants import constant
from unskew.analytics.lab.simulator.hardware import FATAL, Hardware
from unskew.analytics.lab.simulator.outcome import PolicyAnswer, SimulationOutcome
from unskew.analytics.lab.simulator.progress import TrainingProgress
from unskew.analytics.lab.simulator.randomness import SeededRandomness
from unskew.analytics.policies.base import WAITING, ClusterView, Policy, Reaction

__all__ = ["SimulationOptions", "simulate"]


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`noise_cv`: of one iteration; `spares`: whole nodes; `estimate_error`: speeds, delays and costs as the policy
    estimates them are wrong by up to this share, without its knowing; `speed_error`: of a speed that the detector measures, one
    standard deviation; `checkpoint_s`: time between checkpoints, None = the
    policy's own (a policy that writes none writes none either way)."""

    hours: float
    seed: int = 0
    spares: int = 0
    noise_cv: float = constant("iteration_cv")
    estimate_error: float = msgspec.field(name="belief_error", default=0.0)
    speed_error: float = constant("speed_error")
    checkpoint_s: float | None = None


LATE_S = 60.0
"""After so long it is tried again to write a checkpoint that was due while the job stood."""

_State = Literal["running", "detecting", "pausing", "waiting", "stopped"]


class _Simulation:
    def __init__(self, job: Job, policy: Policy, options: SimulationOptions) -> None:
        self.job, self.policy, self.options = job, policy, options
        self.randomness = SeededRandomness(options.seed, options.estimate_error, options.speed_error)
        self.end_s = options.hours * 3600.0
        self.checkpoint_s = policy.checkpoint_s and (options.checkpoint_s or policy.checkpoint_s)
        self.hardware = Hardware(job, options.spares)
        self.account = Account()
        self.progress = TrainingProgress(job, self.account, self.randomness.noise, options.noise_cv)
        self.layout, self.plan_version = policy.start(job), 0
        self.held = self.layout
        self.now = 0.0
        self.state: _State = "running"
        self.pauses: list[tuple[Lost, float]] = []
        self.queue: list[tuple[float, int, str, ClusterEvent, int]] = []
        self.counter = itertools.count()
        self.turn = 0  # a resumption of an earlier turn is void
        self.answers: list[PolicyAnswer] = []
        self.failures = 0
        self.aborted_s: float | None = None
        self.capacity_s = 0.0

    # --- the queue

    def push(self, at_s: float, what: str, event: ClusterEvent, turn: int = 0) -> None:
        if at_s < self.end_s:
            heapq.heappush(self.queue, (at_s, next(self.counter), what, event, turn))

    def run(self, cluster_events: Iterable[ClusterEvent]) -> SimulationOutcome:
        for event in cluster_events:
            self.push(event.at_s, "truth", event)
        if self.checkpoint_s:
            self.push(self.checkpoint_s, "save", ClusterEvent(kind="review", at_s=0.0))
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
                self.resume()
        self.advance(self.end_s)
        self.account.save()
        return self.outcome()

    # --- time passes

    def advance(self, until_s: float) -> None:
        """Book the time from now to `until_s`."""
        span = until_s - self.now
        if span <= 0:
            return
        self.capacity_s += span * capacity(self.job, self.hardware.truth)
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
        expected = iteration_s(self.job, self.layout, self.hardware.truth, self.hardware.links)
        if math.isinf(expected):
            self.account.lose("stall", span)
        else:
            left = capacity(self.job, self.hardware.truth)
            self.progress.train(self.now, span, self.layout, plan_version=self.plan_version, expected_s=expected, capacity=left)

    def pause(self, span: float) -> None:
        """The pauses of the last reaction, in their order."""
        for position, (cause, seconds) in enumerate(self.pauses):
            part = min(span, seconds)
            self.account.lose(cause, part)
            self.pauses[position] = (cause, seconds - part)
            span -= part

    def begin_pauses(self, pauses: list[tuple[Lost, float]], event: ClusterEvent) -> None:
        self.turn += 1
        self.pauses = pauses
        total = sum(seconds for _, seconds in pauses)
        if total <= 0:
            self.resume()
        else:
            self.state = "pausing"
            self.push(self.now + total, "resume", event, self.turn)

    def resume(self) -> None:
        """The pauses are over: every group holds what it works on."""
        self.pauses, self.held = [], self.layout
        self.state = self.able()

    # --- what happens

    def happen(self, event: ClusterEvent) -> None:
        """The truth changes; the policy hears of it after its delay."""
        hit = event.kind in FATAL and not self.layout.devices.isdisjoint(event.devices)
        self.failures += event.kind == "failed"
        if not self.hardware.strike(event):
            if self.state == "waiting" or self.policy.takes_spares:
                self.push(self.now, "react", ClusterEvent(kind="review", at_s=self.now))
            return
        if self.state == "stopped":
            return
        if event.kind == "slowed" and not self.randomness.found(event, self.policy.slow_recall):
            return
        if event.kind not in self.policy.sees and not hit:
            return
        delay = self.policy.delay_s(event, self.progress.ideal_s) * self.randomness.delay(event)
        if hit:
            self.state = "detecting"
            self.turn += 1
        self.push(self.now + delay, "react", event)

    def react(self, event: ClusterEvent) -> None:
        if self.state in {"detecting", "pausing"} and event.kind not in FATAL:
            self.push(self.now + max(1.0, sum(seconds for _, seconds in self.pauses)), "react", event)
            return
        known = self.hardware
        known.update_estimate(event, self.randomness.measured(event))
        before = iteration_s(self.job, self.layout, known.estimate, known.links)
        cluster = ClusterView(
            self.job,
            self.now,
            known.estimate.copy(),
            known.links,
            self.layout,
            known.spares,
            dict(known.slow_since),
            self.held,
            self.end_s,
        )
        self.apply(event, self.policy.react(cluster, event), before)

    def apply(self, event: ClusterEvent, reaction: Reaction, before_s: float) -> None:
        if reaction.layout is None:
            self.state, self.aborted_s = "stopped", self.now
            self.note(event, reaction, before_s, math.inf, acts=True)
            return
        if event.kind == "failed" and not self.layout.devices.isdisjoint(event.devices):
            if reaction.redo == "checkpoint":
                self.progress.fall_back()
            elif reaction.redo == "iteration":
                self.progress.redo(self.layout)
        self.hardware.replace(reaction.replaced, reaction.spares)
        for later in reaction.later:
            self.push(later.at_s, "react" if later.kind == "review" else "truth", later)
        changed = reaction.layout != self.layout
        self.layout = reaction.layout
        self.plan_version += changed and reaction.layout != WAITING
        if reaction.layout == WAITING or any(cause == "restart" for cause, _ in reaction.pauses):
            self.held = WAITING
        predicted = iteration_s(self.job, self.layout, self.hardware.estimate, self.hardware.links)
        longer = self.randomness.pauses(event, len(reaction.pauses))
        pauses = [(cause, seconds * by) for (cause, seconds), by in zip(reaction.pauses, longer, strict=True) if seconds > 0]
        self.begin_pauses([*self.left_of_pauses(pauses, changed=changed), *pauses], event)
        self.note(event, reaction, before_s, predicted, acts=changed or bool(reaction.pauses))

    def left_of_pauses(self, pauses: list[tuple[Lost, float]], *, changed: bool) -> list[tuple[Lost, float]]:
        """What goes on of the pauses in force: all when the answer changes nothing; of a restart what is left, unless another
        begins or the job waits."""
        if self.layout == WAITING or any(cause == "restart" for cause, _ in pauses):
            return []
        return [(cause, left) for cause, left in self.pauses if left > 0 and (cause == "restart" or not (changed or pauses))]

    def able(self) -> _State:
        """Running; or waiting for devices that the layout needs and that are known to be dead, detecting if it is not known."""
        if self.layout == WAITING:
            return "waiting"
        states: dict[str, _State] = {"nobody": "running", "known": "waiting", "unknown": "detecting"}
        return states[self.hardware.missing(self.layout)]

    def save(self, event: ClusterEvent) -> None:
        """A checkpoint: a short stall. One that is due while the job stands is written within a minute of its going on."""
        assert self.checkpoint_s is not None
        running = self.state == "running"
        if running:
            self.progress.save(self.layout)
            self.begin_pauses([("checkpoint", constant("checkpoint_stall_s"))], event)
        self.push(self.now + (self.checkpoint_s if running else min(LATE_S, self.checkpoint_s)), "save", event)

    def note(self, event: ClusterEvent, reaction: Reaction, before_s: float, predicted_s: float, *, acts: bool) -> None:
        resumed = self.now + sum(seconds for _, seconds in self.pauses) if reaction.layout is not None else self.end_s
        self.answers.append(
            PolicyAnswer(
                at_s=self.now,
                resumed_s=resumed,
                plan_version=self.plan_version,
                iteration=self.progress.iteration,
                event=event,
                reaction=reaction,
                acts=acts,
                predicted_s=predicted_s,
                before_s=before_s,
            )
        )

    def outcome(self) -> SimulationOutcome:
        alarms = self.policy.false_alarms_per_hour * self.policy.false_alarm_s * self.end_s / 3600.0
        lost = dict(self.account.lost_s)
        useful = self.account.useful_s
        running = 1.0 - lost["stopped"] / self.end_s
        wasted = alarms * running * useful / self.end_s  # false alarms stop a job that would have worked
        lost["detection"] += wasted
        useful -= wasted
        return SimulationOutcome(
            job=self.job, policy=self.policy.name, whole_s=self.end_s, useful_s=useful, lost_s=lost,
            unexplained_s=self.end_s - useful - sum(lost.values()),
            tokens=self.progress.tokens * (1 - wasted / max(useful + wasted, 1e-9)),
            iterations=self.progress.iteration, failures=self.failures, aborted_s=self.aborted_s,
            fault_free_s=self.progress.ideal_s, capacity=self.capacity_s / self.end_s, checkpoint_s=self.checkpoint_s,
            segments=self.progress.segments, answers=self.answers,
        )  # fmt: skip


def simulate(job: Job, policy: Policy, cluster_events: Iterable[ClusterEvent], options: SimulationOptions) -> SimulationOutcome:
    """Play `cluster_events` (any order) against `policy` for `options.hours`."""
    return _Simulation(job, policy, options).run(sorted(cluster_events, key=lambda event: event.at_s))
