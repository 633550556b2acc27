"""Programs for devices that are only described: buffers have types and no contents, and nothing runs.

    with compiling_for(topology("v5e:2x4")):
        ...  # what is recorded here runs as always, but for the numbers

A plan (`lazytpu.spmd.plan`) records a script this way and then compiles what its last step ran.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from numpy.typing import NDArray

from lazytpu.errors import LazyTPUError
from lazytpu.ir.graph import Graph
from lazytpu.location import site
from lazytpu.lowering.lower import type_of
from lazytpu.lowering.support import shardings
from lazytpu.lowering.target import Topology, described
from lazytpu.runtime import described_gpus
from lazytpu.runtime.client import Buffer
from lazytpu.runtime.executable import Executable

ran: list[Graph] = []
"""The graphs that would have run for a topology, in order."""

reads: Counter[str] = Counter()
"""The lines that read a tensor while programs were for a topology."""

_known: dict[str, Topology] = {}

# What libtpu would ask servers for that only Google's machines have, and complain of where there are none.
_OFFLINE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is used, so other processes may compile meanwhile
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@dataclass(eq=False, slots=True)
class Described:
    """A buffer without contents, in place of a ``jax.Array``.

    Attributes:
        shape, dtype: of the contents.
        sharding: how they would lie.
        fill: what a read of any of them gives.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    fill: int = 0

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return self.size * self.dtype.itemsize

    def is_deleted(self) -> bool:
        """Return False: nothing is ever donated."""
        return False

    def is_ready(self) -> bool:
        """Return True: nothing is computed."""
        return True

    def block_until_ready(self) -> Described:
        """Return the buffer."""
        return self

    def __array__(self, dtype: object = None, copy: bool | None = None) -> NDArray[np.generic]:
        """Return what a read gives.

        Raises:
            LazyTPUError: the plan is over, and this is read as if it had been computed.
        """
        if described() is None:
            raise LazyTPUError(
                "a planned program cannot use the contents of a tensor",
                fix="make what the program computes with outside of what is planned",
            )
        if self.fill:  # a report of ours
            return np.full(self.shape, self.fill, self.dtype)
        reads[str(site.line_of_read())] += 1
        return np.zeros(self.shape, self.dtype)  # the system gives zeros without memory until they are written


def topology(name: str) -> Topology:
    """Return the topology of a name: kind of chip, and chips along each side, ``v5e:2x4``, or of GPUs hosts and GPUs of
    each, ``h100:16x8``.

    Raises:
        ModuleNotFoundError: XLA's compiler for them is not installed.
        ValueError: it knows no such topology.
    """
    found = _known.get(name)
    if found is not None:
        return found
    gpus = described_gpus.is_gpu(name)
    devices = described_gpus.devices_of(name) if gpus else _tpus(name)
    ordered = tuple(sorted(devices, key=lambda device: device.id))
    return _known.setdefault(name, Topology(name, "gpu" if gpus else "tpu", ordered))


def _tpus(name: str) -> Sequence[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            "to compile for a TPU needs XLA's compiler for TPUs: pip install 'lazytpu[tpu]' (libtpu, 140 MB)"
        )
    topologies = importlib.import_module("jax.experimental.topologies")
    missing = {key: value for key, value in _OFFLINE.items() if key not in os.environ}
    os.environ.update(missing)
    try:
        devices: Sequence[jax.Device] = topologies.get_topology_desc(name, "tpu").devices
    except Exception as error:
        raise ValueError(f"XLA does not know the topology {name!r}; 'v5e:2x4' is one it knows: {error}") from error
    finally:
        for key in missing:
            os.environ.pop(key, None)
    return devices


def is_described(buffer: Buffer, at: str = "") -> bool:
    """Return whether a buffer has no contents.

    Raises:
        LazyTPUError: it has, and programs are for a topology.
    """
    if isinstance(buffer, Described):
        return True
    if described() is not None:
        raise LazyTPUError(
            "a planned program uses a tensor from outside the plan, which has contents",
            at=at,
            given=f"{buffer.dtype}{list(buffer.shape)}",
            fix="make models, optimizers and batches inside of what is planned",
        )
    return False


def buffer_of(shape: Sequence[int], dtype: np.dtype, where: Sharding | None = None, fill: int = 0) -> Buffer:
    """Return a buffer without contents, by default on one device of the topology."""
    return cast(Buffer, Described(tuple(shape), np.dtype(dtype), where or one_device(), fill))


def one_device() -> Sharding:
    """Return where the contents of a program for one device lie."""
    target = described()
    assert target is not None
    return SingleDeviceSharding(target.devices[0])


def executable_of(graph: Graph, settings: dict[str, object]) -> Executable:
    """Return what gives the types of a graph's results, and notes that it ran."""

    def run(donated: Sequence[Buffer], retained: Sequence[Buffer], *scalars: object) -> list[Buffer]:
        for buffer in (*donated, *retained):
            is_described(buffer, graph.nodes[0].site.text if graph.nodes else "")
        ran.append(graph)
        return _results(graph)

    return Executable(graph, run, 0.0, 0.0, 0, settings=settings)


def _results(graph: Graph) -> list[Buffer]:
    everywhere = one_device() if graph.mesh is None else shardings.replicated(graph.mesh)
    wanted = [*graph.shardings, *[None] * (len(graph.outputs) - len(graph.shardings))]
    found = []
    for value, sharding in zip(graph.outputs, wanted, strict=True):
        plain = type_of(value.layout)
        size = plain.shape if sharding is None else sharding.padded(plain.shape)
        where = everywhere if sharding is None else shardings.named(sharding)
        found.append(buffer_of(size, plain.dtype, where))
    report = [buffer_of((1, 4), np.dtype(np.int64), everywhere, fill=-1)] if graph.checked else []  # nothing is amiss
    return found + report
