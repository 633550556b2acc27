"""A captured graph for arguments that lie in memory in one way: what to run, and what its results become."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from lazytpu.config import config
from lazytpu.diagnosis import events
from lazytpu.diagnosis.cause import Cause
from lazytpu.frontends.dynamo.memory import argument_views, memory_groups
from lazytpu.frontends.fx.to_ir import Conversion
from lazytpu.ir.graph import Graph, graph_of
from lazytpu.ir.site import Site
from lazytpu.ir.tree import Node, Value
from lazytpu.ir.types import Size
from lazytpu.location.site import here, line_of_call
from lazytpu.observe import metrics
from lazytpu.runtime import compiler, executables, index_checks, launch, placement, transfers
from lazytpu.runtime.client import Buffer
from lazytpu.runtime.executable import Executable
from lazytpu.tensors.layout import Layout, layout_of
from lazytpu.tensors.storage import Storage
from lazytpu.tensors.tensor import LazyTensor

_create = torch._C._acc.create_empty_tensor

Pick = Callable[[list[Buffer]], list[Buffer]]
Fresh = tuple[int, Layout, Size, torch.dtype]
Other = tuple[int, int, object]


@dataclass(frozen=True, slots=True)
class Result:
    """What one result of a captured graph is.

    Attributes:
        position: of the output of the executable; -1 for a constant, and for an argument returned as it is.
        layout: of the tensor to be made.
        host: it is a CPU tensor.
        shared: another result has the same buffer.
        base: of results that share memory, the number of the group; -1 for one that has its own.
        view: how it lies in the memory of its group, whose whole is ``layout``, or in that of the argument; None for
            the whole itself.
        is_view: autograd is to know it as a view of the whole.
        argument: position of the argument, or -1.
        constant: what it is otherwise.
    """

    position: int = -1
    layout: Layout | None = None
    host: bool = False
    shared: bool = False
    base: int = -1
    view: Layout | None = None
    is_view: bool = False
    argument: int = -1
    constant: Any = None

    @property
    def is_fresh(self) -> bool:
        """Whether it is a new tensor on the device with the strides that torch gives one."""
        plain = self.position >= 0 and not self.host and not self.shared and self.base < 0
        return plain and self.layout is not None and self.layout.as_created


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """An executable and how its arguments are picked from the buffers of all arguments.

    Attributes:
        executable: a weak reference, as `runtime` may forget it.
        given, kept: pick the donated inputs and the others.
        same: none is donated, and the others are the arguments as they are.
        scalars: the numbers from Python as buffers, for a graph that draws no random numbers: it has no others.
    """

    executable: weakref.ref[Executable]
    given: Pick
    kept: Pick
    same: bool
    scalars: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Shortcut:
    """A call that starts an executable and wraps its results, and has nothing else to do.

    Attributes:
        layouts: of the arguments.
        precision, lowerings: the settings ``matmul_precision`` and ``lowerings`` it is for; ``check_bounds`` is off.
        executable: a weak reference, as `runtime` may forget it.
        scalars: the numbers from Python as buffers.
        smallest: position of the smallest output.
        fresh, others: see `CapturedProgram`.
        usage: of the executable.
    """

    layouts: list[Layout | None]
    precision: str
    lowerings: str
    executable: weakref.ref[Executable]
    scalars: list[Any]
    smallest: int
    fresh: list[Fresh]
    others: list[Other]
    usage: events.Usage


def results_of(
    fresh: Sequence[Fresh], others: Sequence[Other], outputs: Sequence[Buffer], args: Sequence[object]
) -> list[Any]:
    """Return the results of a call, see `CapturedProgram`: `make` written out, most of the work of a call."""
    made = []
    for position, layout, size, dtype in fresh:
        storage = Storage()
        storage.layout, storage.buffer = layout, outputs[position]
        tensor: Any = _create(size, dtype)
        tensor.untyped_storage()._s = storage
        tensor.__class__ = LazyTensor
        tensor._s = storage
        made.append(tensor)
    for at, argument, constant in others:
        made.insert(at, args[argument] if argument >= 0 else constant)
    return made


def _call_of(executable: Executable, graph: Graph, arguments: int) -> ProgramCall:
    """Return how to call an executable for a graph equal to its own, whose inputs may stand at other positions."""
    given, kept = launch.split_donated(graph, [v.index for v in graph.inputs])
    same = not given and kept == list(range(arguments))
    scalars = launch.resident(launch.scalar_arrays(graph, (), [0] * graph.counts[1], ()))
    return ProgramCall(weakref.ref(executable), _pick(given), _pick(kept), same, scalars)


def _pick(positions: list[int]) -> Pick:
    """Return a function that picks the elements at these positions of a list."""
    if positions == list(range(len(positions))):
        return lambda x: x[: len(positions)]
    if len(positions) == 1:
        return lambda x: [x[positions[0]]]
    pick = itemgetter(*positions)
    return lambda x: [*pick(x)]


@dataclass(slots=True)
class CapturedProgram:
    """A captured graph for one way its arguments lie.

    Attributes:
        layouts: of the arguments; None for those that are no tensors.
        last, outputs: the path and what is computed; ``graph_of`` makes a graph of them for a set of donated inputs.
        results: what the function returns.
        written: positions of arguments to the position of the output that is their new contents.
        whole: no argument is a view, so each buffer is given as it is.
        draws: how many random ops there are.
        captured: buffers of tensors that the graph holds, inputs after the arguments.
        new: what was compiled just now and is to be dumped.
        fresh: position, layout, sizes and dtype of each result that is a new tensor on the device with row-major
            strides, where the others are arguments or constants; else empty.
        others: these others: place among the results, position of the argument or -1, constant.
        plain: it writes to no argument and draws no random numbers.
        calls: donated positions and settings to what is run for them.
    """

    name: str
    layouts: list[Layout | None]
    last: Node
    outputs: tuple[Value, ...]
    results: list[Result]
    written: dict[int, int]
    whole: bool
    draws: int
    captured: list[Buffer]
    compiled_before: bool = False
    new: events.Compilation | None = None
    fresh: list[Fresh] = field(init=False)
    others: list[Other] = field(init=False)
    plain: bool = field(init=False)
    calls: dict[tuple[Any, ...], ProgramCall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plain = not self.written and not self.draws
        made = [(r.position, r.layout, r.layout.size, r.layout.dtype) for r in self.results if r.layout and r.is_fresh]
        known = [(at, r) for at, r in enumerate(self.results) if r.position < 0 and r.view is None]
        self.others = [(at, r.argument, r.constant) for at, r in known]
        self.fresh = made if len(made) + len(self.others) == len(self.results) else []

    def call(self, donated: tuple[int, ...]) -> ProgramCall:
        """Return what to run where the buffers of the ``donated`` arguments may be taken over."""
        key = (donated, config.check_bounds, *compiler.settings().values())
        known = self.calls.get(key)
        executable = None if known is None else known.executable()
        if known is not None and executable is not None:
            executables.used(executable)
            metrics.count("cache_hit")
            return known
        inputs = graph_of(self.last, self.outputs).inputs
        values = dict.fromkeys(v for v in inputs if v.index in donated)  # no set, whose order is of addresses
        checked = index_checks.checked_nodes(self.last) if config.check_bounds else ()
        graph = graph_of(self.last, self.outputs, tuple(values), checked)
        cause = self._cause(key)
        if not self.calls:
            placement.note_ops(graph.nodes)
        executable, compiled = executables.executable_for(graph)
        self.calls[key] = call = _call_of(executable, graph, len(self.layouts) + len(self.captured))
        if compiled:
            events.compiled(graph, cause, executable)
            self.new = events.compilations[-1] if config.dump else None
        else:
            metrics.count("cache_hit")
        return call

    def shortcut(self, call: ProgramCall) -> Shortcut | None:
        """Return how to call this from now on, where one executable takes all arguments and gives all results."""
        executable = call.executable()
        simple = call.same and self.whole and self.fresh and not self.captured and not config.check_bounds
        if executable is None or not simple:
            return None
        scalars = [p for p in call.scalars if p is not None]
        if launch.flat_call(executable, len(self.layouts) + len(scalars)) is None:
            return None
        return Shortcut(
            self.layouts,
            config.matmul_precision,
            config.lowerings,
            call.executable,
            scalars,
            executable.smallest,
            self.fresh,
            self.others,
            executable.usage,
        )

    def _cause(self, key: Any) -> Cause:
        """Return why this is compiled for the donated arguments and the settings of a key of ``calls``."""
        site = next((n.site for n in self.last.path() if n.site.file), None) or here()
        if self.calls:
            return self._other_call(key, line_of_call() or site)
        types = ", ".join(lay.describe() for lay in self.layouts[:4] if lay is not None)
        if not self.compiled_before:
            return Cause("first", f"torch.compile captured it: {self.name}", site)
        return Cause(
            "input",
            f"torch.compile: {self.name} is called with arguments of other types: {types}, ...",
            site,
            fix="keep the shapes of batches the same: drop_last=True, or pad the last batch",
        )

    def _other_call(self, key: Any, site: Site) -> Cause:
        """Return the cause where the same program was called before, with other settings or donated arguments."""
        old, call = next(reversed(self.calls.items()))
        executable = call.executable()
        known = 0 if executable is None else executable.usage.number
        if key in self.calls:
            return Cause("forgotten", f"torch.compile: {self.name} was compiled before and evicted since", site)
        names = ("check_bounds", *compiler.settings())
        changed = [
            f"lazytpu.config.{n} was {was!r} and is {now!r}"
            for n, was, now in zip(names, old[1:], key[1:], strict=True)
            if was != now
        ]
        if changed:
            return Cause("setting", ", ".join(changed), site, known=known)
        return Cause(
            "donation",
            f"other arguments of {self.name} can be donated: {list(key[0])} instead of {list(old[0])}",
            site,
            fix="share the memory of an argument in every call or in none",
            known=known,
        )


def program_of(
    module: torch.fx.GraphModule, name: str, layouts: list[Layout | None], compiled_before: bool
) -> CapturedProgram:
    """Convert a captured graph.

    Args:
        module: aten ops with fixed sizes.
        layouts: how the arguments lie in their storages; None for what is no tensor.

    Raises:
        UnsupportedOpError: the graph cannot be one program.
    """
    done = Conversion(module, layouts)
    groups = memory_groups(module, gradients=name.startswith("backward"))
    bases = {at: done.env[group.base] for at, group in groups.items()}
    host = _on_host(module)
    views = {at: view for at, view in argument_views(module).items() if not host[at]}
    made = [bases.get(i, r) for i, r in enumerate(done.results) if i not in views] + list(done.written.values())
    values = [r for r in made if type(r) is Value and r not in done.arguments and r.node is not None]
    outputs = tuple(dict.fromkeys(values))
    positions = {value: i for i, value in enumerate(outputs)}
    results = []
    for at, result in enumerate(done.results):
        whole = layouts[views[at][0]] if at in views else None
        if whole is not None:
            argument, (size, stride, offset, dtype, bits) = views[at]
            start = whole.offset * whole.dtype.itemsize // dtype.itemsize
            view = whole.root.child_at((size, stride, start + offset, dtype, bits))
            results.append(Result(argument=argument, view=view))
        elif at in groups and bases[at] in positions:
            group, root, position = groups[at], bases[at].layout, positions[bases[at]]
            lies = None if group.geometry is None else root.child_at(group.geometry)
            results.append(Result(position, root, host[at], base=group.number, view=lies, is_view=group.is_view))
        elif type(result) is not Value:
            results.append(Result(constant=result))
        elif result in positions:
            results.append(Result(positions[result], layout_of(result.layout), host[at], values.count(result) > 1))
        elif result in done.arguments:
            results.append(Result(argument=done.arguments[result]))
        else:
            results.append(Result(constant=done.captured[result.index - len(layouts)]))
    return CapturedProgram(
        name,
        layouts,
        done.last,
        outputs,
        results,
        {argument: positions[v] for argument, v in done.written.items() if v in positions},
        all(lay is None or lay.parent is None for lay in layouts),
        done.last.counts[1] // 2,
        [transfers.to_device(t.detach().cpu()) for t in done.captured],
        compiled_before,
    )


def _on_host(module: torch.fx.GraphModule) -> list[bool]:
    """Return which results are CPU tensors."""
    returned = next(iter(module.graph.find_nodes(op="output"))).args[0]
    nodes = returned if isinstance(returned, (list, tuple)) else [returned]
    types = [n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in nodes]
    return [isinstance(t, torch.Tensor) and t.device.type == "cpu" for t in types]
