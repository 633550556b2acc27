"""lazytpu: a lazy XLA device for PyTorch.

import torch, lazytpu

device = lazytpu.device()
x = torch.randn(2, 3, device=device)     # recorded, not run
y = (x * 2).relu().sum()
print(lazytpu.ir_text(y))                # the graph so far
print(y)                                 # cut, lowered to HLO, compiled, run
"""

from lazytpu import versions  # isort: skip

versions.check()  # before anything private of torch or jax is touched

from lazytpu import events, metrics
from lazytpu.compile import compile
from lazytpu.config import config
from lazytpu.debug.dump import dump as _dump
from lazytpu.debug.explain import explain
from lazytpu.debug.inspect import hlo_text, ir_dot, ir_text, stablehlo_text
from lazytpu.device import device, device_count, is_available, register
from lazytpu.loader import DeviceLoader
from lazytpu.runtime import platform
from lazytpu.step import mark_step, wait

register()
events.listeners.append(_dump)
sync = mark_step

__version__ = "0.1.0"
__all__ = [
    "DeviceLoader",
    "compile",
    "config",
    "device",
    "device_count",
    "explain",
    "hlo_text",
    "ir_dot",
    "ir_text",
    "is_available",
    "mark_step",
    "metrics",
    "platform",
    "stablehlo_text",
    "sync",
    "wait",
]
