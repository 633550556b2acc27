"""The statement that two lines lie on different sides of is found in the source."""

from __future__ import annotations

import linecache
from pathlib import Path

from lazytpu.location import source

PROGRAM = """\
def f(x, y):
    if y:
        a(x)
    elif x:
        b(x)
    else:
        c(x)
    if x: e(x)
    g(x)
def h(x):
    for i in range(3):
        if x:
            e(x)
    else:
        g(x)
    return [z for z in x]
def k(x):
    a(x)
    if x:
        b(x)
    return a(x) if x else b(x)
"""


def test_branch_between_lines(tmp_path: Path) -> None:
    file = str(tmp_path / "program.py")
    Path(file).write_text(PROGRAM)

    def between(line: int, other: int) -> tuple[int, bool, bool] | None:
        found = source.branch_between(file, line, other)
        return found and (found.line, found.loop, found.inside)

    assert between(3, 5) == (2, False, True) and between(7, 3) == (2, False, False)
    assert between(13, 15) == (11, True, True), "the loop, not what is in it"
    assert between(15, 16) == (11, True, False)
    assert between(8, 8) == (8, False, True) and between(21, 21) == (21, False, True)
    assert between(9, 9) is None and between(16, 16) is None
    assert between(3, 13) is None, "lines of two functions"
    assert between(18, 20) is None, "the statement comes after one of the lines"
    loop = source.comprehension_on(file, 16)
    assert loop is not None and loop.loop and source.comprehension_on(file, 9) is None


def test_a_loop_over_steps_is_no_cause(tmp_path: Path) -> None:
    file = tmp_path / "steps.py"
    file.write_text("for x in loader:\n    a(x)\n    lazytpu.mark_step()\nb(x)\n")
    assert source.branch_between(str(file), 4, 2) is None


def test_source_that_is_missing_or_no_python(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    assert source.branch_between(str(file), 1, 2) is None
    file.write_text("not python (")
    linecache.checkcache(str(file))
    assert source.branch_between(str(file), 1, 1) is None
