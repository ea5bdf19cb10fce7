"""Who is dead, hung or frozen, and who only waits: named scenarios, each a table of pulses and the ranks that must be named."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unskew.analytics.health.liveness import LivenessOptions, RankLiveness, Suspect, decide

OPTIONS = LivenessOptions().learned(longest_chunk_s=0.2)
NOW_S = 100.0


def status(
    rank, activity="compute", *, stalled=0.0, beat=0.05, onto=None, state=None, alive=True, at=NOW_S, detail="",
    starved=0.0, beat_starved=0.0, promised=0.0,
):  # fmt: skip
    return RankLiveness(
        rank=rank, at_s=at, alive=alive, heartbeat_age_s=beat, stalled_s=stalled, activity=activity, waits_for=onto,
        process_state=state, exit_detail=detail, starved_s=starved, beat_starved_s=beat_starved, promised_s=promised,
    )  # fmt: skip


SCENARIOS = {
    "healthy": ([status(0), status(1, "recv", onto=0)], [], "make progress"),
    "killed while its peers receive from it": (
        [status(0, "recv", onto=1, stalled=0.1), status(1, alive=False, detail="signal 9"), status(2, "send", onto=1)],
        [(1, "exit", (0, 2))],
        "signal 9",
    ),
    "hung in its own work, the chain behind it waits": (
        [status(0, "recv", onto=1, stalled=60), status(1, "recv", onto=2, stalled=60), status(2, stalled=2.1)],
        [(2, "hung", (0, 1))],
        "heartbeats go on",
    ),
    "hung, the others wait in the all-reduce": (
        [status(0, "collective", stalled=9), status(1, stalled=9), status(2, "commit", stalled=9)],
        [(1, "hung", (0, 2))],
        "no progress in compute",
    ),
    "a long chunk, not yet hung": ([status(0, stalled=0.9), status(1, "recv", onto=0, stalled=500)], [], "make progress"),
    "no progress for want of a core": ([status(0, stalled=9, starved=8.5), status(1, "recv", onto=0)], [], "make progress"),
    "hung, and without a core for part of it": (
        [status(0, stalled=3, starved=1.5), status(1, "recv", onto=0)],
        [(0, "hung", (1,))],
        "without a core for 1.50 s",
    ),
    "no news of progress, because the heartbeats are late": (
        [status(0, stalled=1.4, beat=0.6), status(1, "recv", onto=0)],
        [],
        "make progress",
    ),
    "born, and not yet loaded": ([status(0), status(1, "idle", stalled=2, beat=2)], [], "make progress"),
    "born, and silent for half a minute": (
        [status(0), status(1, "idle", stalled=31, beat=31)],
        [(1, "frozen", ())],
        "no heartbeat",
    ),
    "silent for want of a core": ([status(0), status(1, beat=4, beat_starved=3.5)], [], "make progress"),
    "silent for 43 s, of which the count of the time without a core lacks a little": (
        [status(0, stalled=43.3, starved=41), status(1, beat=43.3, beat_starved=42.5)],
        [],
        "make progress",
    ),
    "hung and frozen, and nearly always without a core": (
        [status(0, stalled=100, starved=95), status(1, beat=200, beat_starved=190), status(2, "recv", onto=0)],
        [(0, "hung", (2,)), (1, "frozen", ())],
        "without a core for 95.00 s",
    ),
    "silent, and without a core for part of it": (
        [status(0), status(1, beat=4, beat_starved=2)],
        [(1, "frozen", ())],
        "without a core for 2.00 s",
    ),
    "the kernel does not tell who had a core": (
        [status(0, stalled=2, starved=None), status(1, beat=2, beat_starved=None)],
        [],
        "make progress",
    ),
    "a checkpoint that was promised": ([status(0, stalled=55, promised=60), status(1, "recv", onto=0)], [], "make progress"),
    "a promise that was not kept": (
        [status(0, stalled=61, promised=60), status(1, "recv", onto=0)],
        [(0, "hung", (1,))],
        "the 60 s it had promised are over",
    ),
    "stopped: the kernel says so at once": (
        [status(0, "recv", onto=1), status(1, beat=0.25, state="T")],
        [(1, "frozen", (0,))],
        "stopped",
    ),
    "killed, and a while in ending": ([status(0, "recv", onto=1), status(1, beat=1.2, state="X")], [], "make progress"),
    "killed, and it does not end": (
        [status(0, "recv", onto=1), status(1, beat=3.1, state="X")],
        [(1, "frozen", (0,))],
        "no heartbeat",
    ),
    "silent for 0.25 s is not yet frozen": ([status(0), status(1, beat=0.25, state="S")], [], "make progress"),
    "frozen while it waited for a healthy rank": (
        [status(0), status(1, "recv", onto=0, beat=3.6, stalled=3.6)],
        [(1, "frozen", ())],
        "no heartbeat",
    ),
    "everybody waits in a circle": (
        [status(0, "recv", onto=1, stalled=30), status(1, "send", onto=2, stalled=30), status(2, "recv", onto=0, stalled=30)],
        [],
        "everybody waits and nobody computes",
    ),
    "all silent at once": ([status(0, beat=3.8), status(1, beat=3.9, state="T")], [], "listener"),
    "a third silent since the same moment": (
        [*(status(rank) for rank in range(4)), status(4, beat=0.8), status(5, beat=0.65)],
        [],
        "a third of all, among them 4, fell silent at once",
    ),
    "a third silent, one after the other": (
        [*(status(rank) for rank in range(4)), status(4, beat=0.8), status(5, beat=1.1)],
        [(4, "frozen", ()), (5, "frozen", ())],
        "no heartbeat",
    ),
    "a third silent for too long": (
        [*(status(rank) for rank in range(4)), status(4, beat=3.1), status(5, beat=3.1)],
        [(4, "frozen", ()), (5, "frozen", ())],
        "no heartbeat",
    ),
    "a third hung, and one frozen alone": (
        [*(status(rank) for rank in range(3)), status(3, beat=0.8), status(4, stalled=2), status(5, stalled=2)],
        [(3, "frozen", ()), (4, "hung", ()), (5, "hung", ())],
        "rank 4 hung",
    ),
    "one dead and the rest silent": (
        [status(0, alive=False), status(1, beat=3.9), status(2, beat=3.9)],
        [(0, "exit", ())],
        "rank 0 exit",
    ),
    "the last one is silent": ([status(3, beat=3.9)], [(3, "frozen", ())], "no heartbeat"),
    "agent not heard": ([status(0), status(1, at=NOW_S - 3, beat=0.0, stalled=50)], [], "agent is not heard"),
    "on standby for minutes": ([status(0, alive=False), status(1, "standby", stalled=300)], [(0, "exit", ())], "rank 0 exit"),
    "silent on standby": ([status(0), status(1, "standby", beat=3.6)], [(1, "frozen", ())], "no heartbeat"),
    "not begun yet": ([status(0, "idle", stalled=12), status(1, "regroup", stalled=12)], [], "everybody waits"),
    "never begins": ([status(0, "idle", stalled=31), status(1, "regroup", stalled=31)], [(0, "hung", (1,))], "idle"),
    "two culprits, each with its own victims": (
        [status(0, alive=False), status(1, "recv", onto=0), status(2, stalled=8), status(3, "send", onto=2, stalled=8)],
        [(0, "exit", (1,)), (2, "hung", (3,))],
        "rank 2 hung",
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_names_the_culprit_and_only_the_culprit(name: str) -> None:
    statuses, expected, because = SCENARIOS[name]
    suspects, reason = decide(NOW_S, {p.rank: p for p in statuses}, OPTIONS)
    assert [(s.rank, s.how, s.victims) for s in suspects] == expected
    assert because in reason


def test_hung_timeout_follows_the_longest_chunk_and_has_a_floor() -> None:
    assert LivenessOptions().learned(0.01).hung_s == 0.8
    assert LivenessOptions().learned(1.5).hung_s == 7.5
    assert LivenessOptions().learned(1.5).learned(0.01).hung_s == 0.8


waiting = st.sampled_from(["recv", "send", "collective", "commit", "regroup"])
statuses = st.builds(
    status,
    rank=st.integers(0, 7),
    activity=st.one_of(waiting, st.sampled_from(["compute", "idle"])),
    stalled=st.floats(0, 1e4),
    beat=st.floats(0, 2),
    onto=st.none() | st.integers(0, 9),
    alive=st.booleans(),
)


@settings(deadline=None)
@given(st.lists(statuses, max_size=8))
def test_who_waits_and_is_heard_is_never_accused_and_no_suspect_is_a_victim(rows: list[RankLiveness]) -> None:
    table = {p.rank: p for p in rows}
    suspects, reason = decide(NOW_S, table, OPTIONS)
    assert reason
    flagged: set[int] = {s.rank for s in suspects}
    for rank in flagged:
        p = table[rank]
        assert not p.alive or p.heartbeat_age_s >= OPTIONS.frozen_s or p.activity in ("compute", "idle")
    assert {rank for rank, p in table.items() if not p.alive} <= flagged
    assert flagged.isdisjoint(victim for s in suspects for victim in s.victims)
    assert all(isinstance(s, Suspect) and s.detail for s in suspects)
