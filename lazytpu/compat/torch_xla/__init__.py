"""``torch_xla`` on this device: the names of its top level."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import lazytpu
from lazytpu.compat import lacking
from lazytpu.compat.torch_xla import _XLAC, backends, environment, openxla, runtime, stablehlo
from lazytpu.compat.torch_xla.core import xla_model as xm
from lazytpu.compat.torch_xla.distributed import xla_multiprocessing
from lazytpu.compat.torch_xla.experimental import eager_mode_context
from lazytpu.compat.torch_xla.stablehlo import save_as_stablehlo, save_torch_model_as_stablehlo
from lazytpu.compat.torch_xla.version import __version__

__getattr__ = lacking.names_of(__name__)

environment.apply()
openxla.register()


def device(index: int | None = None) -> torch.device:
    """The device (``xla:0``, or whatever name it was given)."""
    return xm.xla_device(index)


def devices() -> list[torch.device]:
    """All devices of this process: one."""
    return [lazytpu.device(i) for i in range(lazytpu.device_count())]


def real_devices() -> list[str]:
    """What XLA calls them, such as ``CPU:0``."""
    return xm.xla_real_devices(devices())


def device_count() -> int:
    """How many devices this process has."""
    return lazytpu.device_count()


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """Ends a step: see `lazytpu.mark_step`."""
    xm.mark_step(wait, reset_scope)


def step() -> Any:
    """What is recorded inside is one graph: a step ends before and after.  A context manager, or a decorator."""
    return compile()


def compile(
    f: Callable[..., Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    custom_compile_options: dict[str, Any] | None = None,
    *,
    num_different_graphs_allowed: int | None = None,
) -> Any:
    """Records what a function does as one graph and runs it; a decorator, a wrapper or a context manager.

    Inside, ops are lazy where ``eager_mode`` is on.

    Args:
        f: the function or module; without it, the result is a context manager, or a decorator.
        full_graph: raise where something inside would run the graph early.
        name: shown in errors.
        max_different_graphs: raise when more graphs than this were compiled for it.
        custom_compile_options: None or empty; XLA's options are in the variable ``XLA_FLAGS`` here.
        num_different_graphs_allowed: older name of ``max_different_graphs``.

    Raises:
        RuntimeError: one of these limits is broken.
        ValueError: there are ``custom_compile_options``.
    """
    if custom_compile_options:
        raise ValueError("custom_compile_options: use the variable XLA_FLAGS, set before jax is imported")
    allowed = num_different_graphs_allowed if max_different_graphs is None else max_different_graphs
    shown = str(name or getattr(f, "__name__", "torch_xla.compile"))
    scope = _Scope(shown, bool(full_graph), allowed)
    if f is None:
        return scope.open()

    @functools.wraps(f)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        with scope.open():
            return f(*args, **kwargs)

    return compiled


class _Scope:
    """The limits of one `compile`."""

    def __init__(self, name: str, full_graph: bool, allowed: int | None) -> None:
        self.name, self.full_graph, self.allowed = name, full_graph, allowed
        self.compiled = 0

    @contextmanager
    def open(self) -> Iterator[None]:
        with eager_mode_context(False):
            sync()
            cuts, graphs = lazytpu.metrics.counter("cut"), _graphs()
            try:
                yield
                if self.full_graph and lazytpu.metrics.counter("cut") != cuts:
                    raise RuntimeError(f"{self.name}: full_graph=True, but the graph ran early. {lazytpu.explain()}")
            finally:
                sync()
        self.compiled += max(0, _graphs() - graphs)
        if self.allowed is not None and self.compiled > self.allowed:
            raise RuntimeError(
                f"{self.name}: {self.compiled} different graphs, {self.allowed} are allowed. {lazytpu.explain()}"
            )


def _graphs() -> int:
    """How many graphs were new in this process: compiled, or read from the disk cache."""
    return lazytpu.metrics.counter("compile") + lazytpu.metrics.counter("disk_hit")


def manual_seed(seed: int, device: Any = None) -> None:
    """Seeds the device's random numbers."""
    xm.set_rng_state(seed)


def launch(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), start_method: str = "spawn", debug_single_process: bool = False
) -> None:
    """Runs ``fn(index, *args)`` once for each device of this process, of which there is one."""
    xla_multiprocessing.spawn(fn, args, start_method=start_method)


xr = runtime

__all__ = [
    "_XLAC",
    "__version__",
    "backends",
    "compile",
    "device",
    "device_count",
    "devices",
    "launch",
    "manual_seed",
    "real_devices",
    "runtime",
    "save_as_stablehlo",
    "save_torch_model_as_stablehlo",
    "stablehlo",
    "step",
    "sync",
    "xm",
    "xr",
]
