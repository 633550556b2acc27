"""What a recorded call of a function did, as far as a replay has to know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from lazytpu.frontends.replay.numbers import Log
from lazytpu.ir.sharding import Sharding
from lazytpu.ir.tree import Node
from lazytpu.runtime.executable import Executable
from lazytpu.tensors.layout import Layout
from lazytpu.tensors.storage import Storage


@dataclass(slots=True)
class Gradient:
    """A tensor that a call puts into ``parameter.grad``.

    Attributes:
        storage: that of the tensor; gradients that share one in the recorded call share one in each.
        layout: how the tensor lies in it.
        slot: the output that ``storage`` keeps.
    """

    parameter: torch.Tensor
    tensor: torch.Tensor
    storage: Storage
    layout: Layout
    slot: int


class Returned(NamedTuple):
    """A leaf of what a call returns.

    Attributes:
        kind: ``constant``, or a tensor: one of before the call (``kept``), an ``argument``, an earlier leaf (``same``),
            a gradient (``grad``); or a tensor that lies in the storage of an argument (``leaf view``), of a gradient
            (``grad view``), or in a new one (``output``).
        what: the constant or the tensor that is kept; else the position of the argument, of the leaf, of the gradient,
            or of the output.
        layout: how a new tensor lies in its storage.
        requires_grad: it is a new leaf of autograd's that requires a gradient.
        memory: number of the storage it lies in among the new ones of the call.
    """

    kind: str
    what: Any
    layout: Layout = cast(Layout, None)
    requires_grad: bool = False
    memory: int = -1


@dataclass(slots=True)
class RecordedCall:
    """What a recorded call did, as far as a replay has to know.

    Attributes:
        path, key: the last node, and what was live and donated there.
        executable: what ran.
        sources: for each input of the executable its argument leaf, or the storage it is read from.
        equals: for each input the other storages that hold the same buffer.
        written: for each output the storages from before the call that keep it.
        leaves: for each output the argument leaves whose storage keeps it.
        gradients: what it puts into ``.grad``.
        results: for each leaf of the return value how to make it.
        structure: makes the return value of its leaves.
        numbers: floats, ints and complex numbers; ``keys`` are the positions of random keys among the ints.
        counters: step counters on the CPU, to which a call adds one.
        log: what was computed from the settings of optimizers.
        shardings: for each leaf of the return value how it lies on a mesh.
        problem: why the call must not be replayed, empty where nothing is known against it.
        kept_gradients: parameters and the gradients they had before, and have still.
        unexplained: a tensor of the call is kept by nobody who is known.
    """

    path: Node
    key: Any
    executable: Executable
    sources: list[int | Storage]
    equals: list[list[Storage]]
    written: list[list[Storage]]
    leaves: list[list[int]]
    gradients: list[Gradient]
    results: list[Returned]
    structure: Callable[[list[Any]], Any]
    numbers: tuple[list[float], list[int], list[complex]]
    keys: list[int]
    counters: list[torch.Tensor] = field(default_factory=list)
    log: Log = field(default_factory=Log)
    shardings: list[Sharding | None] = field(default_factory=list)
    problem: str = ""
    kept_gradients: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    unexplained: bool = False
