"""The end of a step, and waiting for the device."""

from __future__ import annotations

from lazytpu.diagnosis import events
from lazytpu.ir.tree import trace
from lazytpu.location import site
from lazytpu.observe import metrics, step_statistics
from lazytpu.runtime import executables, index_checks
from lazytpu.tracing import record_time
from lazytpu.tracing.cutting import cut, wait_for_last

_WAIT = metrics.timer("wait")
marks = 0  # calls of `mark_step`


def mark_step(wait: bool = False) -> None:
    """End a step: run everything recorded since the last cut.

    The call returns while the device still computes; reading a tensor waits for it.

    Args:
        wait: wait until the computation has finished.

    Raises:
        LoweringError, CompileError: the graph could not be compiled; every tensor is as it was before.
    """
    global marks
    marks += 1
    cut("mark_step")
    metrics.count("step")
    if wait:
        globals()["wait"]()
    record_time.add_estimates()
    step_statistics.end_step()


def wait() -> None:
    """Run what is pending and wait until the device has finished."""
    step, waited_s = trace.step, _WAIT.total
    cut("wait")
    wait_for_last()
    events.waited("wait", str(site.line_of_read()), _WAIT.total - waited_s, after_cut=trace.step != step)
    index_checks.raise_if_any()


def forget() -> None:
    """Run what is pending and drop every path and executable (for tests)."""
    cut("forget")
    trace.forget_paths()
    executables.forget_executables()
