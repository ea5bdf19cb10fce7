"""Commands: refused when nobody would read them, otherwise given once and in order."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import msgspec
import pytest

from unskew.analytics.loop.approval_queue import ApprovalQueue
from unskew.collector.command import Command
from unskew.collector.events import CommandRefused
from unskew.collector.paths import Store
from unskew.collector.write.commands import MOST_BYTES, CommandError, Inbox, controller_alive, hold_controller_lock, send


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
        assert inbox.poll()[0] == []
        send(store, "r", late)
        send(store, "r", early)
        (store.commands("r") / f"{15:017d}-garbage.json").write_text('{"kind":"appr')
        assert [one.id for one in inbox.poll()[0]] == [early.id, late.id]
        assert inbox.poll()[0] == []
        again = Command(id=early.id, kind="approve", run="r", by="ada", target="p1", at_us=30)
        send(store, "r", again)
        assert inbox.poll()[0] == []
        send(store, "r", Command(id=late.id, kind="reject", run="r", by="bob", at_us=40))
        assert Inbox(store, "r").poll()[0] == []


def test_what_is_no_command_is_set_aside_and_named_and_holds_nobody_up(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with hold_controller_lock(store, "r"):
        send(store, "r", approve("p1", 5))
        folder = store.commands("r")
        (folder / "a-link.json").symlink_to("/nowhere")
        (folder / "b-to-a-file.json").symlink_to("/etc/passwd")
        (folder / "c-folder.json").mkdir()
        os.mkfifo(folder / "d-fifo.json")  # opening it would block until somebody writes
        (folder / "e-large.json").write_bytes(b" " * (MOST_BYTES + 1))
        (folder / "f-deep.json").write_text("[" * 50_000)
        (folder / "g-elsewhere.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(approve("p1", 1), run="other")))
        (folder / os.fsdecode(b"h-\xff\x1b.json")).touch()
        inbox = Inbox(store, "r")
        commands, refused = inbox.poll()
        assert [(one.target, one.user) for one in commands] == [("p1", pwd.getpwuid(os.geteuid()).pw_name)]
        assert [one.command[:6] for one in refused] == [f"file {letter}" for letter in "abcdefgh"]
        assert all(one.reason.startswith("no command: ") for one in refused)
        assert all(msgspec.json.encode(one).isascii() for one in refused)
        assert inbox.poll() == ([], [])
        assert not list(folder.glob("*.json"))
        store.enter()  # what was set aside shuts nobody out of the store


def test_a_command_file_that_cannot_be_moved_away_is_carried_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)

    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with hold_controller_lock(store, "r"):
        send(store, "r", approve("p1", 1))
        monkeypatch.setattr(Path, "rename", forbidden)
        inbox = Inbox(store, "r")
        assert [one.target for one in inbox.poll()[0]] == ["p1"]
        assert inbox.poll() == ([], [])


@pytest.mark.parametrize("by", ["", " \t", "auto", "controller ", "Auto", "auto\u200b", "\u200b"])
def test_nobody_decides_without_a_name_or_in_the_controllers(by: str, tmp_path: Path) -> None:
    store, nameless = Store(tmp_path), msgspec.structs.replace(approve("p1", 1), by=by)
    with hold_controller_lock(store, "r"), pytest.raises(CommandError, match="name"):
        send(store, "r", nameless)
    answer = ApprovalQueue(iterations=9, mode="approve", numbered=1).command(msgspec.structs.replace(nameless, user="eve"))
    assert isinstance(answer, CommandRefused)
    assert (answer.by, answer.user) == ("eve", "eve")


def test_a_proposal_that_never_was_is_told_from_one_that_is_closed() -> None:
    queue = ApprovalQueue(iterations=9, mode="approve", numbered=2)
    reasons = [queue.command(approve(target, 1)) for target in ("p2", "p3", "p0", "x")]
    assert [getattr(one, "reason", "") for one in reasons] == [
        "proposal p2 is not open",
        *(f"there is no proposal {name}: so far 2 were made" for name in ("p3", "p0", "x")),
    ]
