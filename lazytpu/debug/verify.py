"""``lazytpu.config.verify`` runs each program once beside torch's CPU kernels, before anyone gets its results.

The CPU computes the whole graph op by op from the program's inputs, once in the graph's dtypes and once in float64.
Where a result of the program is farther from both than rounding explains, the graph runs again with all of its values
as outputs, and op by op beside the CPU, to find the op.  If each op is right by itself, the fault may be in what XLA
fused; or the result depends on the last digits of the inputs, as one does that is chosen by comparing equal numbers.
So the CPU computes it again from inputs that differ in the last digit, and what moves that far is no fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np
import torch

from lazytpu.config import config
from lazytpu.debug.against_cpu import Checked, compare_ops, differing
from lazytpu.debug.on_cpu import run_on_cpu, why_not, wide
from lazytpu.debug.values import results_of
from lazytpu.errors import VerificationError
from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Node, Number, Value
from lazytpu.observe import logs, metrics
from lazytpu.observers import Observer, add
from lazytpu.runtime import compiler, launch, meshes, transfers
from lazytpu.runtime.client import Buffer, ScalarArray, Scalars
from lazytpu.runtime.executable import Executable

Contents = dict[Value, torch.Tensor]
_PERTURBATIONS = 3
_ROUNDING = 8  # a result may be this many times as far off as results that are right are from each other


class _FirstRun:
    """Starts an executable in place of ``compiled`` until it has run once and was found right."""

    _call = None  # for `Executable.shorten_call`

    def __init__(self, executable: Executable) -> None:
        self._executable_, self._compiled_ = executable, executable.compiled
        executable.compiled = executable.call = self

    def __call__(self, donated: list[Buffer], retained: list[Buffer], *scalars: ScalarArray) -> Sequence[Buffer]:
        executable = self._executable_
        copies = [jax.numpy.array(x, copy=True) for x in donated]  # if this raises, the tensors are what they were
        results: Sequence[Buffer] = self._compiled_(copies, retained, *scalars)
        program = _Program(executable.graph, donated, retained, scalars)
        problem = program.problem(results)
        if problem:
            raise VerificationError(problem, fix="report it, with lazytpu.stablehlo_text() of the step")
        executable.compiled = executable.call = self._compiled_
        metrics.count("verified_program")
        return results

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):  # what the shorter ways to call it are made of
            raise AttributeError(name)
        return getattr(self._compiled_, name)


class _Program:
    """A program with the inputs of one run: its values on the device and on the CPU."""

    def __init__(self, graph: Graph, donated: list[Buffer], retained: list[Buffer], scalars: Scalars) -> None:
        self.graph, self._scalars = graph, scalars
        order = [v for part in launch.split_donated(graph, graph.inputs) for v in part]
        self._buffers = dict(zip(order, [*donated, *retained], strict=True))
        self.inputs = {v: transfers.to_host(meshes.whole_of(x, v.layout.size)) for v, x in self._buffers.items()}
        # What the CPU cannot compute, or has another right result for, is the device's.
        self._taken = [node for node in graph.nodes if why_not(node)]
        self._from_device: Contents = {}

    def scalar(self, x: Number) -> float | complex:
        """Return the value of a scalar input."""
        array = self._scalars["fic".index(x.kind)]
        assert array is not None, "a kind that a graph has none of"
        found: float | complex = array[x.index].item()
        return found

    def contents(self, values: Sequence[Value]) -> Contents:
        """Return values that the device computes in a graph that has all of them as outputs."""
        made = tuple(dict.fromkeys(v for v in values if v.node is not None))
        found = {v: self.inputs[v] for v in values if v.node is None}
        if made:
            graph = replace(self.graph, outputs=made, donated=(), checked=False, concatenated=0, shardings=())
            buffers = [self._buffers[v] for v in graph.inputs]
            with jax.enable_x64(True):
                results = compiler.compile_graph(graph).compiled([], buffers, *self._scalars)
            found |= dict(zip(made, map(transfers.to_host, results), strict=True))
        return found

    def problem(self, results: Sequence[Buffer]) -> str:
        """Say what is wrong about the program's results; return nothing where they are right."""
        device = dict(zip(self.graph.outputs, self._outputs(results), strict=True))
        theirs, exact = self._on_cpu(self.inputs), self._on_cpu(self.inputs, double=True)
        suspects = [v for v in device if _is_off(device[v], theirs[v], exact[v])]
        if not suspects:
            return ""
        found = Checked()
        compare_ops(self.graph.nodes, self, found, None)
        if found.difference is not None:
            return f"a program computes something else than the CPU: {found.difference}"
        apart = self.contents([v for node in self.graph.nodes for v in results_of(node)])
        suspects = [v for v in suspects if bool(differing(device[v], apart[v], None).any())]
        moved = {v: [theirs[v], exact[v]] for v in suspects}
        for seed in range(_PERTURBATIONS if suspects else 0):
            other = self._on_cpu(_perturbed(self.inputs, seed))
            for v in suspects:
                moved[v].append(other[v])
        for v in suspects:
            if not _moves_as_far(device[v], moved[v]):
                return self._fused(v, device[v], theirs[v])
        return ""

    def _outputs(self, results: Sequence[Buffer]) -> list[torch.Tensor]:
        """Return the outputs on the CPU."""
        results = list(results)
        if self.graph.checked:
            results.pop()  # the report
        if self.graph.concatenated:
            results = [*results[:-1], *launch.split_concatenated(self.graph, results[-1])]
        sizes = [v.layout.size for v in self.graph.outputs]
        return [transfers.to_host(meshes.whole_of(x, size)) for x, size in zip(results, sizes, strict=True)]

    def _on_cpu(self, inputs: Contents, *, double: bool = False) -> Contents:
        """Return the outputs as the CPU computes them, in float64 if ``double``."""
        known = dict(inputs)
        for node, dead in zip(self.graph.nodes, self.graph.last_uses(), strict=True):
            known |= self._results(node, known, double)
            for v in dead:
                known.pop(v, None)
        return {v: known[v] for v in self.graph.outputs}

    def _results(self, node: Node, known: Contents, double: bool) -> Contents:
        if node not in self._taken:
            try:
                results = run_on_cpu(node, known, self, double=double)
            except Exception:  # the CPU has no kernel for it
                self._taken.append(node)
            else:
                found = dict(zip(node.values, results, strict=True))
                return {v: t for v, t in found.items() if v is not None and t is not None}
        if node.values[0] not in self._from_device:
            self._from_device |= self.contents([v for n in self._taken for v in results_of(n)])
        return {v: self._from_device[v] for v in results_of(node)}

    def _fused(self, value: Value, ours: torch.Tensor, theirs: torch.Tensor) -> str:
        node = value.node
        assert node is not None
        wrong = differing(ours, theirs, None)
        at = tuple(wrong.nonzero()[0].tolist())
        return (
            f"a program computes something else than the CPU, although each of its {len(self.graph.nodes)} ops is "
            f"right by itself: the result of {node.op.name} is {ours[at].item()} instead of {theirs[at].item()} at "
            f"{list(at)}; {int(wrong.sum())} of {wrong.numel()} elements\n  at    {node.site.describe()}"
        )


def _is_off(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> bool:
    """Return whether a result is farther than rounding from the CPU's and from that in float64."""
    wrong = differing(ours, theirs, None)
    return bool(wrong.any()) and not _moves_as_far(ours, [theirs, exact])


def _moves_as_far(ours: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Return whether results that are all right differ among themselves as much as ours does from them."""
    first, *rest = map(wide, others)
    if not first.is_floating_point() and not first.is_complex():
        same = torch.zeros(first.shape, dtype=torch.bool)
        for other in others:
            same |= ours == other
        return bool(same.all()) or any(bool((other != others[0]).any()) for other in others)
    mine = wide(ours)
    if bool((mine.isfinite() != first.isfinite()).any()):
        return any(bool((other.isfinite() != first.isfinite()).any()) for other in rest)
    return _largest(mine - first) <= _ROUNDING * max(_largest(other - first) for other in rest)


def _largest(difference: torch.Tensor) -> float:
    """Return the largest finite magnitude."""
    return float(difference.abs().nan_to_num(0.0, 0.0, 0.0).max()) if difference.numel() else 0.0


def _perturbed(inputs: Mapping[Value, torch.Tensor], seed: int) -> Contents:
    """Return inputs whose elements differ by up to one unit in the last place."""
    draws = np.random.default_rng(seed)

    def moved(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point() and not x.is_complex():
            return x
        signs = torch.from_numpy(draws.integers(-1, 2, tuple(x.shape)))
        return (x * (1 + torch.finfo(x.dtype).eps * signs)).to(x.dtype)

    return {v: moved(x) for v, x in inputs.items()}


class _Verifier(Observer):
    """Follows ``lazytpu.config.verify``."""

    def executable_made(self, executable: Executable) -> None:
        """Verify the first run."""
        if config.verify:
            _FirstRun(executable)
            logs.note("compile", "the next run of a program of %d ops is verified", len(executable.graph.nodes))


add(_Verifier())
