"""All of torch's operator database on the device, with the CPU as the oracle: ``python -m tests.sweep``.

    python -m tests.sweep --dtype float32,float64 --shard 0/8 --resume sweep.jsonl
    python -m tests.sweep --ops add,linalg.qr --checks forward,backward --samples 3

All samples, forward and backward, in place, ``out=``, with gaps in memory, without elements, forward-mode
derivatives, vmap and second derivatives.  ``--resume`` names a file with a line of JSON for each operator and dtype;
what it holds already is not run again.  The operators run in a child process that is replaced before it takes 8 GB,
and when one of them kills it.  At the end come the entries that fail, those that ran on the CPU, and those that pass
although `op_status.py` says they do not; the exit status is 1 if there are any of the first or last kind.
"""

from __future__ import annotations

import argparse
import json
import resource
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import lazytpu
from tests.support.op_checks import ENTRIES, full_name, problems
from tests.support.op_status import CHECKS, known

DTYPES = "float32 float64 int64 int32 uint8 bool bfloat16 float16 complex64"
GRADIENTS = ("backward", "jvp", "gradgrad")
MAX_MEMORY = 4 << 30  # bytes at which a child makes room for the next; an operator more takes up to as much again
PER_GRAPH = 8  # samples


@dataclass(frozen=True)
class Job:
    """One operator in one dtype."""

    op: str
    dtype: str


def jobs(options: argparse.Namespace) -> list[Job]:
    """What to run, in order; a shard takes every n-th."""
    chosen = set(filter(None, options.ops.split(",")))
    found = [
        Job(full_name(op), dtype)
        for dtype in options.dtype.split(",")
        for op in ENTRIES
        if getattr(torch, dtype) in op.dtypes and (not chosen or chosen & {op.name, full_name(op)})
    ]
    shard, shards = map(int, options.shard.split("/"))
    return found[shard::shards]


# --- the child --------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Runs the jobs that come in on lines of JSON, and answers each with a line; ends when it has grown too large."""
    warnings.simplefilter("ignore")
    by_name = {full_name(op): op for op in ENTRIES}
    answers, sys.stdout = sys.stdout, sys.stderr  # what operators print is no answer
    for line in sys.stdin:
        job = Job(**json.loads(line))
        print(json.dumps(run(by_name[job.op], job, options)), file=answers, flush=True)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MAX_MEMORY:
            return


def run(op: Any, job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """The verdict on one operator in one dtype."""
    start, dtype = time.monotonic(), getattr(torch, job.dtype)
    checks = options.checks.split(",") if options.checks else [c for c in CHECKS if c != "errors"]
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    checks = [c for c in checks if grad or c not in GRADIENTS]
    torch.manual_seed(0)
    samples = islice(op.sample_inputs("cpu", dtype, requires_grad=grad), options.samples)
    try:
        found = problems(op, samples, checks, lazytpu.device(), PER_GRAPH)
    except Exception as error:
        found = {"forward": [f"{type(error).__name__}: {error}"]}
    return {
        "op": job.op,
        "dtype": job.dtype,
        "checks": checks,
        "all": options.samples is None,
        "problems": {check: texts[:3] for check, texts in found.items() if texts},
        "seconds": round(time.monotonic() - start, 1),
    }


# --- the parent -------------------------------------------------------------------------------------------


def run_all(todo: list[Job], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The verdicts, as they come from children."""
    child: subprocess.Popen[str] | None = None
    for job in todo:
        if child is None or child.poll() is not None:
            child = _child(options)
        verdict = _ask(child, job, options.timeout)
        if verdict is None and child.poll() == 0:  # it had made room before it saw the job
            child = _child(options)
            verdict = _ask(child, job, options.timeout)
        if verdict is None:
            child.kill()
            died = f"killed the process, or took longer than {options.timeout} s (exit status {child.wait()})"
            verdict = {"op": job.op, "dtype": job.dtype, "checks": ["forward"], "problems": {"forward": [died]}}
        yield verdict
    if child is not None:
        with child:  # closes its pipes and waits
            child.kill()


def _child(options: argparse.Namespace) -> subprocess.Popen[str]:
    passed = ["--child", "--checks", options.checks]
    passed += [] if options.samples is None else ["--samples", str(options.samples)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.sweep", *passed],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        cwd=Path(__file__).parents[1],
    )


def _ask(child: subprocess.Popen[str], job: Job, timeout: float) -> dict[str, Any] | None:
    """The answer of a child, or None if it died or takes too long."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(json.dumps(job.__dict__) + "\n")
        child.stdin.flush()
    except OSError:
        child.wait()
        return None
    ready, _, _ = select.select([child.stdout], [], [], timeout)
    line = child.stdout.readline() if ready else ""
    if not line:
        if ready:
            child.wait()
        return None
    return json.loads(line)  # type: ignore[no-any-return]


def read_verdicts(path: Path | None) -> list[dict[str, Any]]:
    """The verdicts of a file; a last line that was cut short is taken out of it."""
    if path is None or not path.exists():
        return []
    text = path.read_text()
    if not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])
    return [json.loads(line) for line in path.read_text().splitlines()]


def complaints(verdict: dict[str, Any]) -> list[str]:
    """What is wrong with a verdict, measured against the table of what is known."""
    texts, dtype = [], getattr(torch, verdict["dtype"])
    for check in verdict["checks"]:
        entry, found = known(verdict["op"], check, dtype), verdict["problems"].get(check, [])
        if entry is None and check != "lowered":
            texts += [f"FAIL {verdict['op']} {verdict['dtype']}, {check}: {text}" for text in found[:1]]
        elif entry is not None and not found and (verdict.get("all") or not entry.rare):
            texts.append(f"PASS {verdict['op']} {verdict['dtype']}, {check}: remove it from op_status.py")
    return texts


def fell_back(verdict: dict[str, Any]) -> list[str]:
    """The ops of a verdict that ran on the CPU."""
    return verdict["problems"].get("lowered", [])  # type: ignore[no-any-return]


def report(verdicts: list[dict[str, Any]]) -> int:
    """Prints the summary; 1 if something is wrong."""
    bad = [text for verdict in verdicts for text in complaints(verdict)]
    fallen = [verdict for verdict in verdicts if fell_back(verdict)]
    unknown = [v for v in fallen if known(v["op"], "lowered", getattr(torch, v["dtype"])) is None]
    print("\n".join(bad))
    for verdict in fallen:
        print(f"CPU  {verdict['op']} {verdict['dtype']}: {', '.join(fell_back(verdict))}")
    failed = {text.split(",")[0] for text in bad}
    print(f"{len(verdicts)} entries: {len(failed)} not as op_status.py says, {len(fallen)} ran in part on the CPU")
    return 1 if bad or unknown else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default=DTYPES.replace(" ", ","), help="names, separated by commas")
    parser.add_argument("--ops", default="", help="names of op_db, separated by commas; all if not given")
    parser.add_argument("--checks", default="", help=f"some of: {', '.join(c for c in CHECKS if c != 'errors')}")
    parser.add_argument("--samples", type=int, default=None, help="of an operator and dtype; all if not given")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th entry, from the i-th")
    parser.add_argument("--resume", type=Path, help="file of verdicts, read and appended to")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for an operator and dtype")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        work(options)
        return 0
    todo = jobs(options)
    kept = [v for v in read_verdicts(options.resume) if Job(v["op"], v["dtype"]) in set(todo)]
    done = {Job(v["op"], v["dtype"]) for v in kept}
    for verdict in run_all([job for job in todo if job not in done], options):
        kept.append(verdict)
        if options.resume is not None:
            with options.resume.open("a") as file:
                file.write(json.dumps(verdict) + "\n")
        for text in complaints(verdict):
            print(text.splitlines()[0], flush=True)
    print()
    return report(kept)


if __name__ == "__main__":
    sys.exit(main())
