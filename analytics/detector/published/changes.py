"""Iteration times -> alarms, as Greyhound raises them: a change point, verified, and who is suspected for it.

ResiHP's filter lies between: a change that the iteration's own batches explain is benign, and its iteration is deleted from the
series, so that it does not disturb the next decision.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from unskew.analytics.core.iteration import Chunk, CommittedIteration
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.published.change_point import ChangePoint, ChangePointOptions, Series
from unskew.analytics.detector.published.validation import profile


class ChangeAlarm(msgspec.Struct, frozen=True, kw_only=True):
    """Iterations became slower, or faster, from `since` on, as was seen after iteration `at`; `suspects`: rank -> how
    many times as long it computes as the median of its role, where that is suspicious."""

    change: ChangePoint
    since: int
    at: int
    suspects: dict[int, float]


class ChangeWatch(msgspec.Struct, frozen=True, kw_only=True):
    """The `iterations` seen, their times, and the chunks of the `recent` ones."""

    series: Series = Series()
    iterations: tuple[int, ...] = ()
    recent: tuple[tuple[Chunk, ...], ...] = ()

    def observe(
        self,
        committed: CommittedIteration,
        plan: Plan,
        options: ChangePointOptions,
        benign: Callable[[ChangePoint], bool] = lambda _: False,
    ) -> tuple[ChangeWatch, ChangeAlarm | None]:
        """With the next iteration; the alarm when it reveals a change that is verified and not `benign`."""
        series = self.series.observe(committed.measured_us, options)
        seen = ChangeWatch(
            series=series,
            iterations=(*self.iterations, committed.iteration),
            recent=(*self.recent, committed.chunks)[-options.recent :],
        )
        change = series.change(options)
        if change is None:
            return seen, None
        if change.verified(options) and benign(change):
            return msgspec.structs.replace(self, recent=seen.recent), None
        taken = msgspec.structs.replace(seen, series=series.taken(change))
        if not change.verified(options):
            return taken, None
        since, suspects = seen.iterations[change.at], profile(seen.recent, plan)
        return taken, ChangeAlarm(change=change, since=since, at=committed.iteration, suspects=suspects)
