"""Commands: refused when nobody would read them, otherwise given once and in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from unskew.collector.command import Command
from unskew.collector.paths import Store
from unskew.collector.write.commands import CommandError, Inbox, controller_alive, hold_controller_lock, send


def approve(target: str, at_us: int) -> Command:
    return Command(kind="approve", run="r", by="ada", target=target, reason="looks right", at_us=at_us)


def test_a_command_without_a_living_controller_is_refused_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(CommandError, match="run r has no living controller"):
        send(store, "r", approve("p1", 1))
    with hold_controller_lock(store, "r"):
        assert controller_alive(store, "r")
        with pytest.raises(CommandError, match="living controller already"):
            hold_controller_lock(store, "r")
        send(store, "r", approve("p1", 1))
    assert not controller_alive(store, "r")
    with pytest.raises(CommandError):
        send(store, "r", approve("p2", 2))


def test_each_command_is_given_once_in_order_also_to_the_next_controller(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with hold_controller_lock(store, "r"):
        late, early = approve("p2", 20), approve("p1", 10)
        inbox = Inbox(store, "r")
        assert inbox.poll() == []
        send(store, "r", late)
        send(store, "r", early)
        (store.commands("r") / f"{15:017d}-garbage.json").write_text('{"kind":"appr')
        assert inbox.poll() == [early, late]
        assert inbox.poll() == []
        again = Command(id=early.id, kind="approve", run="r", by="ada", target="p1", at_us=30)
        send(store, "r", again)
        assert inbox.poll() == []
        send(store, "r", Command(id=late.id, kind="reject", run="r", by="bob", at_us=40))
        assert Inbox(store, "r").poll() == []
