"""The ring between replicas: exact, the same bits everywhere, and a death costs its neighbours a connection and nobody else."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from unskew.runtime.rank.comm import PeerLost
from unskew.runtime.replicas.ring import IN_FLIGHT, PACKET, Ring, RingLinks

pytestmark = pytest.mark.limit(60)
FORK = multiprocessing.get_context("fork")
SIZES = (5, 1_000, 7 * PACKET * IN_FLIGHT // 8 + 3)


def values(rank: int, size: int, turn: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(1_000 * turn + rank))


def member(folder: Path, rank: int, turns: Sequence[tuple[int, ...]], victim: int | None) -> None:
    """One all-reduce of each size per turn among those of the turn; the victim dies as the last of the first turn begins."""
    links, found = RingLinks(str(folder), rank), dict[Any, Any]()
    (folder / f"ready-{rank}").touch()
    for turn, group in enumerate(turns):
        while not all((folder / f"ready-{other}").exists() for other in group):
            time.sleep(0.005)
        for number, size in enumerate(SIZES if rank in group else ()):
            tensor = values(rank, size, turn)
            ring = Ring(links, plan_version=turn, iteration=number, clock_us=rank)
            if rank == victim and number == 2:
                links.right(group[(group.index(rank) + 1) % len(group)])
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                ring.all_reduce(tensor, group)
                found[turn, size] = tensor.numpy(), ring.clock_us
            except PeerLost:
                found[turn, size] = None
    found["connects"] = links.connects
    (folder / f"found-{rank}").write_bytes(pickle.dumps(found))
    (folder / f"done-{rank}").touch()
    while len([*folder.glob("done-*")]) < len({*turns[0]} - {victim}):
        time.sleep(0.005)


def run(folder: Path, turns: Sequence[tuple[int, ...]], victim: int | None = None) -> dict[int, dict[Any, Any]]:
    torch.set_num_threads(1)  # a fork of a process with more would not come back from them
    members = [FORK.Process(target=member, args=(folder, rank, turns, victim)) for rank in turns[0]]
    for one in members:
        one.start()
    for one in members:
        one.join(40)
        if one.is_alive():
            one.kill()
    files = {rank: folder / f"found-{rank}" for rank in turns[0]}
    return {rank: pickle.loads(path.read_bytes()) for rank, path in files.items() if path.exists()}


def assert_exact(found: dict[int, dict[Any, Any]], turn: int, group: tuple[int, ...]) -> None:
    for size in SIZES:
        results = [torch.from_numpy(found[rank][turn, size][0]) for rank in group]
        assert torch.allclose(results[0], sum(values(rank, size, turn) for rank in group), rtol=0, atol=1e-12)
        assert all(torch.equal(result, results[0]) for result in results)
        assert {found[rank][turn, size][1] for rank in group} == {max(group)}


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_sum_is_exact_and_the_same_everywhere(count: int, tmp_path: Path) -> None:
    group = tuple(range(count))
    found = run(tmp_path, [group])
    assert_exact(found, 0, group)
    assert [found[rank]["connects"] for rank in group] == [1] * count


def test_only_the_left_neighbour_of_a_dead_member_connects_anew(tmp_path: Path) -> None:
    """All others send where they did, over what may still have packets of the exchange that broke."""
    found = run(tmp_path, [(0, 1, 2, 3), (0, 1, 3)], victim=2)
    assert sorted(found) == [0, 1, 3]
    assert all(found[rank][0, SIZES[1]] is not None and found[rank][0, SIZES[2]] is None for rank in found)
    assert_exact(found, 1, (0, 1, 3))
    assert {rank: found[rank]["connects"] for rank in found} == {0: 1, 1: 2, 3: 1}
