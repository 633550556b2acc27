"""Children of a process that has imported lazytpu and not used the device: each starts in milliseconds.

A child is a process of its own as lazytpu sees it: what forbids the device in forked children is undone there, since
nothing of XLA has been started yet.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch._subclasses.fake_tensor
import torch.fx.experimental.symbolic_shapes  # noqa: F401  with sympy, which each child would import

from lazytpu.ir.tree import trace
from lazytpu.runtime import client, compiler, launch, transfers
from lazytpu.torch_backend import fork as forbidding

_TRACE = {name: getattr(trace, name) for name in ("step", "cursor", "root")}
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class Become(BaseException):
    """Raised in a child: it has to leave all frames and end as any program ends, after `work`."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__()
        self.work = work


@dataclass
class Ended:
    """How a child has ended.

    Attributes:
        status: its exit status; the negative number of the signal that ended it.
        said: the JSON values that it has said.
        printed: its standard output and standard error.
    """

    status: int
    said: list[Any]
    printed: str

    @property
    def problem(self) -> str:
        """What is wrong where it should have ended by itself; empty if nothing is."""
        return "" if self.status == 0 else f"exit status {self.status}: {self.printed[-1500:]}"


class Child:
    """A process that does ``work(*args)``; what the work says with `say` comes back as JSON."""

    def __init__(self, work: Callable[..., object], *args: Any, ends: bool = False) -> None:
        reader, writer = os.pipe()
        self._out = tempfile.TemporaryFile()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # jax warns of forks, whatever has been started
            self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            _become_fresh(self._out.fileno(), writer)
            if ends:
                raise Become(lambda: work(*args))
            _finish(work, args)
        os.close(writer)
        self._reader, self._said, self._rest = reader, [], b""

    def hear(self, timeout_s: float) -> Any:
        """The next value that it says; None when it has ended or says nothing."""
        deadline = time.monotonic() + timeout_s
        while not self._said and (left := deadline - time.monotonic()) > 0:
            if select.select([self._reader], [], [], left)[0] and not self._read():
                break
        return self._said.pop(0) if self._said else None

    def _read(self) -> bool:
        data = os.read(self._reader, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._said += map(json.loads, lines)
        return bool(data)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 120) -> Ended:
        """Wait until it ends; one that takes too long is killed, and its status is -9."""
        deadline = time.monotonic() + timeout_s
        while True:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                break
            if select.select([self._reader], [], [], 0.02)[0] and not self._read():
                time.sleep(0.005)
            if time.monotonic() > deadline:
                self.kill()
        while select.select([self._reader], [], [], 0)[0] and self._read():
            pass  # not to the end of the file: a process that the child has left may hold it open
        os.close(self._reader)
        self._out.seek(0)
        with self._out:
            printed = self._out.read().decode(errors="replace")
        return Ended(os.waitstatus_to_exitcode(status), self._said, printed)


_writer = -1


def say(value: object) -> None:
    """Tell the parent a JSON value."""
    os.write(_writer, json.dumps(value).encode() + b"\n")


def in_child(work: Callable[..., object], *args: Any, timeout_s: float = 120) -> Ended:
    """Do ``work(*args)`` in a child and wait for it."""
    return Child(work, *args).wait(timeout_s)


def _become_fresh(out: int, writer: int) -> None:
    global _writer
    _writer = writer
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, int(signal.SIGKILL))
    os.dup2(out, 1)
    os.dup2(out, 2)
    forbidding._home_process = os.getpid()
    for name, value in _TRACE.items():
        setattr(trace, name, value)
    for module in (client, compiler, launch, transfers):
        vars(module)["jax"] = jax


def _finish(work: Callable[..., object], args: tuple[Any, ...]) -> None:
    status = 1
    try:
        work(*args)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def folder() -> Path:
    """A new folder."""
    return Path(tempfile.mkdtemp(prefix="lazytpu-faults-"))
