"""Copy between the host and the device, and wait for buffers.

A buffer is a ``jax.Array``.  Nothing here changes jax's global configuration: 64-bit types are switched on around our
own calls and conversions only.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from lazytpu.dtypes import host_array, host_tensor
from lazytpu.errors import DonatedBufferError
from lazytpu.ir.sharding import Sharding
from lazytpu.lowering import target
from lazytpu.observe import metrics, regions, step_statistics
from lazytpu.runtime import client, described, meshes, together, world
from lazytpu.runtime.client import Buffer
from lazytpu.runtime.disk_cache import prefetch
from lazytpu.runtime.host.interrupts import uninterrupted


@regions.region("transfer_in")
def to_device(tensor: torch.Tensor) -> Any:
    """Return a buffer with the contents of a CPU tensor.

    It copies the contents first: `client.put` may alias a numpy buffer on the CPU, and the user may overwrite the
    tensor afterwards.
    """
    if target.described() is not None:
        return described.buffer_of(tensor.shape, host_array(tensor.new_empty(0)).dtype)
    start = time.perf_counter()
    return send(host_array(tensor), start=start)


def send(
    host: np.typing.NDArray[np.generic], sharding: Sharding | None = None, *, start: float | None = None
) -> Buffer:
    """Return a buffer with the contents of an array, whose memory nobody writes to any more.

    Args:
        sharding: how it is to lie; on one device by default.
        start: when the transfer began; now by default.
    """
    start = time.perf_counter() if start is None else start
    prefetch.start(client.device())
    with uninterrupted(), jax.enable_x64(True):
        buffer = client.put([host])[0] if sharding is None else meshes.put(host, sharding, host.shape)
    seconds = time.perf_counter() - start
    if step_statistics.in_background():
        metrics.add_time("background", seconds)
    metrics.add_transfer("transfer_in", seconds, host.nbytes)
    return buffer


@regions.region("transfer_out")
def to_host(buffer: Buffer) -> torch.Tensor:
    """Return the contents of a buffer as a CPU tensor, which shares memory with it where the device is the CPU.

    Waits for the computation.  The caller copies before it lets anyone else have the tensor.  What torch calls
    complex32 comes as complex64.
    """
    try:
        if meshes.used and len(buffer.sharding.device_set) > 1:
            metrics.count("gathered")
        if world.is_connected():
            buffer = meshes.whole_here(buffer)
        ready([buffer])
        start = time.perf_counter()
        # jax cannot put parts together that have no elements
        host = np.asarray(buffer) if buffer.size else np.empty(buffer.shape, buffer.dtype)
    except RuntimeError as error:
        if "deleted" in str(error):
            raise DonatedBufferError(
                "the buffer of a tensor was donated and is gone",
                fix="donate no array that `to_jax` gave or `from_jax` took; if your jax code does not, it is our bug",
            ) from error
        raise
    metrics.add_transfer("transfer_out", time.perf_counter() - start, host.nbytes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the memory is read-only, and nobody writes to it
        return host_tensor(host)


def wait(buffers: Sequence[Buffer]) -> None:
    """Wait until the buffers are computed, those that are not donated; another thread may donate some meanwhile."""
    left = [b for b in buffers if not b.is_deleted()]
    while left:
        try:
            ready(left)
            return
        except RuntimeError:
            still = [b for b in left if not b.is_deleted()]
            if len(still) == len(left):
                raise
            left = still


@regions.region("wait")
def ready(buffers: Sequence[Buffer]) -> None:
    """Wait until buffers that are not donated are computed, and add the time to the timer ``wait``."""
    start = time.perf_counter()
    if world.is_connected():
        together.wait(buffers)
    else:
        for buffer in buffers:
            buffer.block_until_ready()
    metrics.add_time("wait", time.perf_counter() - start)


def finished(buffers: Sequence[Buffer]) -> bool:
    """Wait for buffers; return whether all could be computed (if not, a read of one raises the error)."""
    try:
        ready(buffers)
    except jax.errors.JaxRuntimeError:
        return False
    return True
