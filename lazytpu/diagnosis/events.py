"""Keep what happened at each compilation, forced cut and fallback, for `lazytpu.explain` and the log."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lazytpu.config import config
from lazytpu.diagnosis.cause import KINDS, Cause
from lazytpu.errors import CompileBudgetError
from lazytpu.ir.graph import Graph
from lazytpu.ir.site import UNKNOWN, Site
from lazytpu.ir.tree import trace
from lazytpu.observe import logs, metrics, step_statistics
from lazytpu.observers import Observer, add, notify


class CompileBudgetWarning(UserWarning):
    """More graphs were compiled than ``lazytpu.config.max_compiles``, with ``max_compiles_action = "warn"``."""


_TIMED_EVERY, _TIMED_AFTER_S = 100, 0.5  # runs of a graph, and seconds, from one that is timed to the next


@dataclass(slots=True)
class Usage:
    """How a compiled graph was used.

    Attributes:
        number: of its compilation, counted from 1; 0 before it is noted.
        runs: how often it was started.
        run_s: what the device takes, from the runs that were timed; 0 where none was.
        timed_at: when the last of them began, by `time.perf_counter`.
        record_s: what recording it takes, estimated (`record_time`); 0 where it is not known yet.
    """

    number: int = 0
    runs: int = 0
    run_s: float = 0.0
    timed_at: float = 0.0
    record_s: float = 0.0

    def is_due(self) -> bool:
        """Return whether the run that begins is to be waited for and timed, which takes as long as a few short ones."""
        if self.run_s and self.runs != 2:
            if self.runs % _TIMED_EVERY or time.perf_counter() - self.timed_at < _TIMED_AFTER_S:
                return False
        self.timed_at = time.perf_counter()
        return True


@dataclass(frozen=True, slots=True)
class Compilation:
    """One compiled graph.

    Attributes:
        number: counts from 1.
        graph: what was compiled.
        cause: why.
        seconds: for lowering and XLA together, or for loading it.
        reference: a weak one to the runtime's executable, which is freed when `runtime` forgets it.
        usage: how it was used.
        loaded: it was compiled by an earlier process and came from the disk cache.
        flags: torch's own flags at the time, see `torch_flags`.
        end: where it was cut.
    """

    number: int
    graph: Graph
    cause: Cause
    seconds: float
    reference: weakref.ref[Any]
    usage: Usage
    loaded: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)
    end: Site = UNKNOWN

    @property
    def executable(self) -> Any:
        """The runtime's executable, or None where it has been forgotten."""
        return self.reference()


@dataclass(slots=True)
class Tally:
    """How often something happened at a line, the seconds it took, and the bytes that it moved."""

    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0

    def add(self, seconds: float, nbytes: int = 0) -> None:
        """Count one more."""
        self.count += 1
        self.seconds += seconds
        self.nbytes += nbytes


compilations: list[Compilation] = []
cuts: dict[tuple[str, str], Tally] = {}  # (what forced it, line): how often, and how long it waited for the device
reads: dict[tuple[str, str], Tally] = {}  # the same for reads and waits that found nothing to cut
fallbacks: dict[tuple[str, str], Tally] = {}  # (op, line)
uploads: dict[Site, Tally] = {}  # copies to the device, by the line that waits for them
batches: dict[Site, Tally] = {}  # what waited for a batch of a `DeviceLoader`, after its first
dynamic_scalars: dict[tuple[str, str, str], None] = {}  # (op, argument, line) in order
unreplayed: dict[tuple[str, str], None] = {}  # (function, why it is recorded in every call) in order
pieces: Counter[str] = Counter()  # what ranks recorded differently -> how many graphs ran in pieces for it
interpretations: Counter[tuple[str, str]] = Counter()  # (why the graph was new, line) -> how many ran op by op
new_graphs: dict[str, Cause] = {}  # line -> the last cause of those
rerecorded: Counter[tuple[str, str]] = Counter()  # (function, what changed around it) -> how often it was recorded anew
functions: dict[str, Site] = {}  # where those are defined

MAX_KEPT = 1000
_total = 0
_resumed = 0  # number of the graph that was begun by the latest forced cut


def compiled(graph: Graph, cause: Cause, executable: Any, end: Site = UNKNOWN) -> None:
    """Note a compilation, log it and notify the observers.

    Args:
        end: where the graph was cut.

    Raises:
        CompileBudgetError: it is one too many for ``config.max_compiles``, and ``config.max_compiles_action`` is
            ``error``.
    """
    global _total
    _total += 1
    loaded = bool(executable.load_s)
    seconds = executable.load_s if loaded else executable.lower_s + executable.compile_s
    executable.usage.number = _total
    flags = torch_flags()
    cause = _with_changes(cause, executable.difference, flags)
    used = weakref.ref(executable), executable.usage
    event = Compilation(_total, graph, cause, seconds, *used, loaded, flags, end)
    compilations.append(event)
    del compilations[:-MAX_KEPT]
    logs.note("compile", "%s", one_line(event))
    notify("graph_compiled", event)
    done = metrics.counter("compile") + metrics.counter("disk_hit")  # a warm cache must not hide a recompilation
    if config.max_compiles and done > config.max_compiles:
        _over_budget(event, done)


def interpreted(graph: Graph, cause: Cause) -> None:
    """Note that a graph ran op by op because it was new, and why it was."""
    metrics.count("interpret")
    line = cause.site.describe()
    interpretations[cause.headline, line] += 1
    new_graphs[line] = cause
    if logs.is_on("compile"):
        text = "interpreted a graph of %d ops, which is new: %s (%s)"
        logs.note("compile", text, len(graph.nodes), cause.headline, line)


def torch_flags() -> dict[str, object]:
    """Return the flags of torch that change which ops are run, by the name under which they are read."""
    return {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.is_anomaly_enabled()": torch.is_anomaly_enabled(),
        "torch.backends.mha.get_fastpath_enabled()": torch.backends.mha.get_fastpath_enabled(),
    }


def _with_changes(cause: Cause, difference: str, flags: Mapping[str, object]) -> Cause:
    """Return the cause, with the versions, settings and flags that changed since a like graph was compiled."""
    if difference and cause.kind != "setting":
        text = f"{cause.text}; the disk cache has it, but {difference}"
        return replace(cause, kind="version" if not cause.known else cause.kind, text=text)
    known = next((e for e in reversed(compilations) if e.number == cause.known), None)
    if cause.kind == "first" and compilations:
        known = compilations[-1]
    if known is None or KINDS[cause.kind].same_path:
        return cause
    changed = [f"{n} was {known.flags[n]} and is {v}" for n, v in flags.items() if known.flags.get(n, v) != v]
    if not changed:
        return cause
    return replace(cause, kind="flag", text=f"{cause.text}; {', '.join(changed)}", fix=KINDS["flag"].fix)


def _over_budget(event: Compilation, done: int) -> None:
    cause = event.cause
    was = f" (was {cause.was})" if cause.was else ""
    error = CompileBudgetError(
        f"{done} graphs were compiled; lazytpu.config.max_compiles is {config.max_compiles}",
        at=cause.site.describe() + was,
        given="; ".join(filter(None, (cause.headline, cause.given))),
        fix=cause.fix or "see lazytpu.explain()",
    )
    if config.max_compiles_action == "error":
        raise error
    warnings.warn_explicit(str(error), CompileBudgetWarning, cause.site.file or "?", cause.site.line)


def end_of(number: int) -> Site:
    """Return where the graph of that number was cut; `UNKNOWN` where that is not kept."""
    return next((e.end for e in reversed(compilations) if e.number == number), UNKNOWN)


def compiled_before() -> int:
    """Return how many graphs were compiled in this process."""
    return _total


def op_counts() -> Iterator[tuple[str, int]]:
    """Yield (aten name, how often it ran) for each op of each graph kept here."""
    total: Counter[str] = Counter()
    for event in compilations:
        for node in event.graph.nodes:
            total[node.op.name] += event.usage.runs
    yield from ((name, n) for name, n in total.items() if n)


def lines_of(event: Compilation) -> list[str]:
    """Return what `lazytpu.explain` prints about a compilation: the cause, both lines of code, and the fix."""
    cause = event.cause
    source = " from disk" if event.loaded else ""
    head = f"{event.number}  {len(event.graph.nodes)} ops, {event.seconds:.2f} s{source}: {cause.headline}"
    labelled = ("at", cause.site.describe()), ("was", cause.was), ("with", cause.given), ("fix", cause.fix)
    return [head, *[f"   {label:<4} {text}" for label, text in labelled if text]]


def one_line(event: Compilation) -> str:
    """Return ``compiled graph 2: 153 ops in 1.90 s: <cause> (train.py:44  Net.head)``; ``loaded`` if it was on disk."""
    cause = event.cause
    was = f", was {cause.was}" if cause.was else ""
    text = "; ".join(filter(None, (cause.headline, cause.given)))
    verb = "loaded" if event.loaded else "compiled"
    graph = f"{verb} graph {event.number}: {len(event.graph.nodes)} ops in {event.seconds:.2f} s"
    return f"{graph}: {text} ({cause.site.describe()}{was})"


def cut(reason: str, line: str) -> None:
    """Note a cut that something other than ``mark_step`` forced, when it is done."""
    global _resumed
    _resumed = trace.recorded_step
    cuts.setdefault((reason, line), Tally()).count += 1
    if logs.is_on("cut"):
        logs.note("cut", "cut by %s at %s", reason, line)


def is_resumed() -> bool:
    """Return whether the graph that is recorded, or is being cut, begins after a cut that something forced."""
    return _resumed == trace.recorded_step


def waited(reason: str, line: str, seconds: float, *, after_cut: bool) -> None:
    """Note how long a line waited for the device.

    Args:
        reason: what reads, as given to `cut`.
        after_cut: whether it had to cut first, which `cut` has noted.
    """
    if after_cut and (reason, line) in cuts:
        cuts[reason, line].seconds += seconds
    else:
        reads.setdefault((reason, line), Tally()).add(seconds)
    if logs.is_on("cut"):
        logs.note("cut", "%s at %s waited %.1f ms", reason, line, 1e3 * seconds)


def uploaded(site: Site, seconds: float, nbytes: int) -> None:
    """Note a copy to the device that the program waited for; those of other threads are hidden."""
    if not step_statistics.in_background():
        uploads.setdefault(site, Tally()).add(seconds, nbytes)


def fell_back(op: str, line: str, seconds: float) -> None:
    """Note that an op without a lowering ran on the CPU."""
    fallbacks.setdefault((op, line), Tally()).add(seconds)
    if logs.is_on("fallback"):
        logs.note("fallback", "%s ran on the CPU at %s, %.1f ms", op, line, 1e3 * seconds)


def made_dynamic(op: str, argument: str, line: str) -> None:
    """Note that a number became a scalar input because it changed."""
    dynamic_scalars[op, argument, line] = None
    if logs.is_on("made_dynamic"):
        text = "argument %r of %s changed and is a scalar input from now on, at %s"
        logs.note("made_dynamic", text, argument, op, line)


def not_replayed(function: str, problem: str, site: Site) -> None:
    """Note that a function given to `lazytpu.compile`, defined at ``site``, keeps being recorded."""
    unreplayed[function, problem] = None
    functions[function] = site
    logs.note("compile", "%s is recorded in every call: %s", function, problem, level=logs.LEVELS["warning"])


def recorded_again(function: str, change: str, site: Site) -> None:
    """Note that a function given to `lazytpu.compile` is recorded anew, because of a change around it."""
    rerecorded[function, change] += 1
    functions[function] = site
    if logs.is_on("compile"):
        logs.note("compile", "%s is recorded again: %s", function, change)


def ran_in_pieces(difference: str) -> None:
    """Note that a graph ran in pieces, as ranks recorded something different between the same collectives."""
    if difference not in pieces:
        text = "ranks record different ops between their collectives, so these run as programs of their own: %s"
        logs.note("world", text, " | ".join(difference.split("\n        ")), level=logs.LEVELS["warning"])
    pieces[difference] += 1


def reset() -> None:
    """Forget everything noted (compilations keep counting)."""
    for noted in (
        compilations,
        cuts,
        reads,
        fallbacks,
        uploads,
        batches,
        new_graphs,
        functions,
        dynamic_scalars,
        unreplayed,
        rerecorded,
        interpretations,
        pieces,
    ):
        noted.clear()


class _Reset(Observer):
    """Lets `lazytpu.metrics.reset` forget what was noted here, too."""

    def metrics_reset(self) -> None:
        reset()


add(_Reset())
