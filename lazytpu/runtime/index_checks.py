"""Keep the reports of ``lazytpu.config.check_bounds`` until a read: indices, divisors and values that are refused."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from lazytpu.errors import DivisionByZeroError, LazyTPUError, OutOfBoundsError, RefusedValueError
from lazytpu.ir.graph import graph_of
from lazytpu.ir.tree import Node, Value, operands
from lazytpu.lowering.bounds import DIVISOR, REASONS, VALUE, is_checked
from lazytpu.runtime import transfers
from lazytpu.runtime.client import Buffer


@dataclass(frozen=True, slots=True)
class _Report:
    """What one run of a graph found.

    Attributes:
        buffer: i64[n,4], see lowering/bounds.py; may still be computing.
        path, outputs: what ran, to name the op and the line if need be.
    """

    buffer: Any  # a jax.Array, whose `is_ready` its stub leaves out
    path: Node
    outputs: tuple[Value, ...]


_reports: list[_Report] = []
_lock = threading.Lock()


def checked_nodes(last: Node) -> list[Node]:
    """Return the nodes up to ``last`` whose indices are checked; they run even if nobody holds their results."""
    return [node for node in last.path() if is_checked(node.op.recorded)]


def note(buffer: Buffer, path: Node, outputs: tuple[Value, ...]) -> None:
    """Keep the report of a run, and forget earlier ones that are done and found nothing."""
    with _lock:
        _reports[:] = [r for r in _reports if not r.buffer.is_ready() or _bad_row(r) is not None]
        _reports.append(_Report(buffer, path, outputs))


def raise_if_any() -> None:
    """Wait for the reports, forget them, and raise what the first bad one says.

    Raises:
        OutOfBoundsError: an index was out of range in a graph that ran since the last call.
        DivisionByZeroError: a divisor of whole numbers was 0 in one.
        RefusedValueError: an op got values in one that eager refuses, such as a probability of 2.
    """
    if not _reports:
        return
    with _lock:
        taken, _reports[:] = list(_reports), []
    for report in taken:
        row = _bad_row(report)
        if row is not None:
            raise _error(report, row)


def _bad_row(report: _Report) -> list[int] | None:
    rows: list[list[int]] = transfers.to_host(report.buffer).tolist()
    return next((row for row in rows if row[0] >= 0), None)


def _error(report: _Report, row: list[int]) -> LazyTPUError:
    position, index, dim, size = row
    node = graph_of(report.path, report.outputs, checked=checked_nodes(report.path)).nodes[position]
    at = node.site.text
    given = ", ".join(repr(x.layout) for x in operands(node) if type(x) is Value)
    kind: type[LazyTPUError]
    if dim == DIVISOR:
        kind, found = DivisionByZeroError, "a whole number is divided by zero"
        left = "numbers that mean nothing in those places"
    elif dim == VALUE:
        kind, found, left = RefusedValueError, REASONS[size], "a result that means nothing"
    else:
        kind, found = OutOfBoundsError, f"index {index} is out of bounds for dimension {dim} with size {size}"
        left = "the position clamped (a read) or left out (a write)"
    return kind(f"{node.op.name}: {found}", at=at, given=given, fix=f"the step has run all the same, with {left}")
