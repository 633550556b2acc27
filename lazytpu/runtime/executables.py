"""Keep executables in memory: find the one of a graph, load or compile it, keep it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lazytpu.config import config
from lazytpu.ir.graph import Graph
from lazytpu.lowering import target
from lazytpu.observers import notify
from lazytpu.passes.uniform_scalars import are_uniform, with_uniform
from lazytpu.runtime import agreement, client, compiler, described
from lazytpu.runtime.disk_cache import claims, lookup
from lazytpu.runtime.executable import Executable
from lazytpu.runtime.host import memory
from lazytpu.runtime.least_recent import LeastRecent

executables: LeastRecent[object, Executable] = LeastRecent(config.max_executables)  # by `name_of`


def executable_for(
    graph: Graph,
    scalars: tuple[Sequence[float], Sequence[int]] | None = None,
    *,
    instead: Callable[[Graph], Executable | None] = lambda graph: None,
    counter: str = "compile",
) -> tuple[Executable, bool]:
    """Return the executable of a graph, and whether it was compiled, or loaded from disk, just now.

    Args:
        scalars: the step's floats and ints, for an executable that is only for steps like this one (see `fits`);
            without them it is for any.
        instead: makes what runs a graph that is neither in memory nor on disk; None to compile it now.
        counter: what counts a graph that is compiled.

    Raises:
        LoweringError: a rule failed; names the op and the user's line.
        CompileError: XLA refused the program.
    """
    if scalars is not None:
        graph = with_uniform(graph, *scalars)
    known = executables.find(name_of(graph))
    if known is not None:
        return known, False
    graph.verify()
    if target.described() is not None:
        noting = described.executable_of(graph, compiler.settings())
        _keep(noting)
        return noting, False
    key = lookup.key_of(graph)
    made = _load(graph, key)
    if made is None:
        made = instead(graph)
        if made is not None and made.interpreted:
            return made, False
        made = _kept(graph, key, made, counter)
    members = agreement.members_of(graph)
    if members:
        made.compiled = made.call = agreement.Together(made, members, lambda piece: executable_for(piece)[0])
    _keep(made)
    notify("executable_made", made)
    return made, True


def _kept(graph: Graph, key: str, made: Executable | None, counter: str) -> Executable:
    """Compile a graph, unless it was ``made`` or another rank has just done so, and keep the executable on disk."""
    shared = bool(graph.patterns) or graph.mesh is not None
    if made is None and shared and claims.claim(key) and (found := _load(graph, key)) is not None:
        return found
    try:
        made = made or compiler.compile_graph(graph, counter)
        made.difference = lookup.difference(key)
        lookup.keep(key, made.compiled.compiled if graph.patterns else made.compiled)
    except BaseException:
        claims.end(key)
        raise
    return made


def _load(graph: Graph, key: str) -> Executable | None:
    """Load the executable of a graph from the disk cache."""
    found = lookup.find(key, *compiler.argument_types(graph))
    return None if found is None else compiler.executable_of(graph, found[0], load_s=found[1])


def _keep(made: Executable) -> None:
    """Keep an executable in memory, within the limits of their number and of the system's memory mappings."""
    executables.limit = config.max_executables
    executables.keep(name_of(made.graph), made)
    memory.free_mappings(executables)
    if client.platform() == "cpu":
        memory.keep_heap()


def used(executable: Executable) -> None:
    """Mark an executable that was found without `executable_for` as used, so that it is not forgotten."""
    if executables.newest is not executable:
        executables.find(name_of(executable.graph))


def name_of(graph: Graph) -> tuple[object, ...]:
    """Return what an executable is kept under: equal for graphs and settings that give one program."""
    return graph.key, graph.uniform, *compiler.settings().values()


def fits(executable: Executable, floats: Sequence[float], ints: Sequence[int]) -> bool:
    """Return whether an executable is for steps with these scalars; some need the scalars of a list to be equal."""
    uniform = executable.graph.uniform
    return not uniform or are_uniform(floats, ints, uniform)


def forget_executables() -> None:
    """Drop every compiled graph (for tests)."""
    executables.clear()
