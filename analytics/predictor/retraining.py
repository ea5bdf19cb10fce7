"""When the predictor is fitted again, and when a new one replaces the old: live and offline alike.

The steps, per committed iteration (pure: the same iterations give the same predictors):

1. warm-up: the first iterations fit the first predictor, which nothing precedes;
2. a new one is fitted when one is due: `refit_every` iterations after the last, some iterations into a new plan, or on
   drift: in each of the last `backtest` iterations the median chunk of all ranks, or the iteration itself, was more than
   `drift` off to the same side (the first iterations, on which the first predictor is fitted, often take longer than the
   rest of the run). Estimated speeds of the time are divided out first, so a device estimated slow is fitted as slow and
   does not bend the healthy reference;
3. while a device is suspected that is not known to be slow nothing is fitted or replaced, for what takes sixteen iterations
   to name would be learned as healthy on the way; but not for ever: after `patience` such iterations more than others, and
   at once where only the speeds of known slow devices are in doubt, it is fitted on the chunks of all others, and the end of
   an iteration at the speeds that suspects showed in it;
4. back-test: both predictors predict the next `backtest` iterations, which neither has seen; the new one replaces the old iff
   its chunks are no worse and the sum of its two median errors (chunks, iterations) is smaller.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import median

import msgspec

from unskew.analytics.core.cost import CostModel, GradientSync, SlowLink
from unskew.analytics.core.iteration import Chunk, CommittedIteration, IterationTelemetry, Transfer
from unskew.analytics.core.plan import Plan
from unskew.analytics.core.workload import Work
from unskew.analytics.pipeline.prediction import predict_iteration
from unskew.analytics.predictor.ends import EndsBySize
from unskew.analytics.predictor.fit import (
    Fit,
    NotIdentifiable,
    OwnTime,
    TimedIteration,
    at_healthy_speed,
    expected_us,
    fit,
    fit_terms,
    median_error,
    median_ratio,
)
from unskew.analytics.shards.together import LayerSums
from unskew.collector.events import IterationJudged, PredictorFitted, Verdict, VerdictClosed

NO_WORSE = 0.002
"""Two median errors of chunks nearer than this are alike. More is not excused by better iterations: an end that is learned from
disturbed iterations fits disturbed iterations."""


class RetrainingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are iterations; `drift` is a ratio less one, `suspicious_score` a score of the Detector (above 1 it flags);
    `patience`: for so long nothing is fitted while somebody is suspected."""

    warm_up: int = 8
    refit_every: int = 40
    backtest: int = 8
    drift: float = 0.03
    suspicious_score: float = msgspec.field(name="doubt", default=0.25)
    patience: int = 20


class IterationSample(msgspec.Struct, frozen=True):
    """A committed iteration, the plan it ran under, the estimated speeds and slow links when it ran, and its time as it was
    predicted then. `scores`: of the ranks that were judged in it."""

    released: IterationTelemetry
    plan: Plan
    speeds: dict[int, dict[str, float]]
    predicted_us: float | None = None
    scores: dict[int, float] = {}
    slow_links: tuple[SlowLink, ...] = ()

    @property
    def committed(self) -> CommittedIteration:
        return self.released.committed

    @property
    def chunks(self) -> list[Chunk]:
        """At healthy speed."""
        return at_healthy_speed(self.committed.chunks, self.speeds)

    @property
    def suspicion(self) -> float:
        """The highest score of a rank; 0.0 when nobody was judged."""
        return max(self.scores.values(), default=0.0)

    def without(self, suspects: Collection[int], model: CostModel | None = None) -> IterationSample:
        """Without the chunks of `suspects`, which by the `model` were as fast as they took in it."""
        if not suspects:
            return self
        chunks, kept = self.committed.chunks, tuple(one for one in self.committed.chunks if one.rank not in suspects)
        speeds = self.speeds | (shown_speeds(model, [one for one in chunks if one.rank in suspects]) if model else {})
        committed = msgspec.structs.replace(self.committed, chunks=kept)
        return msgspec.structs.replace(
            self, released=msgspec.structs.replace(self.released, committed=committed), speeds=speeds
        )

    @property
    def slow(self) -> frozenset[tuple[int, int]]:
        """The links that were estimated slow."""
        return frozenset((link.sender, link.receiver) for link in self.slow_links)

    @property
    def transfers(self) -> list[Transfer]:
        """Over all other links."""
        return [one for one in self.committed.transfers if (one.sender, one.receiver) not in self.slow]

    @property
    def idle(self) -> dict[int, float]:
        """Of ranks that were estimated slow, how much of their time they held no core."""
        return {rank: part for rank, part in self.released.idle.items() if rank in self.speeds}

    def known(self, model: CostModel) -> CostModel:
        """The model with what was known of links and cores then."""
        return msgspec.structs.replace(model, slow_links=self.slow_links, idle=self.idle)

    def predicted_by(self, model: CostModel) -> float:
        """Its time (us) by a model, with what is estimated of it."""
        return predict_iteration(self.plan, self.committed.works, self.known(model), self.speeds).iteration_us


class PredictorBacktest(msgspec.Struct, frozen=True, kw_only=True):
    """Median absolute relative errors on `n` iterations that were not fitted: of chunks, of iterations."""

    n: int
    chunks: float
    iterations: float

    @property
    def total(self) -> float:
        return self.chunks + self.iterations

    def beats(self, old: PredictorBacktest) -> bool:
        """Whether the predictor of these errors replaces that of the `old` ones: chunks no worse, the sum smaller."""
        return self.chunks <= old.chunks + NO_WORSE and self.total < old.total


class _Candidate(msgspec.Struct, frozen=True):
    fitted: Fit
    trigger: str
    later: tuple[IterationSample, ...] = ()
    suspects: frozenset[int] = frozenset()


class Retraining(msgspec.Struct, frozen=True, kw_only=True):
    """The predictor of one run and what it is learned from; never changed, only replaced. `classes`: device class -> ranks;
    `blocking`: their sends are; `sync`, `cores`, `layer_sums`: what is known beforehand of the sums of gradients, of
    cores, of groups' sums (`CostModel`).

    `seen`: the last complete iterations; `fitted_at`: the last that the predictor is fitted on; a new one is due at iteration
    `due_at`, because of `why`; `suspected`: in how many more iterations somebody was who is not known to be slow than nobody,
    up to twice the patience.
    """

    options: RetrainingOptions = RetrainingOptions()
    classes: dict[str, tuple[int, ...]] = {}
    blocking: bool = False
    sync: GradientSync | None = None
    cores: int | None = None
    layer_sums: LayerSums = ()
    fitted: Fit | None = None
    fitted_at: int = -1
    number: int = 0
    seen: tuple[IterationSample, ...] = ()
    candidate: _Candidate | None = None
    suspected: int = 0
    due_at: int = 0
    why: str = ""
    ends: EndsBySize = EndsBySize()

    def recent(self, n: int) -> tuple[tuple[Work, ...], ...]:
        """The work of the last `n` iterations' micro-batches, oldest first."""
        return tuple(seen.committed.works for seen in self.seen[-n:])

    def idle(self, n: int) -> dict[int, float]:
        """The part of its chunks' time for which a rank held no core, in the median of the last `n` iterations."""
        of: dict[int, list[float]] = {}
        for seen in self.seen[-n:]:
            for rank, part in seen.released.idle.items():
                of.setdefault(rank, []).append(part)
        return {rank: median(parts) for rank, parts in of.items()}

    def plan_changed(self, iteration: int) -> Retraining:
        """A new plan is in force from `iteration` on: fit again some iterations later."""
        due_at = iteration + self.options.refit_every // 2
        return msgspec.structs.replace(self, candidate=None, due_at=due_at, why="plan change")

    def correct_speeds(self, rank: int, since: int, speeds: Mapping[str, float]) -> Retraining:
        """`rank` has had these speeds (kind -> speed) since iteration `since`, as is known only now."""

        def known(seen: IterationSample) -> IterationSample:
            if seen.committed.iteration < since:
                return seen
            others = {other: kinds for other, kinds in seen.speeds.items() if other != rank}
            return msgspec.structs.replace(seen, speeds={**others, rank: dict(speeds)} if speeds else others)

        candidate = self.candidate
        if candidate is not None:
            candidate = msgspec.structs.replace(candidate, later=tuple(map(known, candidate.later)))
        return msgspec.structs.replace(self, seen=tuple(map(known, self.seen)), candidate=candidate)

    def fitted_again(self, trigger: str) -> tuple[Retraining, PredictorFitted | None]:
        """At once, on the iterations that the predictor is fitted on: their speeds were corrected."""
        same = [one for one in self.seen if one.committed.iteration <= self.fitted_at]
        found = self._fit(same) if same else None
        if found is None:
            return self, None
        return self._adopted(found, trigger, self.seen[-1].committed.iteration, upto=self.fitted_at)

    def observe(self, sample: IterationSample) -> tuple[Retraining, PredictorFitted | None]:
        """With the next complete iteration; the event when a predictor came into force with it."""
        seen = (*self.seen, sample)[-self.options.refit_every :]
        after = msgspec.structs.replace(self, seen=seen, candidate=None)
        now = sample.committed.iteration
        if self.fitted is None:
            found = self._fit(seen) if len(seen) >= self.options.warm_up else None
            return (after, None) if found is None else after._adopted(found, "warm-up", now, upto=now)
        suspects = frozenset(rank for rank, score in sample.scores.items() if score >= self.options.suspicious_score)
        unknown, patience = bool(suspects - sample.speeds.keys()), self.options.patience
        suspected = min(self.suspected + 1, 2 * patience) if unknown else max(self.suspected - 1, 0)
        after = msgspec.structs.replace(after, suspected=suspected)
        waits = unknown and (suspected <= patience or 2 * len(suspects) > len(sample.scores))
        if self.candidate is None:
            return (after if waits else after._with_candidate(now, self.fitted, suspects)), None
        candidate = msgspec.structs.replace(
            self.candidate, later=(*self.candidate.later, sample), suspects=self.candidate.suspects | suspects
        )
        if len(candidate.later) < self.options.backtest:
            return msgspec.structs.replace(after, candidate=candidate), None
        return (after, None) if waits else after._tested(candidate, self.fitted, now)

    def _tested(self, candidate: _Candidate, old: Fit, now: int) -> tuple[Retraining, PredictorFitted | None]:
        """Back-test: the candidate replaces the `old` one or is dropped until the next is due."""
        after = msgspec.structs.replace(self, due_at=now + self.options.refit_every, why="")
        new, before = (
            backtest(model, [one.without(candidate.suspects, model) for one in candidate.later])
            for model in (candidate.fitted.model, old.model)
        )
        if not new.beats(before):
            return after, None
        tested = {"chunks, later": 100 * new.chunks, "chunks, later, before": 100 * before.chunks,
                  "iteration, later": 100 * new.iterations, "iteration, later, before": 100 * before.iterations}  # fmt: skip
        errors = {**candidate.fitted.error_percent, **{name: round(error, 3) for name, error in tested.items()}}
        found = msgspec.structs.replace(candidate.fitted, error_percent=errors)
        return after._adopted(found, candidate.trigger, now, upto=candidate.later[0].committed.iteration - 1)

    def _with_candidate(self, now: int, fitted: Fit, suspects: frozenset[int]) -> Retraining:
        """With a candidate where one is due and can be fitted, `suspects` left out."""
        trigger = (self.why or "again from the log") if now >= self.due_at else self._drift(now, fitted)
        if not trigger:
            return self
        found = self._fit(self.seen, suspects, fitted)
        return self if found is None else msgspec.structs.replace(self, candidate=_Candidate(found, trigger, suspects=suspects))

    def _fit(self, seen: Sequence[IterationSample], suspects: Collection[int] = (), before: Fit | None = None) -> Fit | None:
        return fit_seen(
            seen, self.classes, blocking=self.blocking, sync=self.sync, cores=self.cores, layer_sums=self.layer_sums,
            suspects=suspects, before=before,
        )  # fmt: skip

    def _drift(self, now: int, fitted: Fit) -> str:
        """Why to fit early: the ranks' median chunk, or the iteration, has been off for some time; "" when neither has."""
        n = self.options.backtest
        last = self.seen[-n:]
        if now < self.due_at - self.options.refit_every + 2 * n or len(last) < n:
            return ""
        of_chunks = [off for seen in last if (off := median_ratio(fitted.model, seen.chunks)) is not None]
        of_iterations = [seen.committed.measured_us / seen.predicted_us for seen in last if seen.predicted_us]
        for what, offs in (("", of_chunks), (" of the iteration", of_iterations)):
            apart = [off - 1 for off in offs]
            if len(apart) == n and (min(apart) > self.options.drift or max(apart) < -self.options.drift):
                return f"drift{what} of {100 * median(apart):+.1f} %"
        return ""

    def _adopted(self, found: Fit, trigger: str, now: int, *, upto: int) -> tuple[Retraining, PredictorFitted]:
        """In force from iteration `now` on; it is fitted on iterations up to `upto`."""
        number, due_at = self.number + 1, now + self.options.refit_every
        last = next((one for one in reversed(self.seen) if one.committed.iteration <= upto), self.seen[-1])
        before_us = None if self.fitted is None else self.fitted.model.iteration_end_us
        ends = self.ends.fitted(last.plan.widest, found.model.iteration_end_us, before_us)
        found = msgspec.structs.replace(found, model=msgspec.structs.replace(found.model, end_more_us=ends.more))
        after = msgspec.structs.replace(self, fitted=found, fitted_at=upto, number=number, due_at=due_at, ends=ends)
        return after, fitted_event(found, number=number, watermark=now, trigger=trigger)


def fitted_event(found: Fit, *, number: int, watermark: int, trigger: str) -> PredictorFitted:
    """The fit as an event."""
    return PredictorFitted(
        predictor=number,
        watermark=watermark,
        model=msgspec.to_builtins(found.model),
        n_chunks=found.n_chunks,
        error_percent=found.error_percent,
        trigger=trigger,
    )


def fit_seen(
    seen: Sequence[IterationSample],
    classes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    blocking: bool = False,
    sync: GradientSync | None = None,
    cores: int | None = None,
    layer_sums: LayerSums = (),
    suspects: Collection[int] = (),
    before: Fit | None = None,
) -> Fit | None:
    """The predictor of these iterations; None when they do not suffice. `classes`, `blocking`, `sync`, `cores`,
    `layer_sums`: as in `Retraining`.
    Chunks of `suspects` are left out; where they are the only ones that show what some work takes, chunks cost what they did
    `before`."""
    last = seen[-1]
    plan, speeds, ranks = last.plan, last.speeds, len(last.plan.ranks) if cores else 0
    everything = [chunk for one in seen for chunk in one.chunks]
    chunks = [chunk for chunk in everything if chunk.rank not in suspects]
    # The first iteration pays for start-up once; it is no evidence on the end of the others.
    measured = [
        one
        for one in seen
        if one.plan.plan_version == plan.plan_version
        and one.speeds == speeds
        and one.slow == last.slow
        and one.committed.iteration > 0
    ]
    transfers = [transfer for one in seen for transfer in one.transfers]
    collectives = [us for one in seen for us in one.released.collectives_us]
    group_waits = [wait for one in seen for wait in one.released.group_waits]
    healthy = [(one, rank) for one in seen if one.committed.iteration > 0 for rank in one.released.own_us.keys() - one.speeds]
    own = [OwnTime(rank, len(one.plan.team_of.get(rank, (rank,))), one.released.own_us[rank]) for one, rank in healthy]
    bucket_steps = [step for one in seen for step in one.released.bucket_steps]

    def makespan_us(timed: TimedIteration, cost: CostModel) -> float:
        return predict_iteration(timed.plan, timed.works, last.known(cost), timed.speeds).iteration_us

    try:
        if before is not None and _witnessed(chunks, before.model) != _witnessed(everything, before.model):
            found = before
        else:
            found = fit(chunks, classes, own)
        model = msgspec.structs.replace(
            found.model, blocking=blocking, sync=sync, cores=cores, end_ranks=ranks, layer_sums=layer_sums
        )
        found = msgspec.structs.replace(found, model=model)
        timed = [
            TimedIteration(one.plan, one.committed.works, one.committed.measured_us, one.without(suspects, found.model).speeds)
            for one in measured
        ]
        return fit_terms(found, timed, makespan_us, transfers, collectives, group_waits=group_waits, bucket_steps=bucket_steps)
    except NotIdentifiable:
        return None


def backtest(model: CostModel, later: Sequence[IterationSample]) -> PredictorBacktest:
    """The errors of a model on iterations that it has not seen."""
    chunks = [chunk for seen in later for chunk in seen.chunks]
    errors = [
        abs(seen.predicted_by(model) / seen.committed.measured_us - 1) for seen in later if seen.committed.measured_us > 0
    ]
    return PredictorBacktest(n=len(later), chunks=median_error(model, chunks), iterations=median(errors) if errors else 0.0)


def _witnessed(chunks: Sequence[Chunk], model: CostModel) -> set[object]:
    """The kinds of work that these chunks show, with the head and without, at each place."""
    return {(chunk.kind, chunk.has_head, model.place_of(chunk.rank, chunk.tp)) for chunk in chunks}


def shown_speeds(model: CostModel, chunks: Sequence[Chunk]) -> dict[int, dict[str, float]]:
    """rank -> kind -> what its chunks should take by the model over what they took."""
    expected, took = defaultdict[tuple[int, str], float](float), defaultdict[tuple[int, str], float](float)
    for chunk in chunks:
        if chunk.us > 0 and chunk.kind in model.chunks:
            expected[chunk.rank, chunk.kind] += expected_us(model, chunk)
            took[chunk.rank, chunk.kind] += chunk.us
    found: dict[int, dict[str, float]] = {}
    for rank, kind in took:
        if expected[rank, kind] > 0:
            found.setdefault(rank, {})[kind] = expected[rank, kind] / took[rank, kind]
    return found


def scores_of(judged: IterationJudged) -> dict[int, float]:
    """The Detector's scores of the ranks that were judged."""
    return {ratio.rank: ratio.score for ratio in judged.ranks}


def turned(found: Sequence[Verdict | VerdictClosed], opened: Mapping[int, Verdict]) -> dict[int, int]:
    """rank -> the iteration since which its speed is another, by these verdicts; `opened`: all so far, by number."""
    since: dict[int, int] = {}
    for verdict in found:
        of = opened.get(verdict.verdict)
        if of is not None and of.cause == "slow_device" and (rank := of.culprits[0].rank) is not None:
            since[rank] = verdict.since_iteration if isinstance(verdict, Verdict) else verdict.until_iteration
    return since
