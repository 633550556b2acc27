"""Signals that are held back until an exception leaves nothing half done."""

from __future__ import annotations

import signal

import pytest

from lazytpu.runtime.host import interrupts


def test_no_signal_that_is_put_off_is_lost_where_the_handler_of_another_raises() -> None:
    seen: list[int] = []

    def handler(number: int, frame: object) -> None:
        seen.append(number)
        raise SystemExit

    numbers = [signal.SIGTERM, signal.SIGALRM]
    handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        with pytest.raises(SystemExit), interrupts.uninterrupted():
            for number in numbers:
                signal.raise_signal(number)
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)
    assert seen == numbers
