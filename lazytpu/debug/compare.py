"""What two graphs have in common, and where they differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

_VALUE = re.compile(r"%[a-z]?\d+(?:\.\d+)?")
_OP = re.compile(r" = ([\w.]+)\(")
CONTEXT = 3
# Above this many lines between the common start and end, very frequent lines do not anchor the match (see difflib).
_EXACT = 3000


@dataclass(frozen=True)
class Text:
    """The IR of a graph for comparing: its lines, and the lines without the names of values.

    One op more renumbers all that follow it, so lines are compared without numbers.
    """

    name: str
    lines: tuple[str, ...]
    keys: tuple[str, ...]
    ops: Counter[str]
    count: Counter[str]


def text_of(name: str, ir: str) -> Text:
    """Prepares ``ir`` (see `ir.printer.graph_text`) for comparing."""
    lines = tuple(line.rstrip() for line in ir.splitlines())
    keys = tuple(_VALUE.sub("%", line.partition(" # ")[0].rstrip()) for line in lines)
    ops = Counter(match[1] for match in map(_OP.search, keys) if match)
    return Text(name, lines, keys, ops, Counter(keys))


def nearest(text: Text, others: Sequence[Text]) -> Text | None:
    """The one that shares most ops with ``text``, of several the one that shares most lines, the latest of these.

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
    """The differences in the unified format of ``diff``; empty where there are none."""
    hunks = _hunks(old, new)
    if not hunks:
        return ""
    out = [f"--- {old.name}", f"+++ {new.name}"]
    for group in hunks:
        (_, a0, _, b0, _), (_, _, a1, _, b1) = group[0], group[-1]
        out.append(f"@@ -{a0 + 1},{a1 - a0} +{b0 + 1},{b1 - b0} @@")
        for kind, i, j, k, m in group:
            if kind == "equal":
                out += [f" {line}" for line in new.lines[k:m]]
            elif j - i == m - k and _same_ops(old.keys[i:j], new.keys[k:m]):  # the same ops with other types, in pairs
                pairs = zip(old.lines[i:j], new.lines[k:m], strict=True)
                out += [text for a, b in pairs for text in (f"-{a}", f"+{b}")]
            else:
                out += [f"-{line}" for line in old.lines[i:j]] + [f"+{line}" for line in new.lines[k:m]]
    return "\n".join(out)


def _same_ops(old: Sequence[str], new: Sequence[str]) -> bool:
    return [_OP.findall(x) for x in old] == [_OP.findall(x) for x in new]


_Edit = tuple[str, int, int, int, int]


def _hunks(old: Text, new: Text) -> list[list[_Edit]]:
    edits = _edits(old.keys, new.keys)
    hunks: list[list[_Edit]] = []
    current: list[_Edit] = []
    for kind, i, j, k, m in edits:
        if kind != "equal":
            current.append((kind, i, j, k, m))
            continue
        head = min(CONTEXT, j - i)
        if current and j - i > 2 * CONTEXT:
            hunks.append([*current, ("equal", i, i + head, k, k + head)])
            current = [("equal", j - CONTEXT, j, m - CONTEXT, m)]
        elif current:
            current.append((kind, i, j, k, m))
        else:
            current = [("equal", j - head, j, m - head, m)]
    if any(kind != "equal" for kind, *_ in current):
        last = current[-1]
        if last[0] == "equal" and last[2] - last[1] > CONTEXT:
            current[-1] = ("equal", last[1], last[1] + CONTEXT, last[3], last[3] + CONTEXT)
        hunks.append(current)
    return hunks


def _edits(old: Sequence[str], new: Sequence[str]) -> list[_Edit]:
    """Edits as difflib's opcodes, with the common start and end taken off first: most recompiles change little."""
    limit = min(len(old), len(new))
    start = next((i for i in range(limit) if old[i] != new[i]), limit)
    end = next((i for i in range(limit - start) if old[-1 - i] != new[-1 - i]), limit - start)
    middle = SequenceMatcher(None, old[start : len(old) - end], new[start : len(new) - end], autojunk=False)
    if max(len(old), len(new)) - start - end > _EXACT:
        middle = SequenceMatcher(None, old[start : len(old) - end], new[start : len(new) - end])
    edits: list[_Edit] = [("equal", 0, start, 0, start)] if start else []
    edits += [(kind, i + start, j + start, k + start, m + start) for kind, i, j, k, m in middle.get_opcodes()]
    if end:
        edits.append(("equal", len(old) - end, len(old), len(new) - end, len(new)))
    return edits
