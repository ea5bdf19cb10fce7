"""What was learned and found: predictors, verdicts and how right they were, and what cannot be seen."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from unskew.collector.events.base import Cause, Control


class AdaptationStarted(Control, frozen=True, kw_only=True, tag="adaptation_started@1"):
    """What the deciding part of the controller was given, as plain data: with this and the log its decisions can be replayed.

    `site` is analytics.loop.site.Site, `options` its AdaptationOptions.
    """

    site: dict[str, Any]
    options: dict[str, Any]


class PredictorFitted(Control, frozen=True, kw_only=True, tag="predictor_fitted@1"):
    """`model` is analytics.core.cost.CostModel as plain data; errors are mean absolute relative, in percent, on data not
    fitted."""

    predictor: int
    watermark: int
    model: dict[str, Any]
    n_chunks: int
    error_percent: dict[str, float]
    trigger: str


class Party(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who is meant: a device (`rank`), a link (`link`), a stage (`stage`) or a whole replica (`replica`)."""

    kind: Literal["device", "link", "stage", "replica"]
    rank: int | None = None
    link: tuple[int, int] | None = None
    stage: int | None = None
    replica: int | None = None


class Verdict(Control, frozen=True, kw_only=True, tag="verdict@1"):
    """What is wrong, who did it, who only suffers. `speed` is per kind (healthy 1.0); `config` hashes the thresholds."""

    verdict: int
    cause: Cause
    culprits: tuple[Party, ...]
    victims: tuple[Party, ...] = ()
    speed: dict[str, float] = msgspec.field(default_factory=dict)
    since_iteration: int
    until_iteration: int | None = None
    at_iteration: int
    confidence: float
    sentence: str
    evidence: dict[str, Any]
    config: str = ""


class VerdictClosed(Control, frozen=True, kw_only=True, tag="verdict_closed@1"):
    """The condition ended: the device is back at its healthy speed."""

    verdict: int
    until_iteration: int
    at_iteration: int
    reason: str


MOST_SLOWDOWN = 2.0
"""Who would only have seen a device at less than half of its speed has not looked: nobody calls a job well in which one may
take twice as long. For every way of judging."""


class DetectionLimit(Control, frozen=True, kw_only=True, tag="detection_limit@1"):
    """What the Detector sees from `at_iteration` on, when that changed: a lasting slowdown of a device of `smallest_slowdown`
    times its healthy time is named, and what `why` says of the whole job; None = it cannot be judged, and `why`. `of_devices`:
    where only the whole job cannot be judged, the smallest slowdown of a device over the others that is named all the same."""

    at_iteration: int
    smallest_slowdown: float | None
    why: str = ""
    of_devices: float | None = None


class VerdictScored(Control, frozen=True, kw_only=True, tag="verdict_scored@1"):
    """The verdict against injected truth, or against later evidence (`by`). `truth` names the matching fault or what was seen
    later, None for a false verdict."""

    verdict: int
    correct: bool
    truth: str | None
    delay_iterations: int | None
    onset_error_iterations: int | None
    speed_error: float | None
    by: Literal["injected", "later"] = "injected"


class Diagnosed(Control, frozen=True, kw_only=True, tag="diagnosed@1"):
    """What `unskew diagnose` found in the run's log: on the stream analysis/diagnose, when it differs from the last one.

    `status`: the run's in the log that was read, "unfinished" before its end ("" in logs of versions that did not say): it is
    about the whole run when the run ended so.

    `verdicts` are `Verdict`s as plain data with numbers of their own, not those of the live run. `outcome`: wrong, well or
    cannot_be_judged ("" in logs of versions that did not judge that); well = a lasting slowdown of `smallest_slowdown`
    times the healthy time would have been named; `why`: the sentence to it.
    """

    observability: str
    verdicts: tuple[dict[str, Any], ...]
    time_lost_s: dict[str, float]
    abstained: tuple[str, ...]
    outcome: str = ""
    smallest_slowdown: float | None = None
    why: str = ""
    status: str = ""
