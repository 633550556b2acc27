"""``torch_xla`` on this device: its top-level names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.types import Device

import lazytpu
from lazytpu.compat import names
from lazytpu.compat.torch_xla import _XLAC, backends, environment, float_classes, openxla, runtime, stablehlo
from lazytpu.compat.torch_xla.core import xla_model as xm
from lazytpu.compat.torch_xla.distributed import xla_multiprocessing
from lazytpu.compat.torch_xla.experimental import eager_mode_context
from lazytpu.compat.torch_xla.stablehlo import save_as_stablehlo, save_torch_model_as_stablehlo
from lazytpu.compat.torch_xla.version import __version__

__getattr__ = names.missing_from(__name__)

environment.apply()
openxla.register()
float_classes.register()


def device(index: int | None = None) -> torch.device:
    """Return the device (``xla:0``, or by whatever name it was given)."""
    return xm.xla_device(index)


def devices() -> list[torch.device]:
    """Return all devices of this process: one."""
    return [lazytpu.device(i) for i in range(lazytpu.device_count())]


def real_devices() -> list[str]:
    """Return XLA's names of them, such as ``CPU:0``."""
    return xm.xla_real_devices(devices())


def device_count() -> int:
    """Return the number of devices of this process."""
    return lazytpu.device_count()


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """End a step: see `lazytpu.mark_step`."""
    xm.mark_step(wait, reset_scope)


def step() -> AbstractContextManager[None]:
    """Return a context manager, or a decorator, that ends a step before and after: what is inside is one graph."""
    return _Scope("torch_xla.step", False, None).open()


def compile(
    f: Callable[..., object] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    custom_compile_options: dict[str, object] | None = None,
    *,
    num_different_graphs_allowed: int | None = None,
) -> AbstractContextManager[None] | Callable[..., object]:
    """Record a function as one graph and run it; a decorator, a wrapper or a context manager.

    Inside, ops are lazy even where ``eager_mode`` is on.

    Args:
        f: the function or module; without it, the result is a context manager, or a decorator.
        full_graph: raise if something inside runs the graph early.
        name: shown in errors.
        max_different_graphs: raise if more graphs than this were compiled for it.
        custom_compile_options: None or empty; XLA's options are in the variable ``XLA_FLAGS`` here.
        num_different_graphs_allowed: older name of ``max_different_graphs``.

    Raises:
        RuntimeError: one of these limits is exceeded.
        ValueError: there are ``custom_compile_options``.
    """
    if custom_compile_options:
        raise ValueError("custom_compile_options is not supported; set the variable XLA_FLAGS before jax is imported")
    allowed = num_different_graphs_allowed if max_different_graphs is None else max_different_graphs
    shown = str(name or getattr(f, "__name__", "torch_xla.compile"))
    scope = _Scope(shown, bool(full_graph), allowed)
    return scope.open() if f is None else scope.open()(f)


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
                    raise RuntimeError(f"{self.name}: full_graph=True, but the graph ran early.\n{lazytpu.explain()}")
            finally:
                sync()
        self.compiled += max(0, _graphs() - graphs)
        if self.allowed is not None and self.compiled > self.allowed:
            raise RuntimeError(
                f"{self.name}: {self.compiled} different graphs, {self.allowed} are allowed.\n{lazytpu.explain()}"
            )


def _graphs() -> int:
    """Return the number of graphs that were compiled, or read from the disk cache."""
    return lazytpu.metrics.counter("compile") + lazytpu.metrics.counter("disk_hit")


def manual_seed(seed: int, device: Device = None) -> None:
    """Seed the device's random numbers."""
    xm.set_rng_state(seed)


def launch(
    fn: Callable[..., object],
    args: tuple[object, ...] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> None:
    """Run ``fn(index, *args)`` once for each device of this process, of which there is one."""
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
