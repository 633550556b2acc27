"""Where data in a compiled program comes from: an input of the program, moved about but not computed with, or not."""

from __future__ import annotations

import re
from functools import cached_property

from lazytpu.debug.hlo import Computation, Instruction, Module

_MOVES = frozenset(
    "copy bitcast convert transpose reshape slice dynamic-slice pad copy-start copy-done slice-start slice-done "
    "optimization-barrier bitcast-convert broadcast async-done".split()
)
_INDEX = re.compile(r"\bindex=(\d+)")
_MOST_STEPS = 60


class Sources:
    """Finds out whether what an instruction takes is an input of the program."""

    def __init__(self, module: Module) -> None:
        self._module = module

    @cached_property
    def _known(self) -> dict[str, dict[str, Instruction]]:
        return {c.name: {i.name: i for i in c.instructions} for c in self._module.computations.values()}

    def are_inputs(self, computation: Computation, instruction: Instruction) -> bool:
        """Return whether all operands of an instruction are inputs, as they came or in another form."""
        return bool(instruction.operands) and all(
            self._is_input(computation, name, None, _MOST_STEPS) for name in instruction.operands
        )

    def _is_input(self, computation: Computation, name: str, index: int | None, left: int) -> bool:
        """Return whether a value, or an element of a tuple, is an input."""
        found = self._known[computation.name].get(name)
        if found is None or not left:
            return False
        if found.opcode == "parameter":
            return self._is_argument(computation, found, index, left)
        if found.opcode in _MOVES:
            return self._is_input(computation, found.operands[0], index, left - 1)
        if found.opcode == "get-tuple-element":
            position = _INDEX.search(found.attributes)
            return self._is_input(computation, found.operands[0], int(position[1]) if position else None, left - 1)
        if found.opcode == "tuple":
            return index is not None and self._is_input(computation, found.operands[index], None, left - 1)
        if found.opcode == "concatenate":  # parameters of layers, for a loop over them
            return all(self._is_input(computation, name, None, left - 1) for name in found.operands)
        if found.opcode in ("fusion", "call", "async-start") and found.called:
            body = self._module.computations[found.called[0]]
            root = next((i for i in body.instructions if i.root), None)
            return root is not None and self._is_input(body, root.name, index, left - 1)
        return False

    def _is_argument(self, computation: Computation, found: Instruction, index: int | None, left: int) -> bool:
        if computation.entry:
            return True
        callers = self._module.callers.get(computation.name, [])
        position = int(found.inside) if found.inside.isdigit() else 0
        return bool(callers) and all(
            self._is_input(c, user.operands[0 if user.opcode == "while" else position], index, left - 1)
            for c, user in callers
            if position < len(user.operands)
        )


__all__ = ["Sources"]
