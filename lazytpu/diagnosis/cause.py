"""Why a graph had to be compiled, in words: what is told of each cause (diagnosis.py finds it)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lazytpu.ir.tree import Node, Value
from lazytpu.location.site import UNKNOWN, Site


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a graph was compiled.

    Attributes:
        kind: one of `KINDS`.
        text: the cause in words.
        site, other: the line where the paths part, and the line on the known path.
        given: what is known of the tensor or number in question: its name, where it came from, how many were seen.
        fix: what to do about it, empty where nothing is to be done.
        known: number of the compiled graph on the known path, 0 where there is none.
    """

    kind: str
    text: str
    site: Site = UNKNOWN
    other: Site = UNKNOWN
    given: str = ""
    fix: str = ""
    known: int = 0


KINDS = {
    "first": "the first graph",
    "start": "a graph that begins with another op than those before",
    "input": "an input has another shape, dtype or memory layout",
    "operand": "an op takes another tensor than before, or one more or fewer",
    "attribute": "an argument that is part of the program has another value",
    "number": "a Python number is of another kind, such as int instead of float",
    "promoted": "a number that was a constant changed, and is an input from now on",
    "branch": "Python's control flow took another control path",
    "mode": "a module was switched between train() and eval()",
    "gradient": "a gradient is added to one that is there, or no longer is",
    "longer": "the graph goes on where it was cut before",
    "shorter": "the graph is cut where it went on before",
    "live": "other tensors are held at the cut",
    "donation": "other inputs may be overwritten",
    "setting": "a setting of lazytpu.config changed",
    "flag": "one of torch's flags changed, and with it the ops",
    "version": "the disk cache has the program, made by another version or with other settings",
    "forgotten": "the program had been compiled and was forgotten",
    "unfinished": "the ops were recorded before, but never compiled",
}
"""The kinds of causes, and what each means."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the trace tree does not know by itself.

    Attributes:
        describe: a value of this step to the name and origin of the tensor that holds it; empty where unknown.
        number_of: an executable to the number of its graph; 0 where it was not compiled in this process.
        settings: the settings that are part of a program, by name.
        donate: whether ``lazytpu.config.donate`` is on.
        compiled: how many graphs were compiled before.
        end: where this graph is cut.
        end_of: the number of a graph to where it was cut when it was compiled; `UNKNOWN` where that is not known.
        resumed: this graph begins in the middle of a step, after a cut that something forced.
        names: number of an input of this step that is a parameter or buffer to its name.
        name_of: the number of a graph, and that of an input, to the name the input had when the graph was compiled;
            empty where it is not known.
    """

    describe: Callable[[Value], str] = lambda value: ""
    number_of: Callable[[Any], int] = lambda executable: 0
    settings: dict[str, Any] | None = None
    donate: bool = True
    compiled: int = 0
    end: Site = UNKNOWN
    end_of: Callable[[int], Site] = lambda number: UNKNOWN
    resumed: bool = False
    names: dict[int, str] = field(default_factory=dict)
    name_of: Callable[[int, int], str] = lambda number, index: ""

    def graph_through(self, node: Node) -> int:
        """The number of the newest compiled graph whose path leads through a node."""
        while True:
            for reference, _ in reversed(node.executables.values()):
                executable = reference()
                if executable is not None:
                    return self.number_of(executable)
            if not node.children:
                return 0
            node = next(reversed(node.children.values()))
