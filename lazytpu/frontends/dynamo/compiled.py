"""A captured graph as a function of tensors: the hot path of a call, and what happens the first time."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch

from lazytpu import random
from lazytpu.config import config
from lazytpu.dispatch import cpu_fallback
from lazytpu.errors import UnsupportedOpError
from lazytpu.frontends.dynamo.captured_program import CapturedProgram, Result, Shortcut, program_of, results_of
from lazytpu.frontends.dynamo.dump_module import dump
from lazytpu.frontends.dynamo.sizes import has_symbols, with_sizes
from lazytpu.frontends.fx.to_ir import unsupported_ops
from lazytpu.ir.tree import trace
from lazytpu.ir.types import contiguous_stride, is_dense
from lazytpu.location.fx_site import site_of
from lazytpu.observe import metrics
from lazytpu.runtime import launch, meshes, transfers
from lazytpu.runtime.client import Buffer
from lazytpu.runtime.host.interrupts import uninterrupted
from lazytpu.tensors.layout import in_rows, root_layout
from lazytpu.tensors.storage import Cell, Storage, cell_at, new_storage, resolve, storage_of, write_buffer
from lazytpu.tensors.tensor import LazyTensor, lazy, make, view_at
from lazytpu.tracing import cutting, reading, record
from lazytpu.tracing.record import cell_of, is_device_tensor
from lazytpu.tracing.transaction import write_cast

_SIZE = "a program has fixed sizes: use a mask, or compute that part outside of it"
_Found: TypeAlias = tuple[CapturedProgram | None, list[Any], list[Any]]  # and cells and buffers of the arguments
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class CompiledGraph:
    """One graph that AOTAutograd made, called with a list of arguments that it empties.

    A program is made for each way the arguments lie in memory, and kept.

    Attributes:
        shortcut: the latest call, where a call like it has only an executable to start (see hit.py).
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        kind: str,
        saved: tuple[int, ...],
        fullgraph: bool = False,
        weights: Mapping[str, int] | None = None,
    ) -> None:
        """Take a graph; nothing is compiled yet.

        Args:
            module: aten ops, functional but for copies to arguments at the end; sizes may be symbolic.
            kind: ``forward``, ``backward`` or ``inference``.
            saved: positions of arguments that nobody uses after the call, unless the graph of autograd is kept.
            fullgraph: a graph that cannot be one program is an error.
            weights: names of parameters and buffers to their positions, for `dump`.
        """
        self.module, self.kind, self.saved, self.fullgraph = module, kind, saved, fullgraph
        self.weights = weights or {}
        self.programs: dict[Any, CapturedProgram | None] = {}
        self.shortcut: Shortcut | None = None
        self._boxed_call = True  # torch asks the object, and what wraps it copies what the object has
        self._symbolic = has_symbols(module)

    def __call__(self, args: list[Any]) -> list[Any]:
        with record.lock:
            program, cells, buffers = self._stored(args) or self._loaded(args)
            results = None if program is None else self._run(program, args, cells, buffers)
        if results is None:
            grad = self.kind != "inference" and torch.is_grad_enabled()
            with torch.set_grad_enabled(grad), torch._C._DisableAutocast():  # the graph has casts of its own
                results = list(torch.fx.Interpreter(self.module).run(*args))
        args.clear()
        return results

    def _stored(self, args: list[Any]) -> _Found | None:
        """Return what to run where the arguments are whole storages that hold their buffers; None elsewhere."""
        try:
            cells = [x._s for x in args]
        except AttributeError:  # numbers, CPU tensors, device tensors that C++ made
            return None
        program = self.programs.get(tuple([c.layout for c in cells]))
        if program is None or not program.whole or meshes.used:
            return None
        if trace.inputs or trace.pending:  # else nothing belongs to this step
            now = trace.step
            if [c for c in cells if c.step == now]:
                return None
        buffers = [c.buffer for c in cells]
        if [b for b in buffers if b is None]:  # never written, or its contents have moved
            return None
        return program, cells, buffers

    def _loaded(self, args: list[Any]) -> _Found:
        """Return what to run for arguments of any kind, in any state; no program where the graph cannot be one.

        Tensors on a mesh have none either: their ops are recorded.
        """
        if meshes.used and any(storage_of(cell_of(x)).sharding for x in args if is_device_tensor(x)):
            return None, [], []
        if any(storage_of(cell_of(x)).step == trace.step for x in args if is_device_tensor(x)):
            cutting.cut("torch.compile")
        cells = [_cell(x) for x in args]
        key = tuple([x if c is None else c.layout for x, c in zip(args, cells, strict=True)])
        if key not in self.programs:
            self.programs[key] = self._new_program(args, cells)
        program = self.programs[key]
        if program is None:
            return None, [], []
        buffers = [None if c is None else reading.buffer_of(c, "torch.compile") for c in cells]
        if meshes.used:
            buffers = [None if b is None else meshes.on_one_device(b) for b in buffers]
        return program, cells, buffers

    def _run(self, program: CapturedProgram, args: list[Any], cells: list[Any], buffers: list[Any]) -> list[Any]:
        outputs: Sequence[Buffer] = ()
        if program.outputs:
            donating = config.donate and (program.written or self.saved)
            call = program.call(self._donated(program, cells, buffers) if donating else ())
            executable: Any = call.executable()
            if program.new is not None:
                dump(program.new, self.module, self.weights, buffers)
                program.new = None
            if program.captured:
                buffers += program.captured
            if program.plain:  # an interrupt in the middle of it loses nothing that anybody has
                if call.same:
                    outputs = launch.start_ready(executable, [], buffers, call.scalars)
                else:
                    outputs = launch.start_ready(executable, call.given(buffers), call.kept(buffers), call.scalars)
                if executable.graph.checked:
                    outputs = cutting.outputs_of(executable, outputs, program.last, program.outputs)
                else:
                    cutting.remember(outputs[executable.smallest])
                    if not self.saved and executable.call is not executable.compiled:
                        self.shortcut = program.shortcut(call)
            else:
                scalars = launch.scalar_arrays(executable.graph, (), _keys(program.draws), ())
                with uninterrupted():
                    results = launch.start(executable, call.given(buffers), call.kept(buffers), scalars)
                    outputs = cutting.outputs_of(executable, results, program.last, program.outputs)
                    for position, output in program.written.items():
                        _write(args[position], cells[position], outputs[output])
        if program.fresh:
            return results_of(program.fresh, program.others, outputs, args)
        return _made_all(program, outputs, args)

    def _donated(self, program: CapturedProgram, cells: list[Any], buffers: list[Buffer]) -> tuple[int, ...]:
        """Return positions of arguments whose buffers nobody can see after the call."""
        if self.kind == "backward":
            candidates: Sequence[int] = () if _keeps_graph() else self.saved
        else:
            candidates = tuple(program.written)
        if not candidates:
            return ()
        counts = Counter(map(id, buffers))
        return tuple(
            [i for i in candidates if type(cells[i]) is Storage and not cells[i].shared and counts[id(buffers[i])] == 1]
        )

    def _new_program(self, args: list[Any], cells: list[Any]) -> CapturedProgram | None:
        """Return the program for arguments like these; None where the graph cannot be one program."""
        module = with_sizes(self.module, args) if self._symbolic else self.module
        layouts = [None if c is None else c.layout for c in cells]
        unknown = list(unsupported_ops(module))
        missing = ", ".join(sorted({str(node.target) for node in unknown}))
        problem = f"{missing} cannot be part of one" if missing else ""
        if not problem:
            try:
                return program_of(module, f"{self.kind} graph", layouts, any(self.programs.values()))
            except UnsupportedOpError as error:
                if self.fullgraph or config.fallback == "error":
                    raise
                problem = str(error)
        if self.fullgraph or config.fallback == "error":
            sized = torch.Tag.dynamic_output_shape  # what is no op computes with numbers read from tensors
            dynamic = any(sized in getattr(n.target, "tags", (sized,)) for n in unknown)
            raise UnsupportedOpError(
                f"the {self.kind} graph is not one program: {problem}",
                at=site_of(unknown[0]).describe() if site_of(unknown[0]).file else "",
                fix=_SIZE if dynamic else "add a rule (docs/how-to/add-an-op)",
            )
        metrics.count("uncompiled_graph")
        warnings.warn(
            f"a {self.kind} graph of torch.compile is run op by op: {problem}",
            cpu_fallback.FallbackWarning,
            stacklevel=2,
        )
        return None


def _cell(x: object) -> Cell | None:
    """Return the cell of a tensor; one of its own for a CPU tensor, with a copy of its contents."""
    if is_device_tensor(x):
        return cell_at(*resolve(cell_of(x)))
    if not isinstance(x, torch.Tensor):
        return None
    size, stride = tuple(x.shape), x.stride()
    layout = root_layout(size, stride if is_dense(size, stride) else contiguous_stride(size), x.dtype)
    return new_storage(layout, transfers.to_device(x))


def _write(tensor: torch.Tensor, cell: Any, buffer: Buffer) -> None:
    """Make a buffer the contents of an argument."""
    if not is_device_tensor(tensor):
        tensor.copy_(transfers.to_host(buffer))
    elif type(cell) is Storage:
        write_buffer(cell, buffer)
    else:
        layout = cell.layout
        write_cast(cell, new_storage(in_rows(layout.size, layout.dtype), buffer))


def _keys(draws: int) -> list[int]:
    """Return the next keys of the device's generator, two numbers each."""
    ints: list[int] = []
    for _ in range(draws):
        ints += record.signed(random.default_generator.next_key())
    return ints


def _made_all(program: CapturedProgram, outputs: Sequence[Buffer], args: list[Any]) -> list[Any]:
    """Return the results of a call; those that share memory are views of one tensor."""
    bases: dict[int, Any] = {}
    results = []
    for result in program.results:
        if result.base >= 0:
            base = bases.get(result.base)
            if base is None:
                base = bases[result.base] = _made(result, outputs, args)
            results.append(base if result.view is None else _view(base, result))
        else:
            results.append(_made(result, outputs, args))
    return results


def _view(base: torch.Tensor, result: Result) -> torch.Tensor:
    view: Any = result.view
    if result.host or result.is_view and (view.dtype, view.bits) == (view.root.dtype, view.root.bits):
        return base.as_strided(view.size, view.stride, view.offset)
    return view_at(cast(LazyTensor, lazy(base)), view)


def _made(result: Result, outputs: Sequence[Buffer], args: list[Any]) -> Any:
    """Return one result of a call."""
    if result.position < 0:
        argument = args[result.argument] if result.argument >= 0 else result.constant
        return argument if result.view is None else view_at(cast(LazyTensor, lazy(argument)), result.view)
    layout: Any = result.layout
    buffer = outputs[result.position]
    if result.host:
        contents = transfers.to_host(buffer)
        return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype).copy_(contents)
    storage = Storage()
    storage.layout, storage.buffer = layout, buffer
    if result.shared:
        storage.shared = True
    return make(storage)
