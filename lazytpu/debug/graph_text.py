"""Show what was recorded: the IR as text or drawing, StableHLO, and HLO before and after XLA's passes."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager

import torch
from jax.extend.mlir import ir
from jax.stages import Compiled, Lowered

from lazytpu.ir import printer
from lazytpu.ir.graph import Graph
from lazytpu.ir.op_schema import Arg
from lazytpu.runtime import compiler
from lazytpu.tracing.reading import pending_graph


def ir_text(*tensors: torch.Tensor) -> str:
    """Return the recorded graph as text, with the user's line and module path beside each op.

    Args:
        tensors: device tensors to show the graph of; all live tensors when none is given.

    Returns:
        One line for each node; ``graph() {...}`` without nodes when nothing is pending.

    Example:
        >>> x = torch.ones(2, device=lazytpu.device())
        >>> print(lazytpu.ir_text(x * 2))  # doctest: +SKIP
    """
    return printer.graph_text(pending_graph(tensors))


def ir_dot(*tensors: torch.Tensor) -> str:
    """Return the recorded graph in Graphviz's language; arguments as for `ir_text`."""
    return printer.graph_dot(pending_graph(tensors))


def stablehlo_text(*tensors: torch.Tensor) -> str:
    """Return the StableHLO the graph lowers to, with the user's lines as locations; arguments as for `ir_text`."""
    return stablehlo_of(compiler.lower(pending_graph(tensors)))


def hlo_text(*tensors: torch.Tensor, optimized: bool = False) -> str:
    """Return the HLO of the graph; arguments as for `ir_text`.

    Args:
        optimized: after XLA's passes (compiles the graph, without running it) instead of before.
    """
    lowered = compiler.lower(pending_graph(tensors))
    return optimized_hlo_of(lowered.compile()) if optimized else hlo_of(lowered)


def stablehlo_of(lowered: Lowered) -> str:
    """Return StableHLO with locations."""
    return str(lowered.as_text(debug_info=True))


def hlo_of(lowered: Lowered) -> str:
    """Return HLO before optimization, with ``op_name`` metadata."""
    return str(lowered.as_text(dialect="hlo", debug_info=True))


def optimized_hlo_of(compiled: Compiled) -> str:
    """Return HLO after optimization."""
    return str(compiled.as_text())


def gspmd() -> AbstractContextManager[object]:
    """Return a context in which HLO before optimization has shardings in the notation of XLA's older partitioner."""
    found: AbstractContextManager[object] = importlib.import_module("jax._src.config").use_shardy_partitioner(False)
    return found


def module_of(graph: Graph, name: str) -> tuple[Arg, list[int]]:
    """Return the HLO of a graph as a module of a name, and which inputs are its parameters.

    Inputs are those of the graph and then the arrays of numbers; jax leaves out what is not used.
    """
    lowered = compiler.lower(graph)
    module: Arg = lowered.compiler_ir()
    module.operation.attributes["sym_name"] = ir.StringAttr.get(name, context=module.context)
    return lowered.compiler_ir("hlo"), sorted(lowered._lowering.compile_args["kept_var_idx"])
