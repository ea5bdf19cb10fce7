"""Time lost: devices x (measured - ideal), by cause, and what no cause explains by where it was lost.

The measured iterations are made shorter step by step: without what lies after their last operation, without launch delays,
without what chunks waited for other ranks in their middle, then without each cause in the order of `ORDER` (recorded pauses are
launch delays that have one), with no communication longer than the median of its kind on its stage, and last at the ideal: each
kind of work at its mean, communication at its median, as in ByteDance's replay (replay.py), of what the machines' causes (slow
devices and links, pauses, stalls) leave: a mean with a slow device in it is no ideal.

`no_core`: chunks are longer by the time that their ranks had no core, and what begins later on such a rank is late for it, for
as long at most; nobody knows how much of it passed while the rank had nothing to do. The loop takes it so, too.

What a step cost is what the iterations became shorter by, in total. A step that makes them longer costs nothing (long documents
that lie on the shorter stage hid how unequal the stages are), and the next one counts from the shortest so far. So no part is
below zero, and all parts are measured - ideal; nothing is scaled to fit. Only where taking lengths out moved the means, or
clocks of hosts disagree, so that less than nothing would be unexplained, the ideal is what the parts leave.

What the last step takes is `unexplained`: the noise of single chunks, which makes a pipeline longer than their mean does.
`LOCATED` is lost where the log shows it, for a reason that it does not show. Launch delays can hide waiting that the graph does
not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np

from unskew.analytics.core.outcome import times_as_long
from unskew.analytics.diagnosis.trace.replay import TraceRecording, ideal_us, makespan_us
from unskew.analytics.diagnosis.trace.scenarios import (
    STALL,
    balanced_lengths,
    equal_stages,
    even_links,
    even_replica,
    healthy_device,
    usual_communication,
    without_pattern,
    without_stalls,
    without_waits,
)
from unskew.analytics.diagnosis.trace.section import TraceSection
from unskew.analytics.pipeline.dag import Array
from unskew.collector.events import Verdict

OF_MACHINES = ("no_core", "slow_device", "slow_link", "gc_pause", "input_bound", "unknown", "stalls")
OF_WORK = ("long_sequences", "stage_imbalance")
LOCATED = {
    "iteration_end": "lies behind the last recorded operation of its iteration: what the ranks did there is not recorded",
    "launch_delays": "passed while ranks had all that they needed, as far as it is recorded, and did not begin: their host, "
    "their input, or waiting that is not recorded",
    "waits": "passed in the middle of chunks while their ranks waited for others: for what these send, or for one that is late",
    "stalls": f"went into chunks that took more than {STALL:g} times what their workload lets expect: something held them up, "
    "and no span says what",
    "pattern": "went into the same chunks of every iteration, which take longer than others: waiting within them that is not "
    "recorded, or layers or micro-batches that always cost more",
    "communication": "went into messages and collectives that took longer than the median of their like on their stage",
}
"""Where time was lost for which there is no cause, and what is known of it."""
WITHOUT_CAUSE = {**LOCATED, "unexplained": "is the noise of single chunks, which wait for each other"}
MOST_BEYOND = 1.1
"""So much longer than it was may a replay be: clocks and rounding differ by that."""
ORDER = tuple(cause for cause in (*OF_MACHINES, *OF_WORK) if cause not in LOCATED)


class LostTime(msgspec.Struct, frozen=True, kw_only=True):
    """One section's loss: [iteration] us of one device each; `causes` in the order of `ORDER`, `located` in that of `LOCATED`.
    `parts`, together, are `measured_us - ideal_us`. `replayed_us`: what was done, laid out again as it was; `beside_us`: how
    long chunks of a rank passed beside others of it, of the rank with most. `healthy_us` [operation, iteration]: what
    operations would have taken on machines that nothing was wrong with."""

    measured_us: Array
    replayed_us: Array
    beside_us: Array
    healthy_us: Array
    ideal_us: Array
    causes: dict[str, Array]
    located: dict[str, Array]
    unexplained_us: Array

    @property
    def why_unknown(self) -> str:
        """Why no share of the time can be stated: chunks of a rank overlap, which a replay lays out one after the other, or an
        iteration is over before its parts are; "" = they can."""
        measured, replayed = float(self.measured_us.sum()), float(self.replayed_us.sum())
        if replayed <= MOST_BEYOND * measured:
            return "" if self.ideal_us.sum() >= 0 else "the trace contradicts itself: its parts add up to more than its time"
        took = f"one after the other, what its ranks did takes {times_as_long(replayed / max(measured, 1.0))} as its iterations"
        if self.beside_us.sum() > (MOST_BEYOND - 1) * measured:
            return f"chunks of a rank overlap, and a replay, which knows one stream of each rank, cannot lay that out: {took}"
        return f"the trace contradicts itself: {took}"

    @property
    def parts(self) -> dict[str, Array]:
        """All of them."""
        return {**self.causes, **self.located, "unexplained": self.unexplained_us}


def time_lost(section: TraceSection, verdicts: Sequence[Verdict] = ()) -> LostTime:
    """What each cause cost per iteration; devices, links and replicas are those that `verdicts` name, in their iterations."""
    recording, parts = section.recording, section.parts
    graph, work = recording.graph, parts.work_us
    pauses = {"no_core": _late_for_cores(section), **recording.pauses_us}

    def time_us() -> Array:
        return makespan_us(graph, work, sum(pauses.values(), np.zeros_like(work)))

    measured, late, least = recording.iteration_us, makespan_us(graph, work, parts.delay_us), time_us()
    lost = {"iteration_end": _saved(measured, late), "launch_delays": _saved(late, least)}
    healthy = work
    for step in ("waits", *OF_MACHINES, *OF_WORK, "pattern", "communication"):
        work = without(step, section, work, verdicts)
        pauses.pop(step, None)
        lost[step] = _saved(least, after := time_us())
        least = after if lost[step].any() else least
        healthy = work if step in {"waits", *OF_MACHINES} else healthy
    ideal = makespan_us(graph, ideal_us(recording, healthy))
    unexplained = measured - ideal - sum(lost.values(), np.zeros_like(measured))
    if unexplained.sum() < 0:
        ideal, unexplained = ideal + unexplained, np.zeros_like(unexplained)
    return LostTime(
        measured_us=measured,
        replayed_us=late,
        beside_us=_beside_us(recording),
        healthy_us=healthy,
        ideal_us=ideal,
        causes={cause: lost[cause] for cause in ORDER},
        located={place: lost[place] for place in LOCATED},
        unexplained_us=unexplained,
    )


_SCENARIOS: dict[str, Callable[[TraceSection, Array], Array]] = {
    "waits": without_waits, "stalls": without_stalls, "pattern": without_pattern, "communication": usual_communication,
    "long_sequences": balanced_lengths, "stage_imbalance": equal_stages,
}  # fmt: skip
"""Of what no verdict has to name."""


def _saved(before: Array, after: Array) -> Array:
    """What a step made the iterations shorter by: in total, so that noise between iterations is not counted."""
    return np.asarray(before - after if before.sum() > after.sum() else np.zeros_like(before))


def without(cause: str, section: TraceSection, work: Array, verdicts: Sequence[Verdict]) -> Array:
    """Durations when the cause is taken out."""
    if (scenario := _SCENARIOS.get(cause)) is not None:
        return scenario(section, work)
    if cause == "no_core":
        work = work - section.recording.longer_us
    if cause == "gc_pause":
        work = np.where(section.recording.graph.where(kind="gc")[:, None], 0.0, work)
    mine = [verdict for verdict in verdicts if verdict.cause == cause]
    slow = {party.rank for verdict in mine for party in verdict.culprits if party.rank is not None}
    for verdict in mine:
        work = np.where(_iterations(section, verdict), _healed(section, work, verdict, slow), work)
    return work


def _late_for_cores(section: TraceSection) -> Array:
    """How much of each operation's launch delay, beyond recorded pauses, its rank may have been late for want of a core in the
    chunks before."""
    recording = section.recording
    pauses = sum(recording.pauses_us.values(), np.zeros_like(recording.wall_us))
    late = np.maximum(section.parts.delay_us - pauses, 0.0)
    spare = np.broadcast_to(recording.coreless_us, late.shape) - recording.longer_us
    ranks, begins = [operation.rank for operation in recording.graph.operations], np.median(recording.start_us, axis=1)
    left = {rank: np.zeros(late.shape[1]) for rank in ranks}
    for i in np.argsort(begins, kind="stable").tolist():
        late[i] = np.minimum(late[i], left[ranks[i]])
        left[ranks[i]] = left[ranks[i]] - late[i] + spare[i]
    return late


def _beside_us(recording: TraceRecording) -> Array:
    """[iteration]: how long chunks of a rank passed beside others of it, of the rank with most."""
    chunks_of: dict[int, list[int]] = {}
    for i, operation in enumerate(recording.graph.operations):
        if operation.micro_batch is not None:
            chunks_of.setdefault(operation.rank, []).append(i)
    found = np.zeros_like(recording.iteration_us, dtype=np.float64)
    for mine in chunks_of.values():
        order = np.argsort(recording.start_us[mine], axis=0)
        begin, us = (np.take_along_axis(of[mine], order, axis=0) for of in (recording.start_us, recording.wall_us))
        free = np.maximum.accumulate(begin + us, axis=0)[:-1]
        found = np.maximum(found, np.clip(free - begin[1:], 0.0, us[1:]).sum(axis=0))
    return found


def _healed(section: TraceSection, work: Array, verdict: Verdict, slow: Collection[int]) -> Array:
    """Work when the devices, links and replicas that the verdict names are like the others, of which these are slow, too."""
    for party in verdict.culprits:
        if party.rank is not None and party.rank in section.ranks:
            work = healthy_device(section, work, party.rank, slow)
        if party.link is not None:
            work = even_links(section, work, [party.link])
        if party.replica is not None:
            work = even_replica(section, work, party.replica, verdict.speed)
    return work


def _iterations(section: TraceSection, verdict: Verdict) -> Array:
    """Whether each iteration lies in the verdict's: [iteration] of bool."""
    numbers = np.array(section.recording.iterations)
    until = verdict.until_iteration
    return np.asarray((numbers >= verdict.since_iteration) & (numbers < until if until is not None else True))
