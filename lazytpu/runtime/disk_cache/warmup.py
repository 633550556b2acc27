"""Run a program once that was read from disk ahead, before the step that needs it.

In the first run of a program on the CPU, XLA plans its matrix products (2 ms for each, 0.2 s for a GPT of six layers)
and starts its threads.  So the thread that reads programs ahead (prefetch.py) runs each of them once on zeros and drops
the results.  It runs only programs that end soon whatever their inputs are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

_MOST_WORK = 1e11  # operations or bytes: about half a second on two cores
_MOST_BYTES = 4e9  # read and written once, which no program's memory exceeds

_LOOP = re.compile(r" while\(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def ends_soon(compiled: jax.stages.Compiled, text: str) -> bool:
    """Return whether a program is short for any inputs: XLA knows the number of iterations of each of its loops.

    Args:
        text: its HLO.
    """
    trips = [int(n) for n in _TRIPS.findall(text)]
    if len(trips) != len(_LOOP.findall(text)):
        return False
    costs: Any = compiled.cost_analysis() or {}
    flops, transferred = float(costs.get("flops", np.inf)), float(costs.get("bytes accessed", np.inf))
    return max(flops, transferred) * max(trips, default=1) <= _MOST_WORK and transferred <= _MOST_BYTES


def warm_up(executable: Any, inputs: Sequence[Sequence[Any]], device: jax.Device) -> None:
    """Run XLA's executable once on zeros and waits for it.

    Args:
        inputs: shape and name of the dtype of each argument.
    """
    with jax.enable_x64(True):
        zeros = [jax.device_put(np.zeros(shape, jax.numpy.dtype(dtype)), device) for shape, dtype in inputs]
    for result in executable.execute(zeros):
        result.block_until_ready()
