"""An adaptation that goes on: what it is given changes it."""

from __future__ import annotations

from unskew.analytics.core.iteration import IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.loop.adaptation import Adaptation, AdaptationStep
from unskew.analytics.loop.site import Site
from unskew.analytics.predictor.fit import Fit


class Loop:
    """`now` is the adaptation as it is; all ranks of a plan live."""

    def __init__(self, site: Site) -> None:
        self.now = Adaptation.begin(site)

    @property
    def fitted(self) -> Fit | None:
        return self.now.monitor.fitted

    def observe(self, released: IterationTelemetry, plan: Plan) -> AdaptationStep:
        self.now, step = self.now.observe(released, plan, frozenset(plan.ranks))
        return step
