"""``torch_xla.debug.profiler``: traces for TensorBoard, by `lazytpu.profiler`."""

from __future__ import annotations

import os
from contextlib import ContextDecorator

from lazytpu.compat import names
from lazytpu.compat.torch_xla.core import xla_model
from lazytpu.debug import profiler

__getattr__ = names.missing_from(__name__)

_servers: list[object] = []


def start_server(port: int, only_on_master: bool = True) -> object:
    """Let TensorBoard take profiles through a port; a second call, by a second `launch`, changes nothing."""
    if not _servers:
        _servers.append(profiler.start_server(port))
    return _servers[0]


def start_trace(log_dir: str | os.PathLike[str]) -> None:
    """Begin a trace."""
    profiler.start_trace(os.fspath(log_dir))


def stop_trace() -> None:
    """End the trace and write it."""
    profiler.stop_trace()


class Trace:
    """Names what is recorded inside in the trace; extra arguments are shown with it."""

    def __init__(self, name: str, **kwargs: object) -> None:
        self.name = " ".join([name, *(f"{key}={value}" for key, value in kwargs.items())])

    def __enter__(self) -> Trace:
        self._region = profiler.annotate(self.name)
        self._region.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._region.__exit__(None, None, None)


class StepTrace(Trace):
    """Names one step of training, and ends it."""

    def __init__(self, name: str, step_num: int | None = None, **kwargs: object) -> None:
        super().__init__(name, **({} if step_num is None else {"step_num": step_num}), **kwargs)

    def __exit__(self, *error: object) -> None:
        xla_model.mark_step()
        super().__exit__(*error)


def trace_me(scope: str) -> ContextDecorator:
    """Return a decorator that names what a function records."""
    return profiler.annotate(scope)
