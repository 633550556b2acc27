"""How long recording takes, without a clock in the recording of an op.

Timing each op would cost about as much as recording it does.  So the kernels are timed once, on this machine, on a
few small tensors; a step's recording then is what its ops cost by that measure, and the inference of the types of new
ops, which is timed where it happens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from lazytpu.ir.tree import Node, Value, operands, trace
from lazytpu.kernels import fast, general
from lazytpu.recording.record import cell_of, load, lock
from lazytpu.recording.schema import aten, functional_twin, op_of
from lazytpu.reporting import ledger
from lazytpu.storage import storage_of
from lazytpu.tensor import LazyTensor

_CHAIN = 100  # ops in a row that are timed together
_ROUNDS = 5  # of which the fastest counts
_TENSORS = 20  # in the lists of the general op that is timed


class _Pace:
    """Seconds that recording takes: for an op with a fast kernel, and for another one and for each of its tensors."""

    def __init__(self) -> None:
        self.fast_s = self.general_s = self.tensor_s = 0.0

    def measure(self) -> bool:
        """Times the kernels, where it was not done yet; what is recorded for it is taken back.

        Returns:
            Whether they are timed: it is put off while threads of the user's run, as what they record meanwhile would
            be taken back too.
        """
        if self.fast_s:
            return True
        if _others_run():
            return False
        relu = general.functional(aten.relu.default)
        quick = fast.functional(op_of(aten.relu.default), relu)
        twin = functional_twin(aten._foreach_add_.Scalar)
        assert twin is not None
        listed = general.in_place(aten._foreach_add_.Scalar, twin)
        with torch.no_grad(), lock:
            tensors = [torch.empty(2, device=LazyTensor.device_type) for _ in range(_TENSORS)]  # type: ignore[attr-defined]
            fast_s = _time_of(lambda: quick(tensors[0]), tensors[:1])
            few = _time_of(lambda: listed(tensors[:1], 1.0), tensors[:1])
            many = _time_of(lambda: listed(tensors, 1.0), tensors)
        tensor_s = max(0.0, (many - few) / (2 * (_TENSORS - 1)))  # each is an operand and a result
        self.general_s, self.tensor_s = max(0.0, few - 2 * tensor_s), tensor_s
        self.fast_s = fast_s
        return True

    def of_path(self, last: Node) -> float:
        """Seconds for the ops on the path to a node, all of which were recorded before."""
        total, node = 0.0, last
        while node.parent is not None:
            if fast.can_generate(node.op) and len(node.values) == 1:
                total += self.fast_s
            else:
                tensors = sum(type(x) is Value for x in operands(node)) + len(node.values)
                total += self.general_s + tensors * self.tensor_s
            node = node.parent
        return total


def _others_run() -> bool:
    """Whether there are threads that may record: not our own, nor those of torch, which wait outside of a backward."""
    threads = [t for t in threading.enumerate() if t is not threading.current_thread()]
    return any(not t.name.startswith("lazytpu") and type(t).__name__ != "_DummyThread" for t in threads)


def _time_of(call: Callable[[], Any], tensors: list[torch.Tensor]) -> float:
    """Seconds that a kernel takes for an op on these tensors that was recorded before."""
    mark = trace.mark()
    best = float("inf")
    made = []
    try:
        storages = [storage_of(cell_of(t)) for t in tensors]
        values = [load(storage) for storage in storages]
        start = trace.cursor
        for i in range(_ROUNDS + 1):
            trace.cursor = start
            for storage, value in zip(storages, values, strict=True):
                storage.value = value
            began = time.perf_counter()
            for _ in range(_CHAIN):
                made.append(call())
            if i:  # the first round makes the nodes
                best = min(best, time.perf_counter() - began)
    finally:
        for storage in trace.rewind(mark):
            storage.value, storage.step, storage.dirty = None, 0, 0
    return best / _CHAIN


_pace = _Pace()


def register() -> None:
    """Lets the ledger ask here."""
    ledger.use_pace(_pace.measure, _pace.of_path)
