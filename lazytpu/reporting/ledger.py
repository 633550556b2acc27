"""What each step cost: the difference of all counters and timers from the end of one step to that of the next.

Nothing is added to recording: what Python, torch and the kernels take is the time that no timer claims, and the
kernels' part of it is estimated (pace.py).
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from lazytpu import metrics
from lazytpu.config import config
from lazytpu.reporting import logs
from lazytpu.reporting.metrics_tables import Step

_TIMERS = [
    metrics.timer(name)
    for name in (
        "cut", "lower", "compile", "dispatch", "wait", "transfer_in", "transfer_out", "background", "run", "infer",
        "record", "load", "store", "dump",
    )
]  # fmt: skip
_COUNTERS = (
    "cut", "compile", "cache_hit", "execute", "donated", "donated_bytes", "fallback",
    "transfer_in", "transfer_in_bytes", "transfer_out", "transfer_out_bytes",
)  # fmt: skip
_RECORD = metrics.timer("record")

# Called with each step, once it is over.
listeners: list[Callable[[Step], None]] = []


# Set by `use_pace`: seconds for the ops on the path to a node.
_pace: list[Callable[[Any], float]] = []
_unknown: deque[tuple[Any, Any]] = deque(maxlen=1000)  # arguments of `recorded` for graphs it is not known of yet


class _Ledger:
    """Where the counters stood when the step began."""

    def __init__(self) -> None:
        self.steps = 0
        self.thread = threading.main_thread().ident
        self.begin()

    def begin(self) -> None:
        """Notes where everything stands now."""
        self.started = time.perf_counter()
        self.times = [series.total for series in _TIMERS]
        self.counts = [metrics.counter("op"), *metrics.plain_counters(_COUNTERS)]

    def reset(self) -> None:
        """Begins anew."""
        self.steps = 0
        self.begin()


_ledger = _Ledger()
metrics.on_reset(_ledger.reset)


def measuring() -> bool:
    """Whether what costs a little is measured, too: how long recording takes, and how long the device works."""
    return config.metrics or steps_file() != ""


def steps_file() -> str:
    """Where each step is written as a line of JSON: the file that is asked for, or that of the dump; empty for none."""
    return config.metrics_file or (os.path.join(config.dump, "times", "steps.jsonl") if config.dump else "")


def use_pace(of_path: Callable[[Any], float]) -> None:
    """Says how the time of recording the path to a node is estimated."""
    _pace[:] = [of_path]


def recorded(last: Any, usage: Any) -> None:
    """Notes that the ops on the path to a node were recorded.

    Args:
        usage: of the graph they became, which keeps how long that takes.
    """
    if usage.record_s:
        _RECORD.add(usage.record_s)
    else:
        _unknown.append((last, usage))


def _estimate() -> None:
    """Finds out how long recording took where it was not known; between two steps, as it takes a while."""
    while _unknown:
        last, usage = _unknown.popleft()
        usage.record_s = usage.record_s or _pace[0](last)
        _RECORD.add(usage.record_s)


def in_background() -> bool:
    """Whether this is another thread than the one that makes the steps."""
    return threading.get_ident() != _ledger.thread


def end_step() -> None:
    """Ends the account of a step."""
    ledger = _ledger
    ended = time.perf_counter()
    _estimate()
    before, times, counts = ledger.started, ledger.times, ledger.counts
    ledger.thread = threading.get_ident()
    ledger.steps += 1
    ledger.begin()
    cut, lower, xla, start, wait, copy_in, copy_out, background, run, infer, record, load, store, dump = [
        new - old for new, old in zip(ledger.times, times, strict=True)
    ]
    total = ended - before - dump
    copies = copy_in + copy_out - background  # which another thread did meanwhile
    rest = max(0.0, total - cut - lower - xla - load - store - start - wait - copies)
    recording = min(rest, infer + record) if measuring() else None
    done = Step(
        ledger.steps,
        time.time(),
        total,
        rest - (recording or 0.0),
        recording,
        cut,
        lower,
        xla,
        load + store,
        start,
        wait,
        copies,
        background,
        run if measuring() else None,
        *[new - old for new, old in zip(ledger.counts, counts, strict=True)],
    )
    metrics.add_step(done)
    if path := steps_file():
        _file.write(path, done)
    if logs.is_on("step"):
        logs.note("step", "%s", one_line(done))
    for listener in listeners:
        listener(done)


def one_line(step: Step) -> str:
    """``step 3: 4.1 ms, 153 ops, 1 graph, 0 compiled, waited 0.2 ms``."""
    return (
        f"step {step.number}: {1e3 * step.total_s:.1f} ms, {step.ops} ops, {step.executions} run, "
        f"{step.compiles} compiled, waited {1e3 * step.waiting_s:.1f} ms"
    )


# A step as JSON where all of it is numbers: a third of the time that `json` takes.
_LINE = "{" + ", ".join(f'"{name}": %s' for name in Step._fields) + "}\n"


class _File:
    """A file of one JSON object a line.

    Lines go straight to the system, so a crash loses none, and a forked child has none to write a second time.
    """

    def __init__(self) -> None:
        self._path = ""
        self._descriptor = -1

    def write(self, path: str, step: Step) -> None:
        """Adds a step to the file at ``path``.

        Raises:
            OSError: the file cannot be written.
        """
        if self._path != path:
            self.close()
            if path != config.metrics_file:  # the dump's, which makes its folder with the first graph
                os.makedirs(os.path.dirname(path), exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            self._path = path
        line = json.dumps(step._asdict()) + "\n" if None in step else _LINE % step
        os.write(self._descriptor, line.encode())

    def close(self) -> None:
        """Closes the file; the next step opens it again."""
        if self._path:
            os.close(self._descriptor)
            self._path = ""


_file = _File()


atexit.register(_file.close)
