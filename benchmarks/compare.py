"""Training steps on every backend, in turn on the same machine:  python -m benchmarks.compare

Each measurement is a process of its own.  A round runs every backend once, so that a machine that slows down slows
all of them; ratios are taken within a round, and their median is shown.  Disk caches are off, but for ``second_s``:
the first step of a second process, with a cache that a first one has filled in a temporary folder.

torch_xla needs an environment of its own (torch==2.9.0 and torch_xla==2.9.0): --xla-python VENV/bin/python
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.goals import GOALS, Goal
from benchmarks.models import SMALL
from benchmarks.page import RESULTS, ROOT, machine, markdown_table, on_machine, save

BACKENDS = ("lazytpu", "lazytpu-compile", "eager", "inductor", "jax", "torch_xla")
CACHED = ("lazytpu", "lazytpu-compile", "inductor", "jax")
_TIMEOUT_S = 1800
_SAME_LOSS = 1e-3
Run = dict[str, Any]


def measure(
    backend: str,
    model: str,
    xla_python: str,
    cache: str = "",
    first_only: bool = False,
    run_s: float = 1.0,
    variables: Mapping[str, str] | None = None,
) -> Run:
    """Times a model in a new process.

    Args:
        backend: one of `BACKENDS`.
        model: a name of `benchmarks.models.make`.
        xla_python: the python that has torch_xla.
        cache: folder of a disk cache; without one it is off.
        first_only: stop after the first step.
        run_s: seconds of each of the seven runs.
        variables: of the environment, beside those of `environment`.

    Returns:
        The fields of `benchmarks.timing.Timing`, or ``error``.
    """
    python = xla_python if backend == "torch_xla" else sys.executable
    program = ["benchmarks.jax_step"] if backend == "jax" else ["benchmarks.torch_step", backend]
    command = [python, "-m", *program, model, "--run-s", str(run_s), *["--first-only"] * first_only]
    with TemporaryDirectory() as empty:
        given = {**environment(cache, empty), **(variables or {})}
        try:
            done = subprocess.run(
                command, env=given, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return {"error": str(error)}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def environment(cache: str, empty: str) -> dict[str, str]:
    """The environment of a measurement: the same for all, whatever the caller's says of lazytpu or of caches."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("LAZYTPU_", "JAX_"))}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    variables["LAZYTPU_DISK_CACHE"] = "1" if cache else "0"
    variables["TORCHINDUCTOR_CACHE_DIR"] = cache or empty
    if cache:
        variables["LAZYTPU_DISK_CACHE_DIR"] = str(Path(cache) / "lazytpu")
        variables["JAX_COMPILATION_CACHE_DIR"] = str(Path(cache) / "jax")
        variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        variables["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    return variables


def measure_all(
    models: Sequence[str], backends: Sequence[str], rounds: int, xla_python: str, run_s: float
) -> Iterator[list[Run]]:
    """Every backend and model in turn, ``rounds`` times; then the first step of second processes.

    Yields:
        After each model, one entry for each of its measurements, with ``model``, ``backend`` and ``round``.
    """
    for model in models:
        runs = []
        for number in range(rounds):
            for backend in backends:
                found = measure(backend, model, xla_python, run_s=run_s)
                print(f"{model} {backend} {found.get('error') or found['step_ms']}", file=sys.stderr, flush=True)
                runs.append({"model": model, "backend": backend, "round": number, **found})
        for backend in [b for b in backends if b in CACHED]:
            second_s = second_first_step(backend, model, xla_python)
            for run in runs:
                if run["backend"] == backend:
                    run["second_s"] = second_s
        yield runs


def second_first_step(backend: str, model: str, xla_python: str) -> float | None:
    """Seconds of the first step in a process that finds what another has compiled; None where one failed."""
    with TemporaryDirectory() as cache:
        for _ in range(2):
            found = measure(backend, model, xla_python, cache, first_only=True)
            if "error" in found:
                print(f"{model} {backend} with a cache: {found['error']}", file=sys.stderr)
                return None
        return found["first_s"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `measure_all` found, for the tables."""

    runs: list[Run]

    def of(self, model: str, backend: str, field: str) -> dict[int, float]:
        """A field by round; nothing where the measurement failed."""
        return {
            run["round"]: run[field]
            for run in self.runs
            if run["model"] == model and run["backend"] == backend and run.get(field) is not None
        }

    def median(self, model: str, backend: str, field: str) -> float | None:
        """The median of a field over the rounds."""
        values = self.of(model, backend, field)
        return statistics.median(values.values()) if values else None

    def ratio(self, model: str, backend: str, peer: str, field: str = "step_ms") -> float | None:
        """The median over the rounds of a backend's field by its peer's."""
        ours = self.of(model, backend, field)
        theirs = self.of(model, peer, "first_s" if field == "second_s" else field)
        pairs = [ours[i] / max(theirs[i], 1e-9) for i in ours.keys() & theirs.keys()]
        return statistics.median(pairs) if pairs else None

    @property
    def models(self) -> list[str]:
        """In order of measurement."""
        return list(dict.fromkeys(run["model"] for run in self.runs))

    @property
    def backends(self) -> list[str]:
        """In the order of `BACKENDS`."""
        there = {run["backend"] for run in self.runs}
        return [backend for backend in BACKENDS if backend in there]

    def goals(self) -> list[tuple[Goal, float]]:
        """The goals that were measured, each with the ratio that was found."""
        found = [(goal, self.ratio(goal.model, goal.backend, goal.peer, goal.field)) for goal in GOALS]
        return [(goal, ratio) for goal, ratio in found if ratio is not None]

    def wrong_losses(self) -> list[str]:
        """Where backends do not begin with the same loss, so that what was timed is not the same; cnn draws dropout."""
        found = []
        for model in self.models:
            losses = {b: self.median(model, b, "first_loss") for b in self.backends}
            known = {b: loss for b, loss in losses.items() if loss is not None}
            first = next(iter(known.values()), 0.0)
            if model != "cnn" and any(not math.isclose(first, loss, rel_tol=_SAME_LOSS) for loss in known.values()):
                found.append(f"{model}: " + ", ".join(f"{b} {loss:.5f}" for b, loss in known.items()))
        return found


HEADER = ("model", "backend", "ms a step", "host ms", "first step s", "second process s", "memory MiB")


def rows_of(comparison: Comparison) -> list[list[str]]:
    """A row for each model and backend: `HEADER`, the ratios to the peers, and the goals for the step."""
    peers = [b for b in comparison.backends if not b.startswith("lazytpu")]
    rows = []
    for model in comparison.models:
        for backend in comparison.backends:
            fields = "step_ms", "host_ms", "first_s", "second_s", "rss_mb"
            row = [model, backend, *(shown(comparison.median(model, backend, field)) for field in fields)]
            ours = backend.startswith("lazytpu")
            row += [shown(comparison.ratio(model, backend, peer)) if ours else "" for peer in peers]
            wanted = [g for g in GOALS if (g.model, g.backend, g.field) == (model, backend, "step_ms")]
            row.append(", ".join(f"{goal.peer} ≤ {shown(goal.limit)}" for goal in wanted))
            rows.append(row)
    return rows


def shown(value: float | None) -> str:
    """A number with three digits that count."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def header_of(comparison: Comparison) -> list[str]:
    """What stands above the rows of `rows_of`."""
    return [*HEADER, *(f"/ {b}" for b in comparison.backends if not b.startswith("lazytpu")), "goal"]


def _beside(goal: Goal) -> str:
    return "its own first_s" if goal.field == "second_s" else goal.peer


def goal_rows(comparison: Comparison) -> list[list[str]]:
    """Return the goals: what is compared, the limit, what was found, and whether it is met."""
    return [
        [
            goal.model,
            goal.backend,
            goal.field,
            _beside(goal),
            f"≤ {shown(goal.limit)}",
            shown(ratio),
            "met" if ratio <= goal.limit else "missed",
        ]
        for goal, ratio in comparison.goals()
    ]


GOAL_HEADER = ("model", "backend", "field", "beside", "goal", "found", "")


def print_tables(comparison: Comparison) -> None:
    """Both tables, in the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 180)
    tables = (
        (header_of(comparison), rows_of(comparison), "Training steps"),
        (list(GOAL_HEADER), goal_rows(comparison), "Goals"),
    )
    for header, rows, title in tables:
        table = Table(title=title)
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i < 2 else "right")
        for i, row in enumerate(rows):
            table.add_row(*row, end_section=i + 1 == len(rows) or rows[i + 1][0] != row[0])
        console.print(table)


def summary(result: dict[str, Any]) -> str:
    """Return the tables of the page: steps, first steps, and how many goals are met."""
    comparison = Comparison(result["runs"])
    first_of = [b for b in comparison.backends if b not in ("eager", "lazytpu-compile")]
    columns = [("first_s", b, b) for b in first_of]
    columns += [("second_s", b, f"{b}, second process") for b in first_of if b in CACHED]
    steps = [[m, *(shown(comparison.median(m, b, "step_ms")) for b in comparison.backends)] for m in comparison.models]
    first = [[m, *(shown(comparison.median(m, b, field)) for field, b, _ in columns)] for m in comparison.models]
    goals = comparison.goals()
    missed = [
        f"* {g.model}, {g.backend}: {g.field} / {_beside(g)} is {shown(ratio)}; the goal is {shown(g.limit)}"
        for g, ratio in goals
        if ratio > g.limit
    ]
    parts = [
        _made(result),
        markdown_table(["ms a step", *comparison.backends], steps),
        markdown_table(["first step, s", *(title for _, _, title in columns)], first),
        f"{len(goals) - len(missed)} of the project's {len(goals)} goals are met.",
        "\n".join(missed),
    ]
    return "\n\n".join(parts).strip()


def _made(result: dict[str, Any]) -> str:
    rounds = "One round." if result["rounds"] == 1 else f"Medians of {result['rounds']} rounds."
    return f"{rounds} {on_machine(result['machine'])}"


def markdown(result: dict[str, Any]) -> str:
    """Return the full tables of a saved result."""
    comparison = Comparison(result["runs"])
    failed = sorted({f"{r['model']} {r['backend']}: {r['error']}" for r in result["runs"] if "error" in r})
    parts = [
        _made(result),
        markdown_table(header_of(comparison), rows_of(comparison)),
        "The goals the project has set itself, as ratios:",
        markdown_table([*GOAL_HEADER[:-1], "verdict"], goal_rows(comparison)),
        *(f"Not measured: {line}" for line in failed),
    ]
    return "\n\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(SMALL), help="names with commas between them")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="names with commas between them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run-s", type=float, default=1.0, help="seconds of each of the seven runs of a measurement")
    parser.add_argument("--xla-python", default="", help="the python of an environment with torch_xla")
    parser.add_argument("--json", type=Path, default=RESULTS / "compare.json", help="where results are written to")
    parser.add_argument("--from-json", type=Path, help="show the results of an earlier run instead of measuring")
    options = parser.parse_args(arguments)
    if options.from_json:
        result = json.loads(options.from_json.read_text())
    else:
        backends = options.backends.split(",")
        if "torch_xla" in backends and not options.xla_python:
            print("torch_xla is left out: --xla-python says which python has it", file=sys.stderr)
            backends.remove("torch_xla")
        result = {"machine": machine(), "rounds": options.rounds}
        result["runs"] = []
        models = options.models.split(",")
        for runs in measure_all(models, backends, options.rounds, options.xla_python, options.run_s):
            result["runs"] += runs
            save(options.json, result)
    comparison = Comparison(result["runs"])
    print_tables(comparison)
    wrong = comparison.wrong_losses()
    for line in wrong:
        print(f"first losses differ: {line}", file=sys.stderr)
    return int(bool(wrong) or any("error" in run for run in result["runs"]))


if __name__ == "__main__":
    sys.exit(main())
