"""Conditions, loops and scans on device tensors: one node each, whose bodies are graphs of their own.

Torch hands a higher-order op its bodies as Python functions (Dynamo has traced them before, so they are pure).
Each is traced once for the types of its arguments.  Gradients are torch's: its autograd calls the same ops again
with other bodies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_dense, while_loop_op, while_loop_stack_output_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lazytpu.errors import UnsupportedOpError
from lazytpu.frontends.fx.higher_order import TABLE, HigherOrder, result_layouts
from lazytpu.frontends.fx.to_ir import subgraph_of, with_constants
from lazytpu.ir.subgraph import Subgraph
from lazytpu.location import site
from lazytpu.tensors.layout import Layout
from lazytpu.tensors.tensor import make
from lazytpu.tracing.infer import result_layout
from lazytpu.tracing.reading import read
from lazytpu.tracing.record import cell_of, is_device_tensor, lock, record
from lazytpu.tracing.transaction import Transaction

Body = Callable[..., Sequence[torch.Tensor]]  # or one tensor, of a condition
_bodies: weakref.WeakKeyDictionary[object, dict[object, Subgraph]] = weakref.WeakKeyDictionary()


def register() -> None:
    """Give torch's higher-order ops kernels for the device."""
    for higher in TABLE.values():
        if higher.op is not while_loop_op:
            higher.op.py_impl(DispatchKey.PrivateUse1)(partial(_call, higher))
    while_loop_op.py_impl(DispatchKey.PrivateUse1)(_while_loop)
    while_loop_stack_output_op.py_impl(DispatchKey.PrivateUse1)(_while_loop_stack_output)


def _call(higher: HigherOrder, *args: Any, mutated_arg_indices: str = "") -> Any:
    """Record one call of a higher-order op.

    Raises:
        UnsupportedOpError: the body writes to its arguments, as torch 2.15 allows.
    """
    if mutated_arg_indices:
        raise UnsupportedOpError(
            f"the body of {higher.op.name()} writes to its arguments",
            at=site.here().describe(),
            fix="let the body return what it computes",
        )
    named = dict(zip(higher.arguments, args, strict=True))
    given = _body_arguments(higher, named)
    for name, kind in higher.arguments.items():
        if kind == "body":
            named[name] = body_of(named[name], given)
        elif kind == "tensors":
            named[name] = [x for x in named[name] if isinstance(x, torch.Tensor)]
    bodies = [x for x in named.values() if isinstance(x, Subgraph)]
    _check_branches(higher, bodies)
    layouts = {name: [_layout(t) for t in x] for name, x in named.items() if isinstance(x, list)}
    op = higher.recorded(any(body.random for body in bodies))
    results = tuple(result_layouts(higher, named, layouts))
    with lock:
        transaction = Transaction()
        while transaction.open():
            node = record(op, list(named.values()), layouts=results)
            made = transaction.write_new(node.values)
    return tuple(with_constants(bodies[-1], [make(storage) for storage in made.values()]))


def _layout(tensor: torch.Tensor) -> Layout:
    """Return the layout of a device tensor, or of a number in a 0-dim CPU tensor."""
    return cell_of(tensor).layout if is_device_tensor(tensor) else result_layout(tensor)


def _body_arguments(higher: HigherOrder, named: dict[str, Any]) -> list[object]:
    """Return what each body is called with, tensors by their types and numbers as they are."""
    given: list[Any] = []
    for name in higher.body_inputs:
        sliced = name.endswith("*")
        for x in named[name.removesuffix("*")]:
            given.append((tuple(x.shape[sliced:]), x.dtype) if isinstance(x, torch.Tensor) else x)
    return given


def _check_branches(higher: HigherOrder, bodies: Sequence[Subgraph]) -> None:
    if "true_graph" in higher.arguments:
        types = [[(v.layout.size, v.layout.dtype) for v in body.graph.outputs] for body in bodies]
        if types[0] != types[1]:
            texts = [", ".join(repr(v.layout) for v in body.graph.outputs) for body in bodies]
            raise RuntimeError(f"the branches of torch.cond return different types: {texts[0]} and {texts[1]}")


def body_of(function: Body, given: Sequence[Any]) -> Subgraph:
    """Return the graph of a function of tensors.

    Args:
        function: returns a tensor, or a list or tuple of tensors and None.
        given: for each argument (shape, dtype), or the number that stands in its place.
    """
    known = _bodies.setdefault(function, {})
    key = tuple([(type(x), x) for x in given])
    if key not in known:
        known[key] = subgraph_of(trace(function, given))
    return known[key]


def trace(function: Body, given: Sequence[Any]) -> torch.fx.GraphModule:
    """Return the FX graph of functional aten ops that a function computes; arguments as for `body_of`."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # half a second to import

    device = torch.device(torch._C._get_privateuse1_backend_name(), 0)
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), torch.no_grad():
        fakes = [torch.empty(x[0], dtype=x[1], device=device) if isinstance(x, tuple) else x for x in given]
        positions = [i for i, x in enumerate(fakes) if isinstance(x, torch.Tensor)]

        def call(*tensors: torch.Tensor) -> Any:
            arguments = list(fakes)
            for position, tensor in zip(positions, tensors, strict=True):
                arguments[position] = tensor
            results = function(*arguments)
            return tuple(results) if isinstance(results, (list, tuple)) else (results,)

        pure = torch.func.functionalize(call, remove="mutations")
        module: torch.fx.GraphModule = make_fx(pure, tracing_mode="fake")(*[fakes[i] for i in positions])
        return module


def _while_loop(
    cond: Body, body: Body, carried: Sequence[object], additional: Sequence[object], mutated_arg_indices: str = ""
) -> object:
    """Record one node; run torch's own loop, which reads the condition in each iteration, where the state holds Python
    numbers or the bodies write to tensors from outside."""
    if mutated_arg_indices or not all(isinstance(x, torch.Tensor) for x in carried):
        return while_loop_dense(cond, body, carried, additional)
    return _call(TABLE[while_loop_op], cond, body, carried, additional)


def _while_loop_stack_output(cond: Body, body: Body, carried: Sequence[Any], additional: Sequence[Any]) -> object:
    """Return the state after every iteration, which gradients need.  Their number is read first: it is a shape."""
    if not all(isinstance(x, torch.Tensor) for x in carried):
        return while_loop_dense(cond, body, carried, additional, stack_output=True)
    n = len(carried)

    def goes_on(iterations: torch.Tensor, *rest: torch.Tensor) -> Any:
        return cond(*rest)

    def counted(iterations: torch.Tensor, *rest: torch.Tensor) -> Any:
        return iterations + 1, *body(*rest)

    zero = torch.zeros((), dtype=torch.int64, device=carried[0].device)
    iterations = int(read(_call(TABLE[while_loop_op], goes_on, counted, [zero, *carried], additional)[0], "while_loop"))
    if not iterations:
        return tuple([x.unsqueeze(0).clone() for x in carried])

    def step(*rest: torch.Tensor) -> Any:
        results = body(*rest[:n], *rest[n + 1 :])
        return *results, *[x.clone() for x in results]

    index = torch.arange(iterations, device=carried[0].device)
    return tuple(_call(TABLE[scan_op], step, list(carried), [index], additional)[n:])
