"""Our own detector behind the interface of the published ones."""

from __future__ import annotations

from unskew.analytics.detector.detector import Detector
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.published.validation import Probe
from unskew.analytics.replay.method import MethodInput, MethodOutput
from unskew.collector.events import Verdict


class UnskewDetector:
    """The Detector as the controller runs it: it needs no validation, so an alarm is a new verdict."""

    name = "unskew"

    def __init__(self, options: DetectorOptions | None = None) -> None:
        self._detector = Detector(options)
        self._named: set[int] = set()

    def observe(self, observed: MethodInput, probe: Probe | None = None) -> MethodOutput:  # noqa: ARG002  # the interface's
        if observed.cost is None or not observed.committed.log_complete:
            return MethodOutput()
        judgement = self._detector.observe(observed.committed, observed.plan, observed.cost, observed.predicted_us)
        new = [v for v in judgement.verdicts if isinstance(v, Verdict) and v.verdict not in self._named]
        self._named.update(verdict.verdict for verdict in new)
        return MethodOutput(verdicts=judgement.verdicts, alarm="; ".join(verdict.sentence for verdict in new))
