"""Daemon threads that work with tensors end before the process does; those that wait are left alone."""

from __future__ import annotations

import threading

import pytest
import torch

from lazytpu.runtime.host import leaving


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_at_work_end_and_others_stay(device: torch.device) -> None:
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
