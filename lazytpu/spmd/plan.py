"""`plan`: what a step needs and does on a TPU pod, found out without one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lazytpu import random
from lazytpu.debug.planned import Plan, Program
from lazytpu.errors import LazyTPUError
from lazytpu.ir.graph import Graph
from lazytpu.lowering.target import Topology, compiling_for
from lazytpu.observers import Observer, add, remove
from lazytpu.runtime import described, meshes
from lazytpu.runtime.ahead import compile_ahead
from lazytpu.tracing import step
from lazytpu.tracing.cutting import cut

_CUTS_WITHOUT_STEPS = 64  # of a program that ends no step, after which it is looked at


class Ended(BaseException):
    """Ends a program that is planned, at the end of the last of its steps; ``Exception`` does not catch it."""


def plan(function: Callable[[], object], topology: str, *, steps: int = 3) -> Plan:
    """Record a program for a TPU pod that need not be there, compile its last step, and say what that needs.

    XLA's compiler for TPUs, the package ``libtpu``, compiles on any machine: ``pip install 'lazytpu[tpu]'``.  Tensors
    have types and shardings and no contents, so a model of any size can be planned; make it on the device
    (``with torch.device(lazytpu.device())``), or its first parameters take memory on the host.  What is read is zeros.

    Args:
        function: makes model, optimizer and batches, marks them on a `Mesh` whose devices are those of the topology,
            and runs steps.  Where it returns a function, that is the step, and called ``steps`` times.  All tensors
            of the device that it uses have to be made inside.
        topology: kind of chip, and chips along each side: ``v5e:16x16``; of GPUs hosts and GPUs of each: ``h100:2x8``.
        steps: how many steps are recorded; the last one is compiled.  The first ones make the optimizer's state.

    Returns:
        Memory, collectives, FLOPs and least time of the step on one chip.

    Raises:
        ModuleNotFoundError: libtpu is not installed.
        ValueError: there is no such topology, or fewer than one step is asked for.
        CompileError: XLA refused the program, for another reason than its size.
        LazyTPUError: the program runs nothing, or uses a tensor from outside.

    Example:
        >>> def program():
        ...     mesh = lazytpu.spmd.Mesh((256,), ("data",))
        ...     with torch.device(lazytpu.device()):
        ...         model = lazytpu.spmd.fully_shard(GPT(), mesh)
        ...     ...
        ...     return step
        >>> print(lazytpu.spmd.plan(program, "v5e:16x16"))  # doctest: +SKIP
    """
    if steps < 1:
        raise ValueError(f"a plan takes one step or more, not {steps}")
    target = described.topology(topology)
    graphs, reads = recorded(function, target, steps)
    if not graphs:
        raise LazyTPUError("the program that is planned runs nothing on the device")
    programs = tuple([Program(compile_ahead(graph, target), target) for graph in graphs])
    return Plan(target, programs, reads)


def recorded(function: Callable[[], object], target: Topology, steps: int) -> tuple[list[Graph], Counter[str]]:
    """Run a program without computing anything; return the graphs of its last step, and the lines that read."""
    watcher = _Steps(steps)
    with _without_contents(target), _watching(watcher):
        try:
            found = function()
            if callable(found):
                for _ in range(steps):
                    found()
                    step.mark_step()
            cut("plan")
        except Ended:
            pass
        finally:
            found = None
        return watcher.last(), Counter(described.reads)


@contextmanager
def _without_contents(target: Topology) -> Iterator[None]:
    """Let what is recorded be for a topology; leave random numbers as they were."""
    cut("plan")
    used, states = list(meshes.used), (torch.get_rng_state(), random.get_rng_state())
    described.reads.clear()
    described.ran.clear()
    meshes.used[:] = [True]
    try:
        with compiling_for(target):
            try:
                yield
            finally:
                cut("plan")
    finally:
        described.ran.clear()
        meshes.used[:] = used
        torch.set_rng_state(states[0])
        random.set_rng_state(states[1])


@contextmanager
def _watching(watcher: _Steps) -> Iterator[None]:
    add(watcher)
    try:
        yield
    finally:
        remove(watcher)


class _Steps(Observer):
    """Finds out which graphs belong to which step, and ends the program after some steps."""

    def __init__(self, steps: int) -> None:
        self._steps, self._marks, self._ends = steps, step.marks, list[int]()
        self._cuts = 0

    def graph_cut(self, key: object) -> None:
        """Note how many graphs had run where a step ended."""
        ran = len(described.ran)
        if self._ends and self._ends[-1] < 0:
            self._ends[-1] = ran
            if len(self._ends) >= self._steps:
                raise Ended
        self._cuts += 1
        if step.marks > self._marks:
            self._marks = step.marks
            self._ends.append(-1)
        elif not self._ends and self._cuts > _CUTS_WITHOUT_STEPS:
            raise Ended

    def last(self) -> list[Graph]:
        """Return the graphs of the last step, each once; without steps, what was run again and again."""
        ran = described.ran
        ends = [len(ran) if end < 0 else end for end in self._ends]
        if ends:
            found = ran[ends[-2] if len(ends) > 1 else 0 : ends[-1]]
        else:
            keys = [graph.key for graph in ran]
            before = [i for i, key in enumerate(keys[:-1]) if key == keys[-1]]
            found = ran[before[-1] + 1 :] if before else ran
        return list({graph.key: graph for graph in found}.values())
