"""lazytpu: a lazy XLA device for PyTorch.

import torch, lazytpu

device = lazytpu.device()
x = torch.randn(2, 3, device=device)     # recorded, not run
y = (x * 2).relu().sum()
print(lazytpu.ir_text(y))                # the graph so far
print(y)                                 # cut, lowered to HLO, compiled, run
"""

from lazytpu.torch_api import versions

versions.check()  # before anything private of torch or jax is touched

from lazytpu import cache, debug, export, lowering, metrics, profiler
from lazytpu.config import config
from lazytpu.debug.dump import dump as _dump
from lazytpu.debug.explain import explain
from lazytpu.debug.inspect import hlo_text, ir_dot, ir_text, stablehlo_text
from lazytpu.device import device, device_count, is_available, register
from lazytpu.dynamo import backend as _backend
from lazytpu.dynamo import hooks as _hooks
from lazytpu.executing import pages
from lazytpu.executing.runtime import platform
from lazytpu.export.package import load_package as load
from lazytpu.interop import arrays as _arrays
from lazytpu.interop import call as _call
from lazytpu.interop.arrays import from_jax, to_jax
from lazytpu.interop.call import call_jax
from lazytpu.interop.module import as_jax_function
from lazytpu.jit import jit
from lazytpu.loader import DeviceLoader
from lazytpu.replaying.compile import compile
from lazytpu.reporting import events
from lazytpu.reporting.pace import register as _register_pace
from lazytpu.scanning.scan import scan_layers
from lazytpu.step import mark_step, wait
from lazytpu.torch_api import default_dtype

pages.share_heap()
register()
_register_pace()
_arrays.register()
_call.register()
_hooks.register(_backend)
default_dtype.register()
events.listeners.append(_dump)
sync = mark_step

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
    "load",
    "lowering",
    "mark_step",
    "metrics",
    "platform",
    "profiler",
    "scan_layers",
    "stablehlo_text",
    "sync",
    "to_jax",
    "wait",
]
