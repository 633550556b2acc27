"""Graphs that torch captured with symbolic sizes: XLA's programs have fixed ones, so each set of sizes has its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def has_symbols(module: torch.fx.GraphModule) -> bool:
    """Return whether a size, or a number among the arguments, is symbolic."""
    return any(_is_symbolic(node.meta.get("val")) for node in module.graph.nodes)


def _is_symbolic(x: object) -> bool:
    if isinstance(x, torch.Tensor):
        return any(not isinstance(n, int) for n in (*x.shape, *x.stride()))
    if isinstance(x, (list, tuple)):
        return any(_is_symbolic(e) for e in x)
    return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))


def with_sizes(module: torch.fx.GraphModule, args: Sequence[object]) -> torch.fx.GraphModule:
    """Return the same graph for arguments of these sizes, with a placeholder for each argument."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # half a second to import
    from torch.fx.traceback import preserve_node_meta

    def fake(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    def call(*given: Any) -> Any:
        return torch.fx.Interpreter(module).run(*given)

    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), torch.no_grad(), preserve_node_meta():
        return make_fx(call, tracing_mode="fake")(*[fake(x) for x in args])
