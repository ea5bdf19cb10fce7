"""Fail-slow: committed iterations, one after the other -> judged iterations and verdicts (docs/internals/detector.md).

Per iteration, for all ranks and kinds of work at once (arrays [rank, kind]):

1. the residual against the prediction, less the rank's own bias; against its data-parallel and pipeline peers (residuals.py);
2. a two-sided CUSUM per (rank, kind) and over all kinds together (cusum.py);
3. where one fires, the level since the onset, estimated by medians, decides: a new verdict, a revision of the open one (same
   number, new speed), its closing, or nothing (the deviation is smaller than `least_slowdown`) (tracks.py);
4. learning: the noise per kind, and a bounded baseline per healthy (rank, kind) (tracks.py).

`step` is pure: the same iterations give the same verdicts, live or replayed.
"""

from __future__ import annotations

from math import exp, sqrt

import msgspec
import numpy as np

from unskew.analytics.core.cost import CostModel
from unskew.analytics.core.iteration import CommittedIteration
from unskew.analytics.core.outcome import Sight
from unskew.analytics.core.plan import Plan
from unskew.analytics.detector.cusum import CusumLimits
from unskew.analytics.detector.detector_state import DetectorState, Verdicts, flag_rank, waiting_for
from unskew.analytics.detector.links import watch
from unskew.analytics.detector.options import DetectorOptions
from unskew.analytics.detector.peer_groups import UnitRoles, company_of, excess_of
from unskew.analytics.detector.published import resihp
from unskew.analytics.detector.residuals import (
    ALL,
    ChunkColumns,
    Floats,
    Residuals,
    UnitTimes,
    chunk_times,
    columns,
    loads,
    rank_ratios,
)
from unskew.analytics.detector.stages import Stages, ended, suspected
from unskew.analytics.detector.stages import watch as watch_stages
from unskew.analytics.detector.tracks import decide, learn_baselines, learn_noise, learn_roles
from unskew.analytics.detector.verdicts import closed_link, closed_verdict, link_verdict, lost_verdict
from unskew.analytics.health.liveness import Suspect
from unskew.collector.events import IterationJudged, Verdict, VerdictClosed


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    judged: IterationJudged
    verdicts: Verdicts = ()


class Detector:
    """`step` with its state held; one per run."""

    def __init__(self, options: DetectorOptions | None = None) -> None:
        self.options = options or DetectorOptions()
        self.state = DetectorState()

    @property
    def speeds(self) -> dict[int, dict[str, float]]:
        return self.state.speeds

    def observe(
        self, committed: CommittedIteration, plan: Plan, cost: CostModel, predicted_us: float | None = None
    ) -> Judgement:
        """Judge the next committed iteration. Raises `ValueError` when it is not later than the last."""
        self.state, judgement = step(self.state, committed, plan, cost, self.options, predicted_us=predicted_us)
        return judgement

    def observe_units(self, iteration: int, times: UnitTimes, roles: UnitRoles) -> Verdicts:
        """The verdicts on the next iteration of units of which no chunks and no plan are known (`step_units`)."""
        self.state, verdicts = step_units(self.state, iteration, times, roles, self.options)
        return verdicts


def step(
    state: DetectorState,
    committed: CommittedIteration,
    plan: Plan,
    cost: CostModel,
    options: DetectorOptions,
    *,
    predicted_us: float | None = None,
) -> tuple[DetectorState, Judgement]:
    """One committed iteration with a complete log further; the others are for nobody to be judged by (adaptation.py)."""
    now = committed.iteration
    _check_order(state, now)
    judged = IterationJudged(
        iteration=now,
        plan_version=committed.plan_version,
        measured_us=round(committed.measured_us),
        predicted_us=None if predicted_us is None else round(predicted_us),
    )
    chunks = columns(committed.chunks)
    load = loads(chunk_times(chunks, cost))
    if not load.ranks:
        return msgspec.structs.replace(state, iteration=now), Judgement(judged=judged)
    state = _rebased(_prepared(state, load, now, plan), chunks, load, cost)
    if options.method == "resihp":
        state, own = _watched(state, now, load, options)
        state = _learned(state, own, options)
        ratios = rank_ratios(load, state.tracks.ranks, np.zeros(len(state.tracks.ranks)))
        state, verdicts = resihp.step(state, committed, plan, options, predicted_us)
        return state, Judgement(judged=msgspec.structs.replace(judged, ranks=ratios), verdicts=verdicts)
    state, scores, verdicts = _judged(state, load, now, options)
    ratios = rank_ratios(load, state.tracks.ranks, scores.max(axis=1))
    state, of_links = _watched_links(state, committed, options)
    return state, Judgement(judged=msgspec.structs.replace(judged, ranks=ratios), verdicts=(*verdicts, *of_links))


def step_units(
    state: DetectorState, iteration: int, times: UnitTimes, roles: UnitRoles, options: DetectorOptions
) -> tuple[DetectorState, Verdicts]:
    """One iteration further of units whose expected times are known by other means than a cost model. Raises `ValueError` as
    `step` does."""
    _check_order(state, iteration)
    load = loads(times)
    if not load.ranks:
        return msgspec.structs.replace(state, iteration=iteration), ()
    state, _, verdicts = _judged(_prepared(state, load, iteration, roles), load, iteration, options)
    return state, verdicts


def _check_order(state: DetectorState, now: int) -> None:
    if now <= state.iteration:
        raise ValueError(f"iteration {now} after iteration {state.iteration}: committed iterations are judged once, in order")


def _judged(
    state: DetectorState, load: Residuals, now: int, options: DetectorOptions
) -> tuple[DetectorState, Floats, Verdicts]:
    """The tests, their scores [rank, kind], what follows from them for ranks and stages, and what is learned."""
    state, own = _watched(state, now, load, options)
    scores = _scores(state, options)
    verdicts: list[Verdict | VerdictClosed] = []
    for rank in _fired(state, scores):
        state, found = _decided(state, rank, now, options)
        verdicts += found
    state = _learned(state, own, options)
    state, of_stages = _watched_stages(state, own, now, options)
    return state, scores, (*verdicts, *of_stages)


def lose(state: DetectorState, suspect: Suspect, iteration: int, options: DetectorOptions) -> tuple[DetectorState, Verdicts]:
    """Forget a lost rank, with its verdict and the closing of what was open against it."""
    number = state.next_verdict
    found: list[Verdict | VerdictClosed] = [lost_verdict(number, suspect, iteration, options.digest)]
    if suspect.rank in state.open:
        reason = f"rank {suspect.rank} was lost ({suspect.how})"
        found.append(
            VerdictClosed(verdict=state.open[suspect.rank], until_iteration=iteration, at_iteration=iteration, reason=reason)
        )
    return msgspec.structs.replace(
        state,
        tracks=state.tracks.without(suspect.rank),
        company=None,
        open={rank: verdict for rank, verdict in state.open.items() if rank != suspect.rank},
        layers={rank: layers for rank, layers in state.layers.items() if rank != suspect.rank},
        lost={**state.lost, suspect.rank: number},
        next_verdict=number + 1,
    ), tuple(found)


def sight_of(state: DetectorState, options: DetectorOptions, *, alike: bool = False) -> Sight:
    """What would have been named up to now: a test fires on what exceeds its slack by the threshold, summed over the iterations
    that are remembered, and what is named is at least `least_slowdown`. `alike`: all devices are of one class; they are
    compared from the first iteration on where each has data-parallel peers, as a rank alone in its role may have a dear one."""
    tracks = state.tracks
    if options.method != "unskew":
        return Sight(scope="device", smallest_slowdown=None, why="ResiHP's Detector states no smallest slowdown")
    if ALL not in tracks.kinds:
        return Sight(scope="device", smallest_slowdown=None, why="no iteration could be compared with what is expected of it")
    age = tracks.age[[rank not in state.lost for rank in tracks.ranks], tracks.kinds.index(ALL)]
    known = age[age > 0]
    n = min(len(tracks.recent), int(known.min()) if len(known) else 0)
    if n <= options.least_iterations:
        return Sight(
            scope="device",
            smallest_slowdown=None,
            why=f"{n} iteration{'' if n == 1 else 's'} could be compared, at least {options.least_iterations + 1} are needed",
        )
    young = bool((known < options.own_past).any())
    sigma = state.noise.get(ALL, options.sigma_floor)
    level = max(
        options.least_level(young=young),
        options.slack_of(sigma, young=young) + options.threshold_of(sigma, len(tracks.kinds)) / n,
    )
    mistaken = 2 * sqrt(2) * sigma  # a pace that drifts: the mean of many iterations is no surer than one, nor is the past's
    company = state.company
    in_company = company is not None and all(
        peers for rank, peers in company.data_parallel_peers.items() if rank not in state.lost
    )
    compares = alike and len(known) > 1 and in_company
    return Sight(scope="device", smallest_slowdown=round(exp(level + mistaken), 3), compares=compares)


def _prepared(state: DetectorState, load: Residuals, now: int, work: Plan | UnitRoles) -> DetectorState:
    """Rows for ranks and kinds not seen before, and the company under this plan."""
    tracks = state.tracks.covering(load.ranks, load.kinds, now)
    company = state.company
    if company is None or company.digest != work.digest or company.ranks != tracks.ranks:
        company = company_of(work, tracks.ranks)
    return msgspec.structs.replace(state, iteration=now, tracks=tracks, company=company)


def _rebased(state: DetectorState, chunks: ChunkColumns, load: Residuals, cost: CostModel) -> DetectorState:
    """Biases against this predictor."""
    tracks = state.tracks
    if state.cost is not None and state.cost is not cost and state.cost != cost:
        before = loads(chunk_times(chunks, state.cost))
        tracks = tracks.rebased(tracks.spread_out(before), tracks.spread_out(load))
    return msgspec.structs.replace(state, tracks=tracks, cost=cost)


def _watched(state: DetectorState, now: int, load: Residuals, options: DetectorOptions) -> tuple[DetectorState, Floats]:
    """The tests one iteration further, and what each (rank, kind) shows over its bias.

    A rank on new layers is not judged in its first iteration there; its tests begin anew.
    """
    assert state.company is not None
    tracks = state.tracks
    layers = state.company.layers
    settled = np.array([rank in layers and layers[rank] == state.layers.get(rank) for rank in tracks.ranks])[:, None]
    residual = tracks.spread_out(load)
    seen = ~np.isnan(residual)
    tracks = tracks.restarted(seen & ~settled, now, forget=True)
    young = tracks.age < options.own_past
    shown = residual - tracks.baseline
    over = np.where(settled, shown, np.nan)
    apart = options.least_level(young=True)
    tracks = msgspec.structs.replace(tracks, role=learn_roles(tracks, over, young, state.company, apart))
    own = over - tracks.role
    unexplained = own - tracks.level
    excess = excess_of(own, unexplained, ~young, state.company)
    if not settled.all():
        first = shown - tracks.role
        excess = np.where(settled, excess, excess_of(first, first - tracks.level, ~young, state.company))
    last = None  # units without a cost model: a lone one that is longer may have more to do
    if state.cost is not None:
        last = tracks.recent[-1].excess[0] - tracks.level if tracks.recent else np.full(residual.shape, np.nan)
    noise = learn_noise(np.array([state.noise.get(kind, np.nan) for kind in tracks.kinds]), unexplained, last, options)
    tracks = tracks.advanced(now, excess, settled & seen, options.limits_of(noise, young), options.window)
    return msgspec.structs.replace(
        state,
        tracks=tracks,
        layers={**state.layers, **layers},
        noise={kind: float(sigma) for kind, sigma in zip(tracks.kinds, noise, strict=True) if not np.isnan(sigma)},
    ), own


def _limits(state: DetectorState, options: DetectorOptions) -> CusumLimits:
    tracks = state.tracks
    noise = np.array([state.noise.get(kind, np.nan) for kind in tracks.kinds])
    return options.limits_of(noise, tracks.age < options.own_past)


def _scores(state: DetectorState, options: DetectorOptions) -> Floats:
    """[rank, kind]: the sums over their thresholds; a sum downwards counts for a flagged rank only."""
    tracks = state.tracks
    flagged = np.array([rank in state.open for rank in tracks.ranks])[:, None]
    sums = np.where(flagged, np.maximum(tracks.sums.up.total, tracks.sums.down.total), tracks.sums.up.total)
    return np.asarray(sums / _limits(state, options).threshold)


def _fired(state: DetectorState, scores: Floats) -> list[int]:
    """Ranks of which a test is over its threshold, ascending; but not who is lost, of whom iterations are judged still."""
    fired = np.flatnonzero((scores > 1).any(axis=1)).tolist()
    return [rank for rank in (state.tracks.ranks[row] for row in fired) if rank not in state.lost]


def _decided(state: DetectorState, rank: int, now: int, options: DetectorOptions) -> tuple[DetectorState, Verdicts]:
    """What the rank's tests lead to now: nothing, a verdict (new or revised), or the end of one."""
    tracks = state.tracks
    row = tracks.ranks.index(rank)
    flagged = rank in state.open
    change = decide(tracks, row, _limits(state, options), flagged=flagged, options=options)
    if change is None:
        return state, ()
    estimated = tracks.level[row]
    levels = np.array([change.levels.get(kind, 0.0) for kind in tracks.kinds])
    news = max(abs(levels[i] - estimated[i]) for i, kind in enumerate(tracks.kinds) if kind != ALL) >= options.sigma_floor
    state = msgspec.structs.replace(
        state, tracks=tracks.with_levels(row, levels if news else estimated, now, from_anchor=news and bool(change.creep))
    )
    if not news:
        return state, ()
    if not change.levels:
        closed = closed_verdict(state.open[rank], rank, change, now)
        still = {flagged: number for flagged, number in state.open.items() if flagged != rank}
        return msgspec.structs.replace(state, open=still, acquitted={**state.acquitted, rank: now}), (closed,)
    sigma = max(state.noise.get(change.test, 0.0), options.sigma_floor)
    return flag_rank(state, rank, change, now, options, sigma=sigma, victims=waiting_for(state, rank))


def _learned(state: DetectorState, own: Floats, options: DetectorOptions) -> DetectorState:
    tracks = state.tracks
    assert state.company is not None
    suspects = {*state.open, *suspected(state.stages, state.company)}
    innocent = np.array([rank not in suspects for rank in tracks.ranks])[:, None]
    quiet = innocent & ((tracks.sums.up.total <= 0) | (tracks.age < options.own_past))
    baseline = learn_baselines(tracks, own, quiet, options)
    return msgspec.structs.replace(state, tracks=tracks.grown(baseline, ~np.isnan(own), options.own_past))


def _watched_stages(state: DetectorState, own: Floats, now: int, options: DetectorOptions) -> tuple[DetectorState, Verdicts]:
    """Stages that became more expensive on all of their ranks, or cost what they did again."""
    assert state.company is not None
    tracks, company, stages = state.tracks, state.company, state.stages
    over: Verdicts = ()
    if stages is None or stages.digest != company.digest or len(stages.level) != len(company.peer_groups.members):
        over = () if stages is None else ended(stages, now)
        stages = Stages.fresh(company, now)
    column = tracks.kinds.index(ALL)
    known = np.where(tracks.age[:, column] > options.own_past, own[:, column] - tracks.level[:, column], np.nan)
    sigma = max(state.noise.get(ALL, 0.0), options.sigma_floor)
    stages, found = watch_stages(stages, company, known, now=now, sigma=sigma, number=state.next_verdict, options=options)
    opened = [verdict.verdict for verdict in found if isinstance(verdict, Verdict)]
    number = max([state.next_verdict, *(verdict + 1 for verdict in opened)])
    return msgspec.structs.replace(state, stages=stages, next_verdict=number), (*over, *found)


def _watched_links(
    state: DetectorState, committed: CommittedIteration, options: DetectorOptions
) -> tuple[DetectorState, Verdicts]:
    """Links that turned slow or are healthy again."""
    if not options.links or not committed.transfers:
        return state, ()
    now = committed.iteration
    tracks, changes = watch(state.links, now, committed.measured_us, committed.transfers)
    opened, number = dict(state.open_links), state.next_verdict
    verdicts: list[Verdict | VerdictClosed] = []
    for change in changes:
        if change.slow:
            verdicts.append(link_verdict(number, change, now, options.digest))
            opened[change.link], number = number, number + 1
        elif change.link in opened:
            verdicts.append(closed_link(opened.pop(change.link), change, now))
    return msgspec.structs.replace(state, links=tracks, open_links=opened, next_verdict=number), tuple(verdicts)
