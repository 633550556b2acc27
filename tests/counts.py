"""Print what is counted of the source: ``python -m tests.counts``.  `test_counts.py` keeps ceilings."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_ANY = re.compile(r"\bAny\b")
_IGNORE = re.compile(r"#\s*type:\s*ignore")
_SLOW = re.compile(r"\bmark\.slow\b")


def sources(folder: str) -> list[str]:
    """Return the text of each Python file below a folder of the repository."""
    return [path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))]


def counts() -> dict[str, int]:
    """Return each count by name: of lines, and of what the types leave open."""
    package, tests = sources("lazytpu"), sources("tests")
    return {
        "lines of the package": sum(text.count("\n") for text in package),
        "lines of its longest file": max(text.count("\n") for text in package),
        "uses of Any": sum(len(_ANY.findall(text)) for text in package),
        "type: ignore": sum(len(_IGNORE.findall(text)) for text in package),
        "lines of the longest test file": max(text.count("\n") for text in tests),
        "slow tests that slow.txt does not list": sum(len(_SLOW.findall(text)) for text in tests),
    }


if __name__ == "__main__":
    for name, count in counts().items():
        print(f"{count:7,}  {name}")
