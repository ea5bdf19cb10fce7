"""Fewer samples of the same global batch for a slow rank, or none: then it leaves."""

from __future__ import annotations

import msgspec

from unskew.analytics.actuators.actuator import LEAST_GAIN, Situation, weighed
from unskew.analytics.core.division import Division
from unskew.analytics.core.plan import Plan, Role, Route
from unskew.analytics.core.sharing import share_out
from unskew.analytics.scheduler.propose import Proposal

LOSSES = {"mean", "global"}
NOT_OFFERED = "the loop does not iterate over session.balance(loader)"
NO_LOSS = "how the loop's loss is divided is not known, so no gradient can be weighted"


class Shares:
    """Counts in proportion to what the ranks get done; taken back when their speeds are alike again."""

    name = "shares"

    def propose(self, now: Situation) -> tuple[Proposal | None, str]:
        if why := _why_not(now):
            return None, why
        if not now.slow and len(_counts(now.division)) == 1:
            return None, "no rank is slow"
        best = best_shares(now)
        if best.samples == now.division.samples:
            return None, "the samples are divided as the ranks' speeds ask for"
        return weighed(now, divided(now.plan, best), now.times.steps_us(best, now.batches), by=self.name)


class Exclude:
    """The slow rank leaves the living job; the others take its samples over."""

    name = "exclude"

    def propose(self, now: Situation) -> tuple[Proposal | None, str]:
        if why := _why_not(now):
            return None, why
        present = [rank for rank, count in enumerate(now.division.samples) if count]
        if len(now.slow) != 1 or len(present) < 2:
            return None, "it is for one slow rank among others"
        if now.offer is None or not now.offer.leaves:
            return None, "the loop has not given its DDP model: session.balance(loader, model=ddp)"
        (slow,) = now.slow
        without = best_shares(now, without=slow)
        after_us, kept_us = now.times.steps_us(without, now.batches), now.times.mean_us(best_shares(now), now.batches)
        if sum(after_us) / len(after_us) > (1 - LEAST_GAIN) * kept_us:
            return None, f"rank {slow} is of more use with fewer samples than without any"
        return weighed(now, divided(now.plan, without), after_us, by=self.name)


def best_shares(now: Situation, *, without: int | None = None) -> Division:
    """The counts by which the rank that takes longest takes least; only among those that are still there."""
    division, times = now.division, now.times
    ranks = [rank for rank, count in enumerate(division.samples) if count and rank != without]
    each_us = times.micro_batches * _sample_us(now)
    parts = [
        (
            times.beside_us[rank] + times.slowness[rank] * times.micro_batch_us * times.micro_batches,
            times.slowness[rank] * each_us,
        )
        for rank in ranks
    ]
    counts = dict(zip(ranks, share_out(division.total, parts), strict=True))
    samples = tuple(counts.get(rank, 0) for rank in range(len(division.samples)))
    slowness = tuple(round(one, 4) for one in times.slowness)
    return msgspec.structs.replace(division, samples=samples, slowness=slowness)


def divided(plan: Plan, division: Division) -> Plan:
    """The plan with this division: ranks without samples have no role."""
    ranks = [rank for rank, count in enumerate(division.samples) if count]
    each = len(plan.routes) // len(plan.roles)
    hop = plan.routes[0].hops[0]
    roles = tuple(Role(rank=rank, replica=place, stage=0, first_layer=0, n_layers=1) for place, rank in enumerate(ranks))
    routes = tuple(
        Route(
            micro_batch=number,
            replica=number % len(ranks),
            hops=(msgspec.structs.replace(hop, ranks=(ranks[number % len(ranks)],)),),
        )
        for number in range(each * len(ranks))
    )
    return msgspec.structs.replace(plan, roles=roles, routes=routes, division=division)


def _why_not(now: Situation) -> str:
    if now.offer is None:
        return NOT_OFFERED
    return "" if now.offer.loss in LOSSES else NO_LOSS


def _counts(division: Division) -> set[int]:
    return {count for count in division.samples if count}


def _sample_us(now: Situation) -> float:
    """Of a sample on a healthy device, as the loader has them."""
    mine = msgspec.structs.replace(now.division, token_us=now.times.token_us, token2_us=now.times.token2_us)
    each = [mine.cost_us(length) for batch in now.batches for length in batch]
    return sum(each) / len(each)
