"""What every fail-slow detector looks like here, ours and the published ones: live, over a recorded log, in bulk studies."""

from __future__ import annotations

from typing import Protocol

import msgspec

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.iteration import CommittedIteration
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.detector_state import Verdicts
from unskew.analytics.detector.published.validation import Probe


class MethodInput(msgspec.Struct, frozen=True, kw_only=True):
    """One committed iteration, the plan under which it ran, and the predictor of that moment.

    `cost` None = no predictor yet, or no lengths known: methods that need one wait. `predicted_us` is the iteration's
    predicted time at the speeds that our Detector estimates; a method with estimates of its own predicts by itself from `cost`.
    """

    committed: CommittedIteration
    plan: Plan
    cost: CostModel | None = None
    predicted_us: float | None = None


class MethodOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What a method reports after an iteration.

    `alarm` is a sentence when the method takes this moment for a failure before any validation: for a method that validates,
    this is when training would be stopped for it (the false alarms that ResiHP's table 5 counts); "" otherwise. `verdicts`
    are what is left after validation, numbered by the method itself from 1.
    """

    verdicts: Verdicts = ()
    alarm: str = ""


class Method(Protocol):
    """A detector with its state; one per run. Iterations come in order, each once; a method never looks at the clock."""

    name: str

    def observe(self, observed: MethodInput, probe: Probe | None = None) -> MethodOutput:
        """Judge the next iteration. `probe` None = no validation can be run (a recorded log): the method decides without."""
        ...
