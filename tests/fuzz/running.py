"""Runs a program on one device and says what one could see of it there."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import lazytpu
import lazytpu.errors as lazytpu_errors
from tests.fuzz.program import WRAPPERS, Program, bound

CPU = torch.device("cpu")
_DEVICE_TYPE = re.compile(r"\[(?:CPU|tpu|torch\.)(\w+?)(?:Type|Tensor) ")  # errors of torch's autograd name tensors so
_MAKER = re.compile(r", which is output \d+ of \w+,")  # another where `.to(device)` is no op, as on the CPU
Errors = (RuntimeError, ValueError, TypeError, IndexError)


@dataclass(slots=True)
class Seen:
    """All that one could see of a tensor at some moment."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    version: int
    bits: tuple[bool, bool]
    requires_grad: bool
    values: torch.Tensor


@dataclass(slots=True)
class Outcome:
    """What a run gave: by place, tensors, errors, and which names share memory."""

    seen: dict[str, Seen | str] = field(default_factory=dict)

    def error(self, place: str, error: BaseException) -> None:
        text = str(error).strip()
        first = text.partition("\n")[0] if isinstance(error, Errors) and place.startswith("line") else text[:600]
        first = _MAKER.sub("", _DEVICE_TYPE.sub(r"[\1 ", first))
        self.seen[place] = f"{type(error).__name__}: {first}"


@functools.cache
def code(text: str) -> Any:
    return compile(text, text, "exec")


class _NoCuts:
    """Stands for lazytpu in a run on the CPU."""

    @staticmethod
    def mark_step() -> None:
        pass


def namespace(device: torch.device) -> dict[str, Any]:
    """What statements find before they bind anything."""
    on_cpu = device.type == "cpu"
    return {"torch": torch, "lazytpu": _NoCuts if on_cpu else lazytpu, "device": device, "see": lambda t: None}


def look(t: torch.Tensor) -> Seen:
    """What there is to see of a tensor."""
    values = t.detach().cpu().resolve_conj().resolve_neg()
    counts = [s for s, n in zip(t.stride(), t.shape, strict=True) if n != 1 and t.numel()]
    return Seen(
        tuple(t.shape),
        tuple(counts),
        t.storage_offset() if t.numel() else 0,  # without elements it follows from strides of dimensions of size 1
        t.dtype,
        t._version,
        (t.is_conj(), t.is_neg()),
        t.requires_grad,
        values if values.layout != torch.strided else values.clone(memory_format=torch.contiguous_format),
    )


def stages(program: Program, device: torch.device, wrapper: Any = None) -> Generator[None, None, Outcome]:
    """Runs a program; stops before and after each statement that cuts, and before the reads at the end.

    Args:
        wrapper: compiles the function in the place of what the mode says.
    """
    outcome, space = Outcome(), namespace(device)
    if program.mode != "trace":
        with _quiet():
            _call(program, space, outcome, wrapper)
        return outcome
    yield from _trace(program, space, outcome)
    yield
    with _quiet(), _kept(outcome):
        _look_at_all(bound((*program.inputs, *program.body)), space, outcome, "at the end")
    return outcome


def run(program: Program, device: torch.device, wrapper: Any = None) -> Outcome:
    """Runs a program to its end."""
    return run_together([program], device, wrapper)[0]


def run_together(programs: Sequence[Program], device: torch.device, wrapper: Any = None) -> list[Outcome]:
    """Runs programs in step, so that they are cut together and what they compute becomes one graph."""
    outcomes: dict[int, Outcome] = {}
    running = dict(enumerate(stages(program, device, wrapper) for program in programs))
    while running:
        for n, stage in list(running.items()):
            try:
                next(stage)
            except StopIteration as end:
                outcomes[n] = end.value
                del running[n]
    return [outcomes[n] for n in range(len(programs))]


def _trace(program: Program, space: dict[str, Any], outcome: Outcome) -> Iterator[None]:
    place = ""

    def see(t: torch.Tensor) -> None:
        outcome.seen[place] = look(t)

    space["see"] = see
    for n, text in enumerate((*program.inputs, *program.body)):
        place = f"line {n + 1}: {text}"
        cuts = text.startswith(("see(", "lazytpu.mark_step("))
        if cuts:
            yield
        try:
            with _quiet():
                exec(code(text), space)
        except (*Errors, lazytpu_errors.LazyTPUError) as error:
            outcome.error(place, error)
        if cuts:
            yield


def _call(program: Program, space: dict[str, Any], outcome: Outcome, wrapper: Any) -> None:
    exec(code(program.function), space)
    if space["device"].type != "cpu" or wrapper is not None:
        space["step"] = wrapper(space["program"]) if wrapper else eval(WRAPPERS[program.mode], space)
    else:
        space["step"] = space["program"]
    results = program.results
    with _kept(outcome):
        for call in range(program.calls):
            if program.fresh or call == 0:
                for text in program.inputs:
                    exec(code(text), space)
            got = space["step"](*(space[name] for name in program.arguments))
            space.update(zip(results, got if isinstance(got, tuple) else (got,), strict=True) if results else {})
            for text in program.after:
                exec(code(text), space)
            _look_at_all([*program.arguments, *results], space, outcome, f"after call {call + 1}", captured=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _kept(outcome: Outcome) -> Iterator[None]:
    """Keeps an error as part of the outcome: also those of graphs that cannot be compiled."""
    try:
        yield
    except Errors as error:
        outcome.error("the call", error)
    except Exception as error:  # lazytpu's own, Dynamo's, XLA's
        outcome.error("the call", error)


def _look_at_all(names: list[str], space: dict[str, Any], outcome: Outcome, when: str, captured: bool = False) -> None:
    tensors = [(name, space[name]) for name in names if isinstance(space.get(name), torch.Tensor)]
    storages: dict[int, str] = {}
    lying = [(n, t) for n, t in tensors if t.numel() or not captured]  # what is captured may return anew what is empty
    aliases = [storages.setdefault(t.untyped_storage()._cdata, name) for name, t in lying]
    outcome.seen[f"storages {when}"] = " ".join(f"{n}:{a}" for (n, _), a in zip(lying, aliases, strict=True))
    with _quiet():
        for name, t in tensors:
            outcome.seen[f"{name} {when}"] = look(t)
            if t.is_leaf and t.grad is not None:
                outcome.seen[f"{name}.grad {when}"] = look(t.grad)
