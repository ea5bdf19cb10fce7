"""Greyhound (ATC'25, arXiv 2410.12588): iteration times alone -> change point -> verification -> profile -> validation.

Nothing in it knows sequence lengths: a batch of long documents is a change of the iteration time like any other.
"""

from __future__ import annotations

import msgspec

from unskew.analytics.detector.published.change_point import ChangePoint, ChangePointOptions
from unskew.analytics.detector.published.changes import ChangeAlarm, ChangeWatch
from unskew.analytics.detector.published.validation import Probe, validate
from unskew.analytics.lab.baselines.naming import VerdictNames
from unskew.analytics.replay.method import MethodInput, MethodOutput


class GreyhoundDetector:
    """Published settings: P > 0.9, 10 % between the means, 10 % above the median of equal groups."""

    name = "greyhound"

    def __init__(self, options: ChangePointOptions | None = None) -> None:
        self.options = options or ChangePointOptions()
        self.watch = ChangeWatch()
        self.names = VerdictNames(self.name)

    def observe(self, observed: MethodInput, probe: Probe | None = None) -> MethodOutput:
        self.watch, alarm = self.watch.observe(
            observed.committed, observed.plan, self.options, lambda change: self.dismisses(change, observed)
        )
        return MethodOutput() if alarm is None else self.react(alarm, observed, probe)

    def dismisses(self, change: ChangePoint, observed: MethodInput) -> bool:  # noqa: ARG002  # ResiHP's filter overrides this
        """Whether the change is harmless after all."""
        return False

    def react(self, alarm: ChangeAlarm, observed: MethodInput, probe: Probe | None) -> MethodOutput:
        """Profile and validate; a faster job acquits who is no longer slow."""
        at, since, change, suspects = alarm.at, alarm.since, alarm.change, alarm.suspects
        if not change.slower:
            still = validate(dict.fromkeys(self.names.ranks, 1.0), observed.plan, probe) if self.names.ranks else {}
            gone = [rank for rank in self.names.ranks if rank not in (still if probe else suspects)]
            return MethodOutput(verdicts=tuple(v for r in gone for v in self.names.acquit(r, at, "validated as healthy again")))
        culprits = validate(suspects, observed.plan, probe)
        evidence = {
            "change_point": {**msgspec.structs.asdict(change), "at": since},
            "suspects": {str(rank): round(ratio, 3) for rank, ratio in suspects.items()},
            "validated": probe is not None,
        }
        verdicts = tuple(
            verdict
            for rank, ratio in culprits.items()
            for verdict in self.names.flag(
                rank,
                {"F": round(1 / ratio, 4), "B": round(1 / ratio, 4)},
                since=since,
                at=at,
                sentence=f"rank {rank} computes {ratio:.2f} times as long as healthy since iteration {since}",
                evidence=evidence,
            )
        )
        alarm_text = f"iterations take {change.after_us / change.before_us:.2f} times as long since iteration {since}"
        return MethodOutput(verdicts=verdicts, alarm=alarm_text)
