"""The loop, without its muscles: whole committed iterations in; predictions, verdicts, proposals and scores out.

Everything here is a function of the iterations and of the plans that came into force, never of the time of day, so a replay of
the log takes the same decisions. Each part keeps its own state; here they are put together. The steps per iteration:

1. what was probed before it is read (measurements.py);
2. it is predicted from its own batches, and the Detector judges it (monitor.py);
3. verdicts are scored against injected truth or by what came later (hindsight.py), an applied plan against what the old one
   would have cost, on the very batches that ran (scoring.py);
4. after a verdict, a death or the end of a fault, the Scheduler is asked for a better plan (plans.py); who is slow and excused
   by others is probed;
5. the predictor learns from it: in warm-up and again from time to time, on drift and after a change of plan (retraining.py).
"""

from __future__ import annotations

from functools import partial

import msgspec

from unskew.analytics.core.iteration import CommittedIteration, IterationTelemetry
from unskew.analytics.core.outcome import Sight
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector import products
from unskew.analytics.detector.detector_state import Verdicts
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.health.probing import Probe
from unskew.analytics.loop.by_policy.follower import PolicyFollower
from unskew.analytics.loop.by_policy.view import RunFacts
from unskew.analytics.loop.detection_limit import LimitState
from unskew.analytics.loop.hindsight import VerdictScoring
from unskew.analytics.loop.measurements import Measurements
from unskew.analytics.loop.monitor import Monitor
from unskew.analytics.loop.plans import Asking
from unskew.analytics.loop.scoring import PlanTrial, score_plan
from unskew.analytics.loop.site import AdaptationOptions, Site
from unskew.analytics.predictor.retraining import Retraining
from unskew.analytics.scheduler.propose import Proposal
from unskew.analytics.scheduler.recovery import recover_with_spares
from unskew.collector.events import (
    AdaptationStarted,
    Control,
    DetectionLimit,
    DeviceJoined,
    FaultInjected,
    IterationJudged,
    Note,
    Regrouped,
    StandbyMeasured,
    Verdict,
    VerdictClosed,
)

SLOW_AT_THE_BEGINNING = "when the run began they took longer for the same product than others of their class"

UNSEEN_BY_PRODUCT = (
    "is slow, but not in forward passes: its product on standby, which is one, closes no verdict unless it was slow there too"
)


class AdaptationStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one iteration led to. `reason` is why there is no proposal, when the Scheduler was asked, or why `probe`."""

    judged: IterationJudged
    events: tuple[Control, ...] = ()
    proposal: Proposal | None = None
    verdict: int | None = None
    reason: str = ""
    probe: Probe | None = None


class Adaptation(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the loop for one run; never changed, only replaced. `trial`: the change of plan that is being scored;
    `following`: the published policy that decides on plans, None = the Scheduler does."""

    site: Site
    options: AdaptationOptions
    monitor: Monitor
    scoring: VerdictScoring
    asking: Asking
    measurements: Measurements = Measurements()
    trial: PlanTrial | None = None
    limit: LimitState = LimitState()
    following: PolicyFollower | None = None

    @staticmethod
    def begin(site: Site, options: AdaptationOptions | None = None) -> Adaptation:
        """Before the first iteration."""
        options = options or AdaptationOptions()
        retraining = Retraining(
            options=options.retraining,
            classes=site.classes,
            blocking=site.blocking_sends,
            sync=site.sync,
            cores=site.shared_cores,
            layer_sums=site.layer_sums,
        )
        return Adaptation(
            site=site,
            options=options,
            monitor=Monitor(options=site.detector, retraining=retraining),
            scoring=VerdictScoring(truth_known=site.truth_known),
            asking=Asking(bytes_per_us=site.bytes_per_us, regroup_us=site.regroup_us),
            following=_following(options.policy, site),
        )

    def started(self) -> AdaptationStarted:
        """What this was given, for the log: `Adaptation.like` makes another that decides the same."""
        return AdaptationStarted(site=msgspec.to_builtins(self.site), options=msgspec.to_builtins(self.options))

    @staticmethod
    def like(started: AdaptationStarted) -> Adaptation:
        """One at its beginning, from the log. Raises `msgspec.ValidationError` when this code knows other options."""
        return Adaptation.begin(msgspec.convert(started.site, Site), msgspec.convert(started.options, AdaptationOptions))

    def observe(self, released: IterationTelemetry, plan: Plan, alive: frozenset[int]) -> tuple[Adaptation, AdaptationStep]:
        """The next committed iteration, which ran under `plan`; `alive` are the ranks that are left."""
        committed = released.committed
        loop, events = self._probed(released, plan)
        monitor, found = loop.monitor.judge(released, plan)
        step = AdaptationStep(judged=found.judged)
        if found.predicted_us is not None:
            scoring, looked_back = loop.scoring.observed(found.judged)
            loop, decided = msgspec.structs.replace(loop, scoring=scoring)._with_verdicts(
                monitor, found.verdicts, committed.iteration
            )
            loop, scored = loop._tried(committed, found.predicted_us)
            events += [*looked_back, *decided, *scored]
            loop, step = loop._sought(step, plan, alive)
        loop, changed = loop._seeing(found.judged, plan)
        events += changed
        if committed.log_complete:
            monitor, learned = loop.monitor.learn(found.sample, events)
            of_warm_up = tuple(one for one in learned if isinstance(one, Verdict | VerdictClosed))
            loop, decided = loop._with_verdicts(monitor, of_warm_up, committed.iteration)
            events += [*(one for one in learned if one not in of_warm_up), *decided]
            if loop.trial is not None and loop.trial.predictor != (number := monitor.retraining.number):
                before = monitor.longer.before(loop.trial.from_iteration)
                trial = msgspec.structs.replace(loop.trial, longer_us=before.again_us, predictor=number)
                loop = msgspec.structs.replace(loop, trial=trial)
            if loop._takes_longer_than(self.monitor):
                loop = loop.ask_anew(committed.iteration)
        return loop, msgspec.structs.replace(step, events=tuple(events))

    def lost(self, suspect: Suspect, iteration: int) -> tuple[Adaptation, list[Control]]:
        """A rank is dead, hung or frozen: the verdict, its score, and the end of the trial in progress."""
        loop = msgspec.structs.replace(self, measurements=self.measurements.lost(suspect.rank))
        return loop._with_verdicts(*self.monitor.lost(suspect, iteration), iteration)

    def without(
        self, dead: set[int], base: Plan, alive: frozenset[int], iteration: int, *, number: int, spares: frozenset[int]
    ) -> tuple[Adaptation, Plan, str]:
        """The plan numbered `number` in place of `base` after the loss of the `dead`, and what becomes of their work; `spares`
        are on standby. Raises `PlanError` when there is none."""
        if self.following is not None:
            following, plan, how = self.following.lost(dead, self._known(iteration, base, alive - dead), number)
            return msgspec.structs.replace(self, following=following), plan, how
        ready = spares - self.measurements.joining
        fitted = partial(self.site.fitted, before=base)
        return self, *recover_with_spares(base, dead, number, ready, self.expected_us, fitted=fitted)

    def returned(self, plan: Plan, alive: frozenset[int], iteration: int) -> tuple[Adaptation, Plan | None]:
        """Replicas are whole again: the policy's plan with them, if it has one."""
        assert self.following is not None
        following, answer = self.following.asked(self._known(iteration, plan, alive))
        return msgspec.structs.replace(self, following=following), answer.plan

    def _known(self, iteration: int, plan: Plan, alive: frozenset[int]) -> RunFacts:
        ready = alive - self.measurements.joining
        return RunFacts(now=iteration, plan=plan, alive=ready, monitor=self.monitor, site=self.site)

    def added(self, rank: int, committed: int) -> Adaptation:
        """A rank is to come that was lost, or is new: it counts once it has measured itself (`measured`)."""
        return msgspec.structs.replace(self, measurements=self.measurements.added(rank, committed))

    def joined(self, event: DeviceJoined) -> Adaptation:
        """A rank is there; now its class of device is known."""
        peers = self.site.classes.get(event.device_class, ())
        return msgspec.structs.replace(self, measurements=self.measurements.joined(event.rank, peers))

    def measured(self, product: StandbyMeasured) -> tuple[Adaptation, list[Control]]:
        """A rank that executes nothing has multiplied its matrix; of one that has just joined one product decides."""
        joins = product.rank in self.measurements.joining
        measurements, product = self.measurements.on_standby(product)
        loop, judged = msgspec.structs.replace(self, measurements=measurements), product.watermark - 1
        if joins:
            of_its_loss = self.monitor.detector.lost.get(product.rank)
            asking = msgspec.structs.replace(loop.asking, at=judged + self.options.settle, verdict=of_its_loss)
            loop = msgspec.structs.replace(loop, asking=asking)
            loop, decided = loop._with_verdicts(*loop.monitor.joined(product.rank, product.slowdown or 1.0, judged), judged)
            return loop, [product, *decided]
        if product.slowdown is None:
            return loop, [product]
        notes = []
        if len(measurements.readings[product.rank]) == 1 and products.unseen_by_product(self.monitor.detector, product.rank):
            notes = [Note(text=f"rank {product.rank} {UNSEEN_BY_PRODUCT}", by="controller")]
        monitor, verdicts = self.monitor.on_standby(product.rank, measurements.readings[product.rank], judged)
        loop, decided = loop._with_verdicts(monitor, verdicts, judged)
        if verdicts:
            loop = msgspec.structs.replace(loop, measurements=measurements.without({product.rank}))
        return loop, [product, *notes, *decided]

    def injected(self, fault: FaultInjected) -> Adaptation:
        """The truth, for scoring verdicts."""
        return msgspec.structs.replace(self, scoring=self.scoring.injected(fault))

    def ask_anew(self, iteration: int) -> Adaptation:
        """What the Scheduler proposes may be applied now: ask it at the end of `iteration`."""
        return msgspec.structs.replace(self, asking=self.asking.anew(iteration))

    def expected_us(self, plan: Plan) -> float | None:
        """Mean predicted iteration of `plan` on the recent batches; None before there is a predictor."""
        return self.monitor.expected_us(plan, self.options.recent)

    def applied(
        self, plan: Plan, proposal: str, regrouped: Regrouped, *, before: Plan | None, old: Plan | None
    ) -> tuple[Adaptation, list[Control]]:
        """`plan` is in force after `before`. `old` = the plan it replaced by choice, None when there was no choice."""
        loop = msgspec.structs.replace(
            self, asking=self.asking.changed(regrouped), measurements=self.measurements.without(plan.executors)
        )
        if before is not None and plan.digest == before.digest:  # the same plan under another number: a trial goes on
            trial = None if loop.trial is None else msgspec.structs.replace(loop.trial, plan=plan)
            return msgspec.structs.replace(loop, trial=trial), []
        iteration = regrouped.iteration
        loop, events = loop._trial_over(f"plan {plan.plan_version} came at iteration {iteration}")
        loop = msgspec.structs.replace(loop, monitor=loop.monitor.plan_changed(iteration))
        if plan.plan_version == 0:
            return loop, events
        asking = msgspec.structs.replace(loop.asking, at=iteration + loop.options.settle)
        trial = PlanTrial(
            plan=plan, old=old, proposal=proposal, from_iteration=iteration,
            longer_us=self.monitor.longer_us, predictor=self.monitor.retraining.number,
        )  # fmt: skip
        return msgspec.structs.replace(loop, trial=trial, asking=asking), events

    def suspects(self, plan: Plan) -> frozenset[int]:
        """Ranks whose product was slow when the run began, where nothing else tells a slow device from a dear role."""
        first = self.measurements.suspected_first
        class_of = {rank: name for name, ranks in self.site.classes.items() for rank in ranks}
        return products.uncontradicted(self.monitor.detector, first, plan, self.site.detector, class_of)

    def sights(self, plan: Plan) -> tuple[Sight, ...]:
        """What would have been named up to now: of devices, at last of the whole job."""
        suspects, found = self.suspects(plan), self.monitor.sights
        return (products.slow_or_expensive(suspects, plan, self.site.first_iteration), *found) if suspects else found

    def finished(self) -> list[Control]:
        """The run ends: score what there is, and say what is seen again."""
        _, scored = self._trial_over("the run ended")
        return [*scored, *self.scoring.ended(*self.scoring.watched)[1], *self.limit.ended()[1]]

    def _probed(self, released: IterationTelemetry, plan: Plan) -> tuple[Adaptation, list[Control]]:
        """What GPUs and probes tell beside an iteration; a suspect whose product took long is named."""
        monitor = self.monitor.reading(released.gpus)
        slow = max(self.options.probing.least_slowdown, self.site.detector.least_slowdown)
        first, classes = self.site.first_iteration, self.site.classes.values()
        measurements, found = self.measurements.probed(released.probes, first, classes, slow)
        loop = msgspec.structs.replace(self, monitor=monitor, measurements=measurements)
        if found is None:
            return loop, []
        iteration = released.committed.iteration
        events: list[Control] = [found.event(iteration)]
        if self.site.detector.method == "resihp":
            loop, decided = loop._with_verdicts(*loop.monitor.validated(found.slowdowns, iteration), iteration)
            return loop, [*events, *decided]
        for rank, slowdown in found.slowdowns.items():
            if slowdown >= self.options.probing.least_slowdown:
                since = first if rank in self.suspects(plan) else None
                loop, decided = loop._with_verdicts(*loop.monitor.probed(rank, slowdown, iteration, since), iteration)
                events += decided
        return loop, events

    def _with_verdicts(self, monitor: Monitor, verdicts: Verdicts, iteration: int) -> tuple[Adaptation, list[Control]]:
        """With the monitor's new state and what its verdicts lead to: their scores, the end of the trial, a question."""
        loop, events = msgspec.structs.replace(self, monitor=monitor), list[Control](verdicts)
        for one in verdicts:
            number, why = one.verdict, ""
            if isinstance(one, VerdictClosed):
                scoring, scored = loop.scoring.ended(number)
                why, at = f"the fault of verdict {number} ended", one.until_iteration
            else:
                known, at = number in self.monitor.verdicts, one.since_iteration
                scoring, scored = (loop.scoring, []) if known else loop.scoring.named(one)
                if one.cause == "slow_device":
                    why = f"rank {one.culprits[0].rank}'s speed changed" if known else "another device turned slow"
                elif one.cause == "unknown":
                    why = "the pace of the whole job changed"
            loop, over = msgspec.structs.replace(loop, scoring=scoring)._trial_over(why, at)
            events += [*scored, *over]
        of_somebody = [one for one in verdicts if monitor.verdicts[one.verdict].cause != "unknown"]
        if not of_somebody:
            return loop, events
        named = [one.verdict for one in of_somebody if isinstance(one, Verdict)]
        asking = msgspec.structs.replace(
            loop.asking, at=iteration + self.options.settle, verdict=named[-1] if named else loop.asking.verdict
        )
        return msgspec.structs.replace(loop, asking=asking), events

    def _seeing(self, judged: IterationJudged, plan: Plan) -> tuple[Adaptation, list[DetectionLimit]]:
        """With what would be named from now on, and the news of it; in warm-up nothing is."""
        if judged.log_complete and judged.predicted_us is None:
            return self, []
        now, monitor = judged.iteration, self.monitor
        if judged.log_complete:
            limit, news = self.limit.judged(self.sights(plan), now, monitor.unexplained)
        else:
            limit, news = self.limit.passed_over(now)
        return msgspec.structs.replace(self, limit=limit), news

    def _takes_longer_than(self, before: Monitor) -> bool:
        """Whether the predictor has just learned, under the first plan with groups of this size, that iterations end later with
        such: another plan may be better."""
        was, now = before.retraining, self.monitor.retraining
        if was.fitted is None or now.fitted is None or now.ends.size in was.ends.later_us:
            return False
        grown_us = now.fitted.model.iteration_end_us - was.fitted.model.iteration_end_us
        return 100 * grown_us > self.options.scheduler.min_gain_percent * now.seen[-1].committed.measured_us

    def _tried(self, committed: CommittedIteration, predicted_us: float) -> tuple[Adaptation, list[Control]]:
        """With the iteration in the trial in progress, which closes when it has lasted long enough."""
        monitor = self.monitor
        if self.trial is None or committed.plan_version != self.trial.plan.plan_version:
            return self, []
        longer_us = self.trial.longer_us
        if (cost := monitor.cost_with(longer_us)) is None:
            return self, []
        predicted_us += longer_us * cost.crowding(self.trial.plan)
        trial = self.trial.add(committed, cost, monitor.speeds, predicted_us)
        if trial.n < self.options.score_over:
            return msgspec.structs.replace(self, trial=trial), []
        return msgspec.structs.replace(self, trial=None), [trial.score()]

    def _trial_over(self, why: str, at: int | None = None) -> tuple[Adaptation, list[Control]]:
        """End the trial early because of `why`, if any, counting its iterations before `at`: its score when those suffice, else
        void."""
        if self.trial is None or not why:
            return self, []
        return msgspec.structs.replace(self, trial=None), [score_plan(self.trial, why, at)]

    def _sought(self, step: AdaptationStep, plan: Plan, alive: frozenset[int]) -> tuple[Adaptation, AdaptationStep]:
        """The step with a better plan or a probe, where it is time for either, and the reason."""
        iteration, probe = step.judged.iteration, None
        following = self.following
        if self.measurements.awaits(iteration + 1, self.options.patience):  # what is best without them is so for a moment
            return self, step
        if following is None:
            ready = alive - self.measurements.joining
            asking, proposal, reason = self.asking.ask(
                iteration, plan, self.monitor, ready, site=self.site, options=self.options
            )
        else:
            following, asking, proposal, reason = self._answered(following, iteration, plan, alive)
        measurements = self.measurements
        suspected_first = alive & self.suspects(plan)
        if proposal is None and not reason and suspected_first:
            measurements, probe, reason = measurements.validation(iteration, suspected_first, SLOW_AT_THE_BEGINNING)
        elif proposal is None and not reason and self.site.shared_cores is None:
            options = self.options.probing
            if self.monitor.to_validate:
                measurements, probe, reason = measurements.validation(iteration, alive.intersection(self.monitor.to_validate))
            else:
                suspects = self.monitor.suspected_ranks(options.over)
                measurements, probe, reason = measurements.probe(iteration, suspects, len(alive), options)
        loop = msgspec.structs.replace(self, asking=asking, measurements=measurements, following=following)
        return loop, msgspec.structs.replace(step, proposal=proposal, verdict=asking.verdict, reason=reason, probe=probe)

    def _answered(
        self, following: PolicyFollower, iteration: int, plan: Plan, alive: frozenset[int]
    ) -> tuple[PolicyFollower, Asking, Proposal | None, str]:
        """What the policy says when it is time to ask."""
        if not self.asking.due(iteration) or self.monitor.cost is None or self.site.by_replica:
            return following, self.asking, None, ""
        known = self._known(iteration + 1, plan, alive)
        following, answer = following.asked(known)
        again = None if answer.again_in is None else iteration + answer.again_in
        proposal = following.proposal(answer, known, self.options.recent)
        return following, msgspec.structs.replace(self.asking, at=again), proposal, answer.reason


def _following(policy: str, site: Site) -> PolicyFollower | None:
    """Who decides on plans beside the Scheduler; by FT-HSDP's rules a run follows FT-HSDP."""
    if policy != "unskew":
        return PolicyFollower(name=policy)
    return PolicyFollower(name="ft-hsdp") if site.by_replica else None
