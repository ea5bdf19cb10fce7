"""What is known of the devices: how long healthy ones take, and who is slow. It judges live, replayed and diagnosed runs.

Per committed iteration: `judge` predicts it from its own batches and lets the Detector judge it; `learn` gives it to the
predictor afterwards, so that no iteration is predicted by itself.

The whole job is judged by what iterations took over the prediction at the estimated speeds. Where ranks had no core that is a
range: how much of such time passed beside other work nobody knows, next to none where ranks compute, most where devices sleep.
Those in which a rank is suspected are held back until it is named, which explains them, or the suspicion has come to nothing or
has lasted for as long as the tests remember. A predictor that is fitted again learns a slowdown of all ranks as what their work
takes: so each is measured by the one before, on the same batches, and the job by the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import log
from statistics import median

import msgspec

from unskew.analytics.core.cost import CostModel, SlowLink
from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.outcome import Sight, UnexplainedTime
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector import detector, job_wide, products, stages
from unskew.analytics.detector.detector_state import DetectorState, Verdicts, suspects_stage
from unskew.analytics.detector.job_wide import NEXT_STEP, JobWideOptions, JobWideState
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.products import StandbyReading
from unskew.analytics.detector.published import resihp
from unskew.analytics.detector.series.ranges import Sample
from unskew.analytics.health.gpu_evidence import GpuHistory, remembered, with_gpu
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.loop.account import MOST_OUTSIDE, OUTSIDE_OVER, TimeAccount, account_of, outside_of
from unskew.analytics.loop.late_ends import LateEnds
from unskew.analytics.pipeline.prediction import Prediction, predict_iteration, predict_iterations
from unskew.analytics.predictor.fit import Fit
from unskew.analytics.predictor.retraining import IterationSample, Retraining, scores_of, turned
from unskew.collector.events import Control, Event, GpuState, IterationJudged, Verdict, VerdictClosed

RESCALED_BY = 8
"""So many iterations, the last ones, tell how a new predictor measures, compared with the old one."""
IDLE_OVER = 8
"""So many tell how much of a slow rank's time holds no core."""


class JobPace(msgspec.Struct, frozen=True):
    """How long iterations take over what they should. `scale`: log of what the predictor in force expects over what the first
    would, `began`: when the last episode began; `number`: of the verdict on it, `shown`: its last revision, of the whole job,
    `whose`: the replicas whose slowness that is; `outside`: of the last iterations, the share of the time that is not timed
    (`outside_of`); `suspected`: for how many iterations in a row some rank has been suspected, `held`: what of these will be
    judged when that has come to nothing."""

    state: JobWideState = JobWideState()
    scale: float = 0.0
    began: float = 0.0
    number: int = 0
    shown: Verdict | None = None
    whose: stages.SlowReplicas | None = None
    outside: tuple[float, ...] = ()
    suspected: int = 0
    held: tuple[Sample, ...] = ()

    def verdict(self, options: DetectorOptions) -> Verdict:
        """As it is shown: numbered among the others, and whose slowness it is."""
        assert self.shown is not None
        of = self.shown if self.whose is None else self.whose.named_in(self.shown)
        evidence = {"next_step": NEXT_STEP, **of.evidence}
        return msgspec.structs.replace(of, verdict=self.number, evidence=evidence, config=options.digest)

    def learned(self, options: DetectorOptions) -> bool:
        """Whether the predictor takes the open episode for the job's own pace: whose it is can no longer be told."""
        return abs(self.scale - self.began) > options.sigma_floor

    def sight(self, options: JobWideOptions) -> Sight:
        """What would have been named of the whole job up to now."""
        share = median(self.outside) if self.outside else 0.0
        if share <= MOST_OUTSIDE:
            return job_wide.sight_of(self.state, options)
        why = f"{100 * share:.0f} % of the time of an iteration lies outside of all that is timed in it"
        return Sight(scope="device", smallest_slowdown=None, why=why)  # whose, nobody knows


class JudgedIteration(msgspec.Struct, frozen=True, kw_only=True):
    """`predicted_us` None: it was not judged, for want of a predictor or of log lines. `sample`: what can be learned of it."""

    judged: IterationJudged
    sample: IterationSample
    predicted_us: float | None = None
    verdicts: Verdicts = ()


class Monitor(msgspec.Struct, frozen=True, kw_only=True):
    """Never changed, only replaced. `account`: where the time went; `verdicts`: the newest revision of each, by number, also of
    closed ones; `known`: speeds that others than the Detector have found; `side_by_side`: others compare ranks from the first
    iteration on; `longer`: by how much iterations of late end later than fitted.
    """

    options: DetectorOptions
    retraining: Retraining
    detector: DetectorState = DetectorState()
    job: JobPace = JobPace()
    gpus: dict[int, GpuHistory] = {}
    known: dict[int, dict[str, float]] = {}
    account: TimeAccount = TimeAccount()
    verdicts: dict[int, Verdict] = {}
    side_by_side: bool = False
    longer: LateEnds = LateEnds()

    @property
    def fitted(self) -> Fit | None:
        """The predictor in force; None during warm-up."""
        return self.retraining.fitted

    @property
    def speeds(self) -> dict[int, dict[str, float]]:
        """rank -> kind -> estimated speed, where it is not the healthy one."""
        return {**self.known, **self.detector.speeds}

    @property
    def slow_links(self) -> tuple[SlowLink, ...]:
        """The links that are slow by open verdicts, as they are measured now."""
        return tuple(SlowLink(*link, self.detector.links[link].more_us) for link in sorted(self.detector.open_links))

    @property
    def cost(self) -> CostModel | None:
        """What plans are weighed by: the predictor in force, with what is known of slow links, of slow ranks' cores and of the
        end of iterations; None during warm-up."""
        return self.cost_with(self.longer_us)

    def cost_with(self, longer_us: float) -> CostModel | None:
        """The same with an end that is so much longer than the fitted one."""
        if (cost := self._judging) is None:
            return None
        return msgspec.structs.replace(cost, iteration_end_us=cost.iteration_end_us + longer_us)

    @property
    def _judging(self) -> CostModel | None:
        """What iterations are judged by: the end is the fitted one, for a job whose end takes longer is a slow one."""
        if self.fitted is None:
            return None
        idle = {rank: part for rank, part in self.retraining.idle(IDLE_OVER).items() if rank in self.speeds}
        return msgspec.structs.replace(self.fitted.model, slow_links=self.slow_links, idle=idle)

    @property
    def longer_us(self) -> float:
        """By how much the end of iterations is longer of late than the fitted one."""
        if self.fitted is None:
            return 0.0
        return max(self.longer.longer_us, -self.fitted.model.iteration_end_us)

    @property
    def sights(self) -> tuple[Sight, Sight]:
        """What would have been named up to now: of a device, and of the whole job."""
        of_device = detector.sight_of(self.detector, self.options, alike=len(self.retraining.classes) < 2)
        return of_device, self.job.sight(self._job_options)

    @property
    def unexplained(self) -> UnexplainedTime:
        """What was lost for no cause: by all that iterations took, or by those that were long."""
        long_ones = job_wide.long_ones(self.job.state, self._job_options, self.job.held)
        of_all = self.account.unexplained
        return long_ones if long_ones.too_much and not of_all.too_much else of_all

    @property
    def _job_options(self) -> JobWideOptions:
        return JobWideOptions.like(self.options)

    def reading(self, states: Iterable[GpuState]) -> Monitor:
        """With what GPUs say of themselves."""
        return msgspec.structs.replace(self, gpus=remembered(self.gpus, states))

    def judge(self, released: IterationTelemetry, plan: Plan, *, uneven_us: float = 0.0) -> tuple[Monitor, JudgedIteration]:
        """The next committed iteration, which ran under `plan`; of its time the whole job is not judged by `uneven_us`."""
        committed, speeds = released.committed, self.speeds
        if (cost := self._judging) is None or not committed.log_complete:
            judged = IterationJudged(
                iteration=committed.iteration,
                plan_version=committed.plan_version,
                measured_us=round(committed.measured_us),
                log_complete=committed.log_complete,
            )
            sample = IterationSample(released, plan, speeds, slow_links=self.slow_links)
            return self, JudgedIteration(judged=judged, sample=sample)
        prediction = predict_iteration(plan, committed.works, cost, speeds)
        predicted_us = prediction.iteration_us
        state, found = detector.step(self.detector, committed, plan, cost, self.options, predicted_us=predicted_us)
        # Where cores are shared iterations are also long because others want them, which no fit can mend.
        to_learn = found.judged.predicted_us if cost.cores is None else None
        sample = IterationSample(released, plan, speeds, to_learn, scores_of(found.judged), cost.slow_links)
        after, verdicts = self._with_verdicts(state, found.verdicts)
        after = after._seeing(sample, prediction)._accounting(cost, sample)
        after, of_job = after._job_judged(sample, predicted_us, verdicts, uneven_us)
        return after._ended(sample, cost, predicted_us), JudgedIteration(
            judged=found.judged, sample=sample, predicted_us=predicted_us, verdicts=(*verdicts, *of_job)
        )

    def _ended(self, sample: IterationSample, cost: CostModel, predicted_us: float) -> Monitor:
        """With how much longer than predicted this iteration took, where nobody is suspected in it; the first of a plan pays
        for the change."""
        seen = self.retraining.seen
        first = bool(seen) and seen[-1].plan.plan_version != sample.plan.plan_version
        if first or sample.suspicion >= self.retraining.options.suspicious_score:
            return self
        more_us = (sample.committed.measured_us - predicted_us) / cost.crowding(sample.plan)
        return msgspec.structs.replace(self, longer=self.longer.add(sample.committed.iteration, more_us))

    def learn(self, sample: IterationSample, decided: Iterable[Event]) -> tuple[Monitor, tuple[Control, ...]]:
        """From an iteration with a complete log, and from what was `decided` in it."""
        retraining, fitted = self.retraining.observe(sample)
        after, events = msgspec.structs.replace(self, retraining=retraining), list[Control]()
        found = [one for one in decided if isinstance(one, Verdict | VerdictClosed)]
        if fitted is not None:
            events.append(fitted)
            if self.fitted is None and not self.side_by_side:
                after, of_devices = after._warm_up_judged()
                found, events = [*found, *of_devices], [*events, *of_devices]
        after, again = after._speeds_corrected(turned(found, after.verdicts))
        if fitted is not None:
            after, of_job = after._measured_anew(self.fitted)
            events += of_job
        return after, (*events, *again)

    def _speeds_corrected(self, turns: Mapping[int, int]) -> tuple[Monitor, tuple[Control, ...]]:
        """Ranks have had their speeds since these iterations. Where the predictor is fitted on some of them it is fitted again,
        for it took what the others waited for the end of an iteration."""
        retraining = self.retraining
        for rank, since in turns.items():
            retraining = retraining.correct_speeds(rank, since, self.speeds.get(rank, {}))
        again = None
        if turns and min(turns.values()) <= retraining.fitted_at:
            retraining, again = retraining.fitted_again("speeds known")
        longer = self.longer.before(min(turns.values())) if turns else self.longer
        after = msgspec.structs.replace(self, retraining=retraining, longer=longer)
        if again is not None and (cost := after._judging) is not None:
            after = msgspec.structs.replace(after, longer=after.longer.by(cost, after.retraining.seen))
        if turns and (cost := after._judging) is not None:
            after = after._accounting(cost, *(one for one in retraining.seen if one.committed.iteration >= min(turns.values())))
        return after, () if again is None else (again,)

    def expected_us(self, plan: Plan, recent: int) -> float | None:
        """Mean predicted iteration of `plan` on those of the `recent` batches that are large enough for it; None before
        there is a predictor, and without any."""
        n = len(plan.routes)
        batches = [works[:n] for works in self.retraining.recent(recent) if len(works) >= n]
        if (cost := self.cost) is None or not batches:
            return None
        return float(predict_iterations(plan, batches, cost, self.speeds).mean())

    def plan_changed(self, iteration: int) -> Monitor:
        """Another plan is in force from `iteration` on."""
        return msgspec.structs.replace(self, retraining=self.retraining.plan_changed(iteration))

    def knowing(self, speeds: dict[int, dict[str, float]], iteration: int) -> tuple[Monitor, tuple[Control, ...]]:
        """Others than the Detector have found these ranks to be so slow, from the first iteration on."""
        retraining = self.retraining.plan_changed(iteration)
        for rank, of in speeds.items():
            retraining = retraining.correct_speeds(rank, 0, of)
        retraining, fitted = retraining.fitted_again("speeds known") if speeds else (retraining, None)
        after = msgspec.structs.replace(self, retraining=retraining, known=speeds, longer=LateEnds())
        return after, () if fitted is None else (fitted,)

    def lost(self, suspect: Suspect, iteration: int) -> tuple[Monitor, Verdicts]:
        """A rank is dead, hung or frozen."""
        return self._with_verdicts(*detector.lose(self.detector, suspect, iteration, self.options))

    def joined(self, rank: int, slowdown: float, iteration: int) -> tuple[Monitor, Verdicts]:
        """A rank that was lost or is new has measured itself (`products.welcome`)."""
        return self._with_verdicts(*products.welcome(self.detector, rank, slowdown, iteration, self.options))

    @property
    def to_validate(self) -> tuple[int, ...]:
        """Ranks that ResiHP's Detector wants a probe to measure."""
        return resihp.to_validate(self.detector)

    def validated(self, slowdowns: dict[int, float], iteration: int) -> tuple[Monitor, Verdicts]:
        """A probe has measured them."""
        return self._with_verdicts(*resihp.validated(self.detector, slowdowns, iteration, self.options))

    def suspected_ranks(self, over: int) -> dict[int, float]:
        """Ranks that are slow and excused (`products.suspected_ranks`)."""
        return products.suspected_ranks(self.detector, self.options, over)

    def probed(self, rank: int, slowdown: float, iteration: int, since: int | None) -> tuple[Monitor, Verdicts]:
        """A probe has measured a suspected rank (`products.confirm`)."""
        return self._with_verdicts(*products.confirm(self.detector, rank, slowdown, iteration, self.options, since=since))

    def on_standby(self, rank: int, readings: Sequence[StandbyReading], iteration: int) -> tuple[Monitor, Verdicts]:
        """A rank that executes nothing has been measured again (`products.update_estimate`)."""
        return self._with_verdicts(*products.update_estimate(self.detector, rank, readings, iteration, self.options))

    def _with_verdicts(self, state: DetectorState, verdicts: Verdicts) -> tuple[Monitor, Verdicts]:
        """With the Detector's new state and its verdicts, to which the GPUs' own words are added."""
        verdicts = tuple(with_gpu(one, self.gpus) if isinstance(one, Verdict) else one for one in verdicts)
        newest = {one.verdict: one for one in verdicts if isinstance(one, Verdict)}
        return msgspec.structs.replace(self, detector=state, verdicts={**self.verdicts, **newest}), verdicts

    def _seeing(self, sample: IterationSample, prediction: Prediction) -> Monitor:
        """With how much of an iteration lies outside of what is timed."""
        share = outside_of(sample, prediction, sums_timed=self.retraining.sync is not None)
        outside = (*self.job.outside, share)[-OUTSIDE_OVER:]
        return msgspec.structs.replace(self, job=msgspec.structs.replace(self.job, outside=outside))

    def _accounting(self, cost: CostModel, *samples: IterationSample) -> Monitor:
        """With where the time of these iterations went."""
        account = self.account.adding(*(account_of(one, one.known(cost)) for one in samples))
        return msgspec.structs.replace(self, account=account)

    def _job_judged(
        self, sample: IterationSample, predicted_us: float, found: Verdicts, uneven_us: float
    ) -> tuple[Monitor, Verdicts]:
        """The whole job, by this iteration and those that a suspicion held back."""
        job, now = self.job, sample.committed.iteration
        if named := [one for one in found if isinstance(one, Verdict)]:
            since = min(one.since_iteration for one in named)
            set_aside = job_wide.set_aside(job.state, since, f"verdict {named[0].verdict} explains it", self._job_options)
            return self._holding(0)._with_job(*set_aside, sample.plan)
        if suspects_stage(self.detector):
            return self._holding(0), ()
        held = (*job.held, self._over(sample, predicted_us, uneven_us))
        if sample.suspicion < self.retraining.options.suspicious_score:
            return self._holding(0)._job_steps(held, now, sample.plan)
        if job.suspected < self.options.window:
            return self._holding(job.suspected + 1, held), ()
        return self._holding(job.suspected + 1)._job_steps(held, now, sample.plan)

    def _holding(self, suspected: int, held: tuple[Sample, ...] = ()) -> Monitor:
        return msgspec.structs.replace(self, job=msgspec.structs.replace(self.job, suspected=suspected, held=held))

    def _over(self, sample: IterationSample, predicted_us: float, uneven_us: float = 0.0) -> Sample:
        """What the whole job is judged by: the logs of what the iteration would have taken with cores, at least and at most,
        over what it should."""
        released = sample.released
        most_us = max(sample.committed.measured_us - uneven_us - released.coreless_us, 1.0)
        least_us = max(most_us - released.maybe_coreless_us, 1.0)
        least, most = (self.job.scale + log(us / predicted_us) for us in (least_us, most_us))
        return sample.committed.iteration, least, most

    def _job_steps(self, samples: Iterable[Sample], now: int, plan: Plan) -> tuple[Monitor, Verdicts]:
        """Judged in iteration `now`."""
        after, found = self, list[Verdict | VerdictClosed]()
        for one in samples:
            after, verdicts = after._with_job(*job_wide.step(after.job.state, one, self._job_options), plan)
            found += [msgspec.structs.replace(verdict, at_iteration=now) for verdict in verdicts]
        after, revised = after._other_replicas(now, plan)
        return after, (*found, *revised)

    def _other_replicas(self, now: int, plan: Plan) -> tuple[Monitor, Verdicts]:
        """The open verdict anew where it is other replicas that are slow now: the job's time need not show that."""
        if (job := self.job).state.since is None or job.shown is None or job.learned(self.options):
            return self, ()
        whose = stages.slow_replicas_now(job.shown, self.detector.tracks, plan, self.options)
        if whose is None or whose.named == (job.whose.named if job.whose else ()):
            return self, ()
        after = msgspec.structs.replace(self, job=msgspec.structs.replace(job, whose=whose))
        revised = msgspec.structs.replace(after.job.verdict(self.options), at_iteration=now)
        return after._with_verdicts(self.detector, (revised,))

    def _warm_up_judged(self) -> tuple[Monitor, Verdicts]:
        """Devices by the first predictor, over the iterations that it is fitted on: who was slow from the first one on is dated
        so."""
        cost = self.cost
        assert cost is not None
        state, found, seen = self.detector, list[Verdict | VerdictClosed](), self.retraining.seen
        for one in seen:
            state, judgement = detector.step(
                state, one.committed, one.plan, cost, self.options, predicted_us=one.predicted_by(cost)
            )
            found += judgement.verdicts
        now = seen[-1].committed.iteration
        return self._with_verdicts(state, tuple(msgspec.structs.replace(one, at_iteration=now) for one in found))

    def _measured_anew(self, before: Fit | None) -> tuple[Monitor, Verdicts]:
        """The job by the predictor that has just come into force: the first one shows warm-up too, another is weighed against
        the one `before`. The first iteration pays for start-up."""
        assert self.fitted is not None
        cost, seen = self.fitted.model, [one for one in self.retraining.seen if one.committed.iteration > 0]
        if before is not None:
            more = median(log(one.predicted_by(cost) / one.predicted_by(before.model)) for one in seen[-RESCALED_BY:])
            job = msgspec.structs.replace(self.job, scale=self.job.scale + more)
            return msgspec.structs.replace(self, job=job, longer=self.longer.by(cost, self.retraining.seen)), ()
        after = self._accounting(cost, *self.retraining.seen)
        samples = [after._over(one, one.predicted_by(cost)) for one in seen]
        return after._job_steps(samples, samples[-1][0], seen[-1].plan) if samples else (after, ())

    def _with_job(self, state: JobWideState, found: Verdicts, plan: Plan) -> tuple[Monitor, Verdicts]:
        """With the job's new state and its verdicts, numbered among the others."""
        job, number, verdicts = self.job, self.detector.next_verdict, list[Verdict | VerdictClosed]()
        for one in found:
            if isinstance(one, Verdict) and one.verdict > job.state.episodes:
                job, number = msgspec.structs.replace(job, number=number, began=job.scale, whose=None), number + 1
            verdicts.append(msgspec.structs.replace(one, verdict=job.number))
            if isinstance(one, Verdict):
                whose = job.whose
                if state.since is not None and not job.learned(self.options):  # else it is known, or cannot be any more
                    whose = stages.slow_replicas(one, self.detector.tracks, plan, self.options)
                job = msgspec.structs.replace(job, shown=one, whose=whose)
                verdicts[-1] = job.verdict(self.options)
        after = msgspec.structs.replace(self, job=msgspec.structs.replace(job, state=state))
        return after._with_verdicts(msgspec.structs.replace(self.detector, next_verdict=number), tuple(verdicts))
