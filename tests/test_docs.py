"""Runs the Python of the README and the docs, and compares what it prints with what the page shows.

The python blocks of a page are one program, in the order they stand; the user's lines in what is printed
count through all of them, with one blank line between blocks.  A block after ``<!-- output -->`` is what
the block before it prints; one after ``<!-- not run: why -->`` is only shown.

    python -m tests.test_docs README.md        # writes what the page prints now into the page
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.page_program import run_program
from tests.support.processes import run_code

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"(?:<!-- (?P<mark>[^\n]*?) -->\n+)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)

_BY_SECONDS = re.compile(r"  \d+ x .* waited # ms for the device$")  # rows of `lazytpu.explain`, the longest wait first


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text and where that stands in the page."""

    mark: str
    language: str
    text: str
    start: int
    end: int


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    return [
        Block(m["mark"] or "", m["language"], m["text"], m.start("text"), m.end("text")) for m in _FENCE.finditer(page)
    ]


def program_of(page: str) -> list[tuple[Block, Block | None]]:
    """The python blocks that run, each with the block that shows its output."""
    program = []
    for block, following in pairwise([*blocks_of(page), None]):
        if block is not None and block.language == "python" and not block.mark.startswith("not run"):
            shown = following if following is not None and following.mark == "output" else None
            program.append((block, shown))
    return program


def printed_by(page: Path, folder: Path) -> list[str]:
    """What each block of the page's program prints, in a fresh process."""
    texts = [block.text for block, _ in program_of(page.read_text())]
    file = page.stem.replace("-", "_").lower() + ".py"
    with TemporaryDirectory() as outside:
        printed = Path(outside, "printed")
        program = f"""
            import json
            from pathlib import Path
            from tests.support.page_program import run_program
            Path({str(printed)!r}).write_text(json.dumps([*run_program({texts!r}, {file!r})]))
        """
        settings = {"LAZYTPU_DISK_CACHE": "0", "LAZYTPU_COMPILE_AFTER": "2"}  # as users have it, but what is on disk
        done = run_code(program, cwd=folder, loaded=True, **settings)
        assert done.returncode == 0, f"{page} failed:\n{done.stderr}"
        return json.loads(printed.read_text())


def comparable(text: str) -> str:
    """A text without what differs from run to run: seconds and the order they give, hashes, trailing space."""
    text = re.sub(r"\d+\.\d+ (m?s)\b", r"# \1", text)
    text = re.sub(r"\b[0-9a-f]{8}\b", "########", text)
    text = re.sub(r"^where the time of a .*", "where the time goes", text, flags=re.M | re.S)  # to the end: by seconds
    lines = [line.rstrip() for line in text.strip().splitlines()]
    runs = groupby(lines, key=lambda line: bool(_BY_SECONDS.match(line)))
    return "\n".join(line for timed, run in runs for line in (sorted(run) if timed else run))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page, tmp_path):
    program = program_of(page.read_text())
    if not program:
        return
    for (block, shown), printed in zip(program, printed_by(page, tmp_path), strict=True):
        if shown is not None:
            assert comparable(printed) == comparable(shown.text), f"after\n{block.text}"


def test_a_wrong_output_is_noticed():
    shown_only = "<!-- not run: no such name -->\n```python\nnothing\n```\n\n"
    page = shown_only + "```python\nprint(1 + 1)\n```\n\n<!-- output -->\n```text\n3\n```\n"
    ((block, shown),) = program_of(page)
    (printed,) = run_program([block.text], "page.py")
    assert shown is not None
    assert comparable(printed) == "2" != comparable(shown.text)


def test_every_public_name_is_in_the_reference():
    import lazytpu

    reference = (ROOT / "docs/reference/api.md").read_text()
    missing = [name for name in lazytpu.__all__ if not re.search(rf"\b(lazytpu\.)?{name}\b", reference)]
    assert missing == []


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def rewrite(page: Path) -> None:
    """Puts what the program prints into the page."""
    text = page.read_text()
    with TemporaryDirectory() as folder:
        outputs = printed_by(page, Path(folder))
    for (_, shown), printed in reversed(list(zip(program_of(text), outputs, strict=True))):
        if shown is not None:
            lines = "\n".join(line.rstrip() for line in printed.rstrip().splitlines())
            text = text[: shown.start] + lines + "\n" + text[shown.end :]
    page.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rewrite(Path(name))
