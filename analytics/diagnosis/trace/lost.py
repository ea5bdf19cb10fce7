"""Time lost: devices x (measured - ideal), by cause.

Ideal = each kind of work at its mean, communication at its median, as in ByteDance's replay (replay.py), of what the machines'
causes (slow devices and links, pauses) leave: a mean with a slow device in it is no ideal. Causes are taken out one after the
other in the order of `ORDER`, each from what the ones before it left; what a cause cost is what the replayed iterations became
shorter by: below zero where it hid a later one. Launch delays are replayed only where a recorded pause (input, garbage) made
them: the others hide waiting that the graph does not know. What then remains above ideal is `unexplained`: launch delays, and
the noise of single chunks, which makes a pipeline longer than their mean does. Nothing is scaled to fit; it comes out below
zero only by what taking lengths out moves the means.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from unskew.analytics.diagnosis.trace.replay import ideal_us, makespan_us
from unskew.analytics.diagnosis.trace.scenarios import balanced_lengths, equal_stages, even_links, healthy_device
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.analytics.pipeline.dag import Array
from unskew.collector.events import Verdict

OF_MACHINES = ("slow_device", "slow_link", "gc_pause", "input_bound")
ORDER = (*OF_MACHINES, "long_sequences", "stage_imbalance")


class LostTime(msgspec.Struct, frozen=True, kw_only=True):
    """One section's loss: [iteration] us of one device each; `causes` in the order of `ORDER`."""

    measured_us: Array
    ideal_us: Array
    causes: dict[str, Array]

    @property
    def unexplained_us(self) -> Array:
        return np.asarray(self.measured_us - self.ideal_us - sum(self.causes.values(), np.zeros_like(self.measured_us)))


def time_lost(section: TraceSection, verdicts: Sequence[Verdict] = ()) -> LostTime:
    """What each cause cost per iteration; devices and links are those that `verdicts` name, in their iterations."""
    recording, parts = section.recording, section.parts
    graph, work, pauses = recording.graph, parts.work_us, dict(section.recording.pauses_us)

    def time_us() -> Array:
        return makespan_us(graph, work, sum(pauses.values(), np.zeros_like(work)))

    now = time_us()
    causes: dict[str, Array] = {}
    healthy = work
    for cause in ORDER:
        work = _without(cause, section, work, verdicts)
        pauses.pop(cause, None)
        after = time_us()
        causes[cause] = now - after
        now = after
        healthy = work if cause in OF_MACHINES else healthy
    ideal = makespan_us(graph, ideal_us(recording, healthy))
    return LostTime(measured_us=recording.iteration_us, ideal_us=ideal, causes=causes)


def _without(cause: str, section: TraceSection, work: Array, verdicts: Sequence[Verdict]) -> Array:
    """Durations when the cause is taken out."""
    if cause == "long_sequences":
        return balanced_lengths(section, work)
    if cause == "stage_imbalance":
        return equal_stages(section, work)
    if cause == "gc_pause":
        work = np.where(section.recording.graph.where(kind="gc")[:, None], 0.0, work)
    for verdict in verdicts:
        if verdict.cause == cause:
            work = np.where(_iterations(section, verdict), _healed(section, work, verdict), work)
    return work


def _healed(section: TraceSection, work: Array, verdict: Verdict) -> Array:
    """Work when the devices and links that the verdict names are like the others."""
    for party in verdict.culprits:
        if party.rank is not None and party.rank in section.ranks:
            work = healthy_device(section, work, party.rank)
        if party.link is not None:
            work = even_links(section, work, [party.link])
    return work


def _iterations(section: TraceSection, verdict: Verdict) -> Array:
    """Whether each iteration lies in the verdict's: [iteration] of bool."""
    numbers = np.array(section.recording.iterations)
    until = verdict.until_iteration
    return np.asarray((numbers >= verdict.since_iteration) & (numbers < until if until is not None else True))
