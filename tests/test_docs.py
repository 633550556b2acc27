"""Runs the Python of the README and the docs, and compares what it prints with what the page shows.

The python blocks of a page are one program, in the order they stand; the user's lines in what is printed
count through all of them, with one blank line between blocks.  A block after ``<!-- output -->`` is what
the block before it prints; one after ``<!-- not run: why -->`` is only shown.

    python tests/test_docs.py README.md        # writes what the page prints now into the page
"""

from __future__ import annotations

import atexit
import json
import linecache
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from io import StringIO
from itertools import groupby, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

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


def run_program(texts: list[str], file: str) -> Iterator[str]:
    """Runs the blocks one after the other in one namespace and yields what each printed."""
    namespace = {"__name__": "__main__", "__file__": file}
    source = "".join(f"{text}\n" for text in texts)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # as if it were a file
    line = 0
    for text in texts:
        with redirect_stdout(StringIO()) as out:
            exec(compile("\n" * line + text, file, "exec"), namespace)
        line += text.count("\n") + 1
        yield out.getvalue()


def printed_by(page: Path, folder: Path) -> list[str]:
    """What each block of the page's program prints, in a fresh process."""
    texts = [block.text for block, _ in program_of(page.read_text())]
    file = page.stem.replace("-", "_").lower() + ".py"
    answer = _forks().run(texts, file, folder)
    assert answer["status"] == 0, f"{page} failed:\n{answer['errors']}"
    return answer["printed"]


class Forks:
    """A process that has imported torch and jax, but not lazytpu, and forks for each page: half of a page's time."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        variables = {**os.environ, "LAZYTPU_DISK_CACHE": "0"}  # pages show what is compiled, whatever the cache holds
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables
        )
        atexit.register(self._process.kill)

    def run(self, texts: list[str], file: str, folder: Path) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([texts, file, str(folder)]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@cache
def _forks() -> Forks:
    return Forks()


def serve() -> None:
    """Answers each line of JSON with what the program printed, its errors and its exit status."""
    import jax  # noqa: F401
    import torch  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        texts, file, folder = json.loads(line)
        with TemporaryDirectory() as outside:
            printed, errors = Path(outside, "printed"), Path(outside, "errors")
            child = os.fork()
            if child == 0:
                _run_in_child(texts, file, folder, printed, errors)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            answer = {
                "status": status,
                "printed": json.loads(printed.read_text()) if status == 0 else [],
                "errors": errors.read_text(),
            }
        print(json.dumps(answer), file=answers, flush=True)


def _run_in_child(texts: list[str], file: str, folder: str, printed: Path, errors: Path) -> None:
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 1
    try:
        printed.write_text(json.dumps(list(run_program(texts, file))))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def comparable(text: str) -> str:
    """A text without what differs from run to run: seconds and the order they give, hashes, trailing space."""
    text = re.sub(r"\d+\.\d+ (m?s)\b", r"# \1", text)
    text = re.sub(r"\b[0-9a-f]{8}\b", "########", text)
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
    if sys.argv[1] == "--serve":
        serve()
    else:
        for name in sys.argv[1:]:
            rewrite(Path(name))
