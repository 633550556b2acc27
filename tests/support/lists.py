"""The lists of tests in files beside the suite: slow.txt and newer.txt."""

from __future__ import annotations

from pathlib import Path

_SUITE = Path(__file__).parents[1]


def listed(file: str) -> list[list[str]]:
    """Return the entries of a list, each by its fields: one a line, with ``|`` between fields; ``#`` is a comment."""
    lines = (_SUITE / file).read_text(encoding="utf-8").splitlines()
    return [line.split(" | ") for line in lines if line and not line.startswith("#")]
