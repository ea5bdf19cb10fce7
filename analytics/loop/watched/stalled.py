"""A watched job of which no rank finishes a step any more: whether it is more than slow, and who holds it up."""

from __future__ import annotations

from collections.abc import Mapping

from unskew.analytics.health.liveness import WAITING, Suspect
from unskew.collector.events import Heartbeat

HUNG_FACTOR, LEAST_HUNG_S = 20.0, 10.0
"""No rank has finished a step for so many usual ones, and at least so long."""
MOST_PAUSE_S = 600.0
"""For so long nobody asks for the progress of an evaluation or a checkpoint."""


def is_stalled(still_s: float, usual_s: float | None) -> bool:
    """Whether a job of which no rank has finished a step for so long is more than slow."""
    return usual_s is not None and still_s >= max(LEAST_HUNG_S, HUNG_FACTOR * usual_s)


def hung(still_s: float, usual_s: float | None, beats: Mapping[int, Heartbeat]) -> Suspect | None:
    """Who holds up a job of which no rank has finished a step for `still_s`: of those that do not wait for others the one that
    has moved least lately; nobody while it may only be slow, or evaluates or saves, which may take minutes, nor where nobody is
    seen to wait and several stand in the same iteration: on GPUs their streams wait, and their hosts elsewhere."""
    if usual_s is None or not is_stalled(still_s, usual_s):
        return None
    working = [one for one in beats.values() if one.activity not in WAITING and one.stalled_us > 0 and not pauses(one)]
    if not working:
        return None
    culprit = max(working, key=lambda one: (-one.iteration, one.stalled_us))
    victims = tuple(sorted(rank for rank, one in beats.items() if one.activity in WAITING))
    if not victims and sum(one.iteration == culprit.iteration for one in working) > 1:
        return None
    detail = f"no rank has finished a step for {still_s:.0f} s, one takes {usual_s:.2g} s; it waits for nobody"
    return Suspect(rank=culprit.rank, how="hung", detail=detail, victims=victims)


def pauses(beat: Heartbeat) -> bool:
    """Whether a rank does something between its steps, an evaluation or a checkpoint, and not for too long yet."""
    return beat.activity == "idle" and beat.stalled_us < 1e6 * MOST_PAUSE_S
