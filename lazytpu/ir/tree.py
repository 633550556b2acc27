"""The trace tree: every path from the root is the graph of one step, recorded op by op.

A training loop records the same ops every step, so a step walks down a path that exists already.
`Trace.cursor` stands on the node of the last op; the next op looks its key up among the cursor's
children.  A hit makes nothing.  A miss makes one `Node`, and the place where two paths part is the
explanation of a recompilation.

Everything in a key hashes by identity or is an int, str, dtype or tuple of these, so that a look-up
never runs Python code: this is what makes the commit of an op (see tracing/record.py) indivisible.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, cast

from lazytpu.ir.op_schema import Arg, Op
from lazytpu.ir.sharding import Mesh, Sharding
from lazytpu.ir.site import UNKNOWN, Site
from lazytpu.ir.types import TensorType

Key: TypeAlias = tuple[object, ...]
Structure: TypeAlias = int | list["Structure"] | tuple["Structure", ...]


class Value:
    """One array: result ``index`` of ``node``, or input number ``index`` of the graph (``node`` None).

    Identity is equality.  A value has one layout, so tensors that share a value share their strides.  An input that
    lies on a mesh has a sharding; None for one that does not, and for results.
    """

    __slots__ = ("index", "layout", "node", "sharding")

    def __init__(self, node: Node | None, index: int, layout: TensorType, sharding: Sharding | None = None) -> None:
        self.node, self.index, self.layout, self.sharding = node, index, layout, sharding

    def __repr__(self) -> str:
        return f"%{'p' if self.node is None else f'{self.node.depth - 1}.'}{self.index}: {self.layout}"


class Number:
    """A number from Python: element ``index`` of the step's host array of its ``kind``.

    Kinds are ``f`` (float64), ``i`` (int64) and ``c`` (complex128); ``dtype`` is what the op sees
    (``float``, ``int``, ``bool`` or ``complex`` for a Python number, a torch dtype for a 0-dim CPU tensor).
    """

    __slots__ = ("dtype", "index", "kind")

    def __init__(self, kind: str, index: int, dtype: Any) -> None:
        self.kind, self.index, self.dtype = kind, index, dtype

    def __repr__(self) -> str:
        return f"%{self.kind}{self.index}"


class Node:
    """One recorded op.

    Attributes:
        op: what was recorded (record.Op); ``args`` and ``kwargs`` are the aten arguments with `Value`
            for tensors, `Number` for numbers that are inputs, and plain Python values for attributes.
        value, layout: of the first result; ``values`` has all of them (None where torch gives none).
        structure: how the results nest, each an index into ``values``: ``0``, ``(0, 1)``, ``[0, 1]``, ``([0], [1])``.
        natural: types the op gives where an in-place op then casts to those of its target; else None.
        counts: how many floats, ints and complex numbers the path holds up to here.
        site: the user's line and module path.
        children: key of the next op to its node.
        executables: (live values, donated inputs) to what `step.cut` found to run for them: a weak reference to the
            executable, and the inputs it takes.
        cut: what the last cut here was for, and its key (tracing/liveness.py).
        dynamic: per op the positions whose numbers are inputs because they were seen to change.
    """

    __slots__ = (
        "args",
        "children",
        "counts",
        "cut",
        "depth",
        "dynamic",
        "executables",
        "key",
        "kwargs",
        "layout",
        "natural",
        "op",
        "operands",
        "parent",
        "structure",
        "site",
        "value",
        "values",
    )

    def __init__(self, parent: Node | None) -> None:
        self.parent = parent
        self.children: dict[Key, Node] = {} if parent is None else type(parent.children)()
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.counts: tuple[int, int, int] = (0, 0, 0) if parent is None else parent.counts
        self.executables: dict[Key, tuple[weakref.ref[Any], tuple[int, ...]]] = {}
        self.cut: tuple[object, object] | None = None
        self.dynamic: dict[Op, tuple[int, ...]] | None = None
        self.op: Op = cast("Op", None)
        self.key: Key = ()
        self.args: tuple[Arg, ...] = ()
        self.kwargs: dict[str, Arg] = {}
        self.values: tuple[Value | None, ...] = ()
        self.value: Value = cast("Value", None)
        self.layout: TensorType = cast("TensorType", None)
        self.structure: Structure = 0
        self.natural: tuple[TensorType, ...] | None = None
        self.operands: Sequence[Value | Number] | None = None  # see `operands`
        self.site: Site = UNKNOWN

    def set_results(self, layouts: tuple[TensorType | None, ...], structure: Structure) -> None:
        """Give the node its results."""
        self.values = tuple(None if lay is None else Value(self, i, lay) for i, lay in enumerate(layouts))
        self.structure = structure
        if self.values:
            self.value, self.layout = cast(Value, self.values[0]), cast(TensorType, layouts[0])

    @property
    def results(self) -> list[Value]:
        """The values that torch gives."""
        return [v for v in self.values if v is not None]

    def path(self) -> list[Node]:
        """Return the nodes from the first op to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class Unfound(dict[Key, Node]):
    """The children of a node in a tree that remembers nothing: every op is a miss (see `Trace.remember`)."""

    def __getitem__(self, key: Key) -> Node:
        raise KeyError(key)

    def get(self, key: Key, default: Any = None) -> Any:
        return default

    def __setitem__(self, key: Key, node: Node) -> None:
        pass


def operands(node: Node) -> Sequence[Value | Number]:
    """Return every `Value` and `Number` among the arguments of a node, in order; found once."""
    if node.operands is None:
        found: list[Value | Number] = []
        _add_operands(node.args, found)
        _add_operands(node.kwargs.values(), found)
        node.operands = node.args if len(found) == len(node.args) and node.args == (*found,) else found
    return node.operands


# Not a function inside `operands`, for one that calls itself is a reference cycle, one a node.
def _add_operands(arguments: Iterable[Arg], found: list[Value | Number]) -> None:
    for x in arguments:
        if type(x) is Value or type(x) is Number:
            found.append(x)
        elif isinstance(x, (list, tuple)):
            _add_operands(x, found)


Mark: TypeAlias = tuple[Node, int, tuple[Node, Node] | None, Node | None, list[int], Mesh | None]


class Trace:
    """The state of recording: one for the process.

    Attributes:
        root, cursor: the tree and the node of the last op.
        roots: the other trees, by the name of the setting of torch's under which they were recorded (`change_root`).
        root_name: that of ``root``.
        step: number of the current step; a cell whose ``step`` differs has to be loaded first.
        recorded_step: number of the step that ``cursor`` and the lists below belong to: ``step``, except while the
            trace is ``closed``.
        inputs: (storage, its buffer, whether someone else may hold the buffer) in order of first use.
        floats, ints, complexes: the numbers from Python of this step, in order of recording.
        pending: storages that were written in this step, in order of first write.
        nodes: how many nodes the tree holds.
        diverged: (node, its new child) where this step left the known paths.
        forgetful: nothing recorded is found again, see `remember`.
        isolated: the body of a loop is being recorded, on a path of its own that must not be cut.
        mesh: the mesh of this step, once something in it has a sharding; ``shardings`` are those of its inputs, by
            their numbers.
        exchanges: the collectives of this step, which every process of their groups runs, whether or not it needs the
            results.
        shadow: after a number was made dynamic, the node of the path left there that corresponds to the cursor.
    """

    __slots__ = (
        "closed",
        "complexes",
        "cursor",
        "diverged",
        "exchanges",
        "floats",
        "forgetful",
        "input_values",
        "inputs",
        "ints",
        "isolated",
        "mesh",
        "nodes",
        "ops",
        "pending",
        "recorded_step",
        "root",
        "root_name",
        "roots",
        "shadow",
        "shardings",
        "step",
    )

    def __init__(self) -> None:
        self.root = self.cursor = Node(None)
        self.roots: dict[object, Node] = {}
        self.root_name: object = None
        self.step = self.recorded_step = 1
        self.closed = self.isolated = False
        self.forgetful = False
        self.inputs: list[tuple[Any, Any, bool]] = []
        self.floats: list[float] = []
        self.ints: list[int] = []
        self.complexes: list[complex] = []
        self.pending: list[Any] = []
        self.input_values: dict[tuple[int, TensorType, Sharding | None], Value] = {}
        self.mesh: Mesh | None = None
        self.shardings: dict[int, Sharding] = {}
        self.exchanges: list[Node] = []
        self.nodes = 0
        self.ops = 0
        self.diverged: tuple[Node, Node] | None = None
        self.shadow: Node | None = None

    def input_value(self, index: int, layout: TensorType, sharding: Sharding | None = None) -> Value:
        """Return the value that stands for input ``index`` of this layout and sharding on every path."""
        value = self.input_values.get((index, layout, sharding))
        if value is None:
            value = self.input_values[index, layout, sharding] = Value(None, index, layout, sharding)
        return value

    def close(self) -> None:
        """Keep everybody from recording: nothing belongs to the number that ``step`` has now.

        `step.cut` opens it again, with ``step`` at ``recorded_step``: the next step if there was one, else this one.
        """
        self.step += 1
        self.closed = True

    def refuse_if_closed(self) -> None:
        """Raise where something is recorded in the middle of a cut."""
        if self.closed:
            raise RuntimeError("the device was used by a signal handler while a graph was being cut")

    def next_step(self) -> None:
        """Back to the root; what was recorded stays in the tree."""
        self.ops += self.cursor.depth
        self.cursor = self.root
        if not self.closed:
            self.step += 1
        self.recorded_step = self.step
        self.inputs, self.floats, self.ints, self.complexes = [], [], [], []
        self.diverged = self.shadow = None
        if self.mesh is not None:
            self.mesh, self.shardings = None, {}
        if self.exchanges:
            self.exchanges = []

    def mark(self) -> Mark:
        """Return where recording stands, for `rewind`."""
        lengths = [len(x) for x in (self.inputs, self.floats, self.ints, self.complexes, self.pending)]
        return self.cursor, self.nodes, self.diverged, self.shadow, lengths, self.mesh

    def rewind(self, mark: Mark) -> list[Any]:
        """Undo what was recorded since ``mark``; return the storages that were loaded or written since."""
        last, new = self.cursor, self.nodes - mark[1]
        self.cursor, self.nodes, self.diverged, self.shadow, lengths, self.mesh = mark
        self.shardings = {i: s for i, s in self.shardings.items() if i < lengths[0]}
        self.exchanges = [node for node in self.exchanges if node.depth <= self.cursor.depth]
        if new:  # nodes made since then are at the end of the path, below the first of them
            first = last.path()[-new]
            assert first.parent is not None
            first.parent.children.pop(first.key, None)
        touched = [entry[0] for entry in self.inputs[lengths[0] :]] + self.pending[lengths[4] :]
        lists: tuple[list[Any], ...] = (self.inputs, self.floats, self.ints, self.complexes, self.pending)
        for kept, n in zip(lists, lengths, strict=True):
            del kept[n:]
        return touched

    def forget_paths(self) -> None:
        """Drop the tree (compiled graphs are found again by their hash)."""
        dropped = [self.root, *self.roots.values()]
        self.roots.clear()
        while dropped:  # a graph that somebody keeps holds its path, and must not hold all the others too
            node = dropped.pop()
            dropped += node.children.values()
            node.children = {}
        self.root = Node(None)
        if self.forgetful:
            self.root.children = Unfound()
        self.input_values = {}
        self.nodes = 0
        if self.cursor.depth == 0:
            self.cursor = self.root

    def change_root(self, name: object) -> None:
        """Record below the root of that name from now on, so that nothing recorded under another name is found.

        For a setting of torch's that decides the types of results and is in no key.  Called where nothing is pending.
        """
        self.roots[self.root_name] = self.root
        root = self.roots.pop(name, None)
        if root is None:
            root = Node(None)
            if self.forgetful:
                root.children = Unfound()
        self.root = self.cursor = root
        self.root_name = name

    def remember(self, on: bool) -> None:
        """Return whether what is recorded is found again.

        Off, each op is recorded anew wherever it stands, with its own line, and observers are notified of it
        (``op_new``): for debugging.  The hot paths look their ops up as ever and do not find them, so this costs
        nothing while it is on.  Called where nothing is pending.
        """
        self.forgetful = not on
        self.forget_paths()


trace = Trace()
