"""`launch`: run a function in several processes of this machine, for notebooks and tests."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar, cast

from lazytpu.errors import WorldError
from lazytpu.runtime.launchers import Place

_T = TypeVar("_T")
_GRACE_S = 10.0  # in which the others may find out themselves that one has failed


def launch(function: Callable[..., _T], processes: int, *arguments: object) -> list[_T]:
    """Run a function in several new processes, which are connected, and return what each of them returns.

    The processes are started anew (``spawn``), so a script calls this under ``if __name__ == "__main__":``.  A function
    that is defined in a notebook is taken over with the package ``cloudpickle``.

    Args:
        function: called in each process; ``torch.distributed`` and ``lazytpu.spmd`` know the others there.
        processes: how many.
        arguments: for the function, the same in each.

    Returns:
        The results, by rank.

    Raises:
        ValueError: ``processes`` is less than 1.
        WorldError: a process failed; has its traceback.
        TypeError: the function cannot be taken over.

    Example:
        >>> lazytpu.launch(train, 2, "data")  # doctest: +SKIP
    """
    if processes < 1:
        raise ValueError(f"launch takes at least one process, not {processes}")
    packed = _packed(function, arguments)
    context = multiprocessing.get_context("spawn")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    running: list[BaseProcess] = []
    pipes: list[Connection] = []
    for rank in range(processes):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(packed, sender), name=f"rank {rank}")
        with _variables(rank, processes, port):
            process.start()
        sender.close()
        running.append(process)
        pipes.append(receiver)
    try:
        return cast("list[_T]", _results(pipes))
    finally:
        for started in running:
            started.join(_GRACE_S)
            if started.is_alive():
                started.kill()
                started.join()


def _results(pipes: list[Connection]) -> list[object]:
    """Return what each process has sent; raise where one has failed, the first that did."""
    found: dict[int, object] = {}
    while len(found) < len(pipes):
        for ready in wait([pipe for rank, pipe in enumerate(pipes) if rank not in found]):
            rank = next(rank for rank, pipe in enumerate(pipes) if pipe is ready)
            try:
                failure, result = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                failure, result = "it ended without a result", None
            if failure:
                raise WorldError(f"rank {rank} of {len(pipes)} failed: {failure}")
            found[rank] = result
    return [found[rank] for rank in sorted(found)]


def _run(packed: bytes, results: Connection) -> None:
    """What a process does."""
    try:
        function, arguments = pickle.loads(packed)
        sent = pickle.dumps(("", function(*arguments)))
    except BaseException:
        results.send_bytes(pickle.dumps((traceback.format_exc().rstrip(), None)))
        raise
    results.send_bytes(sent)


def _packed(function: Callable[..., object], arguments: tuple[object, ...]) -> bytes:
    try:
        if getattr(function, "__module__", "") == "__main__":
            by_value: bytes = importlib.import_module("cloudpickle").dumps((function, arguments))
            return by_value
    except ModuleNotFoundError:
        pass
    try:
        return pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{error}; define the function in a module, or install the package cloudpickle") from error


@contextmanager
def _variables(rank: int, size: int, port: int) -> Iterator[None]:
    """Set what torchrun sets, for a process that is started inside."""
    set_here = Place("", rank, size, rank, size, "127.0.0.1", port).variables() | {"LAZYTPU_WORLD": "1"}
    before = {name: os.environ.get(name) for name in set_here}
    os.environ.update(set_here)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
