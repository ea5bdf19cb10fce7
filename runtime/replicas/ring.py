"""The all-reduce between replicas, which outlives its members (after FTAR of FT-HSDP, arXiv 2602.00277).

Ranks with the same layers form a ring: reduce-scatter, then all-gather, N - 1 hops each. A rank connects to its right neighbour
and is connected to by its left one. When a member is gone only its neighbours connect anew; all others keep what they have.

The ring is ours and not Gloo's: Gloo cannot call off a receive that was posted, and frees a blocked rank only by closing its
sockets, so there each break costs every connection. Here a message is one packet with the exchange that it belongs to. A rank
whose exchange is called off leaves it at once, and its neighbour drops what was still under way. A message is cut into packets
of `PACKET` bytes, and a hop moves `IN_FLIGHT` of them at most: no more lies between two neighbours at any time.

Every member ends with the same bits: each part is summed in one order, by one chain of members, and then handed round.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from unskew.runtime.rank.comm import PeerLost

PACKET = 64 * 1024
IN_FLIGHT = 3
_HELLO = struct.Struct("=q")
_HEADER = struct.Struct("=qqqq")
_GONE = select.POLLHUP | select.POLLERR | select.POLLRDHUP

Array = NDArray[Any]


class RingLinks:
    """A rank's connections to its neighbours; `folder` is where all ranks of the node have their sockets."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self.rank = folder, rank
        self._incoming: dict[int, socket.socket] = {}
        self._right: tuple[int, socket.socket] | None = None
        self.changed = threading.Condition()
        self.woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.connects = 0
        """How often this rank has connected to a neighbour."""
        path = self._path(rank)
        Path(path).unlink(missing_ok=True)  # of the process that had this number before
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="ring", daemon=True).start()

    def right(self, rank: int) -> socket.socket:
        """The connection to a right neighbour, the one of before where it still stands. Raises `PeerLost`."""
        if self._right is not None:
            known, sock = self._right
            if known == rank and not _is_gone(sock):
                return sock
            sock.close()
        sock, self._right = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), None
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET * IN_FLIGHT)
            sock.connect(self._path(rank))
            sock.send(_HELLO.pack(self.rank))
        except OSError as error:
            sock.close()
            raise PeerLost(f"rank {rank} cannot be reached: {error}") from error
        self._right, self.connects = (rank, sock), self.connects + 1
        return sock

    def left(self, rank: int, ring: Ring) -> socket.socket:
        """The connection from a left neighbour, once there is one that stands. Raises `PeerLost` when `ring` is stopped."""
        with self.changed:
            while True:
                ring.check()
                sock = self._incoming.get(rank)
                if sock is not None and not _is_gone(sock):
                    return sock
                self.changed.wait()

    def wake(self) -> None:
        """Let the main thread look whether its exchange was stopped, wherever it waits."""
        os.eventfd_write(self.woken, 1)
        with self.changed:
            self.changed.notify_all()

    def leave(self) -> None:
        """This rank is in no ring any more."""
        if self._right is not None:
            self._right[1].close()
            self._right = None

    def _path(self, rank: int) -> str:
        return f"{self._folder}/ring-{rank}"

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            with suppress(OSError, struct.error):
                (rank,) = _HELLO.unpack(sock.recv(_HELLO.size))
                with self.changed:
                    self._incoming[rank] = sock  # who was there before under this number is gone, or came anew
                    self.changed.notify_all()


def _is_gone(sock: socket.socket) -> bool:
    """Whether the other side has closed."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return any(event & _GONE for _, event in poll.poll(0))


class FinishedSum:
    """A sum that is through."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        return self._tensor

    def done(self) -> bool:
        return True


class Ring:
    """The all-reduces of one attempt at one iteration. `stop`, from any thread, ends them with `PeerLost`.

    `clock_us` becomes the latest clock of all members.
    """

    def __init__(self, links: RingLinks, plan_version: int, iteration: int, clock_us: int = 0) -> None:
        self._links, self.plan_version, self._iteration, self.clock_us = links, plan_version, iteration, clock_us
        self.rank = links.rank
        self._stopped = False
        self._sent = self._taken = 0
        self._header = bytearray(_HEADER.size)
        self._room = bytearray(PACKET * IN_FLIGHT)

    def stop(self) -> None:
        self._stopped = True
        self._links.wake()

    def check(self) -> None:
        """Raises `PeerLost` once it is stopped."""
        if self._stopped:
            raise PeerLost("the exchange between the replicas was called off")

    def all_reduce(self, tensor: Tensor, group: Sequence[int]) -> FinishedSum:
        """Sum a flat tensor in place over the ranks of `group`, in ring order. Raises `PeerLost`; then it is of no use."""
        place, members = group.index(self.rank), len(group)
        self.check()
        right = self._links.right(group[(place + 1) % members])
        left = self._links.left(group[place - 1], self)
        flat: Array = tensor.numpy()
        at_once = members * len(self._room) // flat.itemsize
        for first in range(0, len(flat), at_once):
            self._partition(flat[first : first + at_once], place, members, right, left)
        return FinishedSum(tensor)

    def _partition(self, part: Array, place: int, members: int, right: socket.socket, left: socket.socket) -> None:
        bounds = [len(part) * number // members for number in range(members + 1)]

        def share(number: int) -> Array:
            return part[bounds[number % members] : bounds[number % members + 1]]

        for hop in range(members - 1):
            summed = share(place - hop - 1)
            room = np.frombuffer(self._room, dtype=part.dtype, count=len(summed))
            self._transfer(share(place - hop), room, right, left)
            summed += room
        for hop in range(members - 1):
            self._transfer(share(place + 1 - hop), share(place - hop), right, left)

    def _transfer(self, out: Array, into: Array, right: socket.socket, left: socket.socket) -> None:
        """Send all of `out` to the right while all of `into` comes from the left."""
        leaving, arriving = out.data.cast("B"), into.data.cast("B")
        sent = taken = 0
        while sent < len(leaving) or taken < len(arriving):
            poll = select.poll()
            poll.register(self._links.woken, select.POLLIN)
            if sent < len(leaving):
                poll.register(right, select.POLLOUT)
            if taken < len(arriving):
                poll.register(left, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._links.woken in ready:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._links.woken)
            self.check()
            try:
                if right.fileno() in ready and sent < len(leaving):
                    sent += self._send(right, leaving[sent : sent + PACKET])
                if left.fileno() in ready and taken < len(arriving):
                    taken += self._take(left, arriving[taken : taken + PACKET])
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerLost(f"a neighbour in the ring is gone: {error}") from error

    def _send(self, right: socket.socket, packet: memoryview) -> int:
        header = _HEADER.pack(self.plan_version, self._iteration, self._sent, self.clock_us)
        right.sendmsg([header, packet], [], socket.MSG_DONTWAIT)
        self._sent += 1
        return len(packet)

    def _take(self, left: socket.socket, room: memoryview) -> int:
        """The next packet of this exchange; one of an exchange before is dropped, one of a later exchange stays."""
        if not left.recv_into(self._header, _HEADER.size, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            raise PeerLost("the left neighbour in the ring has closed")
        plan_version, iteration, number, clock_us = _HEADER.unpack(self._header)
        if (plan_version, iteration) > (self.plan_version, self._iteration):
            raise PeerLost(f"a neighbour is in iteration {iteration} of plan {plan_version} already")
        if (plan_version, iteration) < (self.plan_version, self._iteration):
            left.recv(1, socket.MSG_DONTWAIT)
            return 0
        if number != self._taken:
            raise RuntimeError(f"packet {number} of an exchange came where {self._taken} was due")
        size = left.recvmsg_into([self._header, room], 0, socket.MSG_DONTWAIT)[0] - _HEADER.size
        if size != len(room):
            raise RuntimeError(f"a packet of {size} bytes came where {len(room)} were due")
        self._taken, self.clock_us = self._taken + 1, max(self.clock_us, clock_us)
        return size
