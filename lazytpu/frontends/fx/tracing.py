"""A torch module traced into FX graphs of functional aten ops: its forward pass, and its gradient as torch has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lazytpu.dispatch.recurrent import TracedAsOne
from lazytpu.lowering.decompose import Undecomposed

_PASS_ON = {
    torch.ops.aten.clone.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.view_as.default,
}


@dataclass(frozen=True)
class TensorType:
    """The type of a tensor that a module is traced with."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def differentiable(self) -> bool:
        """Whether a tensor of this type can have a gradient."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass
class TracedModule:
    """A module's forward pass for inputs of certain types.

    Attributes:
        forward: ``(*parameters, *buffers, *inputs) -> (tensors it returns, new buffers)``.
        results: for each leaf of what it returns its position among those tensors, or ``(constant,)``; ``spec`` is how
            they nest.
        types: of the tensors it returns.
        changed: for each buffer whether the forward pass changes it.
        random: whether it draws random numbers.
        differentiable: which of the inputs of ``forward`` have a gradient.
    """

    forward: torch.fx.GraphModule
    results: list[Any]
    spec: TreeSpec
    types: list[TensorType]
    changed: list[bool]
    random: bool
    differentiable: list[int]
    trace_backward: Callable[[], torch.fx.GraphModule]
    _backward: list[torch.fx.GraphModule] = field(default_factory=list)

    @property
    def backward(self) -> torch.fx.GraphModule:
        """``(*inputs of forward, *cotangents of what can have one) -> gradients of those at differentiable``."""
        if not self._backward:
            self._backward.append(self.trace_backward())
        return self._backward[0]

    def unflatten(self, tensors: Sequence[Any]) -> object:
        """Return what the module returns, of the tensors that ``forward`` gives; mappings as plain dictionaries."""
        leaves = [r[0] if isinstance(r, tuple) else tensors[r] for r in self.results]
        nested = tree_unflatten(leaves, self.spec)
        return dict(nested) if isinstance(nested, Mapping) else nested


def trace_module(
    module: torch.nn.Module,
    parameters: Mapping[str, TensorType],
    buffers: Mapping[str, TensorType],
    inputs: Sequence[TensorType],
    call: Callable[[Sequence[torch.Tensor]], tuple[tuple[object, ...], dict[str, object]]],
    training: bool,
) -> TracedModule:
    """Trace the forward pass of a module.

    Args:
        parameters, buffers: name to the type it is given in, for all the module has.
        inputs: types of the tensors among the arguments.
        call: makes the arguments of ``forward`` of those tensors.
        training: whether the module is in training mode.

    Raises:
        Whatever the module raises; among it torch's error for Python that looks at the values of tensors.
    """
    device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    types = [*parameters.values(), *buffers.values(), *inputs]
    n, m = len(parameters), len(parameters) + len(buffers)
    noted: dict[str, Any] = {}

    def forward(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        state = {name: t.clone() for name, t in zip(buffers, tensors[n:m], strict=True)}
        everything = {**dict(zip(parameters, tensors[:n], strict=True)), **state}
        args, kwargs = call(tensors[m:])
        output = torch.func.functional_call(module, everything, args, kwargs)
        leaves, noted["spec"] = tree_flatten(output)
        found = [x for x in leaves if isinstance(x, torch.Tensor)]
        places = iter(range(len(found)))
        noted["results"] = [next(places) if isinstance(x, torch.Tensor) else (x,) for x in leaves]
        noted["types"] = [TensorType(tuple(x.shape), x.dtype) for x in found]
        return found, list(state.values())

    differentiable = [i for i, t in enumerate(types) if t.differentiable and not n <= i < m]

    def backward(*tensors: torch.Tensor) -> list[torch.Tensor]:
        given, cotangents = list(tensors[: len(types)]), tensors[len(types) :]
        wanted = [given[i].detach().requires_grad_() for i in differentiable]
        for i, t in zip(differentiable, wanted, strict=True):
            given[i] = t
        with torch.enable_grad():
            results = [x for x in forward(*given)[0] if x.is_floating_point() or x.is_complex()]
        pairs = [(x, g) for x, g in zip(results, cotangents, strict=True) if x.requires_grad]
        if not pairs:
            return [torch.zeros_like(t) for t in wanted]
        found = torch.autograd.grad([x for x, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]

    def trace(function: Callable[..., Any], more: Sequence[TensorType] = ()) -> torch.fx.GraphModule:
        with _mode_of(module, training), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            with mode:
                fakes = [torch.empty(t.size, dtype=t.dtype, device=device) for t in (*types, *more)]
            functional = dispatch_functionalize(function, FunctionalTensorMode())
            # The dispatcher in Python has the form of batch norm that says that it changes the statistics.
            with TracedAsOne(), enable_python_dispatcher():
                return make_fx(functional, decomposition_table=Undecomposed(), tracing_mode="fake")(*fakes)

    with torch.no_grad():
        graph = trace(forward)
    return TracedModule(
        graph,
        noted["results"],
        noted["spec"],
        noted["types"],
        _changed(graph, n, m),
        any(_draws(node) for node in graph.graph.nodes),
        differentiable,
        lambda: trace(backward, [t for t in noted["types"] if t.differentiable]),
    )


@contextmanager
def _mode_of(module: torch.nn.Module, training: bool) -> Iterator[None]:
    """Put the module into training or evaluation mode for a while."""
    modes = {m: m.training for m in module.modules()}
    try:
        if module.training != training:
            module.train(training)
        yield
    finally:
        for m, mode in modes.items():
            m.training = mode


def _draws(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _changed(graph: torch.fx.GraphModule, first: int, last: int) -> list[bool]:
    """Return for each buffer whether what the graph returns for it is something else than it was given."""
    nodes: Any = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    new = nodes[-1].args[0][1]

    def source(node: Any) -> Any:
        while node.op == "call_function" and node.target in _PASS_ON:
            node = node.args[0]
        return node

    return [source(node) is not placeholders[first + i] for i, node in enumerate(new)]
