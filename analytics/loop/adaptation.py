"""The loop, without its muscles: whole committed iterations in; predictions, verdicts, proposals and scores out.

Everything here is a function of the iterations and of the plans that came into force, never of the time of day, so a replay of
the log takes the same decisions. The steps per iteration:

1. the predictor is fitted in warm-up and again from time to time, on drift and after a change of plan (retraining.py);
2. the iteration is predicted from its own batches, and the Detector judges it; who is slow and excused by others is probed;
3. after a verdict, a death or the end of a fault, the Scheduler is asked for a better plan;
4. an applied plan is scored against what the old one would have cost, on the very batches that ran.
"""

from __future__ import annotations

import msgspec

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.iteration import CommittedIteration, IterationTelemetry
from unskew.analytics.core.plan import Plan, PlanError
from unskew.analytics.detector.detector import Detector, Verdicts
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.standby import StandbyReading, believe
from unskew.analytics.health.gpu_evidence import GpuHistory, remembered, with_gpu
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.health.probing import Probe, ProbeOptions, measured, references, wanted
from unskew.analytics.loop.hindsight import Hindsight, seen_dead
from unskew.analytics.loop.scoring import PlanTrial, score_plan, score_verdict
from unskew.analytics.pipeline.prediction import predict_iteration, predict_iterations
from unskew.analytics.predictor.fit import Fit
from unskew.analytics.predictor.retraining import IterationSample, Retraining, RetrainingOptions, speeds_then, suspicion, turned
from unskew.analytics.scheduler.propose import Proposal, SchedulerOptions, SchedulerState, propose
from unskew.collector.events import (
    AdaptationStarted,
    Control,
    FaultInjected,
    IterationJudged,
    Probed,
    Regrouped,
    StandbyMeasured,
    Verdict,
    VerdictClosed,
)


class AdaptationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are iterations. `settle`: so long after a change of plan or of belief before the Scheduler is asked; `score_over`:
    an effect is scored over so many (scoring.py says over how few it is void)."""

    retraining: RetrainingOptions = RetrainingOptions()
    recent: int = 20
    settle: int = 2
    score_over: int = 20
    probing: ProbeOptions = ProbeOptions()
    scheduler: SchedulerOptions = SchedulerOptions()


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What the Scheduler must know of the place, beyond what the log tells (see `scheduler.State`).

    `shared_cores`: ranks outnumber these cores of a real device, None elsewhere. Then an iteration takes at least all its CPU
    time over the cores, and no gain of a plan is claimed. `truth_known`: every slowness is injected (emulated devices).
    `detector`: the thresholds for this class of device. `classes`: device class -> its ranks (`CostModel.classes`).
    """

    origin: Plan
    iterations: int
    layer_bytes: tuple[int, ...]
    bytes_per_us: float
    regroup_us: float
    shared_cores: int | None = None
    detector: DetectorOptions = DetectorOptions()
    truth_known: bool = False
    classes: dict[str, tuple[int, ...]] = {}


class AdaptationStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration led to. `reason` says why there is no proposal, when the Scheduler was asked, or why `probe`."""

    judged: IterationJudged
    events: tuple[Control, ...] = ()
    proposal: Proposal | None = None
    verdict: int | None = None
    reason: str = ""
    probe: Probe | None = None


class Adaptation:
    """The state of the loop for one run."""

    def __init__(self, site: Site, options: AdaptationOptions | None = None) -> None:
        self.site, self.options = site, options or AdaptationOptions()
        self.detector = Detector(site.detector)
        self.retraining = Retraining(self.options.retraining, site.classes)
        self._alive = frozenset(site.origin.ranks)
        self._ask_at: int | None = None
        self._verdict: int | None = None
        self._trial: PlanTrial | None = None
        self._in_force: Plan | None = None
        self._references: dict[int, float] = {}
        self._probed_at: int | None = None
        self._readings: dict[int, tuple[StandbyReading, ...]] = {}
        self._faults: list[FaultInjected] = []
        self._verdicts: dict[int, Verdict] = {}
        self._hindsight: dict[int, Hindsight] = {}
        self._gpus: dict[int, GpuHistory] = {}

    @property
    def fitted(self) -> Fit | None:
        """The predictor in force; None during warm-up."""
        return self.retraining.fitted

    def started(self) -> AdaptationStarted:
        """What this was given, for the log: `Adaptation.like` makes another that decides the same."""
        return AdaptationStarted(site=msgspec.to_builtins(self.site), options=msgspec.to_builtins(self.options))

    @staticmethod
    def like(started: AdaptationStarted) -> Adaptation:
        """One at its beginning, as the log says. Raises `msgspec.ValidationError` when this code knows other options."""
        return Adaptation(msgspec.convert(started.site, Site), msgspec.convert(started.options, AdaptationOptions))

    def observe(self, released: IterationTelemetry, plan: Plan) -> AdaptationStep:
        """Take the next committed iteration, which ran under `plan`."""
        committed = released.committed
        self._gpus = remembered(self._gpus, released.gpus)
        found = self._take_probes(released)
        speeds_before = speeds_then(self.detector.speeds)
        step = self._judge(committed, plan) if self.fitted is not None else AdaptationStep(judged=_unjudged(committed))
        step = msgspec.structs.replace(step, events=(*found, *step.events))
        if not committed.log_complete:
            return step
        # Learnt from only after it was judged: no iteration is predicted by itself.
        # Where cores are shared the prediction is bounded by them, which no fit can mend.
        predicted_us = step.judged.predicted_us if self.site.shared_cores is None else None
        fitted = self.retraining.observe(IterationSample(released, plan, speeds_before, predicted_us, suspicion(step.judged)))
        said = tuple(event for event in step.events if isinstance(event, Verdict | VerdictClosed))
        for rank, since in turned(said, self._verdicts).items():
            self.retraining.believed(rank, since, self.detector.speeds.get(rank, {}))
        return msgspec.structs.replace(step, events=(*step.events, *([fitted] if fitted else [])))

    def _judge(self, committed: CommittedIteration, plan: Plan) -> AdaptationStep:
        if self.fitted is None or not committed.log_complete:
            return AdaptationStep(judged=_unjudged(committed))
        cost = self.fitted.model
        prediction = predict_iteration(plan, committed.works, cost, self.detector.speeds)
        predicted_us = prediction.iteration_us
        if self.site.shared_cores is not None:
            predicted_us = max(predicted_us, sum(map(float, prediction.timeline.busy_us.values())) / self.site.shared_cores)
        judgement = self.detector.observe(committed, plan, cost, predicted_us)
        events = self._look_back(judgement.judged)
        events += self._take_verdicts(judgement.verdicts, committed.iteration)
        events += self._score(committed, predicted_us)
        proposal, reason = self._ask(committed.iteration, plan, cost)
        step = AdaptationStep(
            judged=judgement.judged, events=tuple(events), proposal=proposal, verdict=self._verdict, reason=reason
        )
        return step if proposal is not None or reason else self._doubt(step, committed.iteration)

    def _doubt(self, step: AdaptationStep, iteration: int) -> AdaptationStep:
        """The step, with a probe where the evidence is not enough and more can be had."""
        options = self.options.probing
        if not self._references or self.site.shared_cores is not None:
            return step
        probe, reason = wanted(iteration, self.detector.doubted(options.over), len(self._alive), self._probed_at, options)
        if probe is None:
            return step
        self._probed_at = iteration
        return msgspec.structs.replace(step, probe=probe, reason=reason)

    def _take_probes(self, released: IterationTelemetry) -> list[Control]:
        """What was probed before this iteration; the first one, when the run began, is what later ones are compared with."""
        if not released.probes:
            return []
        if not self._references:
            self._references = references(released.probes)
            return []
        iteration, found = released.committed.iteration, measured(released.probes, self._references)
        events: list[Control] = [
            Probed(
                at_iteration=iteration,
                ranks=tuple(sorted(found.slowdowns)),
                slowdowns={str(rank): round(slowdown, 4) for rank, slowdown in found.slowdowns.items()},
                links=tuple((sender, receiver, round(rate, 3)) for (sender, receiver), rate in found.links.items()),
                cost_us=found.cost_us,
            )
        ]
        for rank, slowdown in found.slowdowns.items():
            if slowdown >= self.options.probing.least_slowdown:
                events += self._take_verdicts(self.detector.confirm(rank, slowdown, iteration), iteration)
        return events

    def lost(self, suspect: Suspect, iteration: int) -> list[Control]:
        """A rank is dead, hung or frozen: the verdict, its score, and the end of the trial under way."""
        self._alive -= {suspect.rank}
        return self._take_verdicts(self.detector.lost(suspect, iteration), iteration)

    def measured(self, rank: int, iteration: int, product_us: int, watermark: int) -> list[Control]:
        """A rank that executes nothing has multiplied its matrix, asked in `iteration`; `watermark` iterations are judged."""
        reference = self._references.get(rank)
        slowdown = product_us / reference if reference else None
        told = StandbyMeasured(
            rank=rank,
            iteration=iteration,
            product_us=product_us,
            slowdown=None if slowdown is None else round(slowdown, 4),
            watermark=watermark,
        )
        if slowdown is None:
            return [told]
        readings = (*self._readings.get(rank, ()), StandbyReading(iteration, slowdown))
        judged = watermark - 1
        self.detector.state, verdicts = believe(self.detector.state, rank, readings, judged, self.detector.options)
        self._readings[rank] = () if verdicts else readings
        return [told, *self._take_verdicts(verdicts, judged)]

    def injected(self, fault: FaultInjected) -> None:
        """The truth, for scoring verdicts."""
        self._faults.append(fault)

    def expected_us(self, plan: Plan) -> float | None:
        """Mean predicted iteration of `plan` on the recent batches; None before there is a predictor."""
        batches = self.retraining.recent(self.options.recent)
        if self.fitted is None or not batches:
            return None
        return float(predict_iterations(plan, batches, self.fitted.model, self.detector.speeds).mean())

    def applied(self, plan: Plan, proposal: str, regrouped: Regrouped, *, old: Plan | None) -> list[Control]:
        """`plan` is in force. `old` = the plan it replaced by choice, None when there was no choice.

        What this change cost is what the next one is believed to cost.
        """
        iteration = regrouped.iteration
        before, self._in_force = self._in_force, plan
        self._readings = {rank: readings for rank, readings in self._readings.items() if rank not in plan.executors}
        if plan.plan_version > 0:
            regroup_us = 1e6 * (regrouped.seconds - regrouped.migrate_seconds)
            self.site = msgspec.structs.replace(self.site, regroup_us=regroup_us)
        if regrouped.moved_bytes:
            rate = regrouped.moved_bytes / (1e6 * regrouped.migrate_seconds)
            self.site = msgspec.structs.replace(self.site, bytes_per_us=rate)
        if before is not None and plan.digest == before.digest:  # the same plan under another number: a trial goes on
            self._trial = msgspec.structs.replace(self._trial, plan=plan) if self._trial is not None else None
            return []
        events = self._end_trial(f"plan {plan.plan_version} came at iteration {iteration}")
        if plan.plan_version > 0:
            self._trial = PlanTrial(plan=plan, old=old, proposal=proposal, from_iteration=iteration)
            self._ask_at = iteration + self.options.settle
        self.retraining.plan_changed(iteration)
        return events

    def finish(self) -> list[Control]:
        """The run ends: score what there is."""
        return [*self._end_trial("the run ended"), *self._look_back(None)]

    def _take_verdicts(self, verdicts: Verdicts, iteration: int) -> list[Control]:
        verdicts = tuple(with_gpu(one, self._gpus) if isinstance(one, Verdict) else one for one in verdicts)
        events: list[Control] = list(verdicts)
        for verdict in verdicts:
            self._ask_at = iteration + self.options.settle
            if isinstance(verdict, Verdict):
                self._verdict = verdict.verdict
                if verdict.verdict not in self._verdicts:
                    scored = score_verdict(verdict, self._faults, truth_known=self.site.truth_known)
                    events += [scored] if scored else self._await(verdict)
                if verdict.cause == "slow_device":
                    known = verdict.verdict in self._verdicts
                    why = f"rank {verdict.culprits[0].rank}'s speed changed" if known else "another device turned slow"
                    events += self._end_trial(why, verdict.since_iteration)
                self._verdicts[verdict.verdict] = verdict
            elif isinstance(verdict, VerdictClosed):
                events += self._hindsight_of(verdict.verdict)
                events += self._end_trial(f"the fault of verdict {verdict.verdict} ended", verdict.until_iteration)
        return events

    def _await(self, verdict: Verdict) -> list[Control]:
        """No injected fault tells of it: watch what comes later."""
        if verdict.cause == "slow_device":
            self._hindsight[verdict.verdict] = Hindsight(verdict)
        return [seen_dead(verdict)] if verdict.cause == "dead" else []

    def _look_back(self, judged: IterationJudged | None) -> list[Control]:
        """Scores of verdicts that have been watched long enough; of all when nothing more comes."""
        if judged is not None:
            self._hindsight = {number: watched.add(judged) for number, watched in self._hindsight.items()}
        ready = [number for number, watched in self._hindsight.items() if judged is None or watched.complete]
        return [event for number in ready for event in self._hindsight_of(number)]

    def _hindsight_of(self, number: int) -> list[Control]:
        watched = self._hindsight.pop(number, None)
        scored = watched.score() if watched else None
        return [scored] if scored else []

    def _score(self, committed: CommittedIteration, predicted_us: float) -> list[Control]:
        """Add the iteration to the trial under way; close it when it has lasted long enough."""
        trial = self._trial
        if trial is None or self.fitted is None or committed.plan_version != trial.plan.plan_version:
            return []
        self._trial = trial.add(committed, self.fitted.model, self.detector.speeds, predicted_us)
        if self._trial.n < self.options.score_over:
            return []
        scored, self._trial = self._trial.score(), None
        return [scored]

    def _end_trial(self, why: str, at: int | None = None) -> list[Control]:
        """End the trial early, counting its iterations before `at`: its score when those suffice, else void with the reason."""
        trial, self._trial = self._trial, None
        if trial is None:
            return []
        return [score_plan(trial, why, at)]

    def _ask(self, iteration: int, plan: Plan, cost: CostModel) -> tuple[Proposal | None, str]:
        if self._ask_at is None or iteration < self._ask_at:
            return None, ""
        self._ask_at = None
        if self.site.shared_cores is not None:
            return None, f"ranks share {self.site.shared_cores} cores, so no gain of another plan can be claimed"
        state = SchedulerState(
            origin=self.site.origin,
            alive=self._alive,
            speeds=speeds_then(self.detector.speeds),
            cost=cost,
            batches=tuple(self.retraining.recent(self.options.recent)),
            iterations=self.site.iterations,
            layer_bytes=self.site.layer_bytes,
            bytes_per_us=self.site.bytes_per_us,
            regroup_us=self.site.regroup_us,
            slow_since={
                verdict.culprits[0].rank: verdict.since_iteration
                for verdict in self._verdicts.values()
                if verdict.cause == "slow_device" and verdict.culprits[0].rank is not None
            },
        )
        try:
            proposal, reason = propose(iteration + 1, plan, state, self.options.scheduler)
        except PlanError as error:  # the plan in force works: no fault of ours in seeking a better one may end training
            return None, f"no other plan could be made: {error}"
        if proposal is not None:
            evidence = {**proposal.evidence, "predictor": self.retraining.number}
            proposal = msgspec.structs.replace(proposal, evidence=evidence)
        return proposal, reason


def _unjudged(committed: CommittedIteration) -> IterationJudged:
    return IterationJudged(
        iteration=committed.iteration,
        plan_version=committed.plan_version,
        measured_us=round(committed.measured_us),
        log_complete=committed.log_complete,
    )
