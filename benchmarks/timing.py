"""How a training step is timed, the same for every backend.  Imports no framework, so that none is paid for."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

_RUNS = 7


@dataclass(frozen=True, slots=True)
class Timing:
    """What a step costs.

    Attributes:
        first_s: seconds of the first step, compiling included.
        warmup_s: seconds of the next three.
        step_ms, best_ms: milliseconds a step, the median and the best of several runs.
        host_ms: milliseconds until the Python of a step returns, which may leave the device at work.
        compiles: how many programs were compiled, where the backend says so.
        rss_mb: the most memory the process held, in MiB.
        first_loss: loss of the first step, which tells whether all backends compute the same.
        page_faults: minor ones a step: pages of memory that were asked of the system.
        cpu_ms: milliseconds of processor time a step, on all cores.
    """

    first_s: float
    warmup_s: float
    step_ms: float
    best_ms: float
    host_ms: float
    compiles: int
    rss_mb: int
    first_loss: float
    page_faults: float
    cpu_ms: float

    def as_dict(self) -> dict[str, Any]:
        """The fields, rounded to what means something."""
        return {name: round(value, 5) if isinstance(value, float) else value for name, value in asdict(self).items()}


def time_steps(
    step: Callable[[], Any],
    wait: Callable[[], None],
    compiles: Callable[[], int] = lambda: 0,
    first_only: bool = False,
    run_s: float = 1.0,
) -> Timing:
    """Runs a step as often as it takes to time it.

    Args:
        step: runs one step and returns its loss, which `float` reads.
        wait: returns when the device has done everything.
        compiles: how many programs were compiled so far.
        first_only: stop after the first step; the fields of the others are 0.
        run_s: about how long each of the runs takes that a step's time is the median of.
    """

    def run(count: int) -> tuple[float, float]:
        """Seconds a step: in all, and on the host."""
        host, start = 0.0, time.perf_counter()
        for _ in range(count):
            before = time.perf_counter()
            step()
            host += time.perf_counter() - before
        wait()
        return (time.perf_counter() - start) / count, host / count

    start = time.perf_counter()
    loss = step()
    wait()
    first_s = time.perf_counter() - start
    first_loss = float(loss)
    del loss  # a loss that somebody holds is one more result of the next step
    if first_only:
        return Timing(first_s, 0.0, 0.0, 0.0, 0.0, compiles(), _rss_mb(), first_loss, 0.0, 0.0)
    warmup_s = 3 * run(3)[0]
    count = max(3, min(100, int(run_s / run(1)[0])))
    before, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
    runs = [run(count) for _ in range(_RUNS)]
    faults, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, time.process_time() - cpu
    return Timing(
        first_s,
        warmup_s,
        statistics.median(total for total, _ in runs) * 1e3,
        min(total for total, _ in runs) * 1e3,
        statistics.median(host for _, host in runs) * 1e3,
        compiles(),
        _rss_mb(),
        first_loss,
        faults / (count * _RUNS),
        cpu / (count * _RUNS) * 1e3,
    )


def _rss_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def best_ms(run: Callable[[], Any], seconds: float = 0.5) -> float:
    """The fastest of as many calls as fit into some seconds, in milliseconds."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best * 1e3
