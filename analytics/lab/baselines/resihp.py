"""ResiHP's Detector as published (arXiv 2605.06374, section 4): Greyhound's, with a filter that knows sequence lengths.

At a change point, and only there, the iteration's time is predicted from its own batches (micro-batch predictor, eq. 1, and the
pipeline's critical path, eq. 2). Observed above 1.25 times that: the validation phase, unchanged. Else the change is benign: no
validation, and the iteration is deleted from the series, so that it does not disturb the next decision.

It cannot find what makes no change point, nor what is less than 1.25 times slower. Refitting is not described; predictions
use the speeds that it has validated itself, so that a known fail-slow does not alarm again.
"""

from __future__ import annotations

from unskew.analytics.detector.detector_state import Verdicts
from unskew.analytics.detector.published.change_point import ChangePoint, ChangePointOptions
from unskew.analytics.detector.published.resihp import FILTER
from unskew.analytics.detector.published.validation import Probe
from unskew.analytics.lab.baselines.greyhound import GreyhoundDetector
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.replay.method import MethodInput, MethodOutput
from unskew.collector.events import Verdict, VerdictClosed


class ResihpDetector(GreyhoundDetector):
    """Published settings: Greyhound's, and 1.25 times the prediction. It begins when there is a predictor."""

    name = "resihp"

    def __init__(self, options: ChangePointOptions | None = None) -> None:
        super().__init__(options)
        self._speeds: dict[int, dict[str, float]] = {}
        self._rank_of: dict[int, int] = {}

    def observe(self, observed: MethodInput, probe: Probe | None = None) -> MethodOutput:
        if observed.cost is None:
            return MethodOutput()
        outcome = super().observe(observed, probe)
        self._update_estimates(outcome.verdicts)
        return outcome

    def dismisses(self, change: ChangePoint, observed: MethodInput) -> bool:
        if observed.cost is None or not change.slower:
            return False
        predicted = predict_iteration(observed.plan, observed.committed.works, observed.cost, self._speeds)
        return observed.committed.measured_us <= FILTER * predicted.iteration_us

    def _update_estimates(self, verdicts: Verdicts) -> None:
        for verdict in verdicts:
            if isinstance(verdict, Verdict):
                rank = verdict.culprits[0].rank
                if rank is not None:
                    self._speeds[rank] = verdict.speed
                    self._rank_of[verdict.verdict] = rank
            elif isinstance(verdict, VerdictClosed):
                self._speeds.pop(self._rank_of.pop(verdict.verdict, -1), None)
