"""Random programs of views and writes that run on the CPU and on the device side by side.

A program is a list of (action, number): the number decides everything the action leaves open, so a program that
fails shrinks to a few lines.  Numbers stay small integers, which every dtype here and every order of evaluation
represents exactly.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support.lockstep import differences, outcome

Pair = tuple[torch.Tensor, torch.Tensor]  # on the CPU and on the device
Run = Callable[[Sequence[torch.Tensor]], Any]
MAX_PAIRS, MAX_ELEMENTS = 7, 120
ACTIONS: dict[str, Callable[[Program, random.Random], None]] = {}


class Difference(AssertionError):
    """The two sides of a program do not look the same."""


def action(f: Callable[[Program, random.Random], None]) -> Callable[[Program, random.Random], None]:
    ACTIONS[f.__name__] = f
    return f


class Program:
    """The state of one program.

    Attributes:
        pairs: the live tensors, each with its twin.
        log: what was done, for the report.
    """

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.log: list[str] = []

    def run(self, steps: Sequence[tuple[str, int]]) -> None:
        """Runs the actions and compares everything at the end."""
        ACTIONS["new_base"](self, random.Random(len(steps)))
        for name, number in steps:
            ACTIONS[name](self, random.Random(number))
        for index in range(len(self.pairs)):
            self.compare(index)

    def compare(self, index: int) -> None:
        """Raises where a tensor and its twin differ."""
        found = list(differences(*self.pairs[index], f"t{index}", loosely=True))
        if found:
            raise Difference("\n".join([*self.log, *found]))

    def pick(self, rng: random.Random, want: Callable[[torch.Tensor], bool] = lambda t: True) -> int | None:
        """The number of a tensor for which ``want`` holds, if there is one."""
        able = [i for i, (t, _) in enumerate(self.pairs) if want(t)]
        return rng.choice(able) if able else None

    def do(self, what: str, run: Run, *indices: int) -> Any:
        """Calls ``run`` on both sides with the numbered tensors; raises where only one side does, or another error."""
        self.log.append(what + "".join(f" t{i}:{_look(self.pairs[i][0])}" for i in indices))
        sides = []
        for side in (0, 1):
            operands = [self.pairs[i][side] for i in indices]
            sides.append(outcome(lambda operands=operands: run(operands)))
        (expected, raised), (got, error) = sides
        found = list(differences(raised, error))
        if found:
            raise Difference("\n".join([*self.log, *found]))
        if raised is not None:
            self.log[-1] += "  raised"
        return None if raised is not None else (expected, got)

    def keep(self, pair: Pair | None) -> None:
        """Adds a new tensor; the oldest but one goes where there are many."""
        if pair is None or pair[0].numel() > MAX_ELEMENTS:
            return
        self.pairs.append(pair)
        self.log[-1] += f"  -> t{len(self.pairs) - 1}:{_look(pair[0])}"
        if len(self.pairs) > MAX_PAIRS:
            del self.pairs[1]
            self.log.append("del t1")


def _look(t: torch.Tensor) -> str:
    return f"{str(t.dtype)[6:]}{list(t.shape)}{list(t.stride())}+{t.storage_offset()}"


def reach(t: torch.Tensor) -> set[int]:
    """The bytes that a tensor reaches in its storage."""
    positions = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    starts = positions.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist()
    return {start * t.element_size() + b for start in starts for b in range(t.element_size())}


def shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and bool(reach(a) & reach(b))


def overlapping(t: torch.Tensor) -> bool:
    """Whether elements share memory, so that what a read-and-write gives depends on the order."""
    return len(reach(t)) < t.numel() * t.element_size()


def in_order(program: Program, run: Run, indices: Sequence[int]) -> bool:
    """Whether eager's result does not depend on the order in which a kernel visits the elements.

    The first tensor is written.  Where it overlaps with another in a way that torch refuses, the error is the result.
    """
    target, *others = [program.pairs[i][0] for i in indices]
    same = [target.stride() == o.stride() and target.shape == o.shape and target.dtype == o.dtype for o in others]
    clear = [
        not shares(target, o) or s and target.data_ptr() == o.data_ptr() for o, s in zip(others, same, strict=True)
    ]
    if not overlapping(target) and all(clear):
        return True
    _, raised = outcome(lambda: run(copy.deepcopy([target, *others])))
    return raised is not None
