"""Two members sum and gather in one message each way, whatever their size, and are told when the other one is gone."""

import pytest
import torch

from unskew.benchmarks.runtime.processes import Files, in_processes
from unskew.runtime.rank.comm import MOST_AT_ONCE, Comm, PeerLost

SIZES = (3, MOST_AT_ONCE // 4, MOST_AT_ONCE // 4 + 1)


def _alive(files: Files, rank: int) -> list[tuple[float, float, list[float]]]:
    comm = Comm(files, 0, rank, (0, 1), [(0, 1)])
    comm.build()
    found = []
    for turn in range(30):  # nobody waits for what it has sent
        tensor = torch.full((SIZES[turn % 3],), float(10 * turn + rank))
        rows = comm.all_gather(tensor, (0, 1))
        comm.sum(tensor, (0, 1))
        found.append((float(tensor.min()), float(tensor.max()), rows[:, 0].tolist()))
    return found


def _left_alone(files: Files, rank: int) -> str:
    comm = Comm(files, 0, rank, (0, 1), [(0, 1)])
    comm.build()
    if rank == 1:
        comm.stop()
        return "gone"
    with pytest.raises(PeerLost):
        comm.sum(torch.ones(3), (0, 1))
    return "told"


def test_both_have_the_sum_and_the_rows_in_order() -> None:
    expected = [(20.0 * turn + 1, 20.0 * turn + 1, [10.0 * turn, 10.0 * turn + 1]) for turn in range(30)]
    assert in_processes(2, _alive) == [expected, expected]


def test_one_that_is_left_alone_is_told() -> None:
    assert in_processes(2, _left_alone) == ["told", "gone"]
