"""Where ranks find each other that are threads of one process: the agent's table without its sockets."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unskew.runtime.node.rendezvous import RendezvousTable
from unskew.runtime.protocol import Published
from unskew.runtime.rank.comm import PeerLost


class ThreadsRendezvous:
    """What `ControlThread` is to the ranks of a run."""

    def __init__(self) -> None:
        self._table: RendezvousTable[int] = RendezvousTable()
        self._answers: dict[int, Published] = {}
        self._changed, self._called_off = threading.Condition(), False

    def publish(self, key: str, value: bytes) -> None:
        with self._changed:
            self._take(self._table.publish(key, value))

    def fetch(self, keys: Sequence[str], plan_version: int) -> Sequence[bytes]:
        me = threading.get_ident()
        with self._changed:
            self._take(self._table.ask(me, keys))
            while me not in self._answers:
                if self._called_off:
                    raise PeerLost(f"plan {plan_version} was called off")
                self._changed.wait(20)
            return self._answers.pop(me).values

    def call_off(self) -> None:
        with self._changed:
            self._called_off = True
            self._changed.notify_all()

    def _take(self, answers: list[tuple[int, Published]]) -> None:
        self._answers.update(answers)
        self._changed.notify_all()
