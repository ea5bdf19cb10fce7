"""Where ranks find each other: nobody is answered early, and only the user that trains is let in."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.training.threads_rendezvous import ThreadsRendezvous

from unskew.analytics.core.layout import uniform_plan
from unskew.collector.locks import hold
from unskew.runtime.channel import accept_own
from unskew.runtime.control.membership import socket_folder
from unskew.runtime.node.rendezvous import RendezvousTable
from unskew.runtime.protocol import AGENT_LOCK, Await, Message, PlanRecord
from unskew.runtime.rank.comm import Comm, PeerLost
from unskew.runtime.rank.control_thread import ControlThread

KEYS = st.sampled_from("abcd")
STEPS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.lists(KEYS, min_size=1, max_size=3, unique=True)), max_size=30)


@given(STEPS)
def test_a_rank_is_answered_once_when_all_that_it_asked_for_last_is_there(steps: list[tuple[int, bool, list[str]]]) -> None:
    table: RendezvousTable[int] = RendezvousTable()
    values: dict[str, bytes] = {}
    waiting: dict[int, list[str]] = {}
    for number, (rank, asks, keys) in enumerate(steps):
        if asks:
            waiting[rank] = keys
            answers = table.ask(rank, keys)
        else:
            values[keys[0]] = b"%d" % number
            answers = table.publish(keys[0], values[keys[0]])
        due = {one: wanted for one, wanted in waiting.items() if values.keys() >= {*wanted}}
        assert {one: answer.keys for one, answer in answers} == {one: tuple(wanted) for one, wanted in due.items()}
        assert all(answer.values == tuple(values[key] for key in answer.keys) for _, answer in answers)
        waiting = {one: wanted for one, wanted in waiting.items() if one not in due}


def test_a_member_that_dies_after_it_was_met_holds_nobody_up_once_its_plan_is_called_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_ENABLE_STORE_V2_API", "1")
    rendezvous = ThreadsRendezvous()
    rendezvous.publish("plan3/here/1", b"")  # and no more of it
    threading.Timer(0.2, rendezvous.call_off).start()
    with pytest.raises(PeerLost, match="plan 3 was called off"):
        Comm(rendezvous, 3, 0, (0, 1), ()).build()


class Dying(ThreadsRendezvous):
    """Of a member that dies as soon as it has said where it listens."""

    def __init__(self, rendezvous: ThreadsRendezvous) -> None:
        super().__init__()
        self._rendezvous = rendezvous

    def publish(self, key: str, value: bytes) -> None:
        self._rendezvous.publish(key, value)

    def fetch(self, keys: Sequence[str], plan_version: int) -> Sequence[bytes]:
        if all("/here/" in key for key in keys):
            return self._rendezvous.fetch(keys, plan_version)
        raise PeerLost("it died")


def test_a_member_that_dies_before_it_connects_holds_nobody_up_once_the_groups_are_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_ENABLE_STORE_V2_API", "1")
    rendezvous, members = ThreadsRendezvous(), range(4)
    rendezvous.publish("plan3/here/0", b"")
    for dead in (1, 2, 3):
        rendezvous.publish(f"plan3/here/{dead}", b"")
    for dead in (1, 2, 3):
        with pytest.raises(PeerLost, match="it died"):
            Comm(Dying(rendezvous), 3, dead, members, ()).build()
    comm = Comm(rendezvous, 3, 0, members, ())
    threading.Timer(0.3, comm.stop).start()
    began_s = time.monotonic()
    with pytest.raises(PeerLost):  # or it is the first to connect, and is refused
        comm.build()
    assert time.monotonic() - began_s < 1.5  # Gloo itself would wait for 10 s
    ours, theirs = socket.socketpair()  # opened after the groups failed, so it is not theirs
    with ours, theirs:
        comm.stop()
        ours.send(b"open")
        assert theirs.recv(4) == b"open"


@pytest.mark.slow
def test_a_plan_stopped_while_its_groups_fail_closes_nothing_that_is_opened_afterwards() -> None:
    for _ in range(100):  # without the lock about every sixth closes the pair
        rendezvous = ThreadsRendezvous()
        rendezvous.call_off()
        comm = Comm(rendezvous, 3, 0, range(4), ())
        stopping = threading.Thread(target=comm.stop)
        stopping.start()
        with pytest.raises(PeerLost):
            comm.build()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            stopping.join()
            ours.send(b"open")
            assert theirs.recv(4) == b"open"


@contextmanager
def another_user() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_what_killed_agents_have_left_is_removed_and_what_a_living_one_has_is_not(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    left, living, new = (socket_folder() for _ in range(3))
    hold(left / AGENT_LOCK).release()
    with hold(living / AGENT_LOCK):
        for folder in (left, living):
            os.utime(folder / AGENT_LOCK, (0, 0))
        other = socket_folder()
        assert sorted(short_path.iterdir()) == sorted((living, new, other))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_neither_reaches_the_socket_nor_is_let_in() -> None:
    folder = socket_folder()
    path = folder / "agent"

    try:
        with ExitStack() as sockets:
            listener, stranger, own = (sockets.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3))
            listener.bind(str(path))
            listener.listen()
            with another_user(), pytest.raises(PermissionError):
                stranger.connect(str(path))
            for opened in (folder, path):
                opened.chmod(0o777)
            with another_user():
                stranger.connect(str(path))
            assert accept_own(listener) is None
            assert stranger.recv(1) == b""
            own.connect(str(path))
            accepted = accept_own(listener)
            assert accepted is not None
            accepted.close()
    finally:
        shutil.rmtree(folder)


class Asking(ControlThread):
    """A rank's requests go straight to a table, as through its agent."""

    def __init__(self) -> None:
        self._changed, self._records, self._published = threading.Condition(), {}, None
        self._comm = self._kept = None
        self.table: RendezvousTable[int] = RendezvousTable()

    def send(self, message: Message) -> None:
        if isinstance(message, Await):
            for _, answer in self.table.ask(0, message.keys):
                self._take_published(answer)


def test_a_thread_of_a_plan_that_was_called_off_asks_for_nothing_more() -> None:
    """It took the place of what its rank had asked for the next plan, which was never answered then."""
    rank, plan, got = Asking(), uniform_plan(tp=1, pp=1, dp=2, n_layers=1, micro_batches=2), list[Sequence[bytes]]()
    for version in (1, 2):
        rank._take(PlanRecord(plan=plan.renumbered(version), abort=True))
    waiting = threading.Thread(target=lambda: got.append(rank.fetch(["plan2/here/1"], 2)), daemon=True)
    waiting.start()
    time.sleep(0.1)
    with pytest.raises(PeerLost, match="plan 1 was called off"):
        rank.fetch(["plan1/g0-1/0"], 1)
    for _, answer in rank.table.publish("plan2/here/1", b"x"):
        rank._take_published(answer)
    waiting.join(5)
    assert got == [(b"x",)]
