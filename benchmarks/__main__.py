"""Measure everything that the pages on performance show, and write them anew:  python -m benchmarks

python -m benchmarks --xla-python VENV/bin/python
python -m benchmarks --from-json      measure nothing: write the pages from benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from benchmarks import allocation, compare, cpu_lowerings, record, scale
from benchmarks.growth import __main__ as growth
from benchmarks.page import PAGE, RESULTS, ROOT, TABLES, write_part

PARTS = {
    "compare": compare.markdown,
    "cpu_lowerings": cpu_lowerings.markdown,
    "record": record.markdown,
    "allocation": allocation.markdown,
    "scale": scale.markdown,
    "growth": growth.markdown,
}


def write_pages() -> None:
    """Write the tables of both pages from the saved results."""
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in PARTS}
    for name, markdown in PARTS.items():
        write_part(TABLES, name, markdown(results[name]))
    write_part(PAGE, "summary", compare.summary(results["compare"]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--xla-python", default="", help="the python of an environment with torch_xla")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--from-json", action="store_true", help="measure nothing: show what is in benchmarks/results")
    options = parser.parse_args(arguments)
    plots = ["--plot", str(ROOT / "docs" / "_static")]
    if options.from_json:
        status = growth.main([*plots, "--from-json"])
    else:
        xla = ["--xla-python", options.xla_python]
        status = max(
            compare.main([*xla, "--rounds", str(options.rounds)]),
            cpu_lowerings.main(["--json"]),
            record.main(xla),
            allocation.main([]),
            scale.main([]),
            growth.main(plots),
        )
    write_pages()
    return status


if __name__ == "__main__":
    sys.exit(main())
