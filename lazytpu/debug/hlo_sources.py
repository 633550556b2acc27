"""Where data in a compiled program comes from: an input of the program, moved about but not computed with, or not."""

from __future__ import annotations

import re

from lazytpu.debug.hlo import Computation, Instruction, Module

_MOVES = frozenset(
    "copy bitcast convert transpose reshape slice dynamic-slice pad copy-start copy-done slice-start slice-done "
    "optimization-barrier bitcast-convert broadcast async-done".split()
)
_INDEX = re.compile(r"\bindex=(\d+)")
_STACKED = ("/stack", "/concatenate")  # parameters of layers, for a loop over them: pads, of which TPUs take the larger
_BODY = re.compile(r"\bbody=%?([\w.\-~]+)")
_STARTED = 'custom_call_target="AsyncCollectiveStart"'
_MOST_STEPS = 60


class Sources:
    """Finds out whether what an instruction takes is an input of the program."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def are_inputs(self, computation: Computation, instruction: Instruction) -> bool:
        """Return whether all operands of an instruction are inputs, as they came or in another form."""
        return bool(instruction.operands) and all(
            self._is_input(computation, name, None, _MOST_STEPS) for name in instruction.operands
        )

    def _is_input(self, computation: Computation, name: str, index: int | None, left: int) -> bool:
        """Return whether a value, or an element of a tuple, is an input."""
        found = computation.by_name.get(name)
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
        if found.opcode == "concatenate" or (found.opcode == "maximum" and found.op_name.endswith(_STACKED)):
            return all(self._is_input(computation, name, None, left - 1) for name in found.operands)
        if found.opcode == "custom-call" and _STARTED in found.attributes and index == 0:  # what a collective takes
            taken = computation.by_name[found.operands[0]].operands
            return bool(taken) and self._is_input(computation, taken[0], None, left - 1)
        if found.opcode in ("fusion", "call", "async-start") and found.called:
            body = self._module.computations[found.called[0]]
            return body.root is not None and self._is_input(body, body.root.name, index, left - 1)
        if found.opcode == "while" and index is not None and self._is_kept(found, index):
            return self._is_input(computation, found.operands[0], index, left - 1)
        return False

    def _is_kept(self, loop: Instruction, index: int) -> bool:
        """Return whether each iteration of a loop leaves an element of its state as it is."""
        name = _BODY.search(loop.attributes)
        body = self._module.computations[name[1]] if name else None
        root = None if body is None else body.root
        if body is None or root is None or root.opcode != "tuple":
            return False
        known = body.by_name
        found = known[root.operands[index]]
        while found.opcode in _MOVES and found.operands:
            found = known[found.operands[0]]
        taken = _INDEX.search(found.attributes) if found.opcode == "get-tuple-element" else None
        return taken is not None and int(taken[1]) == index and known[found.operands[0]].opcode == "parameter"

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
