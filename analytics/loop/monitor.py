"""What is known of the devices: how long healthy ones take, and who is slow. It judges live, replayed and diagnosed runs.

Per committed iteration: `judge` predicts it from its own batches and lets the Detector judge it; `learn` gives it to the
predictor afterwards, so that no iteration is predicted by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.outcome import Sight
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector import detector, products
from unskew.analytics.detector.detector import DetectorState, Verdicts
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.products import StandbyReading
from unskew.analytics.health.gpu_evidence import GpuHistory, remembered, with_gpu
from unskew.analytics.health.liveness import Suspect
from unskew.analytics.pipeline.prediction import predict_iteration, predict_iterations
from unskew.analytics.predictor.fit import Fit
from unskew.analytics.predictor.retraining import IterationSample, Retraining, suspicion, turned
from unskew.collector.events import Event, GpuState, IterationJudged, PredictorFitted, Verdict, VerdictClosed


class JudgedIteration(msgspec.Struct, frozen=True, kw_only=True):
    """`predicted_us` None: it was not judged, for want of a predictor or of log lines. `sample`: what can be learned of it."""

    judged: IterationJudged
    sample: IterationSample
    predicted_us: float | None = None
    verdicts: Verdicts = ()


class Monitor(msgspec.Struct, frozen=True, kw_only=True):
    """Never changed, only replaced. `verdicts`: the newest revision of each, by number, also of closed ones; `shared_cores` as
    in `Site`."""

    options: DetectorOptions
    retraining: Retraining
    shared_cores: int | None = None
    detector: DetectorState = DetectorState()
    gpus: dict[int, GpuHistory] = {}
    verdicts: dict[int, Verdict] = {}

    @property
    def fitted(self) -> Fit | None:
        """The predictor in force; None during warm-up."""
        return self.retraining.fitted

    @property
    def speeds(self) -> dict[int, dict[str, float]]:
        """rank -> kind -> estimated speed, where it is not the healthy one."""
        return self.detector.speeds

    @property
    def sight(self) -> Sight:
        """What the Detector would have named up to now."""
        return detector.sight_of(self.detector, self.options)

    def reading(self, states: Iterable[GpuState]) -> Monitor:
        """With what GPUs say of themselves."""
        return msgspec.structs.replace(self, gpus=remembered(self.gpus, states))

    def judge(self, released: IterationTelemetry, plan: Plan) -> tuple[Monitor, JudgedIteration]:
        """The next committed iteration, which ran under `plan`."""
        committed, speeds = released.committed, self.speeds
        if self.fitted is None or not committed.log_complete:
            judged = IterationJudged(
                iteration=committed.iteration,
                plan_version=committed.plan_version,
                measured_us=round(committed.measured_us),
                log_complete=committed.log_complete,
            )
            return self, JudgedIteration(judged=judged, sample=IterationSample(released, plan, speeds))
        cost = self.fitted.model
        prediction = predict_iteration(plan, committed.works, cost, speeds)
        predicted_us = prediction.iteration_us
        if self.shared_cores is not None:
            predicted_us = max(predicted_us, sum(map(float, prediction.timeline.busy_us.values())) / self.shared_cores)
        state, found = detector.step(self.detector, committed, plan, cost, self.options, predicted_us=predicted_us)
        # Where cores are shared the prediction is bounded by them, which no fit can mend.
        to_learn = found.judged.predicted_us if self.shared_cores is None else None
        sample = IterationSample(released, plan, speeds, to_learn, suspicion(found.judged))
        after, verdicts = self._with_verdicts(state, found.verdicts)
        return after, JudgedIteration(judged=found.judged, sample=sample, predicted_us=predicted_us, verdicts=verdicts)

    def learn(self, sample: IterationSample, decided: Iterable[Event]) -> tuple[Monitor, PredictorFitted | None]:
        """From an iteration with a complete log, and from what was `decided` in it."""
        retraining, fitted = self.retraining.observe(sample)
        turns = turned([one for one in decided if isinstance(one, Verdict | VerdictClosed)], self.verdicts)
        for rank, since in turns.items():
            retraining = retraining.correct_speeds(rank, since, self.speeds.get(rank, {}))
        return msgspec.structs.replace(self, retraining=retraining), fitted

    def expected_us(self, plan: Plan, recent: int) -> float | None:
        """Mean predicted iteration of `plan` on the `recent` batches; None before there is a predictor."""
        batches = self.retraining.recent(recent)
        if self.fitted is None or not batches:
            return None
        return float(predict_iterations(plan, batches, self.fitted.model, self.speeds).mean())

    def plan_changed(self, iteration: int) -> Monitor:
        """Another plan is in force from `iteration` on."""
        return msgspec.structs.replace(self, retraining=self.retraining.plan_changed(iteration))

    def lost(self, suspect: Suspect, iteration: int) -> tuple[Monitor, Verdicts]:
        """A rank is dead, hung or frozen."""
        return self._with_verdicts(*detector.lose(self.detector, suspect, iteration, self.options))

    def suspected_ranks(self, over: int) -> dict[int, float]:
        """Ranks that are slow and excused (`products.suspected_ranks`)."""
        return products.suspected_ranks(self.detector, self.options, over)

    def probed(self, rank: int, slowdown: float, iteration: int) -> tuple[Monitor, Verdicts]:
        """A probe has measured a suspected rank (`products.confirm`)."""
        return self._with_verdicts(*products.confirm(self.detector, rank, slowdown, iteration, self.options))

    def on_standby(self, rank: int, readings: Sequence[StandbyReading], iteration: int) -> tuple[Monitor, Verdicts]:
        """A rank that executes nothing has been measured again (`products.update_estimate`)."""
        return self._with_verdicts(*products.update_estimate(self.detector, rank, readings, iteration, self.options))

    def _with_verdicts(self, state: DetectorState, verdicts: Verdicts) -> tuple[Monitor, Verdicts]:
        """With the Detector's new state and its verdicts, to which the GPUs' own words are added."""
        verdicts = tuple(with_gpu(one, self.gpus) if isinstance(one, Verdict) else one for one in verdicts)
        newest = {one.verdict: one for one in verdicts if isinstance(one, Verdict)}
        return msgspec.structs.replace(self, detector=state, verdicts={**self.verdicts, **newest}), verdicts
