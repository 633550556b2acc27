"""The causes of compilations: their kinds, what each means, what to do about it, and their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from lazytpu.ir.site import UNKNOWN, Site
from lazytpu.ir.tree import Node, Value


class Kind(NamedTuple):
    """What causes of one kind have in common.

    Attributes:
        meaning: as the reference has it.
        fix: what to do about it where the cause says nothing else; empty where nothing is to be done.
        same_path: the ops are those of a known graph.
    """

    meaning: str
    fix: str = ""
    same_path: bool = False


KINDS = {
    "first": Kind("the first graph"),
    "start": Kind("a graph that begins with another op than those before"),
    "input": Kind(
        "an input has another shape, dtype or memory layout", "pad it to one of a few sizes, and mask the padding"
    ),
    "sharding": Kind("a tensor has another sharding", "mark it once, before the first step"),
    "operand": Kind(
        "an op takes another tensor than before, or one more or fewer",
        "pass the same tensors, with the same memory layout, in every step",
    ),
    "attribute": Kind(
        "an argument that is part of the program has another value",
        "keep it constant, or expect one graph per value: it decides shapes or selects the formula",
    ),
    "number": Kind(
        "a Python number is of another type, such as int instead of float",
        "use the same type in every step: 1.0, not 1",
    ),
    "dynamic": Kind(
        "a number that was a constant changed, and is a scalar input from now on",
        "none needed, other values reuse this graph",
    ),
    "branch": Kind(
        "Python's control flow took another path",
        "none needed for a few control paths, each has its graph; where data decides, torch.where keeps one graph",
    ),
    "mode": Kind(
        "a module was switched between train() and eval()", "none needed, train() and eval() have one graph each"
    ),
    "gradient": Kind(
        "a gradient is accumulated where there was none before, or parameters were frozen or unfrozen",
        "none needed if gradients are accumulated; else call optimizer.zero_grad() before each backward()",
    ),
    "longer": Kind("the graph goes on where it was cut before", "cut at the same place in every step", True),
    "shorter": Kind("the graph is cut where it went on before", "cut at the same place in every step", True),
    "live": Kind(
        "other results are held at the cut", "keep the same tensors in every step: what is held is computed", True
    ),
    "donation": Kind(
        "other inputs can be donated", "share its memory (copy_, to_jax, dlpack) in every step or in none", True
    ),
    "setting": Kind("a setting of lazytpu.config changed", "none needed, each setting has its graph", True),
    "flag": Kind("a setting of torch changed, and with it the ops", "none needed, each setting has its graph"),
    "version": Kind("the disk cache has the program, made by another version or with other settings"),
    "forgotten": Kind(
        "the program was compiled before and evicted",
        "raise lazytpu.config.max_executables, or compile fewer different graphs",
    ),
    "unfinished": Kind("the ops were recorded before, but never compiled"),
}
"""The kinds of causes."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a graph was compiled.

    Attributes:
        kind: one of `KINDS`.
        text: the cause in words.
        site, other: the line where the paths diverge, and the line on the known path.
        given: what is known of the tensor or number in question: its name, where it came from, what was seen here.
        fix: what to do about it, by default that of its kind.
        known: number of the compiled graph on the known path, 0 where there is none.
    """

    kind: str
    text: str
    site: Site = UNKNOWN
    other: Site = UNKNOWN
    given: str = ""
    fix: str = ""
    known: int = 0

    def __post_init__(self) -> None:
        if not self.fix:
            object.__setattr__(self, "fix", KINDS[self.kind].fix)

    @property
    def headline(self) -> str:
        """The cause with the graph that it was compared with: ``diverges from graph 2 at op 3 (aten.view), ...``."""
        if not self.known:
            return self.text
        if KINDS[self.kind].same_path:
            return f"is graph {self.known}, but {self.text}"
        return f"diverges from graph {self.known} at {self.text}"

    @property
    def was(self) -> str:
        """The line on the known path where it is another; empty where it is not."""
        return self.other.describe() if self.other.file and self.other != self.site else ""


@dataclass(frozen=True, slots=True)
class Context:
    """What is known at a cut beside the trace tree.

    Attributes:
        describe: a value of this step to the name and origin of the tensor that holds it; empty where unknown.
        settings: the settings that are part of a program, by name.
        donate: whether ``lazytpu.config.donate`` is on.
        end: where this graph is cut.
    """

    describe: Callable[[Value], str] = lambda value: ""
    settings: Mapping[str, object] = field(default_factory=dict)
    donate: bool = True
    end: Site = UNKNOWN


def graph_through(node: Node) -> int:
    """Return the number of the newest compiled graph whose path leads through a node; 0 where there is none."""
    while True:
        for reference, _ in reversed(node.executables.values()):
            executable = reference()
            if executable is not None:
                return int(executable.usage.number)
        if not node.children:
            return 0
        node = next(reversed(node.children.values()))
