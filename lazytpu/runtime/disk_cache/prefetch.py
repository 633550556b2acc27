"""Read programs of the disk cache before they are needed: those that the last run of the same script used.

XLA takes 20 µs for each instruction of a program that it reads, half a second for one of 20,000, and Python is free
meanwhile.  So a thread reads them from the first transfer to the device on, while the script makes its optimizer,
opens its data and records its first step.  A step waits for a program that is being read, and reads one itself that the
thread has not begun.  The thread also runs a program once that nobody waits for (warmup.py).

A process lists the programs it used, in order, in a small file of the cache under the script's path and arguments.
When a program has to be compiled, this run differs from the last one, and the thread stops.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from lazytpu.config import config
from lazytpu.observe import metrics
from lazytpu.runtime.disk_cache import serialized, store, warmup

_MOST = 16  # programs of a script that are noted, and read
_MOST_BYTES = 64 << 20  # of their files

Found = tuple[dict[str, Any], object]  # the facts `serialized.dump` made, and XLA's executable

_futures: dict[str, Future[Found | None]] = {}
_noted: list[str] = []  # what the last run used, as the file has it
_used: list[str] = []  # what this run used
_started = False
busy = threading.Lock()
"""Held while XLA reads or writes beside the user's work, and by whoever forks."""


def start(device: Any) -> None:
    """Begin to read what the last run of this script used; does nothing when called again.

    Args:
        device: the `jax.Device` that is to run it.
    """
    global _started
    if _started:
        return
    _started = True
    if not config.disk_cache or not (name := _script()):
        return
    _noted[:] = store.noted(name)[:_MOST]
    _futures.update((key, Future()) for key in _noted)
    if _futures:
        threading.Thread(target=_read, args=(device, dict(_futures)), name="lazytpu-prefetch").start()


def take(key: str) -> Found | None:
    """Return what was read under a key, once; wait where it is being read now.  None where it was not read."""
    future = _futures.pop(key, None)
    found = None if future is None or future.cancel() else future.result()
    if found is not None:
        metrics.count("disk_prefetch")
    return found


def used(key: str, *, compiled: bool) -> None:
    """List a program as used by this run.

    Args:
        compiled: it had to be compiled, so this run differs from the last one, and no more programs are read.
    """
    if compiled:
        for future in _futures.values():
            future.cancel()
        _futures.clear()
    if len(_used) == _MOST or key in _used:
        return
    _used.append(key)
    if _used != _noted[: len(_used)] and (name := _script()):
        _noted[:] = _used
        store.note(name, _used)


def _read(device: object, futures: dict[str, Future[Found | None]]) -> None:
    left = _MOST_BYTES
    for key, future in futures.items():
        with busy:
            # At the end of the main thread the interpreter waits for this one.
            if left < 0 or not threading.main_thread().is_alive():
                future.cancel()
            elif future.set_running_or_notify_cancel():
                found, size = _found(key, device)
                left -= size
                future.set_result(found)
                if found is not None and key in _futures:
                    _warm_up(found, device)


def _found(key: str, device: object) -> tuple[Found | None, int]:
    """Return what is kept under a key, and its size; None where anything is wrong, which `store.read_entry` reports."""
    try:
        facts, data = store.read(key)
        return (facts, serialized.deserialized(facts, data, device)), len(data)
    except Exception:  # XLA's own classes among them
        return None, 0


def _warm_up(found: Found, device: Any) -> None:
    facts, executable = found
    if "warm_up" in facts:
        with suppress(Exception):  # whoever takes it will see what is wrong with it
            warmup.warm_up(executable, facts["warm_up"], device)
            metrics.count("disk_warm_up")


def _script() -> str:
    """Return the name of the list of this script; empty where no script runs."""
    path = sys.argv[0] if sys.argv else ""
    if not os.path.isfile(path):
        return ""
    return hashlib.sha256(repr((str(Path(path).resolve()), sys.argv[1:])).encode()).hexdigest()


def _after_in_child() -> None:
    _futures.clear()
    busy._at_fork_reinit()  # type: ignore[attr-defined] # held by the parent's thread, which is not here


if hasattr(os, "register_at_fork"):
    # A fork in the middle of XLA's work would leave locks behind in the child that nobody opens.
    os.register_at_fork(before=busy.acquire, after_in_parent=busy.release, after_in_child=_after_in_child)
