"""The coordinator of a world: a process beside rank 0, where the ranks find each other.

It runs jax's service, through which XLA's processes meet.  In rank 0 itself that would end every other rank with a C++
stack as soon as rank 0 died; here it lives until no rank is left.  Each rank holds a connection to it besides; what is
sent there it compares or passes on, and a connection that closes without a goodbye is a rank that died.

It runs by its file name and imports nothing of lazytpu, torch or jax but jaxlib's service, so it is up in a third of a
second.  Messages are lines of words.  A rank says::

    here RANK                       first
    agree TAG COUNT DIGEST LINE     answered when so many ranks have: ``same TAG``, or ``differ TAG RANK=DIGEST,...``
    tell TAG COUNT JSON             answered when so many ranks have: ``told TAG [[RANK, JSON], ...]``
    withdraw TAG                    it does not wait for the answer any more
    where RANK,...                  answered by ``was LINE`` of each, its last, and by each itself: ``at LINE``
    who agree|tell TAG              answered by ``posted RANK,...``, those that have said it
    at RANK LINE                    the answer of one that was asked
    bye                             last

Each line of an answer begins with the rank that it is about.
"""

from __future__ import annotations

import importlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Collection

_NO_LIMIT_S = 10**6  # of jax's own heartbeats: whoever misses one is ended with a C++ stack


class Coordinator:
    """Answers the ranks.

    Args:
        listener: where the ranks connect.
        size: number of ranks.
    """

    def __init__(self, listener: socket.socket, size: int) -> None:
        self.size = size
        self.selector = selectors.DefaultSelector()
        self.listener = listener
        self.ranks: dict[socket.socket, int] = {}
        self.connections: dict[int, socket.socket] = {}  # by rank
        self.begun: dict[socket.socket, bytes] = {}  # of each connection, the line that is not complete
        self.left: set[int] = set()
        self.log: list[bytes] = []  # lines about ranks that are gone, for those that connect later
        self.open: dict[bytes, dict[int, bytes]] = {}  # by tag, what ranks have said that others have yet to
        self.lines: dict[int, bytes] = {}  # of each rank's last ``agree``

    def serve(self) -> None:
        """Return when every rank that came is gone."""
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(sys.stdin, selectors.EVENT_READ)  # closes when rank 0 ends
        came, rank_0_lives = False, True
        while self.ranks if came else rank_0_lives:
            for key, _ in self.selector.select():
                found = key.fileobj
                if found is self.listener:
                    self._accept()
                elif isinstance(found, socket.socket):
                    self._read(found)
                else:
                    self.selector.unregister(found)
                    rank_0_lives = False
            came = came or bool(self.ranks)

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.begun[connection] = b""
        self.selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._closed(connection)
            return
        *lines, self.begun[connection] = (self.begun[connection] + data).split(b"\n")
        for line in lines:
            self._take(connection, line)

    def _take(self, connection: socket.socket, line: bytes) -> None:
        word, _, rest = line.partition(b" ")
        if word == b"here":
            self.ranks[connection] = int(rest)
            self.connections[int(rest)] = connection
            for old in self.log:
                self._send(connection, old)
            return
        rank = self.ranks[connection]
        if word == b"bye":
            self.left.add(rank)
        elif word == b"agree":
            tag, count, digest, self.lines[rank] = rest.split(b" ", 3)
            self._gather(b"agree " + tag, int(count), rank, digest)
        elif word == b"tell":
            tag, count, text = rest.split(b" ", 2)
            self._gather(b"tell " + tag, int(count), rank, text)
        elif word == b"withdraw":
            self.open.get(b"agree " + rest, {}).pop(rank, None)
        elif word == b"who":
            given = b",".join([b"%d" % r for r in self.open.get(rest, {})])
            self._send(connection, b"0 posted %s\n" % given)
        elif word == b"where":
            for other in map(int, rest.split(b",")):
                self._send(connection, b"%d was %s\n" % (other, self.lines.get(other, b"")))
                self._send_to([other], b"%d where\n" % rank)
        elif word == b"at":
            asker, _, text = rest.partition(b" ")
            self._send_to([int(asker)], b"%d at %s\n" % (rank, text))

    def _gather(self, tag: bytes, count: int, rank: int, said: bytes) -> None:
        """Keep what a rank has said; answer all who have when they are so many."""
        given = self.open.setdefault(tag, {})
        given[rank] = said
        if len(given) < count:
            return
        del self.open[tag]
        word, _, name = tag.partition(b" ")
        if word == b"tell":
            texts = b", ".join([b"[%d, %s]" % (r, given[r]) for r in sorted(given)])
            answer = b"0 told %s [%s]\n" % (name, texts)
        elif len(set(given.values())) == 1:
            answer = b"0 same %s\n" % name
        else:
            answer = b"0 differ %s %s\n" % (name, b",".join([b"%d=%s" % (r, given[r]) for r in sorted(given)]))
        self._send_to(given, answer)

    def _closed(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()
        self.begun.pop(connection, None)
        rank = self.ranks.pop(connection, None)
        if rank is not None:
            del self.connections[rank]
            line = b"%d %s\n" % (rank, b"left" if rank in self.left else b"died")
            self.log.append(line)
            self._send_to(range(self.size), line)

    def _send_to(self, ranks: Collection[int], line: bytes) -> None:
        for rank in ranks:
            if rank in self.connections:
                self._send(self.connections[rank], line)

    def _send(self, connection: socket.socket, line: bytes) -> None:
        try:
            connection.sendall(line)
        except OSError:
            pass  # it is gone, which reading from it will tell


def main() -> None:
    """Serve; ``coordinator.py SIZE`` prints the port of jax's service and the one for the ranks."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the ranks have ended
    size = int(sys.argv[1])
    library = importlib.import_module("jaxlib._jax")
    for attempt in range(10):
        port = _free_port()
        try:
            service = library.get_distributed_runtime_service(
                f"[::]:{port}", size, heartbeat_timeout=_NO_LIMIT_S, shutdown_timeout=1
            )
            break
        except Exception:  # somebody else was faster
            if attempt == 9:
                raise
    listener = socket.create_server(("", 0), backlog=size)
    print(port, listener.getsockname()[1], flush=True)
    sys.stdout.close()
    Coordinator(listener, size).serve()
    del service
    os._exit(0)  # not through the shutdown of the service, which waits for the ranks


def _free_port() -> int:
    with socket.create_server(("", 0)) as found:
        port: int = found.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
