"""Members of a group that give each other small tensors directly: the same bits for all, and nobody waits for the dead."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.training.threads_comm import in_threads
from support.training.threads_rendezvous import ThreadsRendezvous
from torch import Tensor

from unskew.runtime.model.exchange import MOST_BYTES, Exchange
from unskew.runtime.rank.comm import Comm, PeerLost

pytestmark = pytest.mark.limit(60)
MEMBERS = (4, 1, 2)


@pytest.fixture
def comms(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Comm]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_ENABLE_STORE_V2_API", "1")
    rendezvous = ThreadsRendezvous()
    found = {rank: Comm(rendezvous, 0, rank, sorted(MEMBERS), [MEMBERS], team=MEMBERS) for rank in MEMBERS}
    in_threads(MEMBERS, lambda rank: _ignored(found[rank].build()))
    yield found
    for comm in found.values():
        comm.drop()


def _ignored(_: object) -> None:
    pass


@pytest.mark.parametrize("n_bytes", [8, MOST_BYTES, MOST_BYTES + 8], ids=["a number", "the most", "by the backend"])
def test_all_members_have_the_same_sums_to_the_last_bit_however_often(comms: dict[int, Comm], n_bytes: int) -> None:
    torch.manual_seed(1)
    given = {rank: torch.randn(20, n_bytes // 8, dtype=torch.float64) for rank in MEMBERS}
    summed: dict[int, list[Tensor]] = {}

    def live(rank: int) -> None:
        summed[rank] = [comms[rank].sum(row.clone(), MEMBERS) for row in given[rank]]
        gathered = comms[rank].all_gather(given[rank][0], MEMBERS)
        assert torch.equal(gathered, torch.stack([given[member][0] for member in MEMBERS]))

    in_threads(MEMBERS, live)
    for number, rows in enumerate(zip(*summed.values(), strict=True)):
        assert all(torch.equal(row, rows[0]) for row in rows)
        assert torch.allclose(rows[0], sum(given[rank][number] for rank in MEMBERS), rtol=1e-14)  # type: ignore[arg-type]


@pytest.mark.parametrize("who", ["one that has gone", "its own stop"])
def test_who_waits_for_a_member_is_freed(comms: dict[int, Comm], who: str) -> None:
    ended: list[str] = []

    def waits() -> None:
        with pytest.raises(PeerLost) as lost:
            comms[1].sum(torch.ones(3), MEMBERS)
        ended.append(str(lost.value))

    waiting = threading.Thread(target=waits)
    waiting.start()
    time.sleep(0.1)
    comms[4 if who == "one that has gone" else 1].stop()  # whom it hears first
    waiting.join(2)
    assert len(ended) == 1


def test_a_dropped_group_leaves_no_socket_open(comms: dict[int, Comm]) -> None:
    """A run has a group for each plan."""
    comm = comms[1]
    assert comm._team is not None
    numbers = [peer.fileno() for peer in comm._team._peers.values()]
    comm.drop()
    for number in numbers:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(number)


def test_a_member_that_comes_late_is_waited_for_and_has_room_for_what_is_written() -> None:
    """Healthy ranks on a busy machine are silent for 1.7 s; and two writes fit where nobody reads yet."""
    came = threading.Barrier(2)
    names: dict[int, bytes] = {}

    def connected(place: int) -> Exchange:
        def met(name: bytes) -> dict[int, bytes]:
            names[place] = name
            came.wait()
            time.sleep(2.5 * place)
            return names

        exchange = Exchange(place, (0, 1))
        exchange.connect(met)
        return exchange

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(connected, (0, 1)))
    for exchange in both:
        for peer in exchange._peers.values():
            assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) >= 4 * MOST_BYTES
        exchange.close()
