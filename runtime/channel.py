"""Framed messages over stream sockets, waiting for several of them, and the sockets that this process has open."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from stat import S_ISSOCK
from typing import Protocol

import msgspec

from unskew.runtime.protocol import AnyMessage, Message

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
MOST_BYTES = 64 << 20


class Channel:
    """Messages over a stream socket. `send` may block as long as the socket's timeout; after an error close the channel.

    `receive` blocks for one message, `available` never blocks. A frame above `most_bytes` closes the channel.
    """

    def __init__(self, sock: socket.socket, most_bytes: int = MOST_BYTES) -> None:
        self._sock, self._buffer, self.most_bytes = sock, bytearray(), most_bytes
        self.end = ""
        """How the connection ended, once it has."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Raises OSError when the other side is gone."""
        data = _encoder.encode(message)
        self._sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> AnyMessage | None:
        """The next message; None when the other side has closed."""
        while (message := self._next()) is None:
            if not self._read():
                return None
        return message

    def available(self) -> tuple[list[AnyMessage], bool]:
        """(the messages that one read brings, whether the channel is still open); call when the socket is readable."""
        still_open = self._read()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages, still_open

    def close(self) -> None:
        self._sock.close()

    def _read(self) -> bool:
        try:
            data = self._sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError as error:
            self.end = error.strerror or str(error)
            return False
        self._buffer += data
        self.end = "" if data else "closed by the other side"
        return bool(data)

    def _next(self) -> AnyMessage | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self.most_bytes:
            raise ConnectionError(f"a message of {length} bytes, allowed are {self.most_bytes}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message = _decoder.decode(bytes(self._buffer[_LENGTH.size : end]))
        del self._buffer[:end]
        return message


class Readable(Protocol):
    def fileno(self) -> int: ...


def readable(asked: Sequence[int | Readable], wait_s: float | None = None) -> list[int]:
    """The descriptors of those that can be read or have ended, in their order, after at most `wait_s` (None: until one can).

    By poll: `select.select` refuses descriptors above 1,023, which a process that holds many files gets.
    """
    poll = select.poll()
    descriptors = [one if isinstance(one, int) else one.fileno() for one in asked]
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(None if wait_s is None else wait_s * 1000)}
    return [descriptor for descriptor in descriptors if descriptor in ready]


def accept_own(listener: socket.socket) -> socket.socket | None:
    """The next connection to a Unix socket, or None where another user made it: such a one is closed unread."""
    sock = listener.accept()[0]
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user == os.geteuid():
        return sock
    sock.close()
    return None


def opened_since(before: Mapping[int, int]) -> dict[int, int]:
    """The sockets that are open now and were not `before`."""
    return {descriptor: inode for descriptor, inode in open_sockets().items() if before.get(descriptor) != inode}


def open_sockets() -> dict[int, int]:
    """Open sockets of this process: descriptor -> inode, which distinguishes a reused descriptor."""
    found = {}
    # Survivors of a death list them all at once, on cores that they share: by paths and links it takes ten times as long.
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):
            status = os.fstat(int(name))
            if S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def shut_sockets(own: Mapping[int, int]) -> None:
    """Shut those of these that are still what they were, and connected: Gloo ends the process when its listening socket is
    touched."""
    open_now = open_sockets()
    for descriptor, inode in own.items():
        if open_now.get(descriptor) == inode:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                copy.getpeername()
                copy.shutdown(socket.SHUT_RDWR)
