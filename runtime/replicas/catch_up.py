"""Catch-up: a replica that is behind takes its layers from a healthy one while both take part in the step.

The healthy rank copies its state between two steps and sends it from a side thread, past the ring and past Gloo, so what it
computes meanwhile and the exchange of gradients are not held up. Whoever asks for a state that is gone by then is refused, and
asks for the next one in the next step.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from unskew.analytics.scheduler.replicas import Positions

_LENGTH = struct.Struct("=q")


class ReplicaState(msgspec.Struct, frozen=True):
    """What a rank holds after so many `iterations`: its layers as `HeldLayer.pack` gives them, and how far the batches of
    every replica are trained."""

    iterations: int
    positions: Positions
    layers: Mapping[int, Tensor]

    @property
    def bytes(self) -> int:
        return sum(flat.nbytes for flat in self.layers.values())


class _Contents(msgspec.Struct, frozen=True):
    """The head of a reply; `sizes`: layer -> bytes. `iterations` -1: refused."""

    iterations: int
    positions: Positions
    sizes: dict[int, int]


class StateSource:
    """Serves a rank's state to ranks of its role in other replicas. `copy(n)` waits until n iterations are stepped and copies
    the state; None when it is past."""

    def __init__(self, folder: str, rank: int, copy: Callable[[int], ReplicaState | None]) -> None:
        self._copy = copy
        path = _path(folder, rank)
        Path(path).unlink(missing_ok=True)  # of the process that had this number before
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(16)
        threading.Thread(target=self._accept, name="state", daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=[sock], name="state", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, suppress(OSError, struct.error):
            (iterations,) = _LENGTH.unpack(sock.recv(_LENGTH.size))
            state = self._copy(iterations) or ReplicaState(-1, (), {})
            sizes = {number: flat.nbytes for number, flat in state.layers.items()}
            head = msgspec.json.encode(_Contents(state.iterations, state.positions, sizes))
            sock.sendall(_LENGTH.pack(len(head)) + head)
            for flat in state.layers.values():
                sock.sendall(flat.numpy().data.cast("B"))


class StateFetch:
    """A state on its way from `source`; `state` is None until all of it is here."""

    def __init__(self, folder: str, source: int, iterations: int, dtype: torch.dtype) -> None:
        self.source, self._iterations, self._dtype = source, iterations, dtype
        self.state: ReplicaState | None = None
        self.problem = ""
        self.took_us = 0
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._over = threading.Event()
        threading.Thread(target=self._run, args=[_path(folder, source)], name="catch-up", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether it is over, one way or the other."""
        return self._over.wait(seconds)

    def give_up(self) -> None:
        """It is of no use any more."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _run(self, path: str) -> None:
        began = time.monotonic_ns()
        with self._sock as sock:
            try:
                sock.connect(path)
                sock.sendall(_LENGTH.pack(self._iterations))
                (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
                head = msgspec.json.decode(_exactly(sock, length), type=_Contents)
                if head.iterations == self._iterations:
                    layers = {
                        number: torch.frombuffer(_exactly(sock, size), dtype=self._dtype) for number, size in head.sizes.items()
                    }
                    self.state = ReplicaState(head.iterations, head.positions, layers)
                else:
                    self.problem = f"rank {self.source} has gone on to later iterations"
            except (OSError, msgspec.DecodeError) as error:
                self.problem = f"rank {self.source} cannot be reached: {error}"
        self.took_us = (time.monotonic_ns() - began) // 1000
        self._over.set()


def _path(folder: str, rank: int) -> str:
    return f"{folder}/state-{rank}"


def _exactly(sock: socket.socket, size: int) -> bytearray:
    """The next `size` bytes. Raises `OSError` when the other side closes before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise ConnectionError("closed by the other side")
        view = view[count:]
    return data
