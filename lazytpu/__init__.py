"""lazytpu: a lazy XLA device for PyTorch.

    import torch, lazytpu

    device = lazytpu.device()
    x = torch.randn(2, 3, device=device)     # recorded, not run
    y = (x * 2).relu().sum()
    print(lazytpu.ir_text(y))                # the graph so far
    print(y)                                 # cut, lowered to HLO, compiled, run

The folders in the order an op travels, from ``torch.add`` to the executable and back:

    frontends/      other ways in: lazytpu.compile, torch.compile and jit, FX graphs, scan, jax functions
    dispatch/       the kernels that torch calls for each aten op
    distributed/    the backend of torch.distributed: process groups whose collectives are recorded
    torch_backend/  the device as torch knows it: torch.tpu, the accelerator, saving, streams
    tracing/        records the op, infers its types, cuts the graph in `mark_step`
    tensors/        the tensor class, storages and views that hold what was recorded
    ir/             what is recorded: values, nodes, the trace tree, graphs and their text
    location/       the line and module of the user's program that each node came from
    passes/         changes a graph before it is lowered
    lowering/       turns a graph into jax operations; one rule an op, under its aten name
    runtime/        compiles with XLA, keeps programs in memory and on disk, runs them, moves data
    diagnosis/      why a graph was compiled and where the time went
    observe/        metrics, step statistics, logs

Beside the way: `debug` (dump, report, checks, profiler), `export`, `quantization`, `compat` (torch_xla, torch_tpu and
torch_mlu scripts) and `cli`.  A folder imports only those below it; ``tests/test_layers.py`` has the order.
"""

import importlib as _importlib
import sys as _sys
import types as _types
import typing as _typing

import torch.distributed as _dist

from lazytpu import versions

versions.check()  # before anything private of torch or jax is touched

from lazytpu import debug, export, lowering, spmd
from lazytpu.config import config
from lazytpu.debug import profiler
from lazytpu.debug.explain import explain
from lazytpu.debug.graph_text import hlo_text, ir_dot, ir_text, stablehlo_text
from lazytpu.dispatch import registration as _registration
from lazytpu.distributed.launching import launch
from lazytpu.export.package import load_package as load
from lazytpu.frontends import control_flow_kernels as _control_flow
from lazytpu.frontends.dynamo import backend as _backend
from lazytpu.frontends.dynamo import hooks as _hooks
from lazytpu.frontends.jax import arrays as _arrays
from lazytpu.frontends.jax import call as _call
from lazytpu.frontends.jax.arrays import from_jax, to_jax
from lazytpu.frontends.jax.call import call_jax
from lazytpu.frontends.jax.module import as_jax_function
from lazytpu.frontends.jit import jit
from lazytpu.frontends.loader import DeviceLoader
from lazytpu.frontends.replay.compile import compile
from lazytpu.frontends.scan.scan_layers import scan_layers
from lazytpu.observe import metrics
from lazytpu.runtime.client import platform
from lazytpu.runtime.disk_cache import store as cache
from lazytpu.runtime.host import garbage as _garbage
from lazytpu.runtime.host import leaving as _leaving
from lazytpu.torch_backend import default_dtype as _default_dtype
from lazytpu.torch_backend.device import device, device_count, is_available
from lazytpu.tracing.step import mark_step, wait

if _typing.TYPE_CHECKING:
    from lazytpu import quantization

_registration.register()
_control_flow.register()
_arrays.register()
_call.register()
_hooks.register(_backend)
_default_dtype.register()
_leaving.register()
_garbage.register()
if _dist.is_available():
    from lazytpu.distributed import backend as _process_groups

    _process_groups.register()
sync = mark_step

# Public modules that live in a folder of the pipeline: `import lazytpu.metrics` finds them too.
_sys.modules |= {f"{__name__}.{module}": globals()[module] for module in ("cache", "metrics", "profiler")}


def __getattr__(name: str) -> _types.ModuleType:
    """Import `lazytpu.quantization` when it is first asked for: few programs do."""
    if name == "quantization":
        return _importlib.import_module(f"{__name__}.quantization")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = [
    "DeviceLoader",
    "as_jax_function",
    "cache",
    "call_jax",
    "compile",
    "config",
    "debug",
    "device",
    "device_count",
    "explain",
    "export",
    "from_jax",
    "hlo_text",
    "ir_dot",
    "ir_text",
    "is_available",
    "jit",
    "launch",
    "load",
    "lowering",
    "mark_step",
    "metrics",
    "platform",
    "profiler",
    "quantization",
    "scan_layers",
    "spmd",
    "stablehlo_text",
    "sync",
    "to_jax",
    "wait",
]
