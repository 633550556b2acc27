"""Measure what each step cost: the difference of all counters and timers from the end of one step to that of the next.

Recording carries no clock: what Python, torch and the kernels take is the time that no timer claims, and the
kernels' part of it is estimated (tracing/record_time.py).
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from typing import Any

from lazytpu.config import config
from lazytpu.observe import logs, metrics
from lazytpu.observe.metrics_tables import Step
from lazytpu.observers import Observer, add, notify

_TIMERS = [
    metrics.timer(name)
    for name in (
        "cut", "lower", "compile", "dispatch", "wait", "transfer_in", "transfer_out", "background", "run", "infer",
        "record", "load", "dump", "interpret",
    )
]  # fmt: skip
_COUNTERS = (
    "cut", "compile", "cache_hit", "execute", "donated", "donated_bytes", "fallback",
    "transfer_in", "transfer_in_bytes", "transfer_out", "transfer_out_bytes",
)  # fmt: skip


class _Baseline:
    """Where the counters stood when the step began."""

    def __init__(self) -> None:
        self.steps = 0
        self.thread = threading.main_thread().ident
        self.begin()

    def begin(self) -> None:
        """Begin a step: keep where everything stands."""
        self.started = time.perf_counter()
        self.times = [series.total for series in _TIMERS]
        self.counts = [metrics.counter("op"), *metrics.plain_counters(_COUNTERS)]

    def reset(self) -> None:
        """Begin anew."""
        self.steps = 0
        self.begin()


_baseline = _Baseline()


def measuring() -> bool:
    """Return whether what costs a little is measured, too: how long recording takes, and how long the device works."""
    return config.metrics or config.metrics_file != "" or config.dump != ""


def in_background() -> bool:
    """Return whether this is another thread than the one that makes the steps."""
    return threading.get_ident() != _baseline.thread


def end_step() -> None:
    """Add the statistics of the step that ends."""
    baseline = _baseline
    ended = time.perf_counter()
    before, times, counts = baseline.started, baseline.times, baseline.counts
    baseline.thread = threading.get_ident()
    baseline.steps += 1
    baseline.begin()
    cut, lower, xla, start, wait, copy_in, copy_out, background, run, infer, record, load, dump, interpret = [
        new - old for new, old in zip(baseline.times, times, strict=True)
    ]
    total = ended - before - dump
    copies = copy_in + copy_out - background  # which another thread did meanwhile
    rest = max(0.0, total - cut - lower - xla - load - start - interpret - wait - copies)
    measured = measuring()
    recording = min(rest, infer + record) if measured else None
    done = Step(
        baseline.steps,
        time.time(),
        total,
        rest - (recording or 0.0),
        recording,
        cut,
        lower,
        xla,
        load,
        start,
        interpret,
        wait,
        copies,
        background,
        run if measured else None,
        *[new - old for new, old in zip(baseline.counts, counts, strict=True)],
    )
    metrics.add_step(done)
    if config.metrics_file:
        _file.write(config.metrics_file, done, ended)
    if config.dump:
        _of_dump.write(os.path.join(config.dump, "times", "steps.jsonl"), done, ended)
    if logs.is_on("step"):
        logs.note("step", "%s", one_line(done))
    notify("step_ended", done)


def one_line(step: Step) -> str:
    """Return ``step 3: 4.1 ms, 153 ops, 1 graph, 0 compiled, waited 0.2 ms``."""
    return (
        f"step {step.number}: {1e3 * step.total_s:.1f} ms, {step.ops} ops, {step.executions} run, "
        f"{step.compiles} compiled, waited {1e3 * step.waiting_s:.1f} ms"
    )


# A step as JSON where all of it is numbers, in a third of the time that `json` takes.  Nanoseconds are enough.
_WHOLE = Step._fields.index("ops")  # from here on the fields are ints
_NUMBER_AND_TIME = '{"number": %d, "ended": %.6f, '
_SECONDS = _NUMBER_AND_TIME + ", ".join(f'"{name}": %.9f' for name in Step._fields[2:_WHOLE]) + ", "
_COUNTS = ", ".join(f'"{name}": %d' for name in Step._fields[_WHOLE:]) + "}\n"

# Lines are made and written together: one at a time takes ten times as long, as nothing it needs is in caches then.
_WRITE_EVERY_S = 5e-2


class _File:
    """A file of one JSON object a line.

    A line is written when its step ends, unless the line before it was written just now: then it waits for the next
    step, another file or the end of the process.  A process that is killed loses no more than that.
    """

    def __init__(self) -> None:
        self._path = ""
        self._descriptor = -1
        self._waiting: list[Step] = []
        self._written = 0.0
        self._counts: tuple[int, ...] = ()
        self._text = ""
        self._warned_of = ""

    def write(self, path: str, step: Step, now: float) -> None:
        """Add a step to the file at ``path``.

        Args:
            now: of `time.perf_counter`.

        Raises:
            OSError: the file cannot be opened.
        """
        if self._path != path:
            self._open(path)
        self._waiting.append(step)
        if now - self._written >= _WRITE_EVERY_S:
            self._written = now
            self.flush()

    def _open(self, path: str) -> None:
        self.close()
        if self is _of_dump:  # whose folder comes with the first graph
            os.makedirs(os.path.dirname(path), exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._path, self._written = path, 0.0

    def _line(self, step: Step) -> str:
        if None in step:
            return json.dumps(step._asdict()) + "\n"
        counts: Any = step[_WHOLE:]
        if counts != self._counts:  # most steps are like the one before
            self._counts, self._text = counts, _COUNTS % counts
        return _SECONDS % step[:_WHOLE] + self._text

    def flush(self) -> None:
        """Write what waits; a disk that is full ends no run: a warning tells of it once."""
        waiting, self._waiting = self._waiting, []
        try:
            if waiting:
                os.write(self._descriptor, "".join([self._line(step) for step in waiting]).encode())
        except OSError as error:
            if self._warned_of != self._path:
                self._warned_of = self._path
                logs.note("step", "steps are missing in %s: %s", self._path, error, level=logs.LEVELS["warning"])

    def close(self) -> None:
        """Write what waits and close the file; the next step opens it again."""
        if self._path:
            self.flush()
            self._path = ""
            os.close(self._descriptor)

    def forked(self) -> None:
        """Leave what waits to the parent, in a child process."""
        self._waiting = []


_file, _of_dump = _File(), _File()


class _Watch(Observer):
    """Closes a file when its setting changes, and begins anew when the metrics are reset."""

    def setting_changing(self, name: str, value: object) -> None:
        if name == "metrics_file":
            _file.close()
        elif name == "dump":
            _of_dump.close()

    def metrics_reset(self) -> None:
        _baseline.reset()


add(_Watch())
for _each in (_file, _of_dump):
    atexit.register(_each.close)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_each.forked)
