"""Run a graph that holds collectives on all processes that take part: a program of `jax.shard_map` over one device of
each.

A buffer of this process is the part of a global array that lies here: one along dimension 0, so nothing is copied.
What has no such dimension to split (a scalar) is told XLA as if all processes had the same, which it has no use for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lazytpu.errors import LazyTPUError
from lazytpu.ir.graph import Graph
from lazytpu.ir.rank_patterns import Ranks, connected
from lazytpu.lowering.lower import type_of
from lazytpu.lowering.support.processes import AXIS
from lazytpu.runtime.client import Buffer, ScalarArray, put

Results: TypeAlias = tuple[Buffer, ...]
_SPLIT, _WHOLE = PartitionSpec(AXIS), PartitionSpec()


def rank() -> int:
    """Return the number of this process among all that jax connects."""
    return int(jax.process_index())


def ranks_of(graph: Graph) -> Ranks:
    """Return the processes that run the program of a graph together."""
    return connected(graph.patterns, rank())


@cache
def mesh_of(ranks: Ranks) -> jax.sharding.Mesh:
    """Return the first device of each of some processes, as jax's mesh.

    Raises:
        LazyTPUError: jax is not connected to one of them.
    """
    first = {device.process_index: device for device in reversed(jax.devices())}
    missing = [r for r in ranks if r not in first]
    if missing:
        raise LazyTPUError(
            f"a collective of processes {', '.join(map(str, ranks))}, but jax is not connected to {missing[0]}",
            fix="call torch.distributed.init_process_group before the first op on the device",
        )
    return jax.sharding.Mesh(np.array([first[r] for r in ranks]), (AXIS,))


def mapped(graph: Graph, step: Callable[..., Results]) -> Callable[..., Results]:
    """Return a function of a process's arrays as one of the global arrays that they are parts of.

    Args:
        graph: what ``step`` computes.
        step: takes donated and other inputs, and the scalar arrays, as `compiler.lower` has it.
    """
    outputs = [type_of(v.layout).shape for v in graph.outputs[: len(graph.outputs) - graph.concatenated]]
    specs = [_spec(size) for size in outputs] + [_SPLIT] * ((graph.concatenated > 0) + graph.checked)

    def call(donated: list[Buffer], retained: list[Buffer], *scalars: Buffer | None) -> Results:
        given = ([_spec(x.shape) for x in donated], [_spec(x.shape) for x in retained])
        packs = [None if x is None else _SPLIT for x in scalars]
        return jax.shard_map(
            step, mesh=mesh_of(ranks_of(graph)), in_specs=(*given, *packs), out_specs=tuple(specs), check_vma=False
        )(donated, retained, *scalars)

    return call


def global_type(graph: Graph, local: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the type of the global array whose part in each process has a type."""
    ranks = ranks_of(graph)
    spec = _spec(local.shape)
    size = (len(ranks) * local.shape[0], *local.shape[1:]) if spec is _SPLIT else local.shape
    return jax.ShapeDtypeStruct(size, local.dtype, sharding=NamedSharding(mesh_of(ranks), spec))


def _spec(size: Sequence[int]) -> PartitionSpec:
    return _SPLIT if len(size) and size[0] else _WHOLE


class OverProcesses:
    """Starts the program of a graph on buffers of this process, in place of the ``jax.stages.Compiled`` it wraps."""

    def __init__(self, graph: Graph, compiled: jax.stages.Compiled) -> None:
        ranks = ranks_of(graph)
        self.compiled, self._n = compiled, len(ranks)
        mesh = mesh_of(ranks)
        self._split, self._whole = NamedSharding(mesh, _SPLIT), NamedSharding(mesh, _WHOLE)

    def __call__(self, donated: Sequence[Buffer], retained: Sequence[Buffer], *scalars: ScalarArray) -> list[Buffer]:
        packs = [None if x is None else self._global(put([x])[0]) for x in scalars]
        results = self.compiled([*map(self._global, donated)], [*map(self._global, retained)], *packs)
        return [x.addressable_data(0) for x in results]

    def _global(self, part: Buffer) -> jax.Array:
        size = part.shape
        if _spec(size) is _SPLIT:
            return jax.make_array_from_single_device_arrays((self._n * size[0], *size[1:]), self._split, [part])
        return jax.make_array_from_single_device_arrays(size, self._whole, [part])

    def __getattr__(self, name: str) -> object:  # texts and costs
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.compiled, name)
