"""Try faults on the device: ``python -m tests.faults``.

    python -m tests.faults                          # all of them, as the page on reliability has them
    python -m tests.faults kills mutations --scale 0.1
    python -m tests.faults --record docs/_data/reliability.json

Each fault is tried a number of times, which ``--scale`` multiplies.  ``--record`` names a file of JSON that gets the
results.  The exit status is 1 if anything went wrong: a crash, a wrong value, something lost, an unclear error.
"""

from __future__ import annotations

import os

os.environ["LAZYTPU_DISK_CACHE"] = "0"  # read at import

import argparse
import json
import sys
from datetime import date
from pathlib import Path

import torch

import lazytpu
from tests.faults import children
from tests.faults.faults import FAULTS


def record(path: Path, results: dict[str, object]) -> None:
    """Puts results beside those that a file of JSON has already."""
    table = json.loads(path.read_text()) if path.exists() else {}
    table.setdefault("faults", {}).update(results)
    path.write_text(json.dumps(table, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(FAULTS)}")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of times that each is tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="file of JSON that gets the results")
    options = parser.parse_args()
    if unknown := set(options.names) - FAULTS.keys():
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    bad = 0
    for name in options.names or FAULTS:
        fault, count = FAULTS[name]
        result = fault(max(1, int(count * options.scale)), options.seed)
        bad += len(result.found)
        said = f"{len(result.found)} went wrong" if result.found else "nothing went wrong"
        print(f"{name:12} {result.tried:7,} {result.what}; {said}; {result.seconds:.0f} s", flush=True)
        for text in result.found[:10]:
            print(f"    {text}", flush=True)
        if options.record:
            versions = {"torch": torch.__version__, "lazytpu": lazytpu.__version__}
            about = {"title": (fault.__doc__ or "").strip(), "date": date.today().isoformat(), **versions}
            record(options.record, {name: {**about, **result.to_json()}})
    return 1 if bad else 0


if __name__ == "__main__":
    status = None
    try:
        status = main()
    except children.Become as become:
        work = become.work
    if status is not None:
        sys.exit(status)
    work()  # in a child, which ends as any program does
