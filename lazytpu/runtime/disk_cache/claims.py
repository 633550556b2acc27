"""One rank of a machine compiles a program, the others take it from the disk cache.

All ranks come to a program at about the same time.  The first to lock a file of its name compiles it; the others wait
until it is kept, which frees the lock, as the end of a process does.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from lazytpu.config import config
from lazytpu.runtime import world
from lazytpu.runtime.disk_cache import store

if sys.platform != "win32":  # there each rank compiles its own
    import fcntl

_PAUSE_S = 0.005
held: dict[str, int] = {}  # keys of what this process compiles, and the locked files


def claim(key: str) -> bool:
    """Claim a program that is to be compiled; wait where another rank has, and return whether one had."""
    if not key or sys.platform == "win32" or not world.is_connected() or (file := store.open_claim(key)) is None:
        return False
    until, waited = time.monotonic() + config.collective_timeout, False
    while not _locked(file) and time.monotonic() < until:
        waited = True
        world.ranks().check()
        time.sleep(_PAUSE_S)
    if waited:
        os.close(file)
    else:
        held[key] = file
    return waited


def end(key: str) -> None:
    """End the claim of a program, if there is one."""
    file = held.pop(key, None)
    if file is not None:
        store.remove_claim(key)
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile has the file too
        os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: each rank compiles its own
        return True
    return True
