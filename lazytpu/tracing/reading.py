"""Read tensors: cut if their value is pending, wait, copy to the host."""

from __future__ import annotations

import torch

from lazytpu.config import config
from lazytpu.diagnosis import events
from lazytpu.errors import CompileError, DonatedBufferError, LazyTPUError, LoweringError, UnsupportedOpError
from lazytpu.ir.graph import Graph, graph_of
from lazytpu.ir.tree import trace
from lazytpu.ir.types import Size
from lazytpu.location import site
from lazytpu.observe import metrics
from lazytpu.passes.result_shardings import with_shardings
from lazytpu.runtime import index_checks, transfers
from lazytpu.runtime.client import Buffer
from lazytpu.tensors.layout import Layout
from lazytpu.tensors.storage import Cell, Storage, resolve
from lazytpu.tracing import record
from lazytpu.tracing.cutting import cut, run
from lazytpu.tracing.liveness import live_storages
from lazytpu.tracing.planning import plan_of
from lazytpu.tracing.shardings_kept import give_to_gradients, wanted_shardings

_WAIT = metrics.timer("wait")


def read(tensor: torch.Tensor, reason: str) -> torch.Tensor:
    """Return the contents of a device tensor as a CPU tensor with the same sizes and strides.

    A view is taken on the host from its storage's contents, so reading one compiles nothing.

    Args:
        tensor: a device tensor.
        reason: the op that reads, for the report.
    """
    cell = record.cell_of(tensor)
    host = contents_of(cell, reason)
    storage, layout = resolve(cell)
    host = host.to(storage.layout.dtype)
    if layout is storage.layout:
        out = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype)
        return out.copy_(host)
    return _host_view(host, storage.layout, layout)


def contents_of(cell: Cell, reason: str) -> torch.Tensor:
    """Return the contents of a cell's storage as a CPU tensor, which the caller copies before anyone else has it.

    Waits without the lock, so that others go on; where one of them has overwritten the storage meanwhile and the
    buffer is gone, the next try keeps them from it.
    """
    step, waited_s = trace.step, _WAIT.total
    try:
        host = _to_host(cell, reason)
    except DonatedBufferError:
        with record.lock:
            host = _to_host(cell, reason)
    events.waited(reason, str(site.line_of_read()), _WAIT.total - waited_s, after_cut=trace.step != step)
    index_checks.raise_if_any()
    return host


def _to_host(cell: Cell, reason: str) -> torch.Tensor:
    host = transfers.to_host(buffer_of(cell, reason))
    size = resolve(cell)[0].layout.size
    if host.shape == size:
        return host
    return host[tuple([slice(n) for n in size])].contiguous()  # without the padding of a sharding


def buffer_of(cell: Cell, reason: str) -> Buffer:
    """Return the buffer of a cell's storage, after cutting if its value is pending.

    Where the graph cannot be compiled, all stays pending, and what does not need the part that fails can be read.

    Raises:
        LazyTPUError: each device of a mesh has its own.
    """
    buffer = _buffer_of(cell, reason)
    sharding = resolve(cell)[0].sharding
    if sharding is not None and sharding.own:
        raise LazyTPUError(
            "this tensor is another one on each device, and cannot be read as one",
            at=str(site.line_of_read()),
            given=resolve(cell)[1].describe(),
            fix="return it from the function of shard_map (disable_manual_sharding in torch_xla); what needs a "
            "gradient is an argument of that function",
        )
    return buffer


def _buffer_of(cell: Cell, reason: str) -> Buffer:
    with record.lock:
        storage, _ = resolve(cell)
        if storage.step == trace.step and (storage.value.node is not None or storage.buffer is None):
            try:
                cut(reason)
            except (LoweringError, CompileError, UnsupportedOpError) as error:
                alone = (storage.value,)
                try:
                    return run(plan_of(alone, (), config.check_bounds), alone)[storage.value]
                except LazyTPUError:
                    raise error from error.__cause__
        elif storage.step == trace.step and trace.inputs[storage.value.index][1] is not storage.buffer:
            loaded: Buffer = trace.inputs[storage.value.index][1]
            return loaded
        if storage.buffer is None:
            record.load(storage)
            cut(reason)
        assert storage.buffer is not None
        return storage.buffer


def _host_view(host: torch.Tensor, root: Layout, layout: Layout) -> torch.Tensor:
    """Return a copy of the part of a storage's contents that lies at ``layout``."""
    memory = torch.empty_strided(root.size, root.stride, dtype=root.dtype).copy_(host) if not root.contiguous else host
    part = torch.empty(0, dtype=layout.dtype)
    part.set_(memory.untyped_storage(), layout.offset, layout.size, layout.stride)
    out = torch.empty_strided(*_packed(layout), dtype=layout.dtype).copy_(part)
    if layout.bits & 1:
        out = out.conj_physical()
    return out.neg() if layout.bits & 2 else out


def _packed(layout: Layout) -> tuple[Size, Size]:
    """Return sizes and strides of a copy of a view, as ``clone`` gives them."""
    meta = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
    return layout.size, torch.empty_like(meta).stride()


def pending_graph(tensors: tuple[torch.Tensor, ...] = ()) -> Graph:
    """Return the graph of what is pending: of the given tensors, or of all live ones.

    Looking changes nothing: what has to be recorded for it (a view that is read) is undone.
    """
    with record.lock:
        if not tensors:
            live = live_storages()
            values = tuple(dict.fromkeys(s.value for s in live if s.value.node is not None))
            return _with_shardings(graph_of(trace.cursor, values), live)
        mark = trace.mark()
        cells = [record.cell_of(t) for t in tensors]
        try:
            values = tuple(dict.fromkeys([record.load(cell) for cell in cells]))
            storages = [storage for storage, layout in map(resolve, cells) if layout is storage.layout]
            return _with_shardings(graph_of(trace.cursor, values), storages)
        finally:
            for storage in trace.rewind(mark):
                storage.value, storage.step, storage.dirty = None, 0, 0
            for cell in cells:
                resolve(cell)[0].reads = None


def _with_shardings(graph: Graph, storages: list[Storage]) -> Graph:
    """Return a graph with the shardings that its outputs will keep, where the step is on a mesh."""
    if trace.mesh is None:
        return graph
    give_to_gradients()
    return with_shardings(graph, wanted_shardings(storages, graph.outputs), trace.mesh)
