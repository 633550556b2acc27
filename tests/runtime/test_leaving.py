"""Daemon threads that work with tensors end before the process does; those that wait are left alone."""

from __future__ import annotations

import gc
import sys
import threading
import time
from types import FunctionType, SimpleNamespace

import pytest
import torch

from lazytpu.runtime.host import leaving


def test_threads_at_work_end_and_others_stay(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # pytest's is Python too, and raised in like the rest
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    begun, event, ended = threading.Event(), threading.Event(), []

    def work() -> None:
        x = torch.zeros(3, device=device)
        try:
            while True:
                try:
                    x = x + 1
                    begun.set()
                except:  # as libraries have it
                    ended.append("swallowed")
                    raise
        finally:
            ended.append("ended")

    working, waiting = (threading.Thread(target=f, daemon=True) for f in (work, event.wait))
    working.start()
    waiting.start()
    assert begun.wait(20)
    leaving._end_threads()
    assert not working.is_alive() and ended[-1] == "ended"
    assert waiting.is_alive()
    event.set()
    waiting.join(5)
    assert not waiting.is_alive()


def sleeping(seconds: float) -> threading.Thread:
    """Return a daemon thread that is asleep."""
    asleep = threading.Event()

    def sleep() -> None:
        assert torch is not None
        asleep.set()
        time.sleep(seconds)

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    assert asleep.wait(20)
    return thread


def test_a_thread_that_sleeps_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(leaving, "_raise_in", lambda *given: raised.append(given))
    monkeypatch.setattr(leaving, "_AT_MOST_S", 1e9)
    thread = sleeping(8)
    leaving._end_threads()
    assert thread.is_alive() and 0 < len(raised) < 40


def test_nothing_is_said_of_exits() -> None:
    said: list[object] = []
    hook = leaving._but_for_exits(said.append)
    try:
        try:
            raise SystemExit
        except SystemExit as exit:
            raise RuntimeError("Error calling __set_name__") from exit  # as Python does where a class is defined
    except RuntimeError as error:
        of_exit = error
    for error in (SystemExit(), of_exit, ValueError()):
        hook(threading.ExceptHookArgs((type(error), error, None, None)))
    assert [type(given.exc_value) for given in said] == [ValueError]  # type: ignore[attr-defined]


def test_threads_in_a_compile_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use no time of their own while XLA's threads compile, and would abort the process when these are done."""
    monkeypatch.setattr(leaving, "_raise_in", lambda *given: None)
    monkeypatch.setattr(leaving, "_WITH_XLA", (__file__,))
    thread = sleeping(1)
    leaving._end_threads()
    assert not thread.is_alive()


def test_a_process_that_was_stopped_waits_no_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "_raise_in", lambda *given: None)
    monkeypatch.setattr(leaving, "_WITH_XLA", (__file__,))
    thread = sleeping(1)
    seconds = iter(range(0, 10**9, 100))
    with monkeypatch.context() as stopped:
        stopped.setattr(leaving, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
        leaving._end_threads()
    assert not thread.is_alive()


def test_the_collector_calls_nothing_of_jax_in_python() -> None:
    """What a signal's handler raised in there was printed and lost."""
    ours = [callback for callback in gc.callbacks if getattr(callback, "func", None) is not None]
    assert len(ours) == 1 and ours[0].args[0].__name__ == "collect_garbage"
    assert not [c for c in gc.callbacks if isinstance(c, FunctionType) and c.__module__.startswith("jax")]
    assert gc.collect(0) >= 0
