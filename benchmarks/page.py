"""Keep results as JSON, and write parts of documentation pages from them.

A part stands between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "explanation" / "performance.md"
TABLES = PAGE.with_name("performance-tables.md")


def machine() -> dict[str, Any]:
    """Return what a measurement is made on: processor, cores, and versions of this environment."""
    found = re.search(r"model name\s*: (.*)", _text("/proc/cpuinfo"))
    versions = {name: _version(name) for name in ("torch", "jax", "jaxlib", "numpy")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": found[1] if found else platform.processor() or platform.machine(),
        "cores": cores,
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": versions,
    }


def on_machine(of: dict[str, Any]) -> str:
    """Return a sentence that says what a measurement was made on."""
    versions = ", ".join(f"{name} {number}" for name, number in of["versions"].items() if number)
    cores = f"{of['cores']} core{'s' if of['cores'] > 1 else ''} in use"
    load = f", load {of['load']} at the start" if of["load"] is not None else ""
    return f"{of['processor']}, {cores}{load}; Python {of['python']}, {versions}."


def save(path: Path, content: Any) -> None:
    """Write JSON, one entry of the outermost lists a line, so that changes can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = []
    for name, value in content.items():
        if isinstance(value, list) and value:
            value = "[\n  " + ",\n  ".join(json.dumps(entry) for entry in value) + "\n ]"
        else:
            value = json.dumps(value)
        parts.append(f" {json.dumps(name)}: {value}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_part(page: Path, name: str, text: str) -> None:
    """Replace a part of a page.

    Raises:
        ValueError: the page has no part of that name.
    """
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    before, found, rest = page.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{page} has no part between {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
