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


def test_signals_are_held_back_without_the_enums_that_cost_ten_times_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "_int_to_enum")  # what the functions of `signal` call
    with interrupts.uninterrupted():
        pass
