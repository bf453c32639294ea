"""How a segment's descriptor gets from group index 0 to the other ranks.

Index 0 listens on a Unix socket with an abstract, random name: no file, and gone with the process.
A peer shows the token that index 0 published through the rendezvous; both sides ask the kernel
for the other's user (SO_PEERCRED). The connections stay open: later segments need nothing else,
and the kernel closes them when a process dies, however that happened.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import time

from hp_comm._shm.segment import Segment

_GREETING = struct.Struct("<8sI32s")
_PARCEL = struct.Struct("<QQ")
_CREDENTIALS = struct.Struct("3i")
_MAGIC = b"hp-shm-1"
_NUDGE = b"!"
_TOKEN_BYTES = 32
_GREETING_LIMIT_S = 2.0
_TEXT_BYTES = 512
_SPARE_BACKLOG = 64
_RETRY_S = 0.02


class HandoverError(OSError):
    """A descriptor could not be handed over; says why."""


def _is_own_user(connection: socket.socket) -> bool:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, user, _group = _CREDENTIALS.unpack(raw)
    return bool(user == os.geteuid())


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


class Door:
    """Where the peers of group index 0 knock, while the group is being made.

    Args:
        num_peers: How many will come.
    """

    def __init__(self, num_peers: int) -> None:
        self.address = f"hyper-parallel-{secrets.token_hex(16)}"
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._listener = _new_socket()
        self._listener.bind(b"\0" + self.address.encode())
        self._listener.listen(num_peers + _SPARE_BACKLOG)
        self._listener.setblocking(False)

    def admit(self, wanted: set[int], deadline: float) -> dict[int, socket.socket]:
        """Return the connections of the peers that showed the token before the deadline.

        Whoever shows another token, an index that isn't expected, or nothing for two seconds is
        sent away; nobody can hold the others up.
        """
        found: dict[int, socket.socket] = {}
        started: dict[socket.socket, float] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while found.keys() != wanted and time.monotonic() < deadline:
                for key, _events in selector.select(timeout=0.1):
                    if key.fileobj is self._listener:
                        self._accept(selector, started)
                        continue
                    connection = next(c for c in started if c is key.fileobj)
                    self._greet(selector, started, connection, (wanted, found))
                self._expire(selector, started)
            for connection in list(started):
                self._send_away(selector, started, connection)
        return found

    def close(self) -> None:
        """Stop listening; admitted connections stay."""
        self._listener.close()

    def _accept(
        self, selector: selectors.BaseSelector, started: dict[socket.socket, float]
    ) -> None:
        try:
            connection, _address = self._listener.accept()
        except OSError:
            return
        if not _is_own_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        started[connection] = time.monotonic()
        selector.register(connection, selectors.EVENT_READ)

    def _greet(
        self,
        selector: selectors.BaseSelector,
        started: dict[socket.socket, float],
        connection: socket.socket,
        peers: tuple[set[int], dict[int, socket.socket]],
    ) -> None:
        wanted, found = peers
        try:
            message = connection.recv(_GREETING.size + 1)
        except OSError:
            message = b""
        if len(message) == _GREETING.size:
            magic, index, token = _GREETING.unpack(message)
            is_known = magic == _MAGIC and hmac.compare_digest(token, self.token)
            if is_known and index in wanted and index not in found:
                selector.unregister(connection)
                del started[connection]
                found[index] = connection
                return
        self._send_away(selector, started, connection)

    def _expire(
        self, selector: selectors.BaseSelector, started: dict[socket.socket, float]
    ) -> None:
        limit = time.monotonic() - _GREETING_LIMIT_S
        for connection in [c for c, since in started.items() if since < limit]:
            self._send_away(selector, started, connection)

    def _send_away(
        self,
        selector: selectors.BaseSelector,
        started: dict[socket.socket, float],
        connection: socket.socket,
    ) -> None:
        selector.unregister(connection)
        del started[connection]
        connection.close()


def knock(address: str, token: bytes, index: int, deadline: float) -> socket.socket:
    """Return a connection to group index 0.

    Raises:
        OSError: There is nobody of that name on this host (or in this network namespace), it is
            another user's, or it was busy until the deadline.
    """
    while True:
        connection = _new_socket()
        try:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.connect(b"\0" + address.encode())
            if not _is_own_user(connection):
                raise HandoverError(errno.EPERM, "the socket belongs to another user")
            connection.send(_GREETING.pack(_MAGIC, index, token))
        except BlockingIOError:  # too many are waiting to be let in
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)
        except OSError:
            connection.close()
            raise
        else:
            return connection


class Handover:
    """The connections over which group index 0 gives new segments to all ranks of a group.

    Args:
        index: This process's group index.
        connections: By group index: to all peers at index 0, to index 0 at the others.
    """

    def __init__(self, index: int, connections: dict[int, socket.socket]) -> None:
        self._index = index
        self._connections = connections
        self._number = 0

    def share(self, num_bytes: int, timeout_s: float) -> Segment:
        """Return a new segment that every rank of the group has; all call this alike.

        Args:
            num_bytes: Its length, the same on all ranks.
            timeout_s: For each hand-over, in seconds.

        Raises:
            OSError: It could not be made or handed over; the others find out when they look at
                what they got, so all have to tell each other.
        """
        self._number += 1
        if self._index == 0:
            segment, text = _try_create(num_bytes)
            self.give(segment, num_bytes, timeout_s, text)
            if segment is None:
                raise HandoverError(errno.ENOMEM, text)
            return segment
        return self.take(num_bytes, timeout_s)

    def give(
        self, segment: Segment | None, num_bytes: int, timeout_s: float, text: str = ""
    ) -> None:
        """Send a segment, or the reason why there is none, to every peer.

        Raises:
            OSError: A peer is gone or did not take it in time.
        """
        message = _PARCEL.pack(self._number, num_bytes) + text.encode()[:_TEXT_BYTES]
        descriptors = [] if segment is None else [segment.descriptor]
        for connection in self._connections.values():
            connection.settimeout(timeout_s)
            socket.send_fds(connection, [message], descriptors)

    def take(self, num_bytes: int, timeout_s: float) -> Segment:
        """Receive the next segment from group index 0.

        Raises:
            OSError: Index 0 sent none, or another one than all agreed on.
        """
        connection = self._connections[0]
        connection.settimeout(timeout_s)
        message, descriptors, _flags, _address = socket.recv_fds(
            connection, _PARCEL.size + _TEXT_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        if not descriptors:
            text = message[_PARCEL.size :].decode(errors="replace")
            raise HandoverError(errno.ECONNRESET, text or "group index 0 closed the connection")
        number, found_bytes = _PARCEL.unpack_from(message)
        if (number, found_bytes) != (self._number, num_bytes):
            os.close(descriptors[0])
            raise HandoverError(
                errno.EPROTO,
                f"segment {number} of {found_bytes} bytes was handed over instead of segment "
                f"{self._number} of {num_bytes} bytes",
            )
        return Segment.adopt(descriptors[0], num_bytes)

    def nudge(self) -> None:
        """Wake whoever asks `is_nudged` at the other ends."""
        for connection in self._connections.values():
            connection.settimeout(_GREETING_LIMIT_S)
            with contextlib.suppress(OSError):  # gone: found out by whoever waits for it
                connection.send(_NUDGE)

    def is_nudged(self, index: int, timeout_s: float) -> bool:
        """Return when the other end nudged; False where it is closed, or the time is over."""
        connection = self._connections[index]
        connection.settimeout(timeout_s)
        try:
            while (message := connection.recv(len(_NUDGE))) not in {_NUDGE, b""}:
                pass  # a segment that came too late
        except OSError:
            return False
        return message == _NUDGE

    def lost(self) -> tuple[int, ...]:
        """Return the group indices whose end of the connection is closed: they ended or died."""
        return tuple(
            index for index, connection in self._connections.items() if _is_closed(connection)
        )

    def close(self) -> None:
        """Close the connections; idempotent."""
        for connection in self._connections.values():
            connection.close()
        self._connections = {}


def _try_create(num_bytes: int) -> tuple[Segment | None, str]:
    try:
        return Segment.create(num_bytes), ""
    except OSError as error:
        return None, f"a segment of {num_bytes} bytes could not be made: {error}"


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
