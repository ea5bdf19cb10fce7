"""What was measured directly, beside the iterations: matrix products of suspects (probes) and of ranks that execute nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf
from statistics import median

import msgspec

from unskew.analytics.detector.products import StandbyReading
from unskew.analytics.health.probing import Probe, ProbeOptions, ProbeResult, measured, references, wanted
from unskew.collector.events import Span, StandbyMeasured

ASKED_AGAIN = 4
"""Iterations after which a validation that has not come is asked for again."""


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """`references`: rank -> us of its product when the run began; `suspected_first`: ranks whose product was so many times as
    long as others', and no probe has said more; `readings`: of ranks on standby since the last conclusion;
    `added_at`: of ranks that were added to the run and have not been measured yet, how many iterations were judged then."""

    references: dict[int, float] = {}
    suspected_first: dict[int, float] = {}
    probed_at: int | None = None
    readings: dict[int, tuple[StandbyReading, ...]] = {}
    added_at: dict[int, int] = {}

    @property
    def joining(self) -> frozenset[int]:
        """Ranks that were added to the run and have not been measured yet."""
        return frozenset(self.added_at)

    def awaits(self, committed: int, patience: int) -> bool:
        """Whether a rank was added less than `patience` iterations ago that has not been measured yet."""
        return any(committed < added + patience for added in self.added_at.values())

    def probed(
        self, spans: Sequence[Span], first: int = 0, classes: Iterable[Collection[int]] = (), slow: float = inf
    ) -> tuple[Measurements, ProbeResult | None]:
        """What was probed before an iteration; the probe of the `first`, when the run began or was resumed, is what later ones
        are compared with (`probing.references`). Of a log that begins later none of them says anything."""
        if spans and spans[0].iteration == first:
            healthy, suspected_first = references(spans, classes, slow)
            return msgspec.structs.replace(self, references=healthy, suspected_first=suspected_first), None
        if not spans or not self.references:
            return self, None
        found = measured(spans, self.references)
        left = {rank: slowdown for rank, slowdown in self.suspected_first.items() if rank not in found.slowdowns}
        return msgspec.structs.replace(self, suspected_first=left), found

    def probe(
        self, iteration: int, suspected_ranks: Mapping[int, float], n_ranks: int, options: ProbeOptions
    ) -> tuple[Measurements, Probe | None, str]:
        """The probe to run after `iteration`, where the evidence is not enough and more can be had."""
        if not self.references:
            return self, None, ""
        probe, reason = wanted(iteration, suspected_ranks, n_ranks, self.probed_at, options)
        return (self, None, "") if probe is None else (msgspec.structs.replace(self, probed_at=iteration), probe, reason)

    def validation(
        self, iteration: int, ranks: Collection[int], why: str = "iterations take longer or shorter than before"
    ) -> tuple[Measurements, Probe | None, str]:
        """The probe to run after `iteration` because of an alarm; again where it has not come after some iterations."""
        asked = self.probed_at is not None and iteration < self.probed_at + ASKED_AGAIN
        if not ranks or not self.references or asked:
            return self, None, ""
        names = ", ".join(map(str, sorted(ranks)))
        reason = f"{why}, so ranks {names} are validated"
        return msgspec.structs.replace(self, probed_at=iteration), Probe(ranks=tuple(sorted(ranks))), reason

    def on_standby(self, product: StandbyMeasured) -> tuple[Measurements, StandbyMeasured]:
        """A rank that executes nothing has multiplied its matrix; with its slowdown, which a log that begins later than the run
        still has."""
        reference = self.references.get(product.rank)
        slowdown = product.product_us / reference if reference else product.slowdown
        after = self._joined({product.rank})
        if slowdown is None:
            return after, product
        readings = (*self.readings.get(product.rank, ()), StandbyReading(product.iteration, slowdown))
        after = msgspec.structs.replace(after, readings={**self.readings, product.rank: readings})
        return after, msgspec.structs.replace(product, slowdown=round(slowdown, 4))

    def added(self, rank: int, committed: int) -> Measurements:
        """A rank is to come that was lost, or is new."""
        return msgspec.structs.replace(self, added_at={**self.added_at, rank: committed})

    def joined(self, rank: int, peers: Collection[int]) -> Measurements:
        """It is there; where nothing is known of its device, it is compared with its `peers`', which are of its class."""
        known = [self.references[peer] for peer in peers if peer in self.references]
        if rank not in self.joining or not known:
            return self
        return msgspec.structs.replace(self, references={rank: median(known), **self.references})

    def lost(self, rank: int) -> Measurements:
        """A rank is gone, and what it showed on standby with it."""
        return self.without({rank})._joined({rank})

    def without(self, ranks: Collection[int]) -> Measurements:
        """What these ranks showed on standby is concluded, or over."""
        left = {rank: readings for rank, readings in self.readings.items() if rank not in ranks}
        return msgspec.structs.replace(self, readings=left)

    def _joined(self, ranks: Collection[int]) -> Measurements:
        """Nobody waits for these ranks any more."""
        left = {rank: added for rank, added in self.added_at.items() if rank not in ranks}
        return msgspec.structs.replace(self, added_at=left)
