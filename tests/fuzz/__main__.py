"""Random programs on the device, with the CPU as the oracle: ``python -m tests.fuzz``.

    python -m tests.fuzz --programs 1000 --seed 0 --reduce
    python -m tests.fuzz --programs 100 --mode jit
    python -m tests.fuzz --programs 100 --effort both   # interpreted, then compiled
    python -m tests.fuzz --seed 4711                 # one program, printed
    python -m tests.fuzz --ops --programs 1000       # calls of single operators

A program is decided by its seed (and torch's version).  One that differs from the CPU is printed, with ``--reduce`` as
a script of a few lines that runs by itself.  Programs run in a child process, so that one that kills it is reported
like any other.  The exit status is 1 if there was a difference.
"""

from __future__ import annotations

import os

os.environ["LAZYTPU_DISK_CACHE"] = "0"  # read at import; each program is compiled once

import argparse
import functools
import json
import sys
import time
from datetime import date
from pathlib import Path

from tests.fuzz import worker


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=1, help="how many, from the first seed on")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--mode", default="", choices=("", "trace", "compile", "jit", "dynamo"), help="for all programs"
    )
    parser.add_argument("--effort", default="", choices=("", *sorted({*worker.EFFORTS})), help="to compile; by turns")
    parser.add_argument("--reduce", action="store_true", help="make programs that fail small")
    parser.add_argument("--ops", action="store_true", help="single operators with unusual operands")
    parser.add_argument("--only", default="", help="with --ops: names of operators, separated by commas")
    parser.add_argument("--here", action="store_true", help="run in this process, for debuggers")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so long")
    parser.add_argument("--record", type=Path, help="file of JSON that gets seeds, programs and time")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        worker.serve(options.effort)
        return 0
    from tests.fuzz import campaign

    checker = worker.LocalWorker(options.effort) if options.here else worker.ChildWorker(options.effort)
    seeds = range(options.seed, options.seed + options.programs)
    start, deadline = time.monotonic(), time.monotonic() + options.seconds
    tell = functools.partial(print, flush=True)
    if options.ops:
        ended, failed = campaign.ops(checker, seeds, options.only, tell, deadline)
    else:
        ended, failed = campaign.programs(checker, seeds, options.mode, options.reduce, tell, deadline)
    checker.close()
    seconds = time.monotonic() - start
    print(f"{ended} programs in {seconds:.0f} s, {ended / seconds:.1f} a second; {len(failed)} differ: {failed}")
    if options.record:
        table = json.loads(options.record.read_text()) if options.record.exists() else {}
        run = {"what": "calls of operators" if options.ops else "programs", "first seed": options.seed, "ended": ended}
        run |= {"effort": options.effort} if options.effort else {}
        run |= {"seconds": round(seconds), "differ": failed, "date": date.today().isoformat()}
        table.setdefault("fuzz", []).append(run)
        options.record.write_text(json.dumps(table, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
