"""The other ranks of a world, as this one hears of them: a connection to the coordinator, and its reader."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from lazytpu.errors import WorldError
from lazytpu.location import site
from lazytpu.runtime.host.interrupts import deferred

Told: TypeAlias = dict[int, dict[str, list[str]]]
"""What ranks have told each other, by rank."""

_CONNECT_S = 60.0
_ANSWER_S = 1.0  # in which a rank that runs says where it is
_LOOK_S = 0.5


class Ranks:
    """What this process knows of the others.

    Args:
        rank, size: of this process, and of the world.
        address: host and port of the coordinator.

    Attributes:
        gone: ranks that ended, and whether they died (else they ended as programs do).
        differing: by tag, the digests of ranks that do not agree, of what nobody waits for (`compare`).
    """

    def __init__(self, rank: int, size: int, address: tuple[str, int]) -> None:
        self.rank, self.size = rank, size
        self.gone: dict[int, bool] = {}
        self.differing: dict[str, dict[int, str]] = {}
        self._compared: dict[str, str] = {}  # by tag, the line
        self._answers: dict[str, dict[int, str] | Told] = {}
        self._at: dict[int, str] = {}
        self._posted: list[set[int]] = []
        self._was: dict[int, str] = {}
        self._news = threading.Condition()
        self._sending = threading.Lock()
        self._socket = socket.create_connection(address, timeout=_CONNECT_S)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        os.register_at_fork(after_in_child=self._socket.close)  # or a worker would hold the place of a rank that died
        self._ended = False
        self._say(f"here {rank}")
        threading.Thread(target=self._listen, name="lazytpu-ranks", daemon=True).start()

    def leave(self) -> None:
        """Say that this process ends as it should."""
        if not self._ended:
            self._ended = True
            self._say("bye")

    def agree(self, tag: str, members: Collection[int], digest: str, line: str, limit_s: float) -> dict[int, str]:
        """Return the digests of all members; empty where they are equal.

        Args:
            tag: names what is agreed on, alike in all members.
            line: of this rank, for others that wait for it.
            limit_s: how long to wait.

        Raises:
            WorldError: one of them died, has ended, or does not come in time; or a signal came meanwhile.
        """
        self._say(f"agree {tag} {len(members)} {digest} {line}")
        found = self._answer(f"agree {tag}", members, line, limit_s)
        return {rank: digest for rank, digest in found.items() if isinstance(digest, str)}

    def tell(
        self, tag: str, members: Collection[int], told: Mapping[str, list[str]], line: str, limit_s: float
    ) -> Told:
        """Return what each member tells, as `agree` does."""
        self._say(f"tell {tag} {len(members)} {json.dumps(told)}")
        found = self._answer(f"tell {tag}", members, line, limit_s)
        return {rank: told for rank, told in found.items() if isinstance(told, dict)}

    def compare(self, tag: str, count: int, digest: str, line: str) -> None:
        """Have a digest compared with that of other ranks; `differing` has the tag later if they are not equal."""
        self._compared[tag] = line
        self._say(f"agree {tag} {count} {digest} {line}")

    def line_compared(self, tag: str) -> str:
        """Return the line that `compare` was given."""
        return self._compared.pop(tag, "")

    def check(self) -> None:
        """Raise where a rank has died.

        Raises:
            WorldError: names it.
        """
        if self.gone and (dead := self.dead()):
            raise self._death(dead)

    def dead(self) -> list[int]:
        """Return the ranks that died."""
        return sorted(rank for rank, died in self.gone.items() if died)

    def await_end(self, count: int, seconds: float) -> bool:
        """Wait until so many other ranks have ended; return whether they have in time."""
        return self._wait(lambda: len(self.gone) >= count, seconds)

    def places(self, ranks: Collection[int]) -> dict[int, str]:
        """Ask ranks where they are; return what they answer in a second, or where they were before."""
        asked = [rank for rank in ranks if rank != self.rank]
        with self._news:
            self._at.clear()
        self._say(f"where {','.join(map(str, asked))}")
        self._wait(lambda: self._at.keys() >= set(asked), _ANSWER_S)
        return {rank: self._place(rank) for rank in asked}

    def _place(self, rank: int) -> str:
        if rank in self._at:
            return f"rank {rank} is at {self._at[rank]}"
        before = f"; it was at {self._was[rank]} before" if self._was.get(rank) else ""
        return f"rank {rank} does not answer: it is stopped, or its machine is gone{before}"

    def _answer(self, name: str, members: Collection[int], line: str, limit_s: float) -> dict[int, str] | Told:
        def gone() -> bool:
            return bool(self.gone) and any(rank in self.gone for rank in members)

        come = self._wait(lambda: name in self._answers or gone() or bool(deferred), limit_s)
        with self._news:
            found = self._answers.pop(name, None)
        if found is not None:
            return found
        self._posted.clear()
        self._say(f"who {name}\nwithdraw {name.partition(' ')[2]}")
        if deferred:
            raise WorldError("interrupted while waiting for other ranks", at=line)
        if come:
            ended = sorted(rank for rank in members if rank in self.gone)
            raise self._death(self.dead() or ended, line)
        raise self._lateness(members, line, limit_s)

    def _death(self, dead: list[int], line: str = "") -> WorldError:
        how = "ended without finishing" if self.dead() else f"ended before rank {self.rank} did"
        return WorldError(
            f"{named(dead)} {how}; rank {self.rank} cannot go on alone",
            at=line,
            fix=f"see what {named(dead)} said last; torchrun --max-restarts starts all ranks again",
        )

    def _lateness(self, members: Collection[int], line: str, limit_s: float) -> WorldError:
        self._wait(lambda: bool(self._posted), _ANSWER_S)
        here = set().union(*self._posted, {self.rank})
        late = sorted(set(members) - here)
        places = self.places(late)
        return WorldError(
            f"rank {self.rank} waited {limit_s:.0f} s for {named(late)}, which did not come to a collective",
            at=line,
            given="\n        ".join(places[rank] for rank in late[:8]),
            fix="all ranks have to come to the same collectives; lazytpu.config.collective_timeout has the limit",
        )

    def _say(self, line: str) -> None:
        try:
            with self._sending:
                self._socket.sendall(f"{line}\n".encode())
        except OSError:
            pass  # the coordinator is gone, as the thread finds out as well

    def _wait(self, come: Callable[[], bool], seconds: float) -> bool:
        """Wait until something is so, or some seconds have passed; return whether it is.  Signals are taken."""
        end = time.monotonic() + seconds
        with self._news:
            while not come():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._news.wait(min(left, _LOOK_S))
        return True

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
            with self._news:
                for line in lines:
                    sender, word, *rest = line.decode().split(" ", 2)
                    self._take(int(sender), word, rest[0] if rest else "")
                self._news.notify_all()
        with self._news:
            if not self._ended:  # the coordinator died, and with it its machine
                self.gone.setdefault(0, True)
            self._news.notify_all()

    def _take(self, sender: int, word: str, rest: str) -> None:
        """Note what was heard, on the thread."""
        if word in ("died", "left"):
            self.gone[sender] = word == "died"
        elif word == "where":
            self._say(f"at {sender} {site.line_of_main()}")
        elif word in ("at", "was"):
            (self._at if word == "at" else self._was)[sender] = rest
        elif word == "posted":
            self._posted[:] = [set(map(int, filter(None, rest.split(","))))]
        else:
            tag, _, text = rest.partition(" ")
            pairs = [pair.split("=") for pair in text.split(",")] if word == "differ" else []
            digests = {int(rank): digest for rank, digest in pairs}
            if word == "told":
                self._answers[f"tell {tag}"] = dict(json.loads(text))
            elif tag not in self._compared:
                self._answers[f"agree {tag}"] = digests
            elif digests:
                self.differing[tag] = digests
            else:
                del self._compared[tag]


def named(ranks: Collection[int]) -> str:
    """Return ``rank 3`` or ``ranks 1, 3 and 5``; of many the first ones."""
    listed = [*map(str, ranks)]
    if len(listed) == 1:
        return f"rank {listed[0]}"
    more = f"{len(listed) - 8} more" if len(listed) > 8 else listed.pop()
    return f"ranks {', '.join(listed[:8])} and {more}"
