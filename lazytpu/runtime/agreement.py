"""Have ranks agree on each program that they start together.

A collective that one rank starts and another does not would wait for ever, and one that differs would end in C++ or mix
numbers up.  So before each start the ranks of a program compare a key of 16 bytes through the coordinator, while their
devices compute what was started before.  All equal: the program runs.  Else they tell each other which collectives
they have.  If these are the same, in the same order, each rank runs its graph in pieces, every collective a program of
its own; if not, all ranks raise, and no tensor has changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import numpy as np
import torch

from lazytpu.config import config
from lazytpu.diagnosis import events
from lazytpu.errors import WorldError
from lazytpu.ir.graph import Graph
from lazytpu.ir.printer import node_text
from lazytpu.ir.rank_patterns import connected
from lazytpu.ir.tree import Node, Value, operands
from lazytpu.location import site
from lazytpu.lowering.support import shardings
from lazytpu.observe import metrics
from lazytpu.passes.pieces import collectives_of, pieces_of
from lazytpu.runtime import differing, processes, together, world
from lazytpu.runtime.client import Buffer, ScalarArray
from lazytpu.runtime.comparison import by_rank, check_inputs, name_of
from lazytpu.runtime.disk_cache.provenance import sources_digest
from lazytpu.runtime.executable import Executable
from lazytpu.runtime.host.chatter import silenced
from lazytpu.runtime.launch import split_donated
from lazytpu.runtime.ranks import Told

_counts: Counter[tuple[int, ...]] = Counter()  # of the agreements of each set of ranks
_in_pieces: dict[object, tuple[str, int]] = {}  # by digests of ranks: what differs, and how many collectives do not
_ALL = 1 << 60
_EXCHANGE = re.compile(r"^ *%\S+ = .* (?:all-[a-z-]+|reduce-scatter[a-z-]*|collective-[a-z-]+)(?=\()", re.M)  # of HLO


def members_of(graph: Graph) -> tuple[int, ...]:
    """Return the ranks that run the program of a graph together, none if this one runs it alone."""
    if not world.is_connected():
        return ()
    if graph.patterns:
        return processes.ranks_of(graph)
    found = {d.process_index for mesh in graph.meshes for d in shardings.mesh_of(mesh).devices.flat}
    return tuple(sorted(found)) if len(found) > 1 else ()


class Together:
    """Starts a program that several ranks run, in place of what it wraps.

    Args:
        made: the executable of the whole graph.
        members: the ranks.
        executable_for: finds or compiles a piece of it.

    Attributes:
        inner: what it wraps.
    """

    def __init__(
        self, made: Executable, members: tuple[int, ...], executable_for: Callable[[Graph], Executable]
    ) -> None:
        self.graph, self.inner, self._smallest = made.graph, made.compiled, made.smallest
        self.members, self._executable_for = members, executable_for
        key = self.graph.key, self.graph.donated, self.graph.uniform, self.graph.concatenated, *made.settings.values()
        key += (*_EXCHANGE.findall(str(made.compiled.as_text())),)  # in the order that XLA has put them into
        self._digest = hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()
        self._connected = False

    def __call__(
        self, donated: Sequence[Buffer], retained: Sequence[Buffer], *scalars: ScalarArray
    ) -> Sequence[Buffer]:
        numbers = [] if self.graph.patterns else [x for x in scalars if isinstance(x, np.ndarray)]
        digest = self._digest + "".join([f"-{zlib.crc32(x.tobytes()):x}" for x in numbers])
        count = _agreed(self.graph, self.members, digest, 0, numbers)
        if count is None:
            return self.start(donated, retained, *scalars)
        metrics.count("in_pieces")
        order = [i for part in split_donated(self.graph, range(len(self.graph.inputs))) for i in part]
        known = {self.graph.inputs[i]: x for i, x in zip(order, [*donated, *retained], strict=True)}
        done = 0
        for piece in pieces_of(self.graph):
            if piece.patterns:
                if done == count:
                    count = _agreed(self.graph, self.members, self._digest, done) or _ALL
                done += 1
            made = self._executable_for(piece)
            start = made.compiled.start if type(made.compiled) is Together else made.compiled
            results = start([], [known[v] for v in piece.inputs], *(scalars if any(piece.counts) else (None,) * 3))
            known.update(zip(piece.outputs, results, strict=True))
            together.wait(results if piece.patterns else ())
        outputs = [known[v] for v in self.graph.outputs]
        if not self.graph.concatenated:
            return outputs
        n = len(outputs) - self.graph.concatenated
        return [*outputs[:n], jax.numpy.concatenate([x.reshape(-1) for x in outputs[n:]])]

    def start(self, donated: Sequence[Buffer], retained: Sequence[Buffer], *scalars: ScalarArray) -> Sequence[Buffer]:
        """Start the program without asking the other ranks."""
        if self._connected:
            results: Sequence[Buffer] = self.inner(donated, retained, *scalars)
        else:
            with silenced():
                results = self.inner(donated, retained, *scalars)
                together.wait(results)
            self._connected = True
        if results:
            together.remember(results[self._smallest])
        return results

    def __getattr__(self, name: str) -> object:  # texts and costs
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)


def _agreed(
    graph: Graph,
    members: tuple[int, ...],
    digest: str,
    done: int,
    numbers: Sequence[np.typing.NDArray[np.generic]] = (),
) -> int | None:
    """Return None where all members run the same program, else how many collectives they have before they differ.

    Args:
        done: how many of the collectives have run in pieces.
        numbers: scalar inputs, where they have to be the same on all ranks, as for a mesh.

    Raises:
        WorldError: the next collectives differ, one of the members died, or does not come.
    """
    others = world.ranks()
    others.check()
    check_inputs()
    _counts[members] += 1
    tag, line = f"{name_of(members)}.{_counts[members]}", _line()
    found = others.agree(tag, members, f"{digest}-{done}" if done else digest, line, config.collective_timeout)
    if not found:
        return None
    pattern = tuple(sorted(found.items()))
    if pattern in _in_pieces:
        where, count = _in_pieces[pattern]
    else:
        told = others.tell(
            tag,
            members,
            _description(graph, done, line)
            | {"numbers": [str(n) for x in numbers for n in x.tolist()], "attributes": differing.attributes(graph)},
            line,
            config.collective_timeout,
        )
        count = in_common(told)[processes.rank()]
        if len({tuple(said["ops"]) for said in told.values()}) == 1 and not graph.patterns:
            raise WorldError(
                "ranks give different numbers to one program on a mesh",
                at=line,
                given=by_rank({rank: ", ".join(said["numbers"][:8]) for rank, said in told.items()}),
                fix="use the same seed and the same Python numbers on all ranks",
            )
        where = _first_difference(graph, told, tag)
        if not graph.patterns or graph.checked:
            raise WorldError(
                "ranks record different programs for one mesh, which XLA divides as one program",
                given=where,
                fix="record the same ops on all ranks: read values, and print them, outside of `if rank == 0:`",
            )
        _in_pieces[pattern] = where, count
        differing.make_inputs(graph, {rank: said["attributes"] for rank, said in told.items()})
    events.ran_in_pieces(where)
    return done + count


def _line() -> str:
    return str(site.line_of_read())


def _description(graph: Graph, done: int, line: str) -> dict[str, list[str]]:
    """Return what ranks tell each other of their graphs: collectives with lines, and a short hash of each op."""
    nodes = collectives_of(graph)[done:]
    names = graph.names
    return {
        "collectives": [_collective_text(node) for node in nodes],
        "with": [",".join(map(str, connected([_pattern(node)], processes.rank()))) for node in nodes],
        "lines": [str(node.site) for node in nodes],
        "ops": [f"{zlib.crc32(node_text(node, names).encode()):x}" for node in graph.nodes],
        "end": [line],
    }


def _collective_text(node: Node) -> str:
    given = ", ".join(repr(x.layout) for x in operands(node) if type(x) is Value)
    settings = "".join(f" {x}" for x in node.args[:-1] if type(x) is not Value and x is not None)
    return f"{node.op.name.partition('.')[2]} {given}{settings} over ranks {_pattern(node)}"


def _pattern(node: Node) -> str:
    return str(node.args[-1])


def in_common(told: Told) -> dict[int, int]:
    """Return how many of its collectives each rank can run, one after the other, as its graph and others' stand.

    Those of a group are compared by its members alone: a group that only some ranks use is none of the others' concern.

    Raises:
        WorldError: the members of a group come to it with different collectives.
    """
    done = dict.fromkeys(told, 0)

    def next_of(rank: int) -> tuple[str, ...]:
        said, at = told[rank], done[rank]
        return (said["collectives"][at], said["with"][at]) if at < len(said["collectives"]) else ()

    def members(rank: int) -> list[int]:
        return [int(r) for r in next_of(rank)[1].split(",")] if next_of(rank) else []

    while ready := [r for r in told if next_of(r) and all(next_of(m) == next_of(r) for m in members(r))]:
        for rank in members(ready[0]):
            done[rank] += 1
    waiting = {r: members(r) for r in told if next_of(r)}
    stuck = {r for r, others in waiting.items() if all(m in waiting for m in others)}
    while more := {r for r in stuck if not stuck.issuperset(waiting[r])}:
        stuck -= more
    if stuck:
        raise WorldError(
            "ranks exchange different things",
            given=by_rank({r: f"{next_of(r)[0]}, {told[r]['lines'][done[r]]}" for r in sorted(stuck)}),
            fix="all ranks of a group have to call the same collectives, in the same order, with equal sizes and types",
        )
    return done


def _first_unequal(lists: list[list[str]]) -> int:
    """Return the first position where some lists differ; their length where none does."""
    length = max(map(len, lists))
    return next((i for i in range(length) if len({tuple(x[i : i + 1]) for x in lists}) > 1), length)


def _first_difference(graph: Graph, told: Told, tag: str) -> str:
    """Return the first op that is not the same on all ranks, with its line on each."""
    at = _first_unequal([said["ops"] for said in told.values()])
    if at < len(graph.nodes):
        node = graph.nodes[at]
        own = f"{node.op.name} {node.layout!r}, {node.site}" if node.values else f"{node.op.name}, {node.site}"
    else:
        own = f"the end of the step, {_line()}"
    every = world.ranks().tell(f"{tag}.op", tuple(told), {"op": [own]}, _line(), config.collective_timeout)
    return by_rank({rank: said["op"][0] for rank, said in every.items()})


def check_versions() -> None:
    """Raise where ranks run different versions, or flags of XLA; called once they are connected.

    So all compile equal graphs alike, with the collectives in the same order.

    Raises:
        WorldError: names them.
    """
    own = {"torch": torch.__version__, "jax": jax.__version__, "lazytpu": sources_digest()[:12]}
    flags = [f for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") for f in os.environ.get(name, "").split()]
    flags = sorted({f for f in flags if not f.startswith("--xla_dump")})
    text = ", ".join([*[f"{name} {version}" for name, version in own.items()], *flags])
    others = world.ranks()
    members = tuple(range(others.size))
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    if others.agree("versions", members, digest, _line(), config.collective_timeout):
        told = others.tell("versions", members, {"versions": [text]}, _line(), config.collective_timeout)
        raise WorldError(
            "ranks run different versions",
            given=by_rank({rank: said["versions"][0] for rank, said in told.items()}),
            fix="install the same packages everywhere",
        )


world.when_connected(check_versions)
