"""How much of a run's time went for no cause that anybody can name, added up iteration by iteration: the same live, in replays
and in `unskew diagnose`, so that none of them is calmer than another.

What an iteration takes beyond its ideal (each kind of chunk at its mean, laid out by the schedule, and what ranks do beside) is
lost. Known causes are: unequal work and stages, slow devices and links that are named (all that is predicted of the iteration
beyond its ideal), recorded pauses, and ranks without a core, as far as that made their chunks longer or could let them begin
late. The rest has none. Where it was lost a replay of the operations shows (diagnosis/trace/lost.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.outcome import UnexplainedTime
from unskew.analytics.pipeline.prediction import Prediction, predict_iteration
from unskew.analytics.pipeline.schedule import Timeline, evaluate
from unskew.analytics.predictor.retraining import IterationSample
from unskew.collector.events import PAUSES

FOR_A_CAUSE = frozenset({*PAUSES, "data_wait"})
KEPT = 40
"""The last iterations are accounted for again when somebody is named for what made them long."""
MOST_OUTSIDE, OUTSIDE_OVER = 0.3, 20
"""Where the median of so many iterations spends a larger part outside of what is timed, much may be wrong there from the first
on."""


class IterationAccount(msgspec.Struct, frozen=True, gc=False):
    """Microseconds of one iteration: all, of these lost, and of these without a cause."""

    iteration: int
    measured_us: float = 0.0
    lost_us: float = 0.0
    uncaused_us: float = 0.0


class TimeAccount(msgspec.Struct, frozen=True):
    """`last`: the last iterations, oldest first; `before`: all others together."""

    last: tuple[IterationAccount, ...] = ()
    before: IterationAccount = IterationAccount(-1)

    def adding(self, *found: IterationAccount) -> TimeAccount:
        """With these iterations, in place of what was known of them; those that lie too far back are left as they are."""
        oldest = self.last[0].iteration if self.last else -1
        entries = {one.iteration: one for one in (*self.last, *found) if one.iteration >= oldest}
        last = [entries[number] for number in sorted(entries)]
        return TimeAccount(tuple(last[-KEPT:]), _together((self.before, *last[:-KEPT])))

    @property
    def unexplained(self) -> UnexplainedTime:
        """What has no cause so far."""
        whole = _together((self.before, *self.last))
        if not whole.uncaused_us:
            return UnexplainedTime()
        return UnexplainedTime(of_lost=whole.uncaused_us / whole.lost_us, of_measured=whole.uncaused_us / whole.measured_us)


def account_of(sample: IterationSample, model: CostModel) -> IterationAccount:
    """Where the time of an iteration went, by what is estimated of its ranks and links; `model`: what chunks should take."""
    released, committed = sample.released, sample.committed
    model = msgspec.structs.replace(model, cores=None)  # time without a core is measured
    prediction = predict_iteration(sample.plan, committed.works, model, sample.speeds)
    beside, paused = Counter[int](), Counter[int]()
    for one in released.beside:
        (paused if one.kind in FOR_A_CAUSE else beside)[one.rank] += round(one.us)
    sums_us = max(released.collectives_us, default=0.0) if model.sync is None else 0.0
    needed_us = max(beside.values(), default=0) + sums_us + released.exchanged_us
    ideal_us = min(even_us(prediction.timeline), prediction.synced_us) + needed_us
    expected_us = prediction.synced_us + needed_us + max(paused.values(), default=0)
    coreless_us = released.coreless_us + min(released.maybe_coreless_us, released.late_us)
    return IterationAccount(
        committed.iteration,
        committed.measured_us,
        max(committed.measured_us - ideal_us, 0.0),
        max(committed.measured_us - expected_us - coreless_us, 0.0),
    )


def outside_of(sample: IterationSample, prediction: Prediction, *, sums_timed: bool) -> float:
    """The share of an iteration that is neither chunks and what they wait for each other, nor anything else that is timed;
    `sums_timed`: the sums of gradients are part of the prediction."""
    released = sample.released
    busy, beside = Counter[int](), Counter[int]()
    for chunk in sample.committed.chunks:
        busy[chunk.rank] += round(chunk.us)
    for one in released.beside:
        beside[one.rank] += round(one.us)
    of_chunks_us = max(prediction.synced_us, *busy.values())
    untimed_us = () if sums_timed else released.collectives_us
    of_end_us = max(beside.values(), default=0) + max(untimed_us, default=0.0)
    inside_us = of_chunks_us + of_end_us + released.exchanged_us + released.coreless_us + released.maybe_coreless_us
    return 1 - inside_us / sample.committed.measured_us


def even_us(timeline: Timeline) -> float:
    """How long the chunks would take together if all of a kind took alike."""
    kinds, spent_us = timeline.schedule.chunks.kind, timeline.end_us - timeline.start_us
    mean_us = np.bincount(kinds, weights=spent_us) / np.maximum(np.bincount(kinds), 1)
    return float(evaluate(timeline.schedule, mean_us[kinds]).makespan_us)


def _together(accounts: Sequence[IterationAccount]) -> IterationAccount:
    return IterationAccount(
        -1,
        sum(one.measured_us for one in accounts),
        sum(one.lost_us for one in accounts),
        sum(one.uncaused_us for one in accounts),
    )
