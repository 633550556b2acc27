"""`lazytpu.profiler`: where the time goes, on the host and on the device.

A trace is jax's own, for TensorBoard, XProf and Perfetto, with regions of lazytpu beside what XLA shows: steps,
recording, and cutting with lowering, compiling, starting and waiting inside.  In torch's profiler the same regions
show as ``record_function`` events, without anything from here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from lazytpu import observers
from lazytpu.debug.op_times import OpTimes, name_device_events, times_of
from lazytpu.observe import regions
from lazytpu.observe.metrics_tables import Step
from lazytpu.tracing import step

__all__ = ["annotate", "op_times", "start_server", "start_trace", "stop_trace", "trace"]


class _Watch(observers.Observer):
    """Makes regions while a trace is taken.

    Attributes:
        folder: where the trace goes.
        step, recording: the regions that are open.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = 0
        self.step: Any = None
        self.recording: Any = None

    def begin(self) -> None:
        """Begins a step."""
        self.steps += 1
        self.step = jax.profiler.StepTraceAnnotation("lazytpu.step", step_num=self.steps)
        self.step.__enter__()
        self.record()

    def end(self) -> None:
        """Ends a step."""
        self.pause()
        self.step.__exit__(None, None, None)

    def record(self) -> None:
        """Begins the region of recording."""
        self.recording = jax.profiler.TraceAnnotation("lazytpu.record")
        self.recording.__enter__()

    def pause(self) -> None:
        """Ends it."""
        if self.recording is not None:
            self.recording.__exit__(None, None, None)
            self.recording = None

    def region(self, name: str) -> AbstractContextManager[object]:
        """Show a region in the trace."""
        shown = jax.profiler.TraceAnnotation(name)
        return self._cut(shown) if name.startswith("lazytpu.cut") and self.recording is not None else shown

    @contextmanager
    def _cut(self, shown: Any) -> Iterator[None]:
        self.pause()
        try:
            with shown:
                yield
        finally:
            self.record()

    def step_ended(self, done: Step) -> None:
        """Begin the next step in the trace."""
        self.end()
        self.begin()


_watch: _Watch | None = None


def start_trace(folder: str | os.PathLike[str], *, python: bool = False) -> None:
    """Begins a trace.

    Args:
        folder: where `stop_trace` writes it, in ``plugins/profile/<time>``: ``*.xplane.pb`` for TensorBoard and XProf,
            ``*.trace.json.gz`` for Perfetto.
        python: show each call of a Python function too, which makes recording several times slower.

    Raises:
        RuntimeError: a trace is being taken already.
    """
    global _watch
    if _watch is not None:
        raise RuntimeError(f"a trace is being taken already, into {str(_watch.folder)!r}; call stop_trace first")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(python)
    jax.profiler.start_trace(os.fspath(folder), profiler_options=options)
    _watch = _Watch(Path(folder))
    observers.add(_watch)
    _watch.begin()


def stop_trace() -> None:
    """Runs what is pending, waits for it, ends the trace and writes it.

    Raises:
        RuntimeError: no trace is being taken.
    """
    global _watch
    if _watch is None:
        raise RuntimeError("no trace is being taken; call start_trace first")
    watch = _watch
    try:
        step.wait()
    finally:
        _watch = None
        watch.end()
        observers.remove(watch)
        jax.profiler.stop_trace()
    name_device_events(watch.folder)


@contextmanager
def trace(folder: str | os.PathLike[str], *, python: bool = False) -> Iterator[None]:
    """Takes a trace of what happens inside; arguments as for `start_trace`.

    Example:
        >>> with lazytpu.profiler.trace("profile"):  # doctest: +SKIP
        ...     for batch in batches:
        ...         train_step(batch)
    """
    start_trace(folder, python=python)
    try:
        yield
    finally:
        stop_trace()


def start_server(port: int) -> Any:
    """Lets TensorBoard take profiles of this process through a port.

    Returns:
        The server, which lives as long as this is kept.
    """
    return jax.profiler.start_server(port)


@contextmanager
def annotate(name: str, **shown: Any) -> Iterator[None]:
    """Names what happens inside, in traces and in torch's profiler.

    On the host only: the device runs the ops later, in one program with all the others of the step.

    Args:
        name: as shown.
        shown: more that a trace shows with it, such as ``epoch=3``.
    """
    with ExitStack() as stack:
        stack.enter_context(jax.profiler.TraceAnnotation(name, **shown))
        stack.enter_context(regions.for_torch(name))
        yield


def op_times(function: Callable[..., Any], *args: Any, runs: int = 3, **kwargs: Any) -> OpTimes:
    """What each aten op of a step takes on the device, measured.

    The function is called once, so that what it runs is compiled, and then ``runs`` times under the profiler.  These
    are times of XLA's instructions, which know the op they came from.  What XLA has fused is one instruction: its time
    counts for the op that XLA named it after, and the others in it are listed beside it.

    Args:
        function: a step; what it leaves pending is run and waited for.
        args, kwargs: for the function.
        runs: how many calls are measured.

    Returns:
        The ops, the dearest first; prints as a table.

    Raises:
        RuntimeError: a trace is being taken already.
        ValueError: ``runs`` is less than 1.
    """
    if runs < 1:
        raise ValueError(f"runs is 1 or more, not {runs}")
    _called(function, args, kwargs)
    with TemporaryDirectory() as folder:
        with trace(folder):
            for _ in range(runs):
                _called(function, args, kwargs)
        return times_of(Path(folder), runs)


def _called(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    held = function(*args, **kwargs)
    step.wait()
    del held
