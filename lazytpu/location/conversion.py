"""Name what the program wrote where a tensor becomes a Python number: ``item``, ``float``, ``if``.

Torch calls one kernel for all of them.  The instruction at which the calling frame stands, and its text, tell which.
"""

from __future__ import annotations

import dis
import linecache
import sys
from types import CodeType, FrameType

from lazytpu.location import source
from lazytpu.location.site import inside, is_ours

UNKNOWN = "item (or a conversion by float, int, bool)"
_CONVERSIONS = ("float", "int", "bool", "complex")
_KEYWORDS = {"if": "if", "elif": "if", "while": "while", "assert": "assert", "and": "and", "or": "or", "not": "not"}
_TESTS = ("POP_JUMP_", "JUMP_IF_", "TO_BOOL", "COMPARE_OP")  # a comparison, from Python 3.13 on, may test its result
_BY_INSTRUCTION = {
    "UNARY_NOT": "bool (not)",
    "CONTAINS_OP": "bool (in)",
    "FORMAT_": "item (by format)",
    "SUBSCR": "int (index)",
    "SLICE": "int (index)",
    "BINARY_OP": "int (index)",  # which subscripts, from Python 3.14 on
}
_MAX_KEPT = 4096
_kept: dict[tuple[CodeType, int], str] = {}


def what_was_written() -> str:
    """Name what made torch ask for the number of a tensor.

    Returns:
        ``item``; ``float``, ``int``, ``bool`` or ``complex``; ``bool (if)`` and the like for a condition; ``item (by
        range)`` for another function that took the tensor for a number; each with `` inside torch`` where the user's
        line called something there that did it; `UNKNOWN` where nothing tells.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (is_ours(frame.f_code.co_filename) or _is_of_tensor(frame.f_code)):
        frame = frame.f_back
    if frame is None:
        return UNKNOWN
    key = frame.f_code, frame.f_lasti
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        found = _kept[key] = _of_instruction(*key) + inside(frame.f_code.co_filename)
    return found


def _is_of_tensor(code: CodeType) -> bool:
    return code.co_filename.endswith(("torch/_tensor.py", "torch\\_tensor.py"))


def _of_instruction(code: CodeType, at: int) -> str:
    name = dis.opname[code.co_code[at]]
    line, last, column, end = list(code.co_positions())[at // 2]
    first_line = linecache.getline(code.co_filename, line or 0)
    if name.startswith(_TESTS):
        return _of_test(first_line.encode()[: column or 0].decode(), first_line.encode()[column or 0 : end].decode())
    if name.startswith("CALL") and first_line and last and column is not None and end is not None:
        called = first_line.encode()[column:].decode().partition("(")[0]
        if linecache.getline(code.co_filename, last).encode()[:end].endswith(b".item()"):
            return "item"
        return called if called in _CONVERSIONS else f"item (by {source.short(called.strip())})"
    return next((text for part, text in _BY_INSTRUCTION.items() if part in name), UNKNOWN)


def _of_test(before: str, text: str) -> str:
    """Return ``bool``, with the keyword before a condition, or that of the statement or expression that tests it."""
    words = [*before.split()[-1:], *text.split()[:1], *(["if"] if " if " in text else [])]
    keyword = next((_KEYWORDS[word] for word in words if word in _KEYWORDS), "")
    return f"bool ({keyword})" if keyword else "bool"
