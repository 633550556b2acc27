"""What fresh pages for large temporaries cost a training step:  python -m benchmarks.allocation

The step of a model, traced, with glibc's malloc set in several ways, each in a process of its own, in turn.  Page
faults and processor time change little on a busy machine.  `lazytpu.runtime.host.memory` does what
follows from these numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare import measure
from benchmarks.page import RESULTS, machine, markdown_table, on_machine, save

WAYS: dict[str, dict[str, str]] = {
    "reuse_pages off": {"LAZYTPU_REUSE_PAGES": "0"},
    "reuse_pages on": {"LAZYTPU_REUSE_PAGES": "1"},
    "huge pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
}
FIELDS = {"page faults": "page_faults", "processor ms": "cpu_ms", "ms": "step_ms", "memory MiB": "rss_mb"}


def measure_in_turn(models: Sequence[str], ways: Sequence[str], rounds: int, run_s: float) -> list[dict[str, Any]]:
    """A row for each model and way: medians over the rounds.

    Raises:
        RuntimeError: a measurement failed.
    """
    rows = []
    for model in models:
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                run = measure("lazytpu", model, "", run_s=run_s, variables=WAYS[way])
                if "error" in run:
                    raise RuntimeError(f"{model}, {way}: {run['error']}")
                found[way].append(run)
        for way, runs in found.items():
            rows.append(
                {"model": model, "way": way, **{f: statistics.median(r[f] for r in runs) for f in FIELDS.values()}}
            )
    return rows


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows as text."""
    return [[row["model"], row["way"], *(f"{row[field]:,.0f}" for field in FIELDS.values())] for row in rows]


def markdown(result: dict[str, Any]) -> str:
    """What the page shows of a saved result."""
    note = f" {result['note']}" if "note" in result else ""
    rows = markdown_table(["model", "malloc", *FIELDS], table(result["rows"]))
    return f"{on_machine(result['machine'])}{note}\n\n{rows}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="cnn,resnet18,gpt", help="names with commas between them")
    parser.add_argument("--ways", default=",".join(WAYS), help="names with commas between them")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--run-s", type=float, default=0.3, help="seconds of each of the seven runs of a measurement")
    parser.add_argument("--json", type=Path, default=RESULTS / "allocation.json", help="where results are written to")
    parser.add_argument("--from-json", action="store_true", help="measure nothing: show what --json holds")
    options = parser.parse_args(arguments)
    if options.from_json:
        result = json.loads(options.json.read_text())
    else:
        result = {"machine": machine()}
        result["rows"] = measure_in_turn(
            options.models.split(","), options.ways.split(","), options.rounds, options.run_s
        )
        save(options.json, result)
    for row in table(result["rows"]):
        print(f"{row[0]:10} {row[1]:18}", "  ".join(f"{v:>8} {f}" for v, f in zip(row[2:], FIELDS, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
