"""Draws a program from a seed.

While it is drawn, a program runs on the CPU, so that each statement knows the shapes it works on, and what torch leaves
undefined is dropped (watching.py).
"""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.fuzz.program import MODES, Program, bound
from tests.fuzz.running import CPU, Errors, code, namespace
from tests.fuzz.watching import UndefinedError, Watch

MAX_TENSORS = 7
MAX_ELEMENTS, MAX_ELEMENTS_OF_LARGE = 150, 1 << 18
DTYPES = (
    "float32",
    "float32",
    "float64",
    "int64",
    "int32",
    "float32",
    "bfloat16",
    "float16",
    "bool",
    "complex64",
    "uint8",
)
SMALL = ((6,), (2, 3), (4, 6), (3, 4), (4, 4), (2, 3, 4), (5,), (), (0, 3), (2, 1, 4), (2, 2, 2, 3), (1, 3, 1, 2), (7,))
KINDS = ("exact", "exact", "exact", "rounded")
Draw = Callable[["Scene"], str | None]


class Scene:
    """A program that is being drawn.

    Attributes:
        rng: where all choices come from.
        exact: whether values stay numbers that each dtype holds exactly; then steps (``floor``, ``>``) may be taken.
        large: whether there are storages of many elements, and few statements.
        space: what the statements so far have made on the CPU.
    """

    def __init__(self, seed: int, mode: str) -> None:
        self.rng = random.Random(seed)
        self.mode = mode
        self.exact = self.rng.choice(KINDS) == "exact"
        self.large = self.rng.random() < 0.12
        self.grad = self.rng.random() < 0.5
        dtype = DTYPES[seed // 4 % len(DTYPES)]
        self.dtypes = (dtype, dtype, self.rng.choice(DTYPES))
        if self.large and self.rng.random() < 0.7:
            self.dtypes = (self.rng.choice(("float32", "float32", "float64")),) * 3
        self.inputs: list[str] = []
        self.body: list[str] = []
        self.made = 0
        self.largest = 1.0
        self.space: dict[str, Any] = {}
        self._again()

    # --- what a statement asks ------------------------------------------------------------------------------------

    def tensors(self, want: Callable[[torch.Tensor], bool] = lambda t: True) -> list[str]:
        return [name for name, t in self.space.items() if isinstance(t, torch.Tensor) and _holds(want, t)]

    def pick(self, want: Callable[[torch.Tensor], bool] = lambda t: True) -> str | None:
        """The name of a tensor for which ``want`` holds, rather one of the newer."""
        able = self.tensors(want)
        return self.rng.choice([*able, *able[-2:]]) if able else None

    def new_name(self) -> str:
        self.made += 1
        return f"t{self.made - 1}"

    def dtype(self) -> str:
        return self.rng.choice(self.dtypes)

    def shape(self) -> tuple[int, ...]:
        """The shape of a new tensor."""
        rng = self.rng
        if not self.large:
            return rng.choice(SMALL)
        kind = rng.randrange(8)
        if kind == 0:
            return (rng.randrange(1 << 12, 1 << 17) | 1,)
        if kind < 4:  # points of a few coordinates
            n = rng.choice((1, 2, 3, 3, 4, rng.randrange(1, 9)))
            points = rng.randrange(1 << 14, max((1 << 17) // n, (1 << 14) + 1)) | 1
            return rng.choice(((n, points), (n, points), (points, n)))
        if kind == 4:
            return (rng.choice((1, 2, 5)), rng.choice((7, 31)), rng.randrange(33, 901) | 1)
        while True:  # of a high rank
            inner = [8] * rng.randrange(4)
            shape = (*(rng.choice((1, 2, 3, 2)) for _ in range(rng.randrange(2, 6))), *inner)
            if torch.Size(shape).numel() <= 1 << 14:
                return shape

    # --- adding ---------------------------------------------------------------------------------------------------

    def add(self, text: str | None, to: str = "body") -> bool:
        """Adds a statement and runs it; an undefined one is taken back."""
        if text is None:
            return False
        getattr(self, to).append(text)
        try:
            self._run(text)
            raised = False
        except Errors:
            raised = True
        except UndefinedError:
            getattr(self, to).pop()
            self._again()
            return False
        if raised and (self.mode != "trace" or to == "inputs" or self.rng.random() < 0.5):
            getattr(self, to).pop()
            self._again()
            return False
        name = text.partition(" = ")[0]
        value = self.space.get(name)
        most = MAX_ELEMENTS_OF_LARGE if self.large else MAX_ELEMENTS
        if isinstance(value, torch.Tensor) and value.numel() > most:
            getattr(self, to).pop()
            self._again()
            return False
        return True

    def _run(self, text: str) -> None:
        watch = Watch()
        with warnings.catch_warnings(), watch:
            warnings.simplefilter("ignore")
            exec(code(text), self.space)
        self.largest = max(self.largest, watch.largest)

    def _again(self) -> None:
        """Runs what there is from the start: a statement that is taken back may have written."""
        self.space = namespace(CPU)
        for text in (*self.inputs, *self.body):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    exec(code(text), self.space)
            except Errors:
                pass


def _holds(want: Callable[[torch.Tensor], bool], t: torch.Tensor) -> bool:
    try:
        return want(t)
    except RuntimeError:  # a view that autograd has declared void: even ``is_leaf`` raises
        return False


def mode_of(seed: int, mode: str = "") -> str:
    """Most programs are traced; Dynamo takes half a second for each of its."""
    if mode:
        return mode
    return MODES[(0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 3)[seed % 20]]


def draw(seed: int, mode: str = "") -> Program:
    """The program of a seed.

    Args:
        mode: one of `MODES`; by default the seed decides.
    """
    return drawn(seed, mode)[0]


def drawn(seed: int, mode: str = "") -> tuple[Program, float]:
    """The program of a seed, and the largest magnitude of a float in it."""
    from tests.fuzz import statements  # imports this module for its types

    scene = Scene(seed, mode_of(seed, mode))
    rng = scene.rng
    for _ in range(rng.choice((1, 2, 2))):
        statements.add_input(scene)
    length = rng.randrange(3, 6) if scene.large else rng.randrange(4, 10)
    tries = 0
    while len(scene.body) < length and tries < 40:
        tries += 1
        scene.add(statements.choose(scene))
        if len(scene.tensors()) > MAX_TENSORS:
            scene.add(f"del {rng.choice(scene.tensors())}" if scene.mode == "trace" else None)
    after: tuple[str, ...] = ()
    if scene.grad and (loss := statements.loss(scene)):
        if scene.mode in ("trace", "compile"):
            scene.add(f"{loss}.backward()")
        else:
            after = (f"{loss}.backward()",)
    calls = 1 if scene.mode == "trace" else 4 if scene.mode == "compile" else 2
    program = Program(
        seed, scene.mode, tuple(scene.inputs), tuple(scene.body), after, calls, calls > 1 and rng.random() < 0.5
    )
    if program.mode != "trace":
        program = _defined(program)
    return program, scene.largest


def _defined(program: Program) -> Program:
    """A function that can be called so often: else with new inputs at each call, without a gradient, or traced."""
    forms: list[dict[str, Any]] = [{}, {"fresh": True}, {"fresh": True, "calls": 1}, {"fresh": True, "after": ()}]
    for form in forms:
        candidate = dataclasses.replace(program, **form)
        if candidate.body and is_defined(candidate):
            return candidate
    return dataclasses.replace(program, mode="trace", calls=1, fresh=False, after=())


def is_defined(program: Program) -> bool:
    """Whether torch defines what a program does."""
    space = namespace(CPU)
    for call in range(program.calls):
        inputs = program.inputs if program.fresh or call == 0 else ()
        for text in (*inputs, *program.body, *program.after):
            try:
                with warnings.catch_warnings(), Watch():
                    warnings.simplefilter("ignore")
                    exec(code(text), space)
            except Errors:
                if program.mode != "trace":
                    return False
            except UndefinedError:
                return False
            except NameError:
                return False
        if program.mode != "trace":
            for name in set(bound(program.body)) - set(program.results):
                space.pop(name, None)
    return True
