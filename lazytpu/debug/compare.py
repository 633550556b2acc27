"""Compare the IR of two graphs: how much they have in common, and where they differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Literal, TypeAlias

_VALUE = re.compile(r"%[a-z]?\d+(?:\.\d+)?")
_OP = re.compile(r" = ([\w.]+)\(")
CONTEXT = 3
# Above this many lines between the common start and end, very frequent lines do not anchor the match (see difflib).
_EXACT = 3000
Kind: TypeAlias = Literal["replace", "delete", "insert", "equal"]


@dataclass(frozen=True)
class Text:
    """The IR of a graph, prepared for comparing: its lines, and the lines without the names of values.

    One op more renumbers all that follow it, so lines are compared without numbers.
    """

    name: str
    lines: tuple[str, ...]
    keys: tuple[str, ...]
    ops: Counter[str]
    count: Counter[str]


def text_of(name: str, ir: str) -> Text:
    """Prepare ``ir`` (see `ir.printer.graph_text`) for comparing."""
    lines = tuple(line.rstrip() for line in ir.splitlines())
    keys = tuple(_VALUE.sub("%", line.partition(" # ")[0].rstrip()) for line in lines)
    ops = Counter(match[1] for match in map(_OP.search, keys) if match)
    return Text(name, lines, keys, ops, Counter(keys))


def nearest(text: Text, others: Sequence[Text]) -> Text | None:
    """Return the graph that shares most ops with ``text``, then most lines, then the latest.

    None where none has half of its ops in common.
    """
    best, shared = None, (0, 0)
    for other in others:
        ops = (text.ops & other.ops).total()
        score = ops, (text.count & other.count).total()
        if score >= shared and 4 * ops >= text.ops.total() + other.ops.total():
            best, shared = other, score
    return best


def unified(old: Text, new: Text) -> str:
    """Return the differences in the unified format of ``diff``; empty where there are none."""
    out = []
    for group in _Matcher(old.keys, new.keys).get_grouped_opcodes(CONTEXT):
        (_, a0, _, b0, _), (_, _, a1, _, b1) = group[0], group[-1]
        out.append(f"@@ -{a0 + 1},{a1 - a0} +{b0 + 1},{b1 - b0} @@")
        for kind, i, j, k, m in group:
            ops = [[_OP.findall(key) for key in keys] for keys in (old.keys[i:j], new.keys[k:m])]
            if kind == "equal":
                out += [f" {line}" for line in new.lines[k:m]]
            elif ops[0] == ops[1]:  # with other types, in pairs
                pairs = zip(old.lines[i:j], new.lines[k:m], strict=True)
                out += [text for a, b in pairs for text in (f"-{a}", f"+{b}")]
            else:
                out += [f"-{line}" for line in old.lines[i:j]] + [f"+{line}" for line in new.lines[k:m]]
    return "\n".join([f"--- {old.name}", f"+++ {new.name}", *out]) if out else ""


class _Matcher(SequenceMatcher[str]):
    """Matches two lists of lines, with the common start and end taken off first: most recompiles change little."""

    def __init__(self, old: Sequence[str], new: Sequence[str]) -> None:
        super().__init__()
        self._old, self._new = old, new

    def get_opcodes(self) -> list[tuple[Kind, int, int, int, int]]:
        old, new = self._old, self._new
        limit = min(len(old), len(new))
        start = next((i for i in range(limit) if old[i] != new[i]), limit)
        end = next((i for i in range(limit - start) if old[-1 - i] != new[-1 - i]), limit - start)
        a, b = len(old) - end, len(new) - end
        middle = SequenceMatcher(None, old[start:a], new[start:b], autojunk=max(a, b) - start > _EXACT)
        edits = [(kind, i + start, j + start, k + start, m + start) for kind, i, j, k, m in middle.get_opcodes()]
        first: list[tuple[Kind, int, int, int, int]] = [("equal", 0, start, 0, start)] if start else []
        return first + edits + ([("equal", a, len(old), b, len(new))] if end else [])
