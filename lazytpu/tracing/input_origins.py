"""Find what the user calls a tensor and where it came from, for the causes of compilations.  Asked on a miss only.

A storage knows the line that moved it to the device.  Names are found the way a debugger finds them: in the
variables of the functions that are running, and one level inside the modules, optimizers, lists and objects there.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

import torch

from lazytpu.config import config
from lazytpu.diagnosis.cause import Context
from lazytpu.ir.tree import Value, trace
from lazytpu.location.site import is_user_file, place_here
from lazytpu.runtime import compiler
from lazytpu.tensors.storage import Storage, storage_of
from lazytpu.tracing.record import cell_of, is_device_tensor

_MAX_FRAMES = 50
_MAX_ITEMS = 1000  # of a list, dictionary or object that is looked into


def context() -> Context:
    """Return what `lazytpu.diagnosis.diagnose.cause_of` has to know about this cut."""
    return Context(name_of, compiler.settings(), config.donate, place_here())


def name_of(value: Value) -> str:
    """Return name and origin of the tensor that holds a value of this step; empty where nothing is known."""
    if value.node is None:
        storage = trace.inputs[value.index][0]
    else:
        storage = next((s for s in trace.pending if s.step == trace.recorded_step and s.value is value), None)
    try:
        return "" if storage is None else describe(storage)
    except Exception:  # an object of the user's that does not like to be looked at; the graph is compiled all the same
        return ""


def describe(storage: Storage) -> str:
    """Return what is known of a storage.

    Returns:
        For example ``parameter `net.head.weight``` or ```x`, moved to the device at train.py:41``; empty where nothing
        is known.
    """
    named = ""
    modules: set[int] = set()
    for frame in _user_frames():
        with _variables(frame, modules) as variables:
            here = _name_in(variables, storage)
        if here.startswith(("parameter", "buffer", "state")):
            return here
        named = named or here
    how = "computed on the CPU" if storage.computed_on_host else "moved to the device"
    if storage.origin is None or not storage.origin.file:
        return named
    return f"{f'{named},' if named else 'a tensor'} {how} at {storage.origin}"


def _user_frames() -> list[FrameType]:
    """Return the user's frames, the innermost first; of the main thread where this one has none."""
    main = threading.main_thread()
    frames = list(_of_user(sys._getframe(1)))
    if not frames and threading.current_thread() is not main:
        frames = list(_of_user(sys._current_frames().get(main.ident or 0)))
    return frames[:_MAX_FRAMES]


def _of_user(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


@contextmanager
def _variables(frame: FrameType, modules: set[int]) -> Iterator[Mapping[str, object]]:
    """Give the variables of a frame, for the time of a ``with`` block.

    Those of its module come with the first frame of the module, and not where it is of an installed package: such have
    thousands of names, of which none is the user's.  ``modules`` are those that came.

    Before Python 3.13 a function's frame keeps the dictionary it is asked for, and with it every tensor in there.
    What is kept is computed, so the dictionary is emptied afterwards; the variables themselves are elsewhere.
    """
    taken, around = frame.f_locals, frame.f_globals
    if id(around) in modules or "site-packages" in frame.f_code.co_filename:
        around = {}
    modules.add(id(around))
    try:
        yield {**around, **taken}
    finally:
        if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            taken.clear()


def _name_in(variables: Mapping[str, object], storage: Storage) -> str:
    """Return the name of a storage among variables: of a parameter or optimizer state, else of a variable."""
    owners = {name: value for name, value in variables.items() if not name.startswith("__")}
    for name, value in list(owners.items()):  # `self.net` of a trainer class
        inner = {f"{name}{k}": v for k, v in _inside(value) if k.startswith(".")}
        owners |= {k: v for k, v in inner.items() if isinstance(v, (torch.nn.Module, torch.optim.Optimizer))}
    named = [*_owned(owners)]
    named += [(f"`{name}`", value) for name, value in owners.items()]
    named += [(f"`{name}{inner}`", x) for name, value in owners.items() for inner, x in _inside(value)]
    return next((name for name, value in named if _holds(value, storage)), "")


def _owned(owners: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield the tensors of modules and optimizers with their names."""
    for name, value in owners.items():
        if isinstance(value, torch.nn.Module):
            parameters = list(value.named_parameters())
            yield from ((f"parameter `{name}.{path}`", x) for path, x in parameters)
            yield from ((f"buffer `{name}.{path}`", x) for path, x in value.named_buffers())
            yield from ((f"gradient of `{name}.{path}`", x.grad) for path, x in parameters)
        elif isinstance(value, torch.optim.Optimizer):
            for i, state in enumerate(value.state.values()):
                for key, x in state.items() if isinstance(state, dict) else ():
                    yield f"state `{key}` of parameter {i} in `{name}` ({type(value).__name__})", x


def _inside(value: object) -> Iterator[tuple[str, object]]:
    """Yield the items or attributes of a variable with what is written behind its name for them."""
    if isinstance(value, (type, torch.Tensor, torch.optim.Optimizer)) or inspect.ismodule(value):
        return
    items = value if isinstance(value, (list, tuple, dict)) else getattr(value, "__dict__", None)
    if not isinstance(items, (list, tuple, dict)) or len(items) > _MAX_ITEMS:
        return
    if isinstance(items, dict):
        written = "[{!r}]" if items is value else ".{}"
        yield from ((written.format(k), x) for k, x in items.items() if isinstance(k, (str, int)))
    else:
        yield from ((f"[{i}]", x) for i, x in enumerate(items))


def _holds(value: object, storage: Storage) -> bool:
    """Return whether a value is a device tensor that lies in a storage."""
    if not is_device_tensor(value):
        return False
    try:
        return storage_of(cell_of(value)) is storage
    except AttributeError:  # a plain tensor that C++ made and nobody has used yet
        return False
