"""The other ranks of a world, as this one hears of them: a connection to the coordinator, and its reader."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from lazytpu.errors import WorldError

_CONNECT_S = 60.0


class Ranks:
    """What this process knows of the others.

    Args:
        rank, size: of this process, and of the world.
        address: host and port of the coordinator.

    Attributes:
        gone: ranks that ended, and whether they died (else they ended as programs do).
        heard: what is called with each line that a rank says, and the rank: on the thread, with ``news`` held.
        news: notified whenever something is heard.
    """

    def __init__(self, rank: int, size: int, address: tuple[str, int]) -> None:
        self.rank, self.size = rank, size
        self.gone: dict[int, bool] = {}
        self.heard: Callable[[int, str], None] = lambda rank, line: None
        self.news = threading.Condition()
        self._sending = threading.Lock()
        self._socket = socket.create_connection(address, timeout=_CONNECT_S)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._ended = False
        self.say(f"here {rank}")
        threading.Thread(target=self._listen, name="lazytpu-ranks", daemon=True).start()

    def say(self, line: str) -> None:
        """Send a line to every rank, this one included."""
        try:
            with self._sending:
                self._socket.sendall(f"{line}\n".encode())
        except OSError:
            pass  # the coordinator is gone, as the thread finds out as well

    def leave(self) -> None:
        """Say that this process ends as it should."""
        if not self._ended:
            self._ended = True
            self.say("bye")

    def dead(self) -> list[int]:
        """Return the ranks that died."""
        return sorted(rank for rank, died in self.gone.items() if died)

    def check(self) -> None:
        """Raise where a rank has died.

        Raises:
            WorldError: names it.
        """
        if self.gone and (dead := self.dead()):
            raise self.death(dead)

    def death(self, dead: list[int]) -> WorldError:
        """Return the error for ranks that died."""
        return WorldError(
            f"{named(dead)} ended without finishing; rank {self.rank} cannot go on alone",
            fix=f"see what {named(dead)} said last; torchrun --max-restarts starts all ranks again",
        )

    def _listen(self) -> None:
        begun = b""
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                break
            *lines, begun = (begun + data).split(b"\n")
            with self.news:
                for line in lines:
                    sender, _, text = line.decode().partition(" ")
                    if text in ("died", "left"):
                        self.gone[int(sender)] = text == "died"
                    else:
                        self.heard(int(sender), text)
                self.news.notify_all()
        with self.news:
            if not self._ended:  # the coordinator died, and with it its machine
                self.gone.setdefault(0, True)
            self.news.notify_all()

    def wait_for(self, came: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so, or some seconds have passed; return whether it is.

        Signals are taken meanwhile.
        """
        end = time.monotonic() + seconds
        with self.news:
            while not came():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self.news.wait(min(left, 0.5))
        return True


def named(ranks: list[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 3 and 5``; of many the first ones."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]]
    more = f"{len(ranks) - 8} more" if len(ranks) > 8 else shown.pop()
    return f"ranks {', '.join(shown)} and {more}"
