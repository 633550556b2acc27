"""Public libraries and scripts on the device, beside the CPU: ``python -m tests.ecosystem``.

    python -m tests.ecosystem                                   # libraries that are installed
    python -m tests.ecosystem --only transformers,timm
    python -m tests.ecosystem --scripts DIR --work FOLDER       # and scripts, of checkouts in DIR
    python -m tests.ecosystem --scripts DIR --write             # and write docs/reference/works-with.md

A library's case runs in a child process, first on the CPU and then on the device, and its numbers are compared.  A
script runs as its README says, once as ``python SCRIPT`` and once as ``python -m lazytpu run SCRIPT``, on data that is
made here; the ending losses are compared.  What is not installed is skipped, with the reason.  Outcomes are appended
to ``--out`` as lines of JSON, and what it holds is not run again with ``--resume``.  The exit status is 1 if a case
fails or differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.ecosystem import libraries, page, scripts
from tests.ecosystem.case import Library, Outcome, Script

CASES: dict[str, Library | Script] = {case.key: case for case in (*libraries.LIBRARIES, *scripts.SCRIPTS)}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ecosystem", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases of these names, or whose names contain these, by commas")
    parser.add_argument("--scripts", type=Path, help="folder with checkouts: examples, nanoGPT, makemore, …")
    parser.add_argument("--work", type=Path, help="folder where scripts are copied and run; by default one that goes")
    parser.add_argument("--out", type=Path, help="file of outcomes, one a line")
    parser.add_argument("--resume", action="store_true", help="run only what --out does not hold")
    parser.add_argument("--write", action="store_true", help="write the table of the page, from --out if it is given")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        libraries.child(options.child)
        return 0
    parts = options.only.split(",")
    chosen = [key for key in CASES if any(key == part if part in CASES else part in key for part in parts)]
    if options.list:
        print(*chosen, sep="\n")
        return 0
    known = _read(options.out)
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        for key in chosen:
            if not (options.resume and key in known):
                known[key] = outcome = _run(CASES[key], options.scripts, work)
                print(page.line(outcome), flush=True)
                _append(options.out, outcome)
    if options.write:
        page.write([(case, known.get(key, Outcome(key, "skipped", "not run"))) for key, case in CASES.items()])
    return int(any(known[key].result in ("fails", "differs") for key in chosen))


def _run(case: Library | Script, folder: Path | None, work: Path) -> Outcome:
    if isinstance(case, Script):
        return scripts.run(case, folder and folder.resolve(), work)
    return libraries.run(case)


def _read(path: Path | None) -> dict[str, Outcome]:
    """Return the last outcome of each case in a file."""
    if path is None or not path.exists():
        return {}
    return {row["key"]: Outcome(**row) for row in map(json.loads, path.read_text().splitlines())}


def _append(path: Path | None, outcome: Outcome) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(outcome.json()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
