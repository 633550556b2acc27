"""Walk an FX graph of aten ops: `AtenInterpreter`, whose subclasses say what values, constants and op calls are."""

from __future__ import annotations

import torch
from torch._higher_order_ops.effects import with_effects
from torch.fx.node import Target

from lazytpu.errors import LazyTPUError, UnsupportedOpError
from lazytpu.ir.op_schema import NO_COMPUTATION, Arg, OpOverload
from lazytpu.location.fx_site import site_of
from lazytpu.lowering.registry import Args, Kwargs, Results


class AtenInterpreter(torch.fx.Interpreter):
    """Run a graph of aten ops on values of another kind than tensors, such as jax arrays.

    The graph has *placeholders*, *get_attr* of tensors and of other graphs, *call_function* of aten overloads, of
    higher-order ops and of Python functions of sizes (``operator.mul``) or results (``operator.getitem``), and one
    *output*.

    Attributes:
        node: the FX node that is being run; its type is in ``meta["val"]``.
    """

    node: torch.fx.Node

    def __init__(self, module: torch.fx.GraphModule, *, keep_values: bool = False) -> None:
        """Take a graph; ``keep_values`` leaves the value of every node in ``env``, also after its last use."""
        super().__init__(module, garbage_collect_values=not keep_values)
        self.extra_traceback = False  # errors name the user's line, and not FX's

    def evaluate(self, *inputs: object) -> Results:
        """Run the graph on the values of its placeholders; return what it returns."""
        return self.run(*inputs, enable_io_processing=False)

    def constant(self, found: object) -> object:
        """Return the value of an attribute of the module that is no graph."""
        return found

    def body(self, module: torch.fx.GraphModule) -> Arg:
        """Return what a higher-order op is given for a graph inside the graph."""
        raise unexpected(self.node)

    def call_aten(self, op: OpOverload, args: Args, kwargs: Kwargs) -> Results:
        """Call an aten op."""
        raise NotImplementedError

    def higher_order(self, op: torch._ops.HigherOrderOperator, args: Args, kwargs: Kwargs) -> Results:
        """Call a higher-order op."""
        raise UnsupportedOpError(f"{op} cannot be part of a graph", at=site_of(self.node).describe())

    def run_node(self, n: torch.fx.Node) -> Results:
        """Run a node on the values of its operands, which come in plain lists and tuples."""
        self.node = n
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return getattr(self, n.op)(n.target, plain(tuple(args)), {k: plain(v) for k, v in kwargs.items()})

    def get_attr(self, target: Target, args: Args, kwargs: Kwargs) -> Results:
        found = self.fetch_attr(str(target))
        return self.body(found) if isinstance(found, torch.fx.GraphModule) else self.constant(found)

    def call_function(self, target: Target, args: Args, kwargs: Kwargs) -> Results:
        if target is with_effects and args[1] in NO_COMPUTATION:
            return args[0], None  # the token that orders what has effects, and the result of the check
        if isinstance(target, torch._ops.HigherOrderOperator):
            return self.higher_order(target, args, kwargs)
        if not isinstance(target, OpOverload):
            return super().call_function(target, args, kwargs)
        return None if target in NO_COMPUTATION else self.call_aten(target, args, kwargs)

    def call_method(self, target: Target, args: Args, kwargs: Kwargs) -> Results:
        raise unexpected(self.node)

    def call_module(self, target: Target, args: Args, kwargs: Kwargs) -> Results:
        raise unexpected(self.node)


def unexpected(node: torch.fx.Node) -> LazyTPUError:
    """Return the error for a kind of node that a graph of aten ops does not have."""
    return LazyTPUError(f"a graph of aten ops has no {node.op}", at=site_of(node).describe(), given=str(node))


def plain(x: Arg) -> Arg:
    """Return FX's immutable lists and tuples as the plain ones that rules take."""
    if isinstance(x, tuple):
        return tuple([plain(e) for e in x])
    return [plain(e) for e in x] if isinstance(x, list) else x
