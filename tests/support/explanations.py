"""What `lazytpu.explain` says, with marks of the test's own lines in it.

In the expected texts ``[name]`` stands for the line of the test file that ends in the comment ``# [name]``.
"""

from __future__ import annotations

import re
from pathlib import Path

import lazytpu
from lazytpu.diagnosis import events


class Explanations:
    """The explanations of what one test file does."""

    def __init__(self, file: str) -> None:
        self.path = Path(file)
        self.lines = self.path.read_text().splitlines()

    def marked(self, text: str) -> str:
        """Return a text with marks in place of lines of the file, and ``#`` in place of times."""

        def mark(match: re.Match[str]) -> str:
            found = re.search(r"# (\[\w+\])$", self.lines[int(match[1]) - 1])
            return found[1] if found else match[0]

        return re.sub(r"\d+\.\d+ (m?s)\b", r"# \1", re.sub(rf"\b{self.path.name}:(\d+)", mark, text))

    def last(self) -> str:
        """Return what is said of the last compilation."""
        return self.marked("\n".join(events.lines_of(events.compilations[-1])))

    def section(self, title: str) -> str:
        """Return the lines below a title in what `explain` says."""
        return self.marked(lazytpu.explain()).partition(title + "\n")[2]


def kinds() -> list[str]:
    """Return the kinds of the causes so far."""
    return [event.cause.kind for event in events.compilations]
