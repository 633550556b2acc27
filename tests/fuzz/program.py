"""What the fuzzer runs: a program is a list of Python statements, which prints as a script and runs on a device.

Statements name the device ``device``.  Tensors made before the body are ``a0, a1, ...``, those of the body
``t0, t1, ...``.  In the mode ``trace`` the statements run one by one, and may raise; in the other modes the body is a
function of the ``a``\\ s that is compiled and called several times.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MODES = ("trace", "compile", "jit", "dynamo")
WRAPPERS = {
    "trace": "program",
    "compile": "lazytpu.compile(program)",
    "jit": "lazytpu.jit(program)",
    "dynamo": 'torch.compile(program, backend="lazytpu")',
}
READ = re.compile(r"see\((\w+)\)")
_BOUND = re.compile(r"^(\w+) = ")
_DELETED = re.compile(r"^del (\w+)$")


@dataclass(frozen=True, slots=True)
class Program:
    """One program.

    Attributes:
        seed: what it was drawn from.
        mode: one of `MODES`.
        inputs: statements that bind the ``a``\\ s.
        body: statements that run afterwards.
        after: statements that run after each call of the compiled function; its results are named as in the body.
        calls: how often the function is called.
        fresh: whether each call gets new inputs; else it gets those that the calls before have written to.
    """

    seed: int
    mode: str
    inputs: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...] = ()
    calls: int = 1
    fresh: bool = False

    @property
    def arguments(self) -> list[str]:
        return bound(self.inputs)

    @property
    def results(self) -> list[str]:
        """The names that the body binds, and that are still there at its end."""
        return bound(self.body)

    @property
    def function(self) -> str:
        """The body as the source of a function."""
        lines = [*self.body, f"return {', '.join([*self.results, ''])[:-1] or 'None'}"]
        return "\n".join([f"def program({', '.join(self.arguments)}):", *(f"    {line}" for line in lines), ""])

    def __len__(self) -> int:
        return len(self.inputs) + len(self.body) + len(self.after)


def bound(statements: tuple[str, ...]) -> list[str]:
    """The names that are bound after some statements, in order."""
    names: dict[str, None] = {}
    for text in statements:
        if found := _BOUND.match(text):
            names[found[1]] = None
        elif found := _DELETED.match(text):
            names.pop(found[1], None)
    return list(names)


def script(program: Program) -> str:
    """A script of its own that prints what the program gives on the CPU and on the device."""
    lines = ["import torch", "import lazytpu", ""]
    if program.mode == "trace":
        statements = [READ.sub(r"print(\1.cpu())", text) for text in (*program.inputs, *program.body)]
        shown = [f"print({name}.cpu())" for name in bound((*program.inputs, *program.body))]
        shown += [f"print({name}.grad.cpu())" for name in _leaves(program)]
        lines += ['for device in (torch.device("cpu"), lazytpu.device()):']
        lines += [f"    {line}" for line in [*statements, *shown]]
        return "\n".join([*lines, ""])
    lines += [program.function, 'for device in (torch.device("cpu"), lazytpu.device()):']
    if not program.fresh:
        lines += [f"    {text}" for text in program.inputs]
    lines += [f'    step = program if device.type == "cpu" else {WRAPPERS[program.mode]}']
    lines += [f"    for call in range({program.calls}):"]
    if program.fresh:
        lines += [f"        {text}" for text in program.inputs]
    results = ", ".join([*program.results, ""])[:-1]
    call = f"step({', '.join(program.arguments)})"
    lines += [f"        {results} = {call}" if results else f"        {call}"]
    lines += [f"        {text}" for text in program.after]
    shown = [f"{name}.cpu()" for name in [*program.arguments, *program.results]]
    shown += [f"{name}.grad.cpu()" for name in _leaves(program)]
    return "\n".join([*lines, f"        print({', '.join(shown)})", ""])


def _leaves(program: Program) -> list[str]:
    if not any("backward" in text for text in (*program.body, *program.after)):
        return []
    return [
        name
        for name in program.arguments
        if any(f"{name} = " in text and "requires_grad" in text for text in program.inputs)
    ]


_MOVES = re.compile(r"^a\d+\.(as_strided_|t_|transpose_|squeeze_|unsqueeze_)\(")
_BACKWARD = ".backward()"


def joinable(program: Program) -> bool:
    """Whether a compiled function stays one with others: not what is recorded anew at each call."""
    return not any(_MOVES.match(text) for text in program.body)


def joined(programs: Sequence[Program]) -> Program:
    """Several programs of one mode as one, with a backward pass for all."""
    inputs: list[str] = []
    body: list[str] = []
    losses: list[str] = []
    for n, program in enumerate(programs):
        rename = lambda text, n=n: re.sub(r"\b([at]\d+)\b", rf"\1_{n}", text)  # noqa: E731
        inputs += map(rename, program.inputs)
        body += map(rename, program.body)
        losses += [rename(text).removesuffix(_BACKWARD) for text in program.after]
    after = (f"torch.autograd.backward([{', '.join(losses)}])",) if losses else ()
    first = programs[0]
    return Program(first.seed, first.mode, tuple(inputs), tuple(body), after, first.calls, first.fresh)
