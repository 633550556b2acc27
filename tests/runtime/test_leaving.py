"""Daemon threads that work with tensors end before the process does; those that wait are left alone."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lazytpu.runtime.host import leaving


def test_threads_at_work_end_and_others_stay(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # pytest's is Python too, and raised in like the rest
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


def test_a_thread_that_sleeps_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(leaving, "_raise_in", lambda *given: raised.append(given))
    monkeypatch.setattr(leaving, "_AT_MOST_S", 1e9)
    asleep = threading.Event()

    def sleep() -> None:
        assert torch is not None
        asleep.set()
        time.sleep(8)

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    assert asleep.wait(20)
    leaving._end_threads()
    assert thread.is_alive() and 0 < len(raised) < 40
