"""Measures everything that the page on performance shows, and rewrites its tables and plots:  python -m benchmarks

python -m benchmarks --xla-python VENV/bin/python
python -m benchmarks --from-json      measure nothing: write the page from benchmarks/results
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from benchmarks import allocation, compare, cpu_lowerings, record
from benchmarks.growth import __main__ as growth
from benchmarks.page import PAGE, RESULTS, ROOT, write_part


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--xla-python", default="", help="the python of an environment with torch_xla")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--from-json", action="store_true", help="measure nothing: show what is in benchmarks/results")
    options = parser.parse_args(arguments)
    page = ["--markdown", str(PAGE)]
    plots = ["--plot", str(ROOT / "docs" / "_static")]
    if options.from_json:
        status = growth.main([*page, *plots, "--from-json"])
        parts = {"compare": compare, "cpu_lowerings": cpu_lowerings, "record": record, "allocation": allocation}
        for name, of in parts.items():
            write_part(PAGE, name, of.markdown(json.loads((RESULTS / f"{name}.json").read_text())))
        return status
    xla = ["--xla-python", options.xla_python]
    return max(
        compare.main([*page, *xla, "--rounds", str(options.rounds)]),
        cpu_lowerings.main(["--json"]),
        record.main([*page, *xla]),
        allocation.main(page),
        growth.main([*page, *plots]),
    )


if __name__ == "__main__":
    sys.exit(main())
