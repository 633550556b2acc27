"""``torch_xla.debug.profiler``: traces for TensorBoard, by `lazytpu.profiler`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from lazytpu.compat import lacking
from lazytpu.compat.torch_xla.core import xla_model
from lazytpu.debug import profiler

__getattr__ = lacking.names_of(__name__)


_servers: list[Any] = []


def start_server(port: int, only_on_master: bool = True) -> Any:
    """Lets TensorBoard take profiles through a port; a second call, of a second `launch`, changes nothing."""
    if not _servers:
        _servers.append(profiler.start_server(port))
    return _servers[0]


def start_trace(log_dir: str | os.PathLike[str]) -> None:
    """Begins a trace."""
    profiler.start_trace(os.fspath(log_dir))


def stop_trace() -> None:
    """Ends the trace and writes it."""
    profiler.stop_trace()


class Trace:
    """Names what is recorded inside in the trace; extra arguments are shown with it."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        self.name = " ".join([name, *(f"{key}={value}" for key, value in kwargs.items())])

    def __enter__(self) -> Trace:
        self._region = profiler.annotate(self.name)
        self._region.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._region.__exit__(*error)


class StepTrace(Trace):
    """Names one step of training, and ends it."""

    def __init__(self, name: str, step_num: int | None = None, **kwargs: Any) -> None:
        super().__init__(name, **({} if step_num is None else {"step_num": step_num}), **kwargs)

    def __exit__(self, *error: Any) -> None:
        xla_model.mark_step()
        super().__exit__(*error)


def trace_me(scope: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that names what a function records."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with Trace(scope):
                return function(*args, **kwargs)

        return traced

    return decorate
