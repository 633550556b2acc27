"""Runs the Python of a page of the docs, its blocks one after the other."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO


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
