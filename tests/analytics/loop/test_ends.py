"""Who died first, of ranks whose ends were seen or not: the right one or nobody, never the peer that it took along."""

from __future__ import annotations

import signal

import pytest

from unskew.analytics.loop.watched.ends import (
    Exit,
    died_before,
    first_dead,
    is_stopping,
    left_early,
    lost_another,
    were_stopped,
)
from unskew.collector.events import RankDetached

KILLED, ABORTED, STOPPED, FAILED = -signal.SIGKILL, -signal.SIGABRT, -signal.SIGTERM, 1
PEER = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:20231"
OWN = "ValueError: bad sample"


def stated(**errors: str) -> dict[int, RankDetached]:
    return {int(name[1:]): RankDetached(rank=int(name[1:]), pid=1, error=error) for name, error in errors.items()}


def named(*exits: Exit, words: dict[int, RankDetached], ranks: int = 2, attached: int = 2, failed: bool = True) -> int | None:
    first = first_dead(exits, words, ranks, attached, failed=failed)
    return None if first is None else first.rank


@pytest.mark.parametrize("at_s", [(2.0, 1.0), (1.0, 2.0), (None, None), (None, 2.0), (1.0, None)])
def test_whoever_says_that_another_is_gone_is_never_named(at_s: tuple[float | None, float | None]) -> None:
    killed, peer = Exit(1, at_s[1], KILLED), Exit(0, at_s[0], FAILED)
    assert named(killed, peer, words=stated(r0=PEER)) == 1
    assert named(peer, killed, words=stated(r0=PEER)) == 1
    assert named(peer, words=stated(r0=PEER)) is None
    assert named(peer, Exit(1, at_s[1], FAILED), words=stated(r0=PEER, r1=OWN)) == 1


def test_an_order_that_was_seen_decides_between_ranks_that_say_nothing() -> None:
    assert named(Exit(1, 1.0, FAILED), Exit(0, 1.1, FAILED), words={}) == 1
    assert named(Exit(0, 1.0, FAILED), Exit(1, 1.1, FAILED), words={}) == 0


def test_without_an_order_whoever_was_struck_is_named_and_of_two_alike_nobody() -> None:
    assert named(Exit(0, None, FAILED), Exit(1, None, KILLED), words={}) == 1
    assert named(Exit(0, None, ABORTED), Exit(1, 2.0, KILLED), words={}) == 1
    assert named(Exit(0, None, FAILED), Exit(1, 2.0, FAILED), words={}) is None
    assert named(Exit(0, None, KILLED), Exit(1, None, KILLED), words={}) is None
    assert named(Exit(0, None, FAILED), Exit(1, None, FAILED), words=stated(r0="KeyError: 1", r1=OWN)) is None


def test_whoever_left_nothing_is_named_where_all_others_say_that_one_is_gone() -> None:
    nothing = Exit(1, None, None)
    assert named(Exit(0, 2.0, FAILED), nothing, words=stated(r0=PEER)) == 1
    assert named(Exit(0, 2.0, FAILED), nothing, words={}) is None
    others = (Exit(0, None, FAILED), Exit(2, None, FAILED))
    assert named(*others, nothing, words=stated(r0=PEER, r2=PEER), ranks=3, attached=3) == 1
    assert named(others[0], nothing, words=stated(r0=PEER), ranks=3, attached=3) is None


def test_ranks_whose_processes_nobody_sees_count_by_what_they_say() -> None:
    assert named(Exit(1, None, None), words=stated(r0=PEER)) == 1
    assert named(words=stated(r0=PEER, r1=OWN)) == 1
    assert named(words=stated(r0=PEER, r1=OWN), failed=False) is None
    assert named(words=stated(r0=PEER)) is None


def test_what_may_become_known_is_waited_for() -> None:
    reaped, failed = Exit(1, 1.0, None), Exit(0, 1.1, FAILED)
    assert named(reaped, failed, words={}, failed=False) is None  # the peer was named: its status was all that was known
    assert named(reaped, failed, words={}) == 1
    assert named(failed, words=stated(r0=OWN), attached=1, failed=False) is None
    assert named(failed, words=stated(r0=OWN), attached=1) is None  # rank 1 may have died before its first step
    assert named(Exit(0, 1.1, KILLED), words={}, attached=1) == 0


def test_an_exit_code_alone_is_enough_where_the_others_lost_it_or_were_stopped() -> None:
    left = Exit(1, 1.0, 3)
    assert named(left, Exit(0, 1.1, FAILED), words=stated(r0=PEER, r1="")) == 1
    assert named(left, Exit(0, 1.1, STOPPED), words=stated(r0=PEER, r1="")) == 1
    assert named(left, Exit(0, 1.1, STOPPED), words=stated(r1="")) == 1
    assert named(left, Exit(0, 1.1, 3), words=stated(r0="", r1="")) is None
    assert named(left, words=stated(r1="")) is None


def test_whoever_was_reaped_unseen_by_its_parent_is_not_named_before_one_that_ended_by_itself() -> None:
    assert named(Exit(1, 1.0, None), Exit(0, 1.1, None), words=stated(r1=OWN)) == 1
    assert named(Exit(0, 1.0, FAILED), Exit(1, 1.1, KILLED), words=stated(r0=OWN)) == 1


def test_a_rank_that_ends_well_before_the_others_is_stated() -> None:
    well, failed = Exit(1, 1.0, 0), Exit(0, 1.1, FAILED)
    assert left_early([well, failed], stated(r0=PEER, r1=""), 2) == 1
    assert left_early([Exit(1, 1.0, 3), failed], stated(r0=PEER, r1=""), 2) is None
    assert left_early([well, failed], stated(r0=OWN, r1=""), 2) is None
    assert left_early([well, failed], stated(r0=PEER, r1=""), 3) is None
    assert left_early([well], stated(r1=""), 1) is None


def test_who_ends_well_or_was_stopped_has_not_died() -> None:
    assert named(Exit(0, 1.0, STOPPED), Exit(1, 1.1, 0), words={}) is None
    assert named(Exit(0, 1.0, FAILED), words=stated(r0="")) is None


def test_only_what_torch_says_of_others_excuses() -> None:
    assert lost_another("TrainingError: step 7, after " + PEER)
    assert not lost_another("ConnectionResetError: [Errno 104] Connection reset by peer")  # of a dataset's server, say
    assert not lost_another("RuntimeError: mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.parametrize("exits", [[], [Exit(1, 1.0, None)], [Exit(1, 1.0, ABORTED), Exit(0, 1.1, -signal.SIGINT)]])
def test_nobody_died_of_a_job_that_was_interrupted(exits: list[Exit]) -> None:
    """The rank that ended first was named, with the other one, which said that it was gone, as its victim."""
    words = stated(r0="KeyboardInterrupt: ", r1=f"KeyboardInterrupt: , after {PEER}")
    assert named(*exits, words=words) is None
    assert were_stopped(exits, words, ranks=2)


def test_whoever_died_long_before_somebody_interrupted_what_hung_is_named() -> None:
    exits = [Exit(1, 1.0, KILLED), Exit(0, 600.0, -signal.SIGINT)]
    assert named(*exits, words={}) == 1
    assert not were_stopped(exits, {}, ranks=2)
    assert died_before(exits, asked_s=600.0) == exits[:1]
    assert died_before(exits, asked_s=5.0) == []  # killed by who asked it to stop, and then once more
    assert named(Exit(1, 1.0, FAILED), words=stated(r1="ValueError: a worker had KeyboardInterrupt", r0=PEER)) == 1


def test_a_job_that_was_asked_to_stop_and_neither_steps_nor_ends_hangs() -> None:
    assert not is_stopping(30.0, None, 30.0)
    assert is_stopping(now_s=1_030.0, asked_s=1_000.0, stepped_s=1_001.0)
    assert not is_stopping(now_s=2_000.0, asked_s=1_000.0, stepped_s=1_030.0)
    assert not is_stopping(now_s=1_100.0, asked_s=1_000.0, stepped_s=1_100.0)


def test_whom_all_their_launcher_stopped_were_stopped_and_those_beside_one_that_died_were_not() -> None:
    assert were_stopped([Exit(0, 1.0, STOPPED), Exit(1, 1.1, STOPPED)], {}, ranks=2)
    assert not were_stopped([Exit(0, 1.0, STOPPED), Exit(1, 1.0, FAILED)], {}, ranks=2)
    assert not were_stopped([Exit(0, 1.0, STOPPED)], {}, ranks=2)
