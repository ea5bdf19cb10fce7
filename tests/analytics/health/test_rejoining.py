"""When a lost rank is started again, and what an operator may ask for."""

from __future__ import annotations

import msgspec
import pytest

from unskew.analytics.health.rejoining import FIRST_WAIT, Rejoining
from unskew.collector.command import Command
from unskew.collector.events import CommandRefused, Control, DeviceJoined, DeviceLost, ProcessEnded, RankAdded


def joined(rank: int) -> DeviceJoined:
    return DeviceJoined(device=f"d{rank}", rank=rank, node="n", pid=1)


def lost(rank: int, iteration: int) -> DeviceLost:
    return DeviceLost(device=f"d{rank}", rank=rank, how="exit", detail="", detected_us=1, iteration=iteration)


def after(*events: Control) -> Rejoining:
    state = Rejoining()
    for event in (*map(joined, range(4)), *events):
        state = state.take(event)
    return state


def test_mode_auto_starts_a_rank_ever_more_rarely_and_not_for_ever() -> None:
    state, started = after(), []
    for iteration in range(200):
        if 2 not in state.gone:
            state = state.take(lost(2, iteration))
        for added in state.due(iteration + 1, 3):
            started.append(added.watermark - state.losses[2][-1])
            assert state.take(added).due(iteration + 1, 3) == []
            state = state.take(added).take(joined(2))
    assert started == [1, FIRST_WAIT + 1, 2 * FIRST_WAIT + 1]
    assert state.processes[2] == 4
    assert state.given_up(2, 3).startswith("rank 2 was lost 4 times: ")
    assert (after(lost(2, 5)).given_up(2, 3), after(lost(2, 5)).due(9, 0), state.given_up(2, 0)) == ("", [], "")


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("", 2),
        ("2", 2),
        ("3", 3),
        ("4", 4),
        ("0", "rank 0 lives"),
        ("5", "rank 5 leaves numbers out, the next new rank is 4"),
        ("6", "rank 6 has no place: the node has places for 6 ranks"),
        ("two", "rank two is no rank, allowed: a whole number"),
    ],
)
def test_who_may_be_asked_for(asked: str, answer: int | str) -> None:
    state = after(lost(3, 5), lost(2, 6))
    found = state.command(Command(kind="rank", run="r", by="ann", target=asked), 7, iterations=60, most_ranks=6)
    assert (found.rank if isinstance(found, RankAdded) else found.reason) == answer


def test_a_rank_is_asked_for_once_and_a_new_one_where_none_is_lost() -> None:
    def ask(state: Rejoining, rank: str, committed: int = 7) -> RankAdded | CommandRefused:
        return state.command(Command(kind="rank", run="r", by="ann", target=rank), committed, iterations=60, most_ranks=6)

    coming = ask(after(lost(2, 6)), "2")
    assert isinstance(coming, RankAdded)
    again, other, late = (ask(after(lost(2, 6), coming), *how) for how in (("2",), ("",), ("", 60)))
    assert isinstance(again, CommandRefused)
    assert (again.reason, again.command) == ("rank 2 is being started already", "rank 2")
    assert isinstance(other, RankAdded)
    assert (other.rank, other.process) == (4, 1)
    assert isinstance(late, CommandRefused)
    assert late.reason == "the run is at its end"


def test_a_rank_that_was_cut_off_keeps_its_device_until_it_ends_or_goes_on() -> None:
    state = after(msgspec.structs.replace(lost(2, 6), cut_off=True))
    assert state.due(100, 3) == []
    back = state.take(joined(2))
    assert (back.gone, back.cut_off, back.losses[2], back.due(100, 3)) == (frozenset(), frozenset(), (), [])
    assert [one.rank for one in state.take(ProcessEnded(rank=2, detail="", watermark=9)).due(100, 3)] == [2]
    asked, other = (
        state.command(Command(kind="rank", run="r", by="ann", target=rank), 7, iterations=60, most_ranks=6)
        for rank in ("2", "")
    )
    assert isinstance(asked, CommandRefused)
    assert asked.reason == "rank 2 was cut off, its process has its device"
    assert isinstance(other, RankAdded)
    assert other.rank == 4
