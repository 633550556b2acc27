"""`check`: compare every recorded op with the same op on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lazytpu.debug.on_cpu import ScalarInputs, run_on_cpu, why_not, wide
from lazytpu.debug.values import describe, observing, results_of
from lazytpu.ir.site import Site
from lazytpu.ir.tree import Node, Value, operands

CHUNK_BYTES = 256 << 20
"""How much is copied to the CPU at a time; at least the results of one op."""

_TOLERANCES = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.complex64: 1e-5}
_TOLERANCES |= {torch.float16: 2e-3, torch.complex32: 2e-3, torch.bfloat16: 1.6e-2}
_ROUNDING = 8  # a result may be this many times as far from that in float64 as the CPU's is


@dataclass(frozen=True, slots=True)
class Difference:
    """An op whose result differs from the CPU's.

    Attributes:
        op, site: the aten op and the user's line.
        operands: types and ranges of its tensor operands.
        result: type and range of the device's result.
        largest: the largest difference, ``relative`` to the largest magnitude of the CPU's result.
        index: where that is; the element is ``ours`` on the device and ``theirs`` on the CPU.
        differing, elements: how many elements are beyond the tolerance, out of how many.
    """

    op: str
    site: Site
    operands: tuple[str, ...]
    result: str
    largest: float
    relative: float
    index: tuple[int, ...]
    ours: bool | float | complex
    theirs: bool | float | complex
    differing: int
    elements: int

    def __str__(self) -> str:
        lines = [
            f"{self.op} differs from the CPU by {self.largest:.3g} (relative {self.relative:.2g}): "
            f"{self.ours} instead of {self.theirs} at {list(self.index)}; "
            f"{self.differing} of {self.elements} elements",
            f"  at    {self.site.describe()}",
            *[f"  with  {text}" for text in self.operands],
            f"  got   {self.result}",
        ]
        return "\n".join(lines)


@dataclass(slots=True)
class Checked:
    """What `check` found.

    Attributes:
        difference: the first op that differs, None where none does.
        compared: how many ops were compared, up to that one.
        skipped: how often each (op, why it was not compared) occurred.
    """

    difference: Difference | None = None
    compared: int = 0
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        """Whether no op differs."""
        return self.difference is None

    def __str__(self) -> str:
        ops = "1 op" if self.compared == 1 else f"{self.compared} ops"
        first = f"{ops} compared with the CPU" + (", all equal" if self.ok else "")
        notes = [
            f"  not compared: {op} {why}" + (f" ({n} times)" if n > 1 else "") for (op, why), n in self.skipped.items()
        ]
        return "\n".join([first, *([str(self.difference)] if self.difference else []), *notes])

    __repr__ = __str__


def check(function: Callable[..., object], *args: object, rtol: float | None = None, **kwargs: object) -> Checked:
    """Run a function on the device, and every op that it records on the CPU too, and compare.

    Each op is compared by itself: the CPU gets the operands that the op had on the device, so the first difference is
    the op that is wrong, not one that got a wrong operand.  The graphs run as usual, and an extra time with all of
    their values as outputs, so fusions may differ from those of the usual run.

    Args:
        function: a function; if it is compiled by `lazytpu.compile`, it is recorded this time.
        args, kwargs: for the function.
        rtol: allowed difference relative to the largest magnitude of the result; by default 1e-5 for f32, 1e-10 for
            f64, 2e-3 for f16, 1.6e-2 for bf16.  More is allowed where the CPU's result is about as far from that in
            float64.  Integers, bools, NaN and infinities must be equal.

    Returns:
        The first difference, how many ops were compared, and which were not.

    Example:
        >>> assert lazytpu.debug.check(train_step, x, y).ok  # doctest: +SKIP
    """
    found = Checked()
    with observing(lambda pending: compare_ops(pending.last.path(), pending, found, rtol), "check"):
        held = function(*args, **kwargs)  # until the cut
    del held
    return found


class DeviceValues(ScalarInputs, Protocol):
    """Knows the values of a graph on the device."""

    def contents(self, values: Sequence[Value]) -> dict[Value, torch.Tensor]: ...


def compare_ops(path: Sequence[Node], device: DeviceValues, found: Checked, rtol: float | None) -> None:
    """Compare the ops of a graph one by one, up to the first that differs, and add to what is ``found``."""
    last_use = {x: i for i, node in enumerate(path) for x in operands(node) if type(x) is Value}
    known: dict[Value, torch.Tensor] = {}
    done = 0
    for chunk in _chunks(path):
        if not found.ok:
            return
        wanted = [x for node in chunk for x in operands(node) if type(x) is Value and x.node is None and x not in known]
        known |= device.contents([*wanted, *[v for node in chunk for v in results_of(node)]])
        for node in chunk:
            if found.ok:
                _check_op(node, known, device, found, rtol)
        done += len(chunk)
        known = {v: held for v, held in known.items() if last_use.get(v, -1) >= done}


def _chunks(path: Sequence[Node]) -> Iterator[list[Node]]:
    chunk: list[Node] = []
    size = 0
    for node in path:
        more = sum(v.layout.nbytes for v in results_of(node))
        if chunk and size + more > CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(node)
        size += more
    if chunk:
        yield chunk


def _check_op(
    node: Node, known: dict[Value, torch.Tensor], scalars: ScalarInputs, found: Checked, rtol: float | None
) -> None:
    reason = why_not(node)
    theirs: list[torch.Tensor | None] = []
    if not reason:
        try:
            theirs = run_on_cpu(node, known, scalars)
        except Exception as error:  # the CPU's kernel refuses the operands
            reason = f"fails on the CPU: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}"
    if reason:
        found.skipped[str(node.op.name), reason] += 1
        return
    found.compared += 1
    for index, (value, right) in enumerate(zip(node.values, theirs, strict=True)):
        if value is not None and right is not None:
            wrong = differing(known[value], right, rtol)
            if bool(wrong.any()) and not _is_rounding(node, index, known, right, scalars):
                found.difference = _difference(node, value, known, right, wrong)
                return


def differing(ours: torch.Tensor, theirs: torch.Tensor, rtol: float | None) -> torch.Tensor:
    """Return where they differ by more than is allowed."""
    if theirs.dtype not in _TOLERANCES:
        return ours != theirs
    allowed = (_TOLERANCES[theirs.dtype] if rtol is None else rtol) * _scale(theirs)
    a, b = wide(ours), wide(theirs)
    same = (a == b) | (a.isnan() & b.isnan())
    return ~(same | ((a - b).abs() <= allowed))


def _scale(x: torch.Tensor) -> float:
    """Return the largest finite magnitude."""
    magnitudes = wide(x).abs()
    finite = magnitudes[magnitudes.isfinite()]
    return float(finite.max()) if finite.numel() else 0.0


def _is_rounding(
    node: Node, index: int, known: dict[Value, torch.Tensor], theirs: torch.Tensor, scalars: ScalarInputs
) -> bool:
    """Return whether the CPU's result is about as far from that in float64."""
    if theirs.dtype not in _TOLERANCES or theirs.dtype in (torch.float64, torch.complex128):
        return False
    try:
        exact = run_on_cpu(node, known, scalars, double=True)[index]
    except Exception:  # no kernel for float64
        return False
    value = node.values[index]
    assert exact is not None and value is not None
    own = (wide(theirs) - exact).abs().nan_to_num(0.0).max()
    difference = (wide(known[value]) - exact).abs()
    return bool((difference <= _ROUNDING * own).all())


def _difference(
    node: Node, value: Value, known: dict[Value, torch.Tensor], theirs: torch.Tensor, wrong: torch.Tensor
) -> Difference:
    ours = known[value]
    a, b = wide(ours), wide(theirs)
    if not a.is_floating_point() and not a.is_complex():
        a, b = a.to(torch.float64), b.to(torch.float64)
    gaps = torch.where(wrong, (a - b).abs().nan_to_num(float("inf")), torch.zeros((), dtype=torch.float64))
    flat = int(gaps.reshape(-1).argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), gaps.shape)) if gaps.ndim else ()
    largest, scale = float(gaps.max()), _scale(theirs)
    texts = dict.fromkeys(x for x in operands(node) if type(x) is Value)
    return Difference(
        str(node.op.name),
        node.site,
        tuple(describe(x.layout, known[x]) for x in texts),
        describe(value.layout, ours),
        largest,
        largest / scale if scale else float("inf"),
        at,
        ours[at].item(),
        theirs[at].item(),
        int(wrong.sum()),
        wrong.numel(),
    )
