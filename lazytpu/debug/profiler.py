"""`lazytpu.profiler`: where the time goes, on the host and on the device.

A trace is jax's own, for TensorBoard, XProf and Perfetto, with regions of lazytpu beside XLA's events: steps,
recording, and cutting with lowering, compiling, starting and waiting inside.  torch's profiler shows the same regions
as ``record_function`` events, without this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from lazytpu import observers
from lazytpu.debug.op_times import OpTimes, name_device_events, times_of
from lazytpu.observe import regions
from lazytpu.observe.metrics_tables import Step
from lazytpu.tracing import step

__all__ = ["annotate", "op_times", "start_server", "start_trace", "stop_trace", "trace"]


class _Regions(observers.Observer):
    """Opens and closes regions while a trace is taken.

    Attributes:
        folder: where the trace goes.
        steps: how many were begun.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = 0
        self._step = ExitStack()
        self._recording: ExitStack | None = None

    def begin(self) -> None:
        """Begin a step."""
        self.steps += 1
        self._step = _entered(jax.profiler.StepTraceAnnotation("lazytpu.step", step_num=self.steps))
        self._record()

    def end(self) -> None:
        """End a step."""
        self._pause()
        self._step.close()

    def _record(self) -> None:
        self._recording = _entered(jax.profiler.TraceAnnotation("lazytpu.record"))

    def _pause(self) -> None:
        if self._recording is not None:
            self._recording.close()
            self._recording = None

    def region(self, name: str) -> AbstractContextManager[object]:
        """Return the region of that name; a cut interrupts that of recording."""
        shown = jax.profiler.TraceAnnotation(name)
        return self._cut(shown) if name.startswith("lazytpu.cut") and self._recording is not None else shown

    @contextmanager
    def _cut(self, shown: AbstractContextManager[object]) -> Iterator[None]:
        self._pause()
        try:
            with shown:
                yield
        finally:
            self._record()

    def step_ended(self, done: Step) -> None:
        """Begin the next step."""
        self.end()
        self.begin()


def _entered(region: AbstractContextManager[object]) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(region)
    return stack


_regions: _Regions | None = None


def start_trace(folder: str | os.PathLike[str], *, python: bool = False) -> None:
    """Begin a trace.

    Args:
        folder: where `stop_trace` writes it, in ``plugins/profile/<time>``: ``*.xplane.pb`` for TensorBoard and XProf,
            ``*.trace.json.gz`` for Perfetto.
        python: also show each call of a Python function, which makes recording several times slower.

    Raises:
        RuntimeError: a trace is already being taken.
    """
    global _regions
    if _regions is not None:
        raise RuntimeError(f"a trace is already being taken, into {str(_regions.folder)!r}; call stop_trace first")
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(python)
    jax.profiler.start_trace(os.fspath(folder), profiler_options=options)
    _regions = _Regions(Path(folder))
    observers.add(_regions)
    _regions.begin()


def stop_trace() -> None:
    """Run what is pending, wait for it, end the trace and write it.

    Raises:
        RuntimeError: no trace is being taken.
    """
    global _regions
    if _regions is None:
        raise RuntimeError("no trace is being taken; call start_trace first")
    ours = _regions
    try:
        step.wait()
    finally:
        _regions = None
        ours.end()
        observers.remove(ours)
        jax.profiler.stop_trace()
    name_device_events(ours.folder)


@contextmanager
def trace(folder: str | os.PathLike[str], *, python: bool = False) -> Iterator[None]:
    """Take a trace of what happens inside; arguments as for `start_trace`.

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


def start_server(port: int) -> object:
    """Let TensorBoard take profiles of this process through a port.

    Returns:
        The server, which runs as long as it is referenced.
    """
    return jax.profiler.start_server(port)


@contextmanager
def annotate(name: str, **shown: object) -> Iterator[None]:
    """Name what happens inside, in traces and in torch's profiler.

    Only on the host: the device runs the ops later, in one program with all the others of the step.

    Args:
        name: as shown.
        shown: what else a trace shows with it, such as ``epoch=3``.
    """
    with jax.profiler.TraceAnnotation(name, **shown), regions.for_torch(name):
        yield


def op_times(function: Callable[..., object], *args: object, runs: int = 3, **kwargs: object) -> OpTimes:
    """Measure what each aten op of a step takes on the device.

    The function is called once, so that its graphs are compiled, and then ``runs`` times under the profiler.  The times
    are those of XLA's instructions, which know the op they came from.  A fusion is one instruction: its time counts for
    the op that XLA named it after, and the others in it are listed beside it.

    Args:
        function: a step; what it leaves pending is run and waited for.
        args, kwargs: for the function.
        runs: how many calls are measured.

    Returns:
        The ops, the longest first; prints as a table.

    Raises:
        RuntimeError: a trace is already being taken.
        ValueError: ``runs`` is less than 1.
    """
    if runs < 1:
        raise ValueError(f"runs is 1 or more, not {runs}")
    _call(function, args, kwargs)
    with TemporaryDirectory() as folder:
        with trace(folder):
            for _ in range(runs):
                _call(function, args, kwargs)
        return times_of(Path(folder), runs)


def _call(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    held = function(*args, **kwargs)
    step.wait()
    del held
