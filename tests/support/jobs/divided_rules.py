"""A made-up training on samples of a shared distribution of lengths, decided by the rules of a watched one that may act: what a
change was predicted to gain, and what it was measured to. No ranks and no clocks, so alike at any load.

The ranks' times are a cost by each sample's length with noise; plans are voted on and entered as `session.balance` does it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from unskew.analytics.actuators import acting
from unskew.analytics.core.division import Division, ahead, grouped, split
from unskew.analytics.core.iteration import BesideChunks, Chunk, CommittedIteration, IterationTelemetry
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import work_of
from unskew.analytics.detector.options import options_for
from unskew.analytics.lab.studies.noise import load_lengths
from unskew.analytics.loop.watched import attached_rules as rules
from unskew.analytics.loop.watched.found_plan import plan_of
from unskew.collector.events import Event, LoaderDivided, PlanProposed, PlanScored, RankAttached, SamplesDrawn
from unskew.runtime.attach.balance import VOTE_EVERY

STEPS, LONGEST, NOISE = 160, 16_384, 0.03
TOKEN_US, SQUARES_AT, PER_PASS_US = 1.5, 6_000, {"F": 1 / 3, "B": 2 / 3}
BESIDE_US, END_US = {"optimizer": 900.0, "other": 300.0, "data_wait": 200.0}, 800.0


class DividedLoop(NamedTuple):
    """`slow`: by how much rank 1 is slower; `epoch`: so many batches, of which the last is half a one; `foresees`: the loader
    says how long the samples are that come; `coreless`: for want of cores an iteration takes longer by this part of it, in the
    mean, and by half as much more of which nobody knows why."""

    name: str
    ranks: int = 2
    each: int = 4
    window: int = 8
    padded: bool = False
    slow: float = 1.0
    epoch: int = 10**6
    foresees: bool = True
    coreless: float = 0.0


class _Batch(NamedTuple):
    """A global batch, the division by which it is given out, and the number of the plan that says so."""

    division: Division
    plan_version: int
    lengths: tuple[int, ...]


class LoopGain(NamedTuple):
    """Part of a step, in percent: as it was proposed with its interval, and as it was measured afterwards."""

    predicted: float
    interval: tuple[float, float]
    measured: float
    steps: int


def trained(loop: DividedLoop, seed: int, steps: int = STEPS) -> list[Event]:
    """What is decided on it."""
    random = np.random.default_rng(seed)
    whole = Division(samples=(loop.each,) * loop.ranks)
    lengths = np.minimum(random.choice(load_lengths(loop.name), (steps, whole.total)), LONGEST).astype(int)
    batches = [tuple(max(one, 1) for one in row) for row in lengths.tolist()]
    for last in range(loop.epoch - 1, steps, loop.epoch):
        batches[last] = batches[last][: whole.total // 2]
    names = {rank: RankAttached(rank=rank, ranks=loop.ranks, node="n", pid=rank) for rank in range(loop.ranks)}
    plan, _ = plan_of(names, dict.fromkeys(range(loop.ranks), 1))
    seen, first = rules.begin(plan, "", options_for("cores"))
    state, events = acting.begin(plan, "auto"), [*first]
    for rank in range(loop.ranks):
        state = acting.heard(
            state, LoaderDivided(rank=rank, samples=whole.samples, window=loop.window, lengths=True, loss="mean")
        )
    division, version, held = whole, 0, deque[Plan]()
    coming: Plan | None = None
    given = deque[_Batch]()
    at = 0
    for step in range(steps):
        if step % VOTE_EVERY == 0 and held:
            coming = held.popleft()
        if not given:
            if coming is not None:
                assert coming.division is not None
                division, version, coming = coming.division, coming.plan_version, None
            window = _window(batches, at, division, whole.total)
            for group in grouped(window, division, f"0-{at}"):
                given.append(_Batch(division, version, tuple(window[batch][place] for batch, place in group)))
            at += len(window)
            behind = tuple(batches[at : at + ahead(loop.window, whole.total)]) if loop.foresees else ()
            state = acting.heard(state, SamplesDrawn(iteration=step, batches=tuple(window), coming=behind))
        released = _iteration(loop, step, given.popleft(), random)
        state, applied = acting.entered(state, released.committed.plan_version, step)
        events += applied
        if applied:
            seen, more = rules.applied(seen, state.plan, step)
            events += more
        seen, found = rules.committed(seen, released)
        events += found
        state, decided, orders = acting.committed(state, released, seen, found)
        events += decided
        held.extend(order.plan for order in orders if isinstance(order, acting.Entering))
    return [*events, *acting.finished(state)]


def _window(batches: list[tuple[int, ...]], at: int, division: Division, total: int) -> list[tuple[int, ...]]:
    """As the loader takes it."""
    found = [batches[at]]
    for batch in batches[at + 1 : at + max(division.window, 1)]:
        if not len(batch) == len(found[0]) == total:
            break
        found.append(batch)
    return found


def _iteration(loop: DividedLoop, step: int, batch: _Batch, random: np.random.Generator) -> IterationTelemetry:
    division, version, lengths = batch
    chunks, beside, works, own_us = [], [], [], []
    if len(lengths) < division.total:
        division = Division(samples=(len(lengths) // loop.ranks,) * loop.ranks)
    for rank, places in enumerate(split(lengths, division)):
        mine = [lengths[place] for place in places]
        held = [max(mine)] * len(mine) if loop.padded else mine
        works.append(work_of(held))
        slower = loop.slow if rank == 1 else 1.0
        us = slower * sum(TOKEN_US * length + TOKEN_US / SQUARES_AT * length * length for length in held)
        took = 0.0
        for kind, part in PER_PASS_US.items():
            chunk_us = us * part * float(random.lognormal(0, NOISE))
            chunks.append(Chunk(rank=rank, kind=kind, n_layers=1, has_head=True, work=works[-1], us=chunk_us))
            took += chunk_us
        for kind, of_us in BESIDE_US.items():
            beside.append(BesideChunks(rank, kind, of_us * float(random.lognormal(0, NOISE))))
            took += beside[-1].us
        own_us.append(took)
    end_us = END_US * float(random.lognormal(0, NOISE))
    coreless_us, unknown_us = (loop.coreless * part * max(own_us) * float(random.exponential()) for part in (1.0, 0.5))
    committed = CommittedIteration(
        iteration=step, plan_version=version, chunks=tuple(chunks), works=tuple(works),
        measured_us=max(own_us) + end_us + coreless_us + unknown_us, log_complete=True,
    )  # fmt: skip
    return IterationTelemetry(committed=committed, beside=tuple(beside), coreless_us=coreless_us)


def gain_of(events: list[Event]) -> LoopGain | None:
    """Of the first change that was scored; None where none was."""
    proposed = {event.proposal: event for event in events if isinstance(event, PlanProposed)}
    for event in events:
        if isinstance(event, PlanScored) and event.effect_s is not None and event.baseline_s:
            one = proposed[event.proposal]
            low, high = one.evidence.get("gain_interval_us") or (0.0, 0.0)
            scale = 100 / (one.baseline_us or 1)
            return LoopGain(
                one.gain_percent or 0.0, (scale * low, scale * high), 100 * event.effect_s / event.baseline_s, event.n
            )
    return None
