"""Runs the studies of growth, each in a process of its own; the exit status is 1 where something does not hold."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.compare import environment
from benchmarks.growth import cutting, plots, recording, scan, training, tree
from benchmarks.growth.study import Study, study_of
from benchmarks.page import RESULTS, ROOT, machine, markdown_table, on_machine, save

STUDIES: dict[str, Callable[[], Study]] = {
    "recording": recording.study,
    "cutting": cutting.study,
    "tree": tree.study,
    "training": training.study,
    "scan": scan.study,
}


def in_new_process(name: str) -> Study:
    """Runs a study in a process of its own, so that none sees the memory or the caches of another."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "study.json"
        command = [sys.executable, "-m", "benchmarks.growth", "--child", name, "--json", str(path)]
        subprocess.run(command, env=environment("", ""), cwd=ROOT, check=True)
        return study_of(json.loads(path.read_text()))


def print_study(study: Study) -> None:
    """The points and the verdicts."""
    print(f"\n{study.title}\n")
    width = max(map(len, study.series))
    for label, points in study.series.items():
        shown = points if len(points) <= 10 else points[:: len(points) // 10]
        print(f"  {label:{width}}", "  ".join(f"{x:,.0f}: {y:.4g}" for x, y in shown))
    for verdict in study.verdicts:
        state = "holds" if verdict.holds else "DOES NOT HOLD"
        print(f"  {state}: {verdict.what}: {verdict.found:.4g}, at most {verdict.limit:g}", flush=True)


def markdown(result: dict[str, Any]) -> str:
    """What the page shows of a saved result: the verdicts."""
    rows = [
        [study.name, verdict.what, f"{verdict.found:.3g}", f"{verdict.limit:g}", "holds" if verdict.holds else "**no**"]
        for study in map(study_of, result["studies"])
        for verdict in study.verdicts
    ]
    return f"{on_machine(result['machine'])}\n\n{markdown_table(['study', 'what', 'found', 'at most', ''], rows)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--only", default=",".join(STUDIES), help="names with commas between them")
    parser.add_argument("--json", type=Path, default=RESULTS / "growth.json", help="where results are written to")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw the studies of --json into this folder, as SVG")
    parser.add_argument("--from-json", action="store_true", help="measure nothing: show and draw what --json holds")
    parser.add_argument("--child", choices=STUDIES, help="run this one, here")
    options = parser.parse_args(arguments)
    if options.child:
        options.json.write_text(json.dumps(STUDIES[options.child]().as_dict()))
        return 0
    result = json.loads(options.json.read_text()) if options.json.exists() else {"studies": []}
    studies = {found["name"]: study_of(found) for found in result["studies"]}
    names = options.only.split(",")
    if not options.from_json:
        result["machine"] = machine()
        for name in names:
            studies[name] = in_new_process(name)
            result["studies"] = [studies[n].as_dict() for n in STUDIES if n in studies]
            save(options.json, result)
            print_study(studies[name])
    shown = [studies[name] for name in names if name in studies]
    if options.from_json:
        for study in shown:
            print_study(study)
    if options.plot:
        for path in plots.draw([studies[name] for name in STUDIES if name in studies], options.plot):
            print(path)
    return int(not all(verdict.holds for study in shown for verdict in study.verdicts))


if __name__ == "__main__":
    sys.exit(main())
