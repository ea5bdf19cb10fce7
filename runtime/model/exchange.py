"""What the members of a tensor-parallel group give each other directly, through Unix sockets of their own (one node).

The backend's collectives pass through threads of its own, and whoever waits for one through another: on cores that ranks share
each of them is woken and waits its turn. A member that writes and reads by itself is woken once. All add the same rows in the
same way, so that all end with the same bits.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from unskew.runtime.channel import accept_own

MOST_BYTES = 64 << 10
"""Of a tensor that is given directly: two fit into a socket, so that nobody who writes has to wait for a reader that writes."""
_BUFFER_BYTES = 4 * MOST_BYTES
_CONNECT_S = 10.0
"""A healthy member may come late where cores are few: 1.7 s of silence was seen."""
_HELLO = struct.Struct("=q")


class Exchange:
    """This rank's connections to the other members of its group."""

    def __init__(self, rank: int, members: Sequence[int]) -> None:
        self.rank, self.members = rank, tuple(members)
        self._place = self.members.index(rank)
        self._peers: dict[int, socket.socket] = {}  # by their places

    def connect(self, met: Callable[[bytes], Mapping[int, bytes]]) -> None:
        """`met`: tells where this member listens, and hears where each does. Raises `OSError` where one is gone."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind("")  # the kernel finds a name
            listener.listen(len(self.members))
            listener.settimeout(_CONNECT_S)
            where = met(listener.getsockname())
            for place, member in enumerate(self.members[: self._place]):
                self._peers[place] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._peers[place].connect(where[member])
                self._peers[place].sendall(_HELLO.pack(self._place))
            while len(self._peers) < len(self.members) - 1:
                if (peer := accept_own(listener)) is not None:
                    _fill(peer, memoryview(hello := bytearray(_HELLO.size)))
                    self._peers[_HELLO.unpack(hello)[0]] = peer
        for peer in self._peers.values():  # as large as the system allows; its default may be too small for two
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)

    def gather(self, tensor: Tensor) -> Tensor:
        """All members' tensors, [member, ...]. Raises `OSError` where one is gone."""
        rows = tensor.new_empty(len(self.members), *tensor.shape)
        rows[self._place] = tensor.detach()
        flat = [memoryview(row.view(-1).view(torch.uint8).numpy()) for row in rows]
        for peer in self._peers.values():
            peer.sendall(flat[self._place])
        for place, peer in self._peers.items():
            _fill(peer, flat[place])
        return rows

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all members' tensors, in place."""
        return tensor.copy_(self.gather(tensor).sum(0))

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


def _fill(peer: socket.socket, place: memoryview) -> None:
    while place:
        if not (n_bytes := peer.recv_into(place, 0, socket.MSG_WAITALL)):
            raise ConnectionResetError("a member of the group has closed its connection")
        place = place[n_bytes:]
