"""Run scripts of torch.distributed on the CPU with Gloo and on the device: ``python -m tests.distributed.scripts``.

Both runs happen in the same processes, of which there are two, or four for scripts that ask for them.  What a script
returns is compared rank by rank: losses, gradients, parameters after ten steps.  What is printed are rows of the table
in the docs; what differs, or is raised, goes to stderr.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

MODULES = ("ddp", "fsdp", "dtensor", "attention", "pipelines")
_LIMIT_S = 150
_SETTLED = 4  # steps after which no program may be new


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a script on a rank.

    Attributes:
        failure: what was raised, empty for nothing.
        compiled: how many programs were compiled, in all and after the first few steps.
        programs: how many programs a step ran at last.
        pieces: how many starts were in pieces, and the first difference of ranks.
    """

    failure: str
    compiled: tuple[int, int] = (0, 0)
    programs: float = 0.0
    pieces: tuple[int, str] = (0, "")


def scripts_of(ranks: int, word: str = "") -> list[str]:
    """Return the names of the scripts of so many processes, that have a word in them."""
    training = importlib.import_module("tests.distributed.scripts.training")
    for name in MODULES:
        importlib.import_module(f"tests.distributed.scripts.{name}")
    return [name for name in training.scripts if name.endswith("(4)") == (ranks == 4) and word.lower() in name.lower()]


def child(names: list[str], into: str) -> None:
    """Run scripts in a process of a world, until one fails; write a line of what became of each."""
    lazytpu = importlib.import_module("lazytpu")
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group(f"cpu:gloo,{lazytpu.config.device_name}:lazytpu", timeout=timedelta(seconds=_LIMIT_S))
    scripts_of(2)
    for name in names:
        faulthandler.dump_traceback_later(_LIMIT_S, exit=True)
        outcome = _run(name)
        with open(f"{into}.{os.environ['RANK']}", "a") as file:
            print(json.dumps({"name": name, **asdict(outcome)}), file=file)
        every: list[Any] = [None] * dist.get_world_size()
        if not outcome.failure:
            dist.all_gather_object(every, "")
        if outcome.failure:
            sys.stdout.flush()
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def _run(name: str) -> Outcome:
    import lazytpu
    from tests.distributed.scripts.training import scripts, tolerances
    from tests.support.ranks import matched

    lazytpu.wait()
    lazytpu.metrics.reset()
    counter, mark = lazytpu.metrics.counter, lazytpu.mark_step
    steps: list[tuple[int, int]] = []

    def counted(*args: Any) -> None:
        mark(*args)
        steps.append((counter("compile"), counter("execute")))

    lazytpu.mark_step = counted
    try:
        matched(scripts[name], atol=tolerances[name] / 10, rtol=tolerances[name])
        failure = ""
    except BaseException:
        failure = traceback.format_exc()
    finally:
        lazytpu.mark_step = mark
    late, programs = 0, 0.0
    if len(steps) > _SETTLED:
        late = steps[-1][0] - steps[_SETTLED - 1][0]
        programs = (steps[-1][1] - steps[_SETTLED - 1][1]) / (len(steps) - _SETTLED)
    compiled = steps[-1][0] if steps else counter("compile")
    text = next((line.strip() for line in lazytpu.explain().splitlines() if "| rank " in line), "")
    if "--explain" in sys.argv:
        print(f"--- {name}\n{lazytpu.explain()}", flush=True)
    return Outcome(failure, (compiled, late), programs, (counter("in_pieces"), text))


def run(names: list[str], ranks: int, environment: dict[str, str], *flags: str) -> dict[str, list[Outcome]]:
    """Run scripts in so many processes; return what became of each on each rank."""
    from tests.support.worlds import start_world

    found: dict[str, list[Outcome]] = {}
    while left := [name for name in names if name not in found]:
        with tempfile.TemporaryDirectory() as folder:
            into = f"{folder}/found"
            code = "import sys; from tests.distributed.scripts import __main__ as m; import json; "
            code += "m.child(json.loads(sys.argv[1]), sys.argv[2])"
            ended = [r.wait() for r in start_world(code, ranks, json.dumps(left), into, *flags, **environment)]
            for done in ended:
                print(done.stdout, end="")
            files = [Path(f"{into}.{rank}") for rank in range(ranks)]
            lines = [[json.loads(x) for x in f.read_text().splitlines()] if f.exists() else [] for f in files]
        come = {line["name"]: None for said in lines for line in said} or {left[0]: None}
        if all(len(said) < len(left) for said in lines) and all(not line["failure"] for said in lines for line in said):
            come |= {left[min(map(len, lines))]: None}  # it ended the processes
        for name in come:
            outcomes = []
            for rank, said in enumerate(lines):
                line = next((x for x in said if x["name"] == name), None)
                failure = f"hung, or ended the process\n{ended[rank].stderr[-3000:]}"
                outcomes.append(Outcome(**{k: v for k, v in line.items() if k != "name"}) if line else Outcome(failure))
            found[name] = outcomes
            _report(name, outcomes)
    return found


def _report(name: str, outcomes: list[Outcome]) -> None:
    bad = [(rank, o) for rank, o in enumerate(outcomes) if o.failure]
    print(row(name, outcomes), flush=True)
    for rank, outcome in bad:
        print(f"  on rank {rank}: {outcome.failure}", file=sys.stderr, flush=True)


def row(name: str, outcomes: list[Outcome]) -> str:
    """Return a row of the docs' table."""
    result = "differs" if any(o.failure for o in outcomes) else "same"
    first, pieces = outcomes[0], max(o.pieces[0] for o in outcomes)
    late = f", {first.compiled[1]} of them late" if first.compiled[1] else ""
    a_step = f"{first.programs:.3g}" if first.programs else "-"
    return f"| {name} | {result} | {first.compiled[0]}{late} | {a_step} | {pieces} |"


def main() -> None:
    """Run what was asked for; the exit status is the number of scripts that differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="scripts with this word in their names")
    parser.add_argument("--names", default="", help="names of scripts, between semicolons")
    parser.add_argument("--ranks", default="2,4", help="2, 4 or both")
    parser.add_argument("--explain", action="store_true", help="print lazytpu.explain() of each")
    asked = parser.parse_args()
    environment = {"LAZYTPU_COLLECTIVE_TIMEOUT": "40", "LAZYTPU_DISK_CACHE": "0", "JAX_PLATFORMS": "cpu"}
    environment |= {"XLA_FLAGS": "--xla_backend_optimization_level=0", "LAZYTPU_COMPILE_AFTER": "2"}
    environment |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    wrong = 0
    for ranks in map(int, asked.ranks.split(",")):
        names = scripts_of(ranks, asked.only)
        if asked.names:
            names = [name for name in names if name in asked.names.split(";")]
        found = run(names, ranks, environment, *(["--explain"] if asked.explain else [])) if names else {}
        wrong += sum(any(o.failure for o in outcomes) for outcomes in found.values())
    sys.exit(wrong)


if __name__ == "__main__":
    main()
