"""Run a graph op by op on a CPU, with torch's own kernels on the memory of the graph's buffers, without compiling it.

Random numbers are those of the compiled graph (`random_kernels`).  An op that has a body or no kernel on the CPU, or
whose kernel raises (one of XLA's clamps an index instead), runs by its lowering rule, compiled by itself.  Nothing is
copied but what a buffer cannot be: results that are not row-major, or that share memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lazytpu.dtypes import host_array, host_tensor, to_numpy
from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Node, Number, Value
from lazytpu.passes.clone import cloned, replaced
from lazytpu.runtime import client, compiler, executables, launch
from lazytpu.runtime.client import Buffer, ScalarArray, Scalars
from lazytpu.runtime.composed import COMPOSED, is_random
from lazytpu.runtime.cpu_kernels import Kernel, laid_out, plain_torch, results_of, scalar_operand
from lazytpu.runtime.executable import Executable
from lazytpu.runtime.random_kernels import draw

Contents = dict[Value, torch.Tensor]
_Step = tuple[Node, Kernel | None, list[Value]]  # an op, what runs it, and the values that nothing needs after it
_COUNTS = {"f": 0, "i": 1, "c": 2}
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.memory_format, torch.layout, torch.device}
_SHARED = {torch.float32, torch.float64, torch.float16, torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool}
_NUMPYS = {*map(to_numpy, _SHARED)}


def interpreted(graph: Graph) -> Executable:
    """Return what runs a graph once as an executable does, and donates nothing."""
    key, graph = graph.key, replace(graph, donated=(), uniform=())
    graph.__dict__["key"] = key  # it computes the same
    return compiler.executable_of(graph, Interpretation(graph), interpreted=True)


class Interpretation:
    """A graph that is called as jax's executable of it would be."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._steps: list[_Step] | None = None
        self._again = False

    def __call__(self, donated: list[Buffer], retained: list[Buffer], *scalars: ScalarArray) -> list[Buffer]:
        """Compute the outputs."""
        graph = self.graph
        with plain_torch(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # buffers are read-only, and nobody writes to them
            contents = {v: _tensor(x, v) for v, x in zip(graph.inputs, retained, strict=True)}
            taken = {t.untyped_storage().data_ptr() for t in contents.values()}
            run = _Run(graph, contents, scalars)
            for node, kernel, dead in self._each():
                run.add_results(node, kernel)
                for value in dead:
                    contents.pop(value, None)
            return client.put([_array(contents[v], taken) for v in graph.outputs])

    def _each(self) -> Iterable[_Step]:
        """Return the ops; they are kept from the second call on, for most graphs have one."""
        if self._steps is None:
            steps = zip(self.graph.nodes, map(kernel_of, self.graph.nodes), self.graph.last_uses(), strict=True)
            if not self._again:
                self._again = True
                return steps
            self._steps = [*steps]
        return self._steps


class _Run:
    """One run of a graph: what its ops take and give."""

    def __init__(self, graph: Graph, contents: Contents, scalars: Scalars) -> None:
        self.contents, self.scalars = contents, scalars
        self._outputs = {*graph.outputs}

    def add_results(self, node: Node, kernel: Kernel | None) -> None:
        """Run an op, and add the results that are there to the contents."""
        if kernel is not None:
            try:
                self._by_kernel(node, kernel)
                return
            except Exception:  # no kernel for these operands, or an error that XLA's op does not make
                pass
        self.contents.update(self._by_rule(node))

    def _by_kernel(self, node: Node, kernel: Kernel) -> None:
        contents = self.contents
        found = self._drawn(node) if kernel is draw else self._called(node, kernel)
        if type(found) is torch.Tensor and len(node.values) == 1:
            contents[node.value] = self._fitted(node, node.value, found)
            return
        made: Contents = {}
        for value, result in zip(node.values, results_of(found), strict=True):
            if value is None:
                continue
            if result is not None:
                made[value] = self._fitted(node, value, result)
            elif value in self._outputs:
                raise NotImplementedError(node.op.name)
        contents.update(made)

    def _called(self, node: Node, kernel: Kernel) -> object:
        contents = self.contents
        args = [
            contents.get(x) if type(x) is Value else x if type(x) in _PLAIN else replaced(x, self._operand)
            for x in node.args
        ]
        if node.kwargs:
            return kernel(*args, **{name: replaced(x, self._operand) for name, x in node.kwargs.items()})
        return kernel(*args)

    def _fitted(self, node: Node, value: Value, result: torch.Tensor) -> torch.Tensor:
        """Return a result as its type has it."""
        layout = value.layout
        if result.shape != layout.size:
            raise NotImplementedError(node.op.name)
        if result.dtype is not layout.dtype:
            result = result.to(layout.dtype)
        if "empty" in node.op.name:
            result.zero_()
        return result if result.stride() == layout.stride else laid_out(result, layout)

    def _drawn(self, node: Node) -> list[torch.Tensor | None]:
        kwargs = {name: replaced(x, self._operand_of_random) for name, x in node.kwargs.items()}
        return draw(node, [replaced(x, self._operand_of_random) for x in node.args], kwargs)

    def _operand_of_random(self, x: Value | Number) -> object:
        if type(x) is Number and not isinstance(x.dtype, torch.dtype):
            return self._number(x)
        return self._operand(x)

    def _operand(self, x: Value | Number) -> object:
        if type(x) is Value:
            return self.contents.get(x)  # None is what a composed op does not return or need
        assert type(x) is Number
        return scalar_operand(x, self._number(x).item() if x.dtype != "rng" else 0)

    def _number(self, x: Number) -> Any:
        pack = self.scalars[_COUNTS[x.kind]]
        assert pack is not None, "a kind that the graph has none of"
        return pack[x.index : x.index + 2] if x.dtype == "rng" else pack[x.index]

    def _by_rule(self, node: Node) -> Contents:
        graph, inputs, numbers = alone(node)
        with torch._C._EnableTorchFunction():  # rules run as they do where the graph is compiled
            executable, _ = executables.executable_for(graph, counter="compile_op")
        if executable.needs:
            launch.ask_for_memory(executable)
        for value in inputs:
            if value not in self.contents and value.node is not None:  # a kernel computed the rest of its op's results
                self.contents.update(self._by_rule(value.node))
        buffers = client.put([host_array(self.contents[v], copy=False) for v in inputs])
        packs = [self._pack(kind, [n for n in numbers if n.kind == kind]) for kind in _COUNTS]
        results = executable.compiled([], buffers, *packs)
        made = node.results
        return {v: laid_out(_tensor(x, v), v.layout) for v, x in zip(made, results, strict=True)}

    def _pack(self, kind: str, numbers: list[Number]) -> object:
        if not numbers:
            return None
        return np.concatenate([np.atleast_1d(self._number(n)) for n in numbers])


def kernel_of(node: Node) -> Kernel | None:
    """Return what runs an op without compiling its rule, `draw` for random numbers; None where there is nothing."""
    if is_random(node):
        return draw
    recorded = node.op.recorded
    if recorded in COMPOSED:
        return COMPOSED[recorded]
    if getattr(recorded, "namespace", "") not in ("aten", "prims"):
        return None
    return getattr(recorded, "_op", recorded)  # without the frame of `OpOverload.__call__`


def alone(node: Node) -> tuple[Graph, list[Value], list[Number]]:
    """Return a graph of one op, equal for equal ops; and which values and scalar inputs of its graph it takes."""
    inputs: dict[Value, Value] = {}
    numbers: dict[Number, Number] = {}
    counts = [0, 0, 0]

    def own(x: Value | Number) -> Value | Number:
        if type(x) is Value:
            return inputs.setdefault(x, Value(None, len(inputs), x.layout))
        assert type(x) is Number
        if x not in numbers:
            at = _COUNTS[x.kind]
            numbers[x] = Number(x.kind, counts[at], x.dtype)
            counts[at] += 2 if x.dtype == "rng" else 1
        return numbers[x]

    args = tuple(replaced(x, own) for x in node.args)
    kwargs = {name: replaced(x, own) for name, x in node.kwargs.items()}
    copy = cloned(node, args, kwargs, results=False)
    outputs = tuple(v for v in copy.values if v is not None)
    nf, ni, nc = counts
    return Graph((copy,), tuple(inputs.values()), outputs, (), (nf, ni, nc)), [*inputs], [*numbers]


def _tensor(buffer: Buffer, value: Value) -> torch.Tensor:
    """Return the contents of a buffer as a tensor of a layout, which shares its memory where it can."""
    buffer.block_until_ready()  # a view of one that failed ends the process
    array, layout = np.asarray(buffer), value.layout
    if array.dtype in _NUMPYS and array.size:
        tensor = torch.from_numpy(array)
        if tensor.dtype is layout.dtype and tensor.stride() == layout.stride:
            return tensor
    return laid_out(host_tensor(array).to(layout.dtype), layout)


def _array(tensor: torch.Tensor, taken: set[int]) -> np.ndarray[Any, Any]:
    """Return the contents of a tensor: in its memory, unless that is not its own or is ``taken``."""
    tensor = tensor.resolve_conj().resolve_neg()
    storage = tensor.untyped_storage()
    own = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in taken
    taken.add(storage.data_ptr())
    if own and tensor.dtype in _SHARED and tensor.numel():
        return tensor.numpy()
    return host_array(tensor, copy=not own)
