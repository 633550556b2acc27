"""``torch.tpu.Stream`` and ``Event``: the device has one queue, which runs everything in order."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from lazytpu.config import config
from lazytpu.tracing import cutting, step


class Event(torch.Event):
    """A moment in the device's queue, which `torch.accelerator.current_stream()` can wait for as well.

    Args:
        enable_timing: lets `elapsed_time` be asked; `record` then runs what is pending, and waits for the device.
    """

    timed: bool
    recorded_s: float | None

    def __new__(cls, device: Any = None, *, enable_timing: bool = False, blocking: bool = False) -> Event:
        made = super().__new__(cls, config.device_name)
        made.timed, made.recorded_s = enable_timing, None
        return made

    def record(self, stream: object = None) -> None:
        """Note the moment behind what is pending; with ``enable_timing``, run it and wait."""
        if self.timed:
            cutting.cut("event")
            step.wait()
        self.recorded_s = time.perf_counter()

    def synchronize(self) -> None:
        """Wait until the device has got as far as the event."""
        step.wait()

    def wait(self, stream: object = None) -> None:
        """What comes later runs after the event: always so in one queue."""

    def query(self) -> bool:
        """Return whether the device has got as far as the event; wait until it has."""
        step.wait()
        return True

    def elapsed_time(self, end: torch.Event) -> float:
        """Return the milliseconds from this event to ``end``.

        Raises:
            RuntimeError: one of them does not keep the time, or was not recorded.
        """
        if not (isinstance(end, Event) and self.timed and end.timed):
            raise RuntimeError("both events must be made with enable_timing=True")
        if self.recorded_s is None or end.recorded_s is None:
            raise RuntimeError("both events must be recorded before their elapsed time is known")
        return (end.recorded_s - self.recorded_s) * 1e3


class Stream:
    """The device's one queue.  Entering it as a context changes nothing.

    Attributes:
        stream_id, device_index, device_type: as `torch.Stream` has them; the last is c10's number of PrivateUse1.
    """

    stream_id, device_index, device_type = 0, 0, 20

    def __init__(self, device: Any = None, priority: int = 0) -> None: ...

    @property
    def device(self) -> torch.device:
        """The device whose queue it is."""
        return torch.device(config.device_name, 0)

    def synchronize(self) -> None:
        """Run what is pending and wait for it."""
        step.wait()

    def query(self) -> bool:
        """Return whether everything has run; wait until it has."""
        step.wait()
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, and return it."""
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        """What comes later runs after ``event``: always so in one queue."""

    def wait_stream(self, stream: Stream) -> None:
        """What comes later runs after what ``stream`` holds now: always so in one queue."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return hash(Stream)


def register() -> None:
    """Have ``record_stream`` of any tensor take a stream of the device: nothing is freed before it was used.

    Streams of the device are ours, or ``torch.accelerator.current_stream()``.
    """
    name = "record_stream"
    torchs = getattr(torch.Tensor, name)

    @functools.wraps(torchs)
    def record_stream(self: torch.Tensor, stream: object) -> None:
        ours = isinstance(stream, Stream) or isinstance(stream, torch.Stream) and stream.device == self.device
        if not ours or self.device.type != config.device_name:
            torchs(self, stream)

    setattr(torch.Tensor, name, record_stream)
