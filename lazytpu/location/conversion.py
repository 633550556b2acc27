"""What the program wrote where a tensor becomes a Python number: ``item``, ``float``, ``if``.

Torch calls one kernel for all of them.  The instruction at which the calling frame stands says which it was, and the
source what was called there.
"""

from __future__ import annotations

import ast
import dis
import sys
from types import CodeType, FrameType

from lazytpu.location import source
from lazytpu.location.site import inside, is_ours

UNKNOWN = "item (or a conversion by float, int, bool)"
_CONVERSIONS = ("float", "int", "bool", "complex")
_MAX_KEPT = 4096
_kept: dict[tuple[CodeType, int], str] = {}
_TESTS = ("POP_JUMP_", "JUMP_IF_", "TO_BOOL", "COMPARE_OP")  # a comparison, from Python 3.13 on, may test its result
_BY_INSTRUCTION = {"UNARY_NOT": "bool (not)", "CONTAINS_OP": "bool (in)"}


def what_was_written() -> str:
    """What made torch ask for the number of a tensor.

    Returns:
        ``item``; ``float``, ``int``, ``bool`` or ``complex``; ``bool (if)`` and the like for a condition; ``item (by
        range)`` for another function that took the tensor for a number; each with `` inside torch`` where the user's
        line called something there that did it; `UNKNOWN` where nothing tells.
    """
    frame = _caller(sys._getframe(1))
    if frame is None:
        return UNKNOWN
    key = frame.f_code, frame.f_lasti
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        found = _kept[key] = _of_instruction(*key)
    return found


def _caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is neither ours nor of a tensor's own methods."""
    while frame is not None and (is_ours(frame.f_code.co_filename) or _is_of_tensor(frame.f_code)):
        frame = frame.f_back
    return frame


def _is_of_tensor(code: CodeType) -> bool:
    return code.co_filename.endswith(("torch/_tensor.py", "torch\\_tensor.py"))


def _of_instruction(code: CodeType, at: int) -> str:
    name = dis.opname[code.co_code[at]] if 0 <= at < len(code.co_code) else ""
    spans = list(code.co_positions())
    span: source.Span = spans[at // 2] if at // 2 < len(spans) else (None, None, None, None)
    if name in _BY_INSTRUCTION:
        found = _BY_INSTRUCTION[name]
    elif name.startswith(_TESTS):
        found = _of_test(code, span)
    elif name.startswith("CALL"):
        found = _of_call(code, span)
    elif name.startswith("FORMAT_"):
        found = "item (by format)"
    elif "SUBSCR" in name or "SLICE" in name:
        found = "int (index)"
    else:
        found = UNKNOWN
    return f"{found}{inside(code.co_filename)}"


def _of_call(code: CodeType, span: source.Span) -> str:
    for node in source.nodes_with_span(code.co_filename, span):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if isinstance(node.func, ast.Attribute) and node.func.attr == "item":
                return "item"
            if called in _CONVERSIONS:
                return called
            method = isinstance(node.func, ast.Attribute) and node.func.attr.strip("_") in _CONVERSIONS
            if method and not node.args:
                return str(node.func.attr.strip("_"))  # type: ignore[attr-defined]
            return f"item (by {source.short(called)})"
    return UNKNOWN


def _of_test(code: CodeType, span: source.Span) -> str:
    """``bool``, with the statement or operator whose condition it is."""
    for kind in source.conditions_with_span(code.co_filename, span):
        return f"bool ({kind})"
    return "bool"
