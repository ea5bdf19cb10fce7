"""Ranks that are threads of one process, with the groups of a plan in its memory: what `Comm` is to the ranks of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unskew.runtime.rank.comm import PeerLost


class Hub:
    """Messages and collectives between threads; `stop` breaks them all, as a death does."""

    def __init__(self) -> None:
        self._changed, self._stopped = threading.Condition(), False
        self._there: dict[tuple[Any, ...], Tensor] = {}

    def put(self, key: tuple[Any, ...], tensor: Tensor) -> None:
        with self._changed:
            self._there[key] = tensor.detach().clone()
            self._changed.notify_all()

    def take(self, key: tuple[Any, ...], *, stays: bool = False) -> Tensor:
        with self._changed:
            while key not in self._there:
                if self._stopped:
                    raise PeerLost("stopped")
                if not self._changed.wait(20):
                    raise RuntimeError(f"nobody sends {key}")
            return self._there[key] if stays else self._there.pop(key)

    def has(self, keys: Sequence[tuple[Any, ...]]) -> bool:
        with self._changed:
            return all(key in self._there for key in keys)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class Arriving:
    def __init__(self, hub: Hub, key: tuple[Any, ...], place: Tensor) -> None:
        self._hub, self._key, self._place = hub, key, place

    def wait(self) -> Tensor:
        return self._place.copy_(self._hub.take(self._key))


class Sent:
    def wait(self) -> None:
        pass


class Summing:
    """A sum that is through once all have given their part."""

    def __init__(self, hub: Hub, keys: Sequence[tuple[Any, ...]], tensor: Tensor) -> None:
        self._hub, self._keys, self._tensor = hub, keys, tensor

    def wait(self) -> Tensor:
        return self._tensor.copy_(torch.stack([self._hub.take(key, stays=True) for key in self._keys]).sum(0))

    def done(self) -> bool:
        if not self._hub.has(self._keys):
            return False
        self.wait()
        return True


class ThreadComm:
    """One rank's side."""

    def __init__(self, hub: Hub, rank: int, members: Sequence[int]) -> None:
        self.rank, self.members, self.plan_version = rank, tuple(members), 0
        self._hub = hub
        self._turn: dict[Any, int] = {}
        self.stop = hub.stop

    def _number(self, key: Any) -> int:
        """The how-manieth of its kind: both sides count alike."""
        self._turn[key] = self._turn.get(key, -1) + 1
        return self._turn[key]

    def send(self, tensor: Tensor, peer: int, tag: int) -> Sent:
        self._hub.put(("message", self.rank, peer, tag, self._number(("send", peer, tag))), tensor)
        return Sent()

    def wait(self, sent: Sequence[tuple[Sent, Callable[[], None]]]) -> None:
        for _, through in sent:
            through()

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Arriving:
        return Arriving(self._hub, ("message", peer, self.rank, tag, self._number(("receive", peer, tag))), tensor)

    def all_gather(self, row: Tensor, group: tuple[int, ...] | None = None) -> Tensor:
        members = group or self.members
        turn = self._number(members)
        self._hub.put((members, turn, self.rank), row)
        return torch.stack([self._hub.take((members, turn, rank), stays=True) for rank in members])

    def all_to_all(self, tensor: Tensor, lengths: Sequence[int], group: tuple[int, ...]) -> Tensor:
        turn = self._number(group)
        self._hub.put((group, turn, self.rank), tensor)
        place = group.index(self.rank)
        mine = slice(sum(lengths[:place]), sum(lengths[: place + 1]))
        return torch.stack([self._hub.take((group, turn, rank), stays=True)[mine] for rank in group])

    def all_reduce(self, tensor: Tensor, group: tuple[int, ...]) -> Summing:
        turn = self._number(group)
        keys = [(group, turn, rank) for rank in group]
        self._hub.put((group, turn, self.rank), tensor)
        return Summing(self._hub, keys, tensor)

    def sum(self, tensor: Tensor, group: tuple[int, ...]) -> Tensor:
        return self.all_reduce(tensor, group).wait()


def in_threads(ranks: Sequence[int], live: Callable[[int], None]) -> None:
    """Run `live` for each rank at once; raises what went wrong in one of them, `PeerLost` aside."""
    failed: list[Exception] = []

    def guarded(rank: int) -> None:
        try:
            live(rank)
        except PeerLost:
            pass
        except Exception as error:  # a thread's own end would be lost
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for error in failed:
        raise error
