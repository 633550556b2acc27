"""How long recording takes, without a clock in the recording of an op.

Timing each op would cost about as much as recording it does.  So the kernels are timed once, on this machine, on a
few small tensors; a step's recording then is what its ops cost by that measure, and the inference of the types of new
ops, which is timed where it happens.

What is timed are copies of the kernels that record into a trace of their own, so that threads may go on recording.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch

from lazytpu.dispatch import foreach, general, generated
from lazytpu.ir.layout import root_layout
from lazytpu.ir.op_schema import Op, aten, functional_twin, op_of
from lazytpu.ir.tree import Node, Trace, Value, operands
from lazytpu.observe import step_statistics
from lazytpu.tensors import storage
from lazytpu.tensors.tensor import make
from lazytpu.tracing import dynamic_scalars, record, views

_CHAIN = 100  # ops in a row that are timed together
_ROUNDS = 5  # of which the fastest counts
_TENSORS = 20  # in the lists of the op on lists that is timed

Kernel = Callable[..., Any]


class _Pace:
    """Seconds that recording takes, 0 where it was not measured yet.

    Attributes:
        fast_s: for an op with a fast kernel.
        general_s: for any other one.
        list_s: for an op on lists of tensors.
        tensor_s: for each tensor beyond the first of an op with many.
    """

    def __init__(self) -> None:
        self.fast_s = self.general_s = self.list_s = self.tensor_s = 0.0

    def measure(self) -> None:
        """Times the kernels, where it was not done yet."""
        if self.fast_s:
            return
        trace = Trace()
        quick, slow, listed = _kernels(trace)
        tensors = [_tensor() for _ in range(_TENSORS)]
        self.general_s = _time_of(trace, lambda: slow(tensors[0]))
        few = _time_of(trace, lambda: listed(tensors[:1], 1.0))
        many = _time_of(trace, lambda: listed(tensors, 1.0))
        self.tensor_s = max(0.0, (many - few) / (2 * (_TENSORS - 1)))  # each is an operand and a result
        self.list_s = few
        self.fast_s = _time_of(trace, lambda: quick(tensors[0]))

    def of_path(self, last: Node) -> float:
        """Seconds for the ops on the path to a node, all of which were recorded before."""
        self.measure()
        total, node = 0.0, last
        while node.parent is not None:
            total += self._of_op(node.op, node)
            node = node.parent
        return total

    def _of_op(self, op: Op, node: Node) -> float:
        if generated.can_generate(op) and len(node.values) == 1:
            return self.fast_s
        more = max(0, sum(type(x) is Value for x in operands(node)) + len(node.values) - 2)
        return (self.list_s if foreach.can_take(op) else self.general_s) + more * self.tensor_s


def _kernels(trace: Trace) -> tuple[Kernel, Kernel, Kernel]:
    """A fast kernel of one tensor, a general one, and one that writes a list, which record into ``trace``."""
    copies = _copies(trace, storage, dynamic_scalars, record, views, general, generated, foreach)
    relu, add = op_of(aten.relu.default), aten._foreach_add_.Scalar
    twin = functional_twin(add)
    assert twin is not None
    slow = copies[general]["functional"](aten.relu.default)
    listed = copies[foreach]["in_place"](op_of(add, twin), copies[general]["in_place"](add, twin))
    return copies[generated]["functional"](relu, slow), slow, listed


def _copies(trace: Trace, *modules: ModuleType) -> dict[ModuleType, dict[str, Any]]:
    """Modules to their names, with functions in place of theirs that use another trace, and each other."""
    lock = threading.RLock()
    copies = {module: dict(vars(module)) for module in modules}
    of_name = {module.__name__: names for module, names in copies.items()}
    for names in copies.values():
        names |= {name: _copy(f, of_name) for name, f in names.items() if type(f) is FunctionType}
        ours = {"trace": trace, "lock": lock, "watchers": [], "after_write": [], "cut_oversized": lambda: None}
        names |= {name: x for name, x in ours.items() if name in names}
    # what was imported from another of the modules, too
    for names in copies.values():
        for name, f in names.items():
            home = of_name.get(getattr(f, "__module__", ""))
            if type(f) is FunctionType and home is not None and f.__globals__ is not home:
                names[name] = home[f.__name__]
    return copies


def _copy(f: FunctionType, of_name: dict[str, dict[str, Any]]) -> FunctionType:
    """A function whose globals are the copied ones; itself where its module has none."""
    names = of_name.get(f.__module__)
    if names is None or f.__closure__ is not None:
        return f
    made = FunctionType(f.__code__, names, f.__name__, f.__defaults__)
    made.__kwdefaults__ = f.__kwdefaults__
    return made


def _tensor() -> torch.Tensor:
    """A small tensor with contents that nobody looks at."""
    return make(storage.new_storage(root_layout((2,), (1,), torch.float32), object()))


def _time_of(trace: Trace, call: Callable[[], Any]) -> float:
    """Seconds that a kernel takes for an op that was recorded before."""
    best = float("inf")
    made = []
    for i in range(_ROUNDS + 1):
        trace.next_step()
        trace.pending.clear()
        call()  # loads its operands
        began = time.perf_counter()
        for _ in range(_CHAIN):
            made.append(call())
        if i:  # the first round makes the nodes
            best = min(best, time.perf_counter() - began)
    return best / _CHAIN


_pace = _Pace()


def register() -> None:
    """Lets the ledger ask here."""
    step_statistics.use_pace(_pace.of_path)
