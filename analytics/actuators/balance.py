"""Samples of like length in each global batch, and like work for each rank: counts stay as they are."""

from __future__ import annotations

import msgspec

from unskew.analytics.actuators.actuator import Situation, weighed
from unskew.analytics.actuators.shares import LOSSES, NOT_OFFERED, divided
from unskew.analytics.scheduler.propose import Proposal

LEAST_WINDOWS = 2
LEAST_FITTED = 24
"""By 16 iterations on cores that others use too, padded batches were once taken for packed ones: of a gain of 36 % 16 were
predicted."""


class Balance:
    """By the fitted cost of each sample's length, over a window of global batches."""

    name = "balance"

    def propose(self, now: Situation) -> tuple[Proposal | None, str]:
        offer, division = now.offer, now.division
        if offer is None or not offer.lengths:
            return None, NOT_OFFERED if offer is None else "the loop does not say how long its samples are: length="
        if division.window:
            return None, "lengths are balanced"
        if offer.by_tokens and offer.loss not in LOSSES:
            return None, "the mean is over tokens, and how the loop's loss is divided is not known"
        if now.fitted_on < LEAST_FITTED:
            return None, f"what lengths cost is seen in {now.fitted_on} iterations, {LEAST_FITTED} are needed"
        if len(now.batches) < LEAST_WINDOWS * offer.window:
            return None, f"the lengths of {len(now.batches)} global batches are known, {LEAST_WINDOWS} windows are needed"
        times = now.times
        whole = now.batches[: len(now.batches) // offer.window * offer.window]
        balanced = msgspec.structs.replace(
            division,
            window=offer.window,
            token_us=times.token_us,
            token2_us=times.token2_us,
            slowness=tuple(round(one, 4) for one in times.slowness),
            padded=times.padded,
        )
        now = msgspec.structs.replace(now, batches=whole)
        return weighed(now, divided(now.plan, balanced), times.steps_us(balanced, whole), by=self.name)
