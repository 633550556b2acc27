"""What it costs on the host to record one op, in microseconds:  python -m benchmarks.record

lazytpu, torch_xla (--xla-python VENV/bin/python) and eager in turn, each in a process of its own.  A line is the best
of many runs of 500 ops on f32[3,4]; nothing is executed in the timed part, except by eager.  ``chain`` is a chain of
additions, ``cut`` is what ending the graph of that chain adds for each of its ops when its program is known.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare import environment
from benchmarks.page import RESULTS, ROOT, machine, markdown_table, on_machine, save
from benchmarks.torch_step import Backend, backend

BACKENDS = ("lazytpu", "torch_xla", "eager")
_OPS = 500


def operations(on: Backend) -> dict[str, Callable[[], Any]]:
    """The ops that are timed, on tensors of a backend."""
    x, y = torch.randn(3, 4).to(on.device), torch.randn(3, 4).to(on.device)
    parameter = torch.nn.Parameter(torch.randn(3, 4).to(on.device))
    total = torch.zeros(3, 4).to(on.device)
    return {
        "x + y": lambda: x + y,
        "parameter + x": lambda: parameter + x,
        "x * 3.5": lambda: x * 3.5,
        "relu(x)": lambda: torch.relu(x),
        "total.add_(y)": lambda: total.add_(y),
        "x.view(4, 3)": lambda: x.view(4, 3),
        "x.t()": lambda: x.t(),
        "x[:, 1:3]": lambda: x[:, 1:3],
        "x.sum(1)": lambda: x.sum(1),
        "mm(x, x.t())": lambda: torch.mm(x, x.t()),
        "x.detach()": lambda: x.detach(),
    }


def best_us(run: Callable[[], Any], on: Backend, rounds: int) -> float:
    """The least time of a call, in microseconds."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(_OPS):
            run()
        best = min(best, time.perf_counter() - start)
        on.cut()
        on.wait()
    return best / _OPS * 1e6


def chain_us(on: Backend, rounds: int) -> tuple[float, float]:
    """Microseconds an op of a chain of additions, to record it and to cut it."""
    x, y = torch.randn(3, 4).to(on.device), torch.randn(3, 4).to(on.device)
    recorded = cut = float("inf")
    for _ in range(rounds):
        start, z = time.perf_counter(), x
        for _ in range(_OPS):
            z = z + y
        recorded = min(recorded, time.perf_counter() - start)
        start = time.perf_counter()
        on.cut()
        cut = min(cut, time.perf_counter() - start)
        on.wait()
        del z
    return recorded / _OPS * 1e6, cut / _OPS * 1e6


def measure(name: str, rounds: int = 15) -> dict[str, float]:
    """Op to microseconds, in this process."""
    on = backend(name)
    found = {op: round(best_us(run, on, rounds), 2) for op, run in operations(on).items()}
    recorded, cut = chain_us(on, rounds)
    return {**found, "chain": round(recorded, 2), "cut": round(cut, 2)}


def measure_in_turn(backends: Sequence[str], turns: int, xla_python: str) -> dict[str, dict[str, float]]:
    """Backend to op to the best of several processes' microseconds."""
    best: dict[str, dict[str, float]] = {name: {} for name in backends}
    for _ in range(turns):
        for name in backends:
            command = [
                xla_python if name == "torch_xla" else sys.executable,
                "-m",
                "benchmarks.record",
                "--child",
                name,
            ]
            done = subprocess.run(
                command, env=environment("", ""), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
            )
            for op, us in json.loads(done.stdout.strip().splitlines()[-1]).items():
                best[name][op] = min(us, best[name].get(op, us))
    return best


def markdown(result: dict[str, Any]) -> str:
    """What the page shows of a saved result."""
    backends, us = list(result["us"]), result["us"]
    rows = [[f"`{op}`", *(f"{us[b][op]:.2f}" for b in backends)] for op in us[backends[0]]]
    return f"{on_machine(result['machine'])}\n\n{markdown_table(['µs', *backends], rows)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3, help="processes of each backend; the best is shown")
    parser.add_argument("--xla-python", default="", help="the python of an environment with torch_xla")
    parser.add_argument("--json", type=Path, default=RESULTS / "record.json", help="where results are written to")
    parser.add_argument("--child", choices=BACKENDS, help="measure this one, here")
    parser.add_argument("--rounds", type=int, default=15, help="how many runs of 500 ops of each kind, with --child")
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(measure(options.child, options.rounds)))
        return 0
    backends = [name for name in BACKENDS if name != "torch_xla" or options.xla_python]
    result = {"machine": machine(), "us": measure_in_turn(backends, options.turns, options.xla_python)}
    save(options.json, result)
    width = max(map(len, result["us"]["lazytpu"]))
    print(f"{'µs':{width}}", *(f"{name:>10}" for name in backends))
    for op in result["us"]["lazytpu"]:
        print(f"{op:{width}}", *(f"{result['us'][name][op]:10.2f}" for name in backends))
    return 0


if __name__ == "__main__":
    sys.exit(main())
