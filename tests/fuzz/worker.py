"""A process that checks programs, so that one that kills it is known; and the same within this process."""

from __future__ import annotations

import dataclasses
import gc
import json
import resource
import select
import subprocess
import sys
import warnings
from typing import Any

PER_EFFORT = 100  # seeds in a row that are compiled alike
EFFORTS = ("optimized", "both", "quick", "both", "plain")
_OPTIONS: dict[str, dict[str, object]] = {
    "optimized": {"xla_backend_optimization_level": "3"},  # as users' programs are
    "plain": {"xla_backend_optimization_level": "0"},
    "quick": {"xla_backend_optimization_level": "0", "xla_cpu_use_fusion_emitters": False},  # a quarter of the time
}
MAX_MEMORY = 3 << 30  # bytes at which a worker makes room for the next
PER_DYNAMO = 40  # programs after which Dynamo forgets what it knows


class LocalWorker:
    """Checks programs in this process.

    Args:
        effort: how programs are compiled, one of `EFFORTS`; by turns, as their seed says, where it is empty; as the
            process does anyway where it is None.
    """

    def __init__(self, effort: str | None = None) -> None:
        import torch

        from lazytpu.runtime import compiler

        torch.set_num_threads(1)
        self._done = 0
        self._asked, self._effort = effort, ""
        self._options_for = compiler.options_for

    def seeds(self, seeds: list[int], mode: str = "") -> list[dict[str, Any]]:
        """Checks the programs of some seeds together; one that fails is checked again alone."""
        from tests.fuzz.checking import check, check_together, groups
        from tests.fuzz.drawing import drawn

        both = self._compile_for(seeds[0])
        self._count(len(seeds))
        verdicts = []
        for some in groups(drawn(seed, mode) for seed in seeds):
            together = [program.seed for program, _ in some]
            found = check_together(some, both)
            alone = [texts and len(some) > 1 and check(*given, both) for given, texts in zip(some, found, strict=True)]
            if some[0][0].mode != "trace" and any(alone):
                found = [texts or [] for texts in alone]  # of those together one does not know whose they are
            for (program, _), texts, own in zip(some, found, alone, strict=True):
                if texts:
                    by_itself = len(some) == 1 or bool(own)
                    verdicts.append(
                        {"seed": program.seed, "found": own or texts, "alone": by_itself, "together": together}
                    )
                if texts and not by_itself and program.mode != "trace":
                    break
        return sorted(verdicts, key=lambda verdict: verdict["seed"])

    def program(self, fields: dict[str, Any], largest: float) -> list[str] | None:
        """What differs; None for a program that torch does not define."""
        from tests.fuzz.checking import check
        from tests.fuzz.drawing import is_defined
        from tests.fuzz.program import Program

        parts = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        program = Program(**parts)
        both = self._compile_for(program.seed)
        self._count(1)
        try:
            return check(program, largest, both) if is_defined(program) else None
        except (NameError, AttributeError, SyntaxError):
            return None

    def op(self, name: str, seed: int) -> list[str]:
        """What differs in a drawn call of an operator."""
        from tests.fuzz.ops import check_op

        both = self._compile_for(seed)
        self._count(1)
        return check_op(name, seed, both)

    def _compile_for(self, seed: int) -> bool:
        """Compile as users do, or without LLVM's optimizations, or with XLA's older emitters; or interpret, too."""
        import lazytpu
        from lazytpu.runtime import compiler

        if self._asked is None:
            return False
        effort = self._asked or EFFORTS[seed // PER_EFFORT % len(EFFORTS)]
        if effort != self._effort:
            options_for = self._options_for
            more = _OPTIONS.get(effort, _OPTIONS["quick"])
            compiler.options_for = lambda graph: {**options_for(graph), **more}
            lazytpu.config.compile_after = 2 if effort == "both" else 1
            self._effort = effort
        return effort == "both"

    def _count(self, programs: int) -> None:
        import torch

        self._done += programs
        if self._done >= PER_DYNAMO:
            self._done = 0
            torch._dynamo.reset()
            if self._asked is not None:  # a process of its own
                gc.collect()
                gc.freeze()  # `lazytpu.compile` collects garbage each time: what stays need not be looked through

    def close(self) -> None:
        pass


class Died(Exception):
    """The worker has ended, or took too long."""


class ChildWorker:
    """Checks programs in a child process, which is replaced when it has died or grown."""

    def __init__(self, effort: str = "", timeout_s: float = 300) -> None:
        self._effort, self._timeout_s = effort, timeout_s
        self._child: subprocess.Popen[str] | None = None

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._ask([name, *args])

    def _ask(self, call: list[Any]) -> Any:
        if self._child is not None and self._child.poll() is not None:
            self._child = None
        if self._child is None:
            command = [sys.executable, "-m", "tests.fuzz", "--child", "--effort", self._effort]
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
            )
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(call) + "\n")
        child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], self._timeout_s)
        line = child.stdout.readline() if ready else ""
        if not line:
            child.kill()
            self._child = None
            raise Died(f"exit status {child.wait()}" if ready else f"no answer in {self._timeout_s:g} s")
        answer = json.loads(line)
        if answer["full"]:
            self.close()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        if self._child is not None:
            assert self._child.stdin is not None
            self._child.stdin.close()
            self._child.wait()
            self._child = None


def serve(effort: str) -> None:
    """Answers calls that come in on lines of JSON."""
    import traceback

    warnings.simplefilter("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr
    local = LocalWorker(effort)
    for line in sys.stdin:
        name, *args = json.loads(line)
        try:
            answer: dict[str, Any] = {"result": getattr(local, name)(*args)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answer["full"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MAX_MEMORY
        print(json.dumps(answer), file=answers, flush=True)


def fields(program: Any) -> dict[str, Any]:
    """A program as JSON."""
    return dataclasses.asdict(program)
