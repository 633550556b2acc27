"""How long recording takes, estimated: a clock around each op would cost about as much as recording it does.

One op and one more tensor of an op on lists are timed once, on this machine, between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import torch

from lazytpu.ir.tree import Node, Value, operands, trace
from lazytpu.observe import metrics
from lazytpu.runtime.client import Buffer
from lazytpu.tensors.layout import root_layout
from lazytpu.tensors.storage import new_storage
from lazytpu.tensors.tensor import make
from lazytpu.tracing import cutting, record

_foreach = torch.ops.aten._foreach_neg.default
_CHAIN, _ROUNDS, _TENSORS = 100, 5, 20
_RECORD = metrics.timer("record")


def add_estimates() -> None:
    """Estimate the time of the paths that were recorded since the last call, between two steps."""
    while cutting.recorded:
        last, usage = cutting.recorded.popleft()
        usage.record_s = usage.record_s or _estimate(last)
        _RECORD.add(usage.record_s)


def _estimate(last: Node) -> float:
    """Return the seconds that recording the path to a node takes."""
    op_s, tensor_s = _costs()
    path = last.path()
    tensors = sum(max(0, len(node.values) + sum(type(x) is Value for x in operands(node)) - 3) for node in path)
    return len(path) * op_s + tensors * tensor_s


@cache
def _costs() -> tuple[float, float]:
    """Return the seconds for an op, and for each tensor beyond those of a binary op."""
    buffer = cast(Buffer, object())  # nothing is run
    x, *tensors = [make(new_storage(root_layout((2,), (1,), torch.float32), buffer)) for _ in range(_TENSORS + 1)]
    op_s = _time_of(lambda: torch.relu(x))
    few, many = _time_of(lambda: _foreach(tensors[:1])), _time_of(lambda: _foreach(tensors))
    return op_s, max(0.0, (many - few) / (2 * (_TENSORS - 1)))  # each is an operand and a result


def _time_of(call: Callable[[], torch.Tensor | Sequence[torch.Tensor]]) -> float:
    """Return the seconds that recording an op takes that was recorded before.  Nothing of it runs or stays."""
    best = float("inf")
    with record.lock, torch.no_grad():
        known = set(trace.root.children)
        for _ in range(_ROUNDS + 1):  # the first makes the nodes
            call()  # loads the operands
            began = time.perf_counter()
            for _ in range(_CHAIN):
                call()
            best = min(best, time.perf_counter() - began)
            cutting.cut("mark_step")
        for key in set(trace.root.children) - known:
            del trace.root.children[key]
    return best / _CHAIN
