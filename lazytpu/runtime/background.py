"""Compile graphs on a thread, while they go on being interpreted (`lazytpu.config.compile_in_background`).

Rules are called on the thread that records, since they share state with it; XLA, which takes most of the time and
leaves Python free, has the thread of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future

import jax

from lazytpu.ir.graph import Graph
from lazytpu.runtime import compiler, executables
from lazytpu.runtime.disk_cache import prefetch
from lazytpu.runtime.executable import Executable

_MOST_READY = 32  # programs that wait for their graph to come again; the oldest go first
_Made = tuple[jax.stages.Compiled, float]  # jax's executable, and the seconds that XLA took

# By `executables.name_of`: what is being compiled, and the seconds that lowering took.
_futures: dict[tuple[object, ...], tuple[Future[_Made], float]] = {}
_waiting: deque[tuple[jax.stages.Lowered, Future[_Made]]] = deque()
_thread: list[threading.Thread] = []  # what compiles, until nothing waits
_lock = threading.Lock()  # held to add to what waits, and by the thread to end because nothing does


def compiled(graph: Graph) -> Executable | None:
    """Return the executable of a graph if it is ready; begin to compile it when asked for the first time.

    Raises:
        LoweringError: a rule failed; names the op and the user's line.
        CompileError: XLA refused the program.
    """
    name = executables.name_of(graph)
    if name not in _futures:
        start = time.perf_counter()
        lowered = compiler.lower(graph)
        _begin(name, lowered, time.perf_counter() - start)
        return None
    future, lower_s = _futures[name]
    if not future.done():
        return None
    del _futures[name]
    made, compile_s = compiler.compiling(graph, future.result)
    return compiler.compiled_just_now(graph, made, lower_s, compile_s)


def is_compiling(graph: Graph) -> bool:
    """Return whether a graph like this one is being compiled and not ready."""
    return any(key[0] == graph.key and not future.done() for key, (future, _) in _futures.items())


def settle() -> None:
    """Wait until all that was begun is compiled."""
    for future, _ in list(_futures.values()):
        future.exception()


def _begin(name: tuple[object, ...], lowered: jax.stages.Lowered, lower_s: float) -> None:
    future: Future[_Made] = Future()
    ready = [other for other, (made, _) in _futures.items() if made.done()]
    for other in ready[: max(0, len(ready) - _MOST_READY)]:
        del _futures[other]
    _futures[name] = future, lower_s
    with _lock:
        _waiting.append((lowered, future))
        if not any(thread.is_alive() for thread in _thread):
            _thread[:] = [threading.Thread(target=_compile, name="lazytpu-compile")]
            _thread[0].start()


def _compile() -> None:
    """Compile what waits, until nothing does; at the end of the main thread, Python waits for one compilation."""
    while threading.main_thread().is_alive():
        with _lock:
            if not _waiting:
                _thread.clear()
                return
            lowered, future = _waiting.popleft()
        with prefetch.busy:
            start = time.perf_counter()
            try:
                future.set_result((lowered.compile(), time.perf_counter() - start))
            except BaseException as error:  # raised where the graph comes next
                future.set_exception(error)
