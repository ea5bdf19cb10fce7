"""What a decision was worth: the effect of a plan, and verdicts against injected truth.

The effect of a plan is never before-mean against after-mean, because the batches differ. Per committed iteration it is what the
old plan would have taken, at the estimated speeds, for these very batches, minus what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import msgspec

from unskew.analytics.core.cost import CostModel, Speeds
from unskew.analytics.core.iteration import CommittedIteration
from unskew.analytics.core.plan import Plan
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.scheduler.cost_benefit import interval
from unskew.collector.events import FaultInjected, PlanScored, Verdict, VerdictScored

LEAST_ITERATIONS = 10
SETTLING = 1


class Row(msgspec.Struct, frozen=True, gc=False):
    """One iteration under the new plan (us); `baseline_us` is what the old plan would have taken."""

    iteration: int
    predicted_us: float
    baseline_us: float | None
    measured_us: float


class PlanTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A change under trial: `plan` is in force from `from_iteration` on; `old` is None when it could not have gone on.

    `longer_us`: by how much the end of iterations was longer than that of `predictor` when the plan came, for what is longer
    since may be the plan's own; of a later predictor what no fit has in it (`LateEnds.again_us`).
    """

    plan: Plan
    old: Plan | None
    proposal: str
    from_iteration: int
    longer_us: float = 0.0
    predictor: int = 0
    rows: tuple[Row, ...] = ()

    @property
    def n(self) -> int:
        """Iterations that count: the first one of the plan paid for regrouping and moving layers and does not."""
        return len(self.rows)

    def add(self, committed: CommittedIteration, cost: CostModel, speeds: Speeds, predicted_us: float) -> PlanTrial:
        """The trial with one more iteration; `speeds` are those estimated now, `predicted_us` is this plan's prediction."""
        if committed.plan_version != self.plan.plan_version or committed.iteration < self.from_iteration + SETTLING:
            return self
        baseline_us = predict_iteration(self.old, committed.works, cost, speeds).iteration_us if self.old else None
        row = Row(committed.iteration, predicted_us, baseline_us, committed.measured_us)
        return msgspec.structs.replace(self, rows=(*self.rows, row))

    def until(self, iteration: int) -> PlanTrial:
        """The trial without the iterations from `iteration` on, where the fault had ended though nobody knew it yet."""
        return msgspec.structs.replace(self, rows=tuple(row for row in self.rows if row.iteration < iteration))

    def score(self) -> PlanScored:
        """The mean effect, `baseline - measured`, with its 95 % interval; void with fewer than 10 iterations or no old plan.

        The interval also covers the effect with the baseline corrected by what the predictor is off for the plan in force: who
        is wrong about the plan that runs is not to be trusted about the one that does not.
        """
        if self.n < LEAST_ITERATIONS:
            return self.void(f"only {self.n} iterations, at least {LEAST_ITERATIONS} are needed")
        means = msgspec.structs.replace(
            self.void("the old plan could not have gone on: there is nothing to compare with"),
            predicted_s=fmean(row.predicted_us for row in self.rows) / 1e6,
            measured_s=fmean(row.measured_us for row in self.rows) / 1e6,
        )
        baseline_us = [row.baseline_us for row in self.rows if row.baseline_us is not None]
        if len(baseline_us) < self.n:
            return means
        measured_us = [row.measured_us for row in self.rows]
        off = fmean(measured_us) / fmean(row.predicted_us for row in self.rows)
        effects, corrected = (
            [(scale * was - took) / 1e6 for was, took in zip(baseline_us, measured_us, strict=True)] for scale in (1.0, off)
        )
        lows, highs = zip(interval(effects), interval(corrected), strict=True)
        return msgspec.structs.replace(
            means,
            void=None,
            baseline_s=fmean(baseline_us) / 1e6,
            effect_s=fmean(effects),
            interval_s=(min(lows), max(highs)),
        )

    def void(self, why: str) -> PlanScored:
        """No effect can be stated, because `why`."""
        first = self.from_iteration + SETTLING
        return PlanScored(
            plan_version=self.plan.plan_version,
            proposal=self.proposal,
            from_iteration=self.rows[0].iteration if self.rows else first,
            to_iteration=self.rows[-1].iteration if self.rows else first,
            n=self.n,
            void=why,
        )


def score_plan(trial: PlanTrial, ended: str = "", at: int | None = None) -> PlanScored:
    """The score of a trial; one that `ended` (why: the fault ended, another plan came) counts up to iteration `at`, exclusive.

    The effect is stated when at least 10 iterations remain, else it is void with that reason.
    """
    counted = trial if at is None else trial.until(at)
    return counted.void(ended) if ended and counted.n < LEAST_ITERATIONS else counted.score()


CAUSES = {
    "slow": "slow_device", "slow_link": "slow_link", "kill": "dead", "exception": "dead", "segfault": "dead", "hang": "hung",
    "freeze": "hung",
}  # fmt: skip
HOW = {"kill": "exit", "exception": "exit", "segfault": "exit", "hang": "hung", "freeze": "frozen"}


def score_verdict(verdict: Verdict, faults: Sequence[FaultInjected], *, truth_known: bool) -> VerdictScored | None:
    """The verdict against injected truth: correct iff a fault of this rank and cause was on between its onset and its naming.

    Without such a fault a slow device or link is a false verdict where `truth_known`: on an emulated device every slowness is
    injected. Elsewhere nobody knows, and a lost rank was seen lost whoever caused it: None, there is nothing to score against.

    Errors of a correct verdict: iterations from injection to verdict (0 = within the same iteration), onset minus injection,
    and for a slow device the largest error of speed over the kinds that are slow in truth or in the verdict.
    """
    culprits = {party.link or party.rank for party in verdict.culprits}
    matching = [fault for fault in faults if culprits == {_culprit(fault)} and _same(verdict, fault)]
    if not matching and not (truth_known and verdict.cause in ("slow_device", "slow_link")):
        return None
    if not matching:
        return VerdictScored(
            verdict=verdict.verdict,
            correct=False,
            truth=None,
            delay_iterations=None,
            onset_error_iterations=None,
            speed_error=None,
        )
    fault = max(matching, key=lambda f: f.at_iteration)
    return VerdictScored(
        verdict=verdict.verdict,
        correct=True,
        truth=_name(fault),
        delay_iterations=verdict.at_iteration - fault.at_iteration,
        onset_error_iterations=verdict.since_iteration - fault.at_iteration,
        speed_error=_speed_error(verdict, fault),
    )


def _culprit(fault: FaultInjected) -> int | tuple[int, int]:
    """The rank that is struck, or the link."""
    return fault.rank if fault.peer is None else (fault.rank, fault.peer)


def _same(verdict: Verdict, fault: FaultInjected) -> bool:
    if CAUSES.get(fault.kind) != verdict.cause or HOW.get(fault.kind, "") != verdict.evidence.get("how", ""):
        return False
    ended = fault.until_iteration is not None and fault.until_iteration <= verdict.since_iteration
    return fault.at_iteration <= verdict.at_iteration and not ended


def _speed_error(verdict: Verdict, fault: FaultInjected) -> float | None:
    shaped = fault.ramp is not None or fault.every is not None or fault.of == "memory"  # no one speed is the truth
    if fault.factor is None or not verdict.speed or shaped:
        return None
    slow = {fault.phase} if fault.phase else set(verdict.speed)
    truth = {kind: 1 / fault.factor if kind in slow else 1.0 for kind in slow | set(verdict.speed)}
    return max(abs(verdict.speed.get(kind, 1.0) - speed) for kind, speed in truth.items())


def _name(fault: FaultInjected) -> str:
    factor = f" x{fault.factor:g}" if fault.factor else ""
    phase = f" {fault.phase} only" if fault.phase else ""
    peer = f" to {fault.peer}" if fault.peer is not None else ""
    return f"{fault.kind} rank {fault.rank}{peer}{factor}{phase} at iteration {fault.at_iteration}"
