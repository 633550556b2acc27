"""The table of docs/reference/works-with.md, and the lines that the sweep prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.ecosystem.case import Library, Outcome, Script

PAGE = Path(__file__).parents[2] / "docs/reference/works-with.md"
_TABLE = re.compile(r"(<!-- (libraries|scripts): written by the sweep -->\n).*?(<!-- end -->)", re.S)
_CELL_LENGTH = 160


def line(outcome: Outcome) -> str:
    """Return an outcome as a line for the terminal."""
    extra = [f"{outcome.seconds[0]} s / {outcome.seconds[1]} s"] if outcome.seconds else []
    extra += [f"{outcome.compiles} compiles"] if outcome.compiles is not None else []
    extra += [f"fallbacks {outcome.fallbacks}"] if outcome.fallbacks else []
    return f"{outcome.result:8} {outcome.key} {outcome.version}  {outcome.detail}  {'; '.join(extra)}".rstrip()


def write(rows: Sequence[tuple[Library | Script, Outcome]]) -> None:
    """Write both tables of the page."""
    made = {
        "libraries": _table([row for row in rows if isinstance(row[0], Library)]),
        "scripts": _table([row for row in rows if isinstance(row[0], Script)]),
    }
    PAGE.write_text(_TABLE.sub(lambda found: found[1] + made[found[2]] + found[3], PAGE.read_text()))


def _table(rows: Sequence[tuple[Library | Script, Outcome]]) -> str:
    head = "| | version | what was tried | result | CPU / device |\n|---|---|---|---|---|\n"
    return head + "".join(_row(case, outcome) for case, outcome in rows)


def _row(case: Library | Script, outcome: Outcome) -> str:
    name = case.name if isinstance(case, Library) else f"{case.repository} {case.folder}".strip()
    ran = outcome.result in ("same", "differs")
    result = outcome.result if ran else f"{outcome.result}: {outcome.detail[:_CELL_LENGTH]}"
    fallbacks = f"; on the CPU: {', '.join(sorted(outcome.fallbacks))}" if outcome.fallbacks else ""
    cells = (name, outcome.version, case.tried, result + fallbacks, outcome.detail if ran else "")
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |\n"
