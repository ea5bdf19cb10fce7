"""Dead, hung, frozen, or only waiting: decided from child exits, heartbeats and progress (docs/internals/liveness.md).

* dead: the process has ended;
* frozen: it exists but sends no heartbeat, or the kernel reports it as stopped;
* hung: heartbeats go on, progress does not, and what it does is its own work;
* whoever waits for another is a victim and never flagged, however long it waits;
* a rank on standby has no work: it is neither hung nor a victim, but it can be dead or frozen.

A rank that is ready to run but given no core is none of these: that time, as the kernel counts it, does not count against it.
Nor does the time that it has promised to a long phase (a compilation, a checkpoint, an evaluation). Where a third of a node's
ranks fall silent at the same moment it is the listener or the node that went wrong, so they are given more time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from unskew.collector.events import DeviceLost

Activity = Literal["compute", "recv", "send", "collective", "commit", "regroup", "idle", "standby"]
WAITING = frozenset({"recv", "send", "collective", "commit", "regroup"})
STOPPED, ENDING = "T", "X"
"""States of a process by the kernel's letters."""


class RankLiveness(msgspec.Struct, frozen=True, kw_only=True):
    """What its agent knows of a rank at the instant `at_s` (the decider's clock); ages are seconds, measured by the agent.

    `stalled_s` is the time since progress last moved, `process_state` the kernel's letter for the process ("T" stopped),
    `waits_for` the rank it is blocked on, None when it waits for a group or for nobody. `starved_s` of `stalled_s`, and
    `beat_starved_s` of `heartbeat_age_s`, the thread was ready to run but had no core; None = not measured. Within
    `promised_s` of its last progress it promised to move again.
    """

    rank: int
    at_s: float
    alive: bool
    heartbeat_age_s: float
    stalled_s: float
    activity: Activity
    waits_for: int | None = None
    process_state: str | None = None
    exit_detail: str = ""
    starved_s: float | None = 0.0
    beat_starved_s: float | None = 0.0
    promised_s: float = 0.0

    @property
    def idle_s(self) -> float:
        """For how long heartbeats have shown no progress: `stalled_s` up to the last of them, without the time it had no core.

        Since then nobody knows: a thread that beats late is no evidence on the one that works.
        """
        return self.stalled_s - self.heartbeat_age_s - (self.starved_s or 0.0)

    @property
    def silent_s(self) -> float:
        """`heartbeat_age_s` without the time it had no core."""
        return self.heartbeat_age_s - (self.beat_starved_s or 0.0)


class LivenessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. `hung_s` holds until chunk times are known (see `learned`); `start_s` is for a rank that has not
    begun (idle), also for its silence.

    A status older than `stale_s` does not count: its agent is not heard. A stopped process is known by its state, after
    `stopped_s`. Where the kernel does not report for how long a thread had no core, nobody is named before `blind_s`: at load
    14 on two cores healthy ranks were silent for 0.5 s. Where it does, `uncounted` of that time, `uncounted_s` at most, may be
    missing from its count: of 43 s of a healthy rank's silence it once lacked 0.8 s.

    A rank that was killed for it and whose process is there `stuck_s` later is cut off as it is: it waits in the kernel, or for
    a core to end on, or its memory is being given back, and the others need not wait with it.

    A frozen rank that goes on within `spared_s` keeps its process; then it is killed.

    Ranks whose last heartbeats lie within `together_s` fell silent at the same moment. Two at least and `crowd` of the living
    are more than chance takes at once; they are not named before `blind_s`, as one cause may still have frozen them all.
    """

    frozen_s: float = 0.7
    stopped_s: float = 0.2
    hung_s: float = 10.0
    hung_floor_s: float = 0.8
    hung_factor: float = 5.0
    blind_s: float = 3.0
    uncounted: float = 0.1
    uncounted_s: float = 2.0
    start_s: float = 30.0
    stale_s: float = 1.0
    stuck_s: float = 0.3
    spared_s: float = 3.0
    together_s: float = 0.2
    crowd: float = 1 / 3

    def learned(self, longest_chunk_s: float) -> LivenessOptions:
        """`hung_s` from the longest chunk seen: `hung_factor` times as long, at least `hung_floor_s`."""
        return msgspec.structs.replace(self, hung_s=max(self.hung_floor_s, self.hung_factor * longest_chunk_s))


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """A lost rank and those who wait for it."""

    rank: int
    how: Literal["exit", "hung", "frozen"]
    detail: str
    victims: tuple[int, ...] = ()

    @staticmethod
    def of(lost: DeviceLost) -> Suspect:
        """As a logged loss has it."""
        return Suspect(rank=lost.rank, how=lost.how, detail=lost.detail, victims=lost.victims)


def decide(now_s: float, table: Mapping[int, RankLiveness], options: LivenessOptions) -> tuple[tuple[Suspect, ...], str]:
    """The lost ranks, ascending, and the reason in one sentence; no suspects with a reason when nobody can be named.

    Abstains when all (two or more) are silent at once: then the listener is at fault, or the node was asleep.
    """
    heard = {
        rank: status for rank, status in sorted(table.items()) if now_s - status.at_s <= options.stale_s or not status.alive
    }
    alive = [rank for rank, status in heard.items() if status.alive]
    found = {rank: finding for rank, status in heard.items() if (finding := _judge(status, options))}
    if len(alive) > 1 and all(rank in found and found[rank][0] == "frozen" for rank in alive):
        found = {rank: finding for rank, finding in found.items() if rank not in alive}
        if not found:
            return (
                (),
                f"no heartbeat from any of {len(alive)} ranks: the listener is at fault or the node slept, nobody is named",
            )
    living = [heard[rank] for rank in alive]
    crowd = [rank for rank in found if found[rank][0] == "frozen" and _in_a_crowd(heard[rank], living, options)]
    found = {rank: finding for rank, finding in found.items() if rank not in crowd}
    if found:
        suspects = tuple(
            Suspect(rank=rank, how=how, detail=detail, victims=_victims(rank, heard, found.keys()))
            for rank, (how, detail) in found.items()
        )
        return suspects, "; ".join(f"rank {suspect.rank} {suspect.how}: {suspect.detail}" for suspect in suspects)
    if crowd:
        ranks = ", ".join(map(str, crowd))
        return (), f"a third of all, among them {ranks}, fell silent at once: nobody is named before {options.blind_s:g} s"
    if unheard := sorted(table.keys() - heard.keys()):
        ranks = ", ".join(map(str, unheard))
        return (), f"no news of ranks {ranks} for more than {options.stale_s:g} s: their agent is not heard"
    if alive and all(heard[rank].idle_s >= _hung_s(heard[rank], options) for rank in alive):
        chain = ", ".join(f"rank {rank} {_waits(heard[rank])}" for rank in alive)
        return (), f"everybody waits and nobody computes, so nobody is named: {chain}"
    return (), "all ranks make progress or wait for one that does"


def _judge(status: RankLiveness, options: LivenessOptions) -> tuple[Literal["exit", "hung", "frozen"], str] | None:
    if not status.alive:
        return "exit", status.exit_detail or "its process has ended"
    if status.process_state == STOPPED and status.heartbeat_age_s >= options.stopped_s:
        return "frozen", f"its process is stopped, no heartbeat for {status.heartbeat_age_s:.2f} s"
    if status.process_state == ENDING and status.silent_s < options.blind_s:
        return None  # how it ended its parent will know
    # A process that has only been born beats for the first time when it has loaded what it needs.
    silence_s = options.start_s if status.activity == "idle" else options.frozen_s
    if status.silent_s >= _at_least_s(silence_s, status.beat_starved_s, options):
        return (
            "frozen",
            f"no heartbeat for {status.heartbeat_age_s:.2f} s while its process exists{_no_core(status.beat_starved_s)}",
        )
    if status.activity not in {*WAITING, "standby"} and status.idle_s >= _patience_s(status, options):
        broken = f" and the {status.promised_s:g} s it had promised are over" if status.promised_s else ""
        return (
            "hung",
            f"no progress in {status.activity} for {status.stalled_s:.2f} s while heartbeats go on"
            f"{_no_core(status.starved_s)}{broken}",
        )
    return None


def _in_a_crowd(status: RankLiveness, living: Sequence[RankLiveness], options: LivenessOptions) -> bool:
    """Whether so many others fell silent with this one that it is too early to blame it; a stopped process is no guess."""
    if status.process_state == STOPPED or status.silent_s >= options.blind_s:
        return False
    apart_s = (abs(status.at_s - status.heartbeat_age_s - (other.at_s - other.heartbeat_age_s)) for other in living)
    return sum(s <= options.together_s for s in apart_s) >= max(2, options.crowd * len(living))


def _patience_s(status: RankLiveness, options: LivenessOptions) -> float:
    return max(_hung_s(status, options), options.start_s if status.activity == "idle" else 0.0)


def _hung_s(status: RankLiveness, options: LivenessOptions) -> float:
    return _at_least_s(max(options.hung_s, status.promised_s), status.starved_s, options)


def _at_least_s(usual_s: float, starved_s: float | None, options: LivenessOptions) -> float:
    """What `usual_s` becomes by what is not known of the time without a core."""
    if starved_s is None:
        return max(usual_s, options.blind_s)
    return usual_s + min(options.uncounted * starved_s, options.uncounted_s)


def _no_core(starved_s: float | None) -> str:
    return f" (without a core for {starved_s:.2f} s of it)" if starved_s and starved_s >= 0.01 else ""


def _victims(culprit: int, table: Mapping[int, RankLiveness], suspects: Collection[int]) -> tuple[int, ...]:
    """Ranks whose chain of waiting ends at the culprit; who waits for a whole group waits for every suspect."""
    found = []
    for rank in table:
        at, passed = rank, set[int]()
        while at in table and at not in suspects and at not in passed and table[at].activity in WAITING:
            passed.add(at)
            onto = table[at].waits_for
            if onto is None or onto == culprit:
                found.append(rank)
                break
            at = onto
    return tuple(found)


def _waits(status: RankLiveness) -> str:
    return f"waits for {status.waits_for}" if status.waits_for is not None else f"waits in {status.activity}"
