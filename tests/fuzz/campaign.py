"""Goes through seeds, reports what fails and makes it small."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.fuzz import worker
from tests.fuzz.checking import batches
from tests.fuzz.comparing import kind_of
from tests.fuzz.drawing import drawn, mode_of
from tests.fuzz.program import Program, joined, script
from tests.fuzz.reducing import reduced

Tell = Callable[[str], None]


def programs(
    checker: Any, seeds: Sequence[int], mode: str, reduce: bool, tell: Tell, deadline: float = float("inf")
) -> tuple[int, list[int]]:
    """How many programs were run, and the seeds of those that failed."""
    ended, failed = 0, []
    for batch in batches(seeds, lambda seed: mode_of(seed, mode)):
        if time.monotonic() > deadline:
            break
        for verdict in _verdicts(checker, batch, mode):
            failed.append(verdict["seed"])
            _report(checker, verdict, mode, reduce, tell)
        ended += len(batch)
    return ended, failed


def _verdicts(checker: Any, batch: list[int], mode: str) -> list[dict[str, Any]]:
    try:
        return checker.seeds(batch, mode)  # type: ignore[no-any-return]
    except worker.Died as died:
        if len(batch) == 1:
            return [{"seed": batch[0], "found": [f"the process: died, {died}"], "alone": True, "together": batch}]
    return [verdict for seed in batch for verdict in _verdicts(checker, [seed], mode)]


def _report(checker: Any, verdict: dict[str, Any], mode: str, reduce: bool, tell: Tell) -> None:
    where = "" if verdict["alone"] else f", only in one graph with {verdict['together']}"
    tell(f"--- seed {verdict['seed']}{where}")
    program, largest = drawn(verdict["seed"], mode)
    if not verdict["alone"]:
        program = joined([drawn(seed, mode)[0] for seed in verdict["together"]])
    found = verdict["found"]
    if reduce:
        program, found = smaller(checker, program, largest, found)
    tell(script(program) + "\n".join(found[:3]) + "\n")


def smaller(checker: Any, program: Program, largest: float, found: list[str]) -> tuple[Program, list[str]]:
    """The smallest program that fails in the same way, and how."""
    kinds = {kind_of(text) for text in found}
    last = [found]

    def fails(candidate: Program) -> bool:
        try:
            texts = checker.program(worker.fields(candidate), largest) or []
        except worker.Died as died:
            texts = [f"the process: died, {died}"]
        same = any(kind_of(text) in kinds for text in texts)
        if same:
            last[0] = texts
        return same

    return reduced(program, fails), last[0]


def ops(
    checker: Any, seeds: Sequence[int], only: str, tell: Tell, deadline: float = float("inf")
) -> tuple[int, list[int]]:
    """How many calls of operators were run, and the seeds of those that failed."""
    from tests.fuzz.ops import name_of

    ended, failed = 0, []
    for seed in seeds:
        if time.monotonic() > deadline:
            break
        name = name_of(seed, only)
        try:
            found = checker.op(name, seed)
        except worker.Died as died:
            found = [f"the process: died, {died}"]
        if found:
            failed.append(seed)
            tell(f"--- seed {seed} {name}\n" + "\n".join(found[:2]))
        ended += 1
    return ended, failed
