"""What happened at each compilation and each forced cut, kept for `lazytpu.explain` and the log."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lazytpu import metrics
from lazytpu.config import config
from lazytpu.errors import CompileBudgetError
from lazytpu.ir.cause import Cause
from lazytpu.ir.graph import Graph

log = logging.getLogger("lazytpu")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


@dataclass(frozen=True, slots=True)
class Compilation:
    """One compiled graph.

    Attributes:
        number: counts from 1.
        graph: what was compiled.
        cause: why.
        seconds: for lowering and XLA together.
        reference: a weak one to the runtime's executable, which is freed when `runtime` forgets it.
    """

    number: int
    graph: Graph
    cause: Cause
    seconds: float
    reference: weakref.ref[Any]

    @property
    def executable(self) -> Any:
        """The runtime's executable, or None where it has been forgotten."""
        return self.reference()


compilations: list[Compilation] = []
cuts: Counter[tuple[str, str]] = Counter()  # (what forced it, line) -> how often
promotions: Counter[tuple[str, str, str]] = Counter()  # (op, argument, line) -> 1

unreplayed: Counter[tuple[str, str]] = Counter()  # (function, why it is recorded in every call) -> 1

# Called with each compilation, once it is done.
listeners: list[Callable[[Compilation], None]] = []
MAX_KEPT = 1000
_total = 0


def compiled(graph: Graph, cause: Cause, seconds: float, executable: Any) -> None:
    """Notes a compilation, logs it and tells the listeners."""
    global _total
    _total += 1
    event = Compilation(_total, graph, cause, seconds, weakref.ref(executable))
    compilations.append(event)
    del compilations[:-MAX_KEPT]
    _log_level()
    log.info("%s", one_line(event))
    for listener in listeners:
        listener(event)
    done = metrics.counter("compile")
    if config.max_compiles and done > config.max_compiles:
        raise CompileBudgetError(
            f"{done} graphs were compiled; lazytpu.config.max_compiles is {config.max_compiles}",
            at=event.cause.site.describe(),
            given=event.cause.text,
            do=event.cause.remedy or "see lazytpu.explain()",
        )


def one_line(event: Compilation) -> str:
    """``compiled graph 2: 153 ops in 1.9 s: <cause> (train.py:44  Net.head)``."""
    return (
        f"compiled graph {event.number}: {len(event.graph.nodes)} ops in {event.seconds:.2f} s: "
        f"{event.cause.text} ({event.cause.site.describe()})"
    )


def cut(reason: str, line: str) -> None:
    """Notes a cut that something other than ``mark_step`` forced."""
    cuts[reason, line] += 1


def promoted(op: str, argument: str, line: str) -> None:
    """Notes that a number became an input because it was seen to change."""
    promotions[op, argument, line] += 1


def not_replayed(function: str, problem: str) -> None:
    """Notes that a function given to `lazytpu.compile` keeps being recorded."""
    unreplayed[function, problem] += 1
    _log_level()
    log.warning("%s is recorded in every call: %s", function, problem)


def _log_level() -> None:
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("lazytpu: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(_LEVELS[config.log])


def reset() -> None:
    """Forgets everything noted (compilations keep counting)."""
    compilations.clear()
    cuts.clear()
    promotions.clear()
    unreplayed.clear()


metrics.on_reset(reset)
