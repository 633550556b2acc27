"""`eager` runs each op at once, `break_at` stops where an op is recorded."""

from __future__ import annotations

import bdb
import pdb
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from lazytpu.config import config
from lazytpu.debug import eager_mode as each_op
from lazytpu.ir.op_schema import display_name, functional_variant
from lazytpu.ir.tree import Node, trace
from lazytpu.location.site import is_user_file
from lazytpu.observers import Observer


@contextmanager
def eager(on: bool = True) -> Iterator[None]:
    """Run each op inside at once, as ``lazytpu.config.eager = True`` does: errors are raised at its own line.

    Example:
        >>> with lazytpu.debug.eager():  # doctest: +SKIP
        ...     loss = net(x).sum()
    """
    before = config.eager
    config.eager = on
    try:
        yield
    finally:
        config.eager = before


class Break(Observer):
    """A breakpoint set by `break_at`; `remove`, or the end of ``with``, removes it."""

    def __init__(self, op: str, call: Callable[[Node], None] | None) -> None:
        self.op = op
        self._call = call
        self._busy = False  # in the debugger, where ops may be recorded too
        self._recorded_again = False  # a tensor was read in the debugger, so the op is recorded a second time
        each_op.watch(self)
        self._set = True

    def op_new(self, node: Node) -> None:
        """Stop, if it is the op."""
        if self._busy or self._recorded_again or not _matches(node, self.op):
            return
        step = trace.step
        self._busy = True
        try:
            if self._call is not None:
                self._call(node)
            else:
                _stop(node)
        finally:
            self._busy = False
            self._recorded_again = trace.step != step

    def op_recorded(self) -> None:
        """Be ready for the next op."""
        self._recorded_again = False

    def remove(self) -> None:
        """Remove the breakpoint."""
        if self._set:
            self._set = False
            each_op.unwatch(self)

    def __enter__(self) -> Break:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def break_at(op: str, call: Callable[[Node], None] | None = None) -> Break:
    """Stop in the debugger at your line just before an op is recorded there, every time.

    Args:
        op: its name in the IR: ``aten.mm``, ``aten.add.Tensor``, or ``aten.add`` for all overloads.  An in-place op is
            recorded as its functional variant: ``x.add_(y)`` as ``aten.add.Tensor``.  An op without a lowering runs on
            the CPU and is not recorded, so it stops nowhere: see `lazytpu.explain`.
        call: called with the node instead of the debugger: ``node.op.name``, ``node.args``, ``node.kwargs``,
            ``node.layout`` (the type of the result), ``node.site``.

    Returns:
        The breakpoint: call its ``remove()``, or use ``with lazytpu.debug.break_at(...):``.

    Raises:
        ValueError: there is no such op, or none is recorded under that name.
    """
    problem = _problem_with(op)
    if problem:
        raise ValueError(f"{problem}; use the names that lazytpu.ir_text() shows, such as 'aten.mm'")
    return Break(op, call)


_WITH_BODIES = ("cond", "while_loop", "scan", "associative_scan", "map")


def _problem_with(op: str) -> str:
    """Return why nothing is ever recorded under a name; empty where something may be."""
    namespace, _, name = op.partition(".")
    name, _, overload = name.partition(".")
    if not name:
        return "" if op in _WITH_BODIES else f"{op!r} is not the name of an op"
    packet = getattr(getattr(torch.ops, namespace), name, None) if namespace.isidentifier() else None
    if packet is None or overload and not hasattr(packet, overload):
        return f"there is no op {op!r}"
    found = [getattr(packet, each) for each in ([overload] if overload else packet.overloads())]
    variants = [functional_variant(each) if each._schema.is_mutable else None for each in found]
    recorded = next(filter(None, variants), None)
    if recorded is None or not all(each._schema.is_mutable for each in found):
        return ""
    return f"{op!r} is recorded as {display_name(recorded)!r}"


def _matches(node: Node, op: str) -> bool:
    name = str(node.op.name)
    return name == op or name.startswith(f"{op}.") or f"{name}.default" == op


def _stop(node: Node) -> None:
    types = ", ".join(repr(v.layout) for v in node.values if v is not None)
    print(f"{node.op.name} -> {types} is about to be recorded at {node.site.describe()}", file=sys.stderr)
    frame = _user_frame()
    if frame is None:
        breakpoint()
        return
    debugger = pdb.Pdb(skip=["lazytpu.*", "torch.*"])
    debugger.reset()
    debugger.interaction(frame, None)
    if debugger.quitting:
        raise bdb.BdbQuit
    if debugger.stoplineno != -1:  # step or next: goes on from the user's frame
        at: FrameType | None = frame
        while at is not None:
            at.f_trace = debugger.trace_dispatch
            debugger.botframe = at
            at = at.f_back
        sys.settrace(debugger.trace_dispatch)


def _user_frame() -> FrameType | None:
    """Return the innermost frame of the user, of the main thread where this one has none (the backward pass)."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    for start in (sys._getframe(1), main):
        frame: FrameType | None = start
        while frame is not None:
            if is_user_file(frame.f_code.co_filename):
                return frame
            frame = frame.f_back
    return None
