"""What the user calls a tensor and where it came from, for the reports of recompilations.  Asked on a miss only.

A storage knows the line that moved it to the device.  Names are found the way a debugger finds them: in the
variables of the functions that are running, and one level inside the modules, optimizers, lists and objects there.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from lazytpu.config import config
from lazytpu.diagnosis import events
from lazytpu.diagnosis.cause import Surroundings
from lazytpu.ir.tree import Value, trace
from lazytpu.location import source
from lazytpu.location.site import is_user_file, place_here
from lazytpu.runtime import compiler
from lazytpu.tensors.storage import Storage, storage_of
from lazytpu.tracing.record import cell_of, is_device_tensor

_MAX_FRAMES = 50
_MAX_ITEMS = 1000  # of a list, dictionary or object that is looked into


def surroundings() -> Surroundings:
    """What `ir.diagnosis.cause_of` wants to know."""
    return Surroundings(
        _of_value,
        events.number_of,
        compiler.settings(),
        config.donate,
        events.compiled_before(),
        place_here(),
        events.end_of,
        events.is_resumed(),
        _names_of_inputs(),
        events.name_of,
    )


def _names_of_inputs() -> dict[int, str]:
    """Number of an input of this step that is a parameter or buffer to its name: ``parameter `net.fc.bias```."""
    numbers = {storage: index for index, (storage, _, _) in enumerate(trace.inputs)}
    names: dict[int, str] = {}
    seen: set[int] = set()
    for frame in _user_frames():
        with _Variables(frame) as variables:
            try:
                for name, module in _owners(variables).items():
                    if isinstance(module, torch.nn.Module) and id(module) not in seen:
                        seen.add(id(module))
                        for text, tensor in _tensors_of(name, module):
                            index = numbers.get(_storage_of(tensor))
                            if index is not None:
                                names.setdefault(index, sys.intern(text))
            except Exception:  # an object of the user's that does not like to be looked at
                continue
    return names


def _tensors_of(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for path, parameter in module.named_parameters():
        yield f"parameter `{name}.{path}`", parameter
    for path, buffer in module.named_buffers():
        yield f"buffer `{name}.{path}`", buffer


def _of_value(value: Value) -> str:
    """`describe` of the storage that holds a value of this step."""
    if value.node is None:
        storage = trace.inputs[value.index][0]
    else:
        held = [s for s in trace.pending if s.step == trace.recorded_step and s.value is value]
        storage = held[0] if held else None
    try:
        return "" if storage is None else describe(storage)
    except Exception:  # an object of the user's that does not like to be looked at; the graph is compiled all the same
        return ""


def describe(storage: Storage) -> str:
    """What is known of a storage.

    Returns:
        For example ``parameter `net.head.weight```, ```x`, a batch of `loader` (DataLoader, train.py:40)``,
        ```x`, moved to the device at train.py:41``; empty where nothing is known.
    """
    named = ""
    for frame in _user_frames():
        with _Variables(frame) as variables:
            here = _name_in(variables, storage)
            batch = _batch(frame, variables, here, storage)
        if here.startswith(("parameter", "buffer", "state")):
            return here
        named = named or here
        if batch:
            return ", ".join(filter(None, (named, batch)))
    how = "computed on the CPU" if storage.computed_on_host else "moved to the device"
    moved = f"{how} at {storage.origin}" if storage.origin is not None and storage.origin.file else ""
    return ", ".join(filter(None, (named, moved)))


def _user_frames() -> Iterator[FrameType]:
    """The user's frames, the innermost first; of the main thread where this one has none."""
    frames = list(_of_user(sys._getframe(1)))
    main = threading.main_thread()
    if not frames and threading.current_thread() is not main:
        frames = list(_of_user(sys._current_frames().get(main.ident or 0)))
    return iter(frames[:_MAX_FRAMES])


def _of_user(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


class _Variables:
    """The variables of a frame, for the time of a ``with`` block.

    Before Python 3.13 a function's frame keeps the dictionary it is asked for, and with it every tensor in there.
    What is kept is computed, so the dictionary is emptied afterwards; the variables themselves are elsewhere.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._taken: Any = None

    def __enter__(self) -> Mapping[str, Any]:
        self._taken = self._frame.f_locals
        return {**self._frame.f_globals, **self._taken}

    def __exit__(self, *_: object) -> None:
        if sys.version_info < (3, 13) and self._frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            self._taken.clear()


def _name_in(variables: Mapping[str, Any], storage: Storage) -> str:
    """The name of a storage among variables: of a parameter or optimizer state if it is one, else of a variable."""
    owners = _owners(variables)
    for name, value in owners.items():
        if isinstance(value, torch.nn.Module):
            found = _in_module(name, value, storage)
        elif isinstance(value, torch.optim.Optimizer):
            found = _in_optimizer(name, value, storage)
        else:
            continue
        if found:
            return found
    for name, value in owners.items():
        if _holds(value, storage):
            return f"`{name}`"
    for name, value in owners.items():
        for inner, x in _inside(value):
            if _holds(x, storage):
                return f"`{name}{inner}`"
    return ""


def _owners(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Variables, and modules and optimizers that are attributes of them, by name."""
    owners = {name: value for name, value in variables.items() if not name.startswith("__")}
    for name, value in list(owners.items()):  # `self.net` of a trainer class
        owners |= {f"{name}.{k}": v for k, v in _attributes(value).items() if _owns_tensors(v)}
    return owners


def _owns_tensors(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer))


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object of the user's own class; none for modules of torch, whose tensors are elsewhere."""
    if isinstance(value, (type, torch.Tensor, torch.optim.Optimizer)) or inspect.ismodule(value):
        return {}
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) and len(found) <= _MAX_ITEMS else {}


def _holds(value: Any, storage: Storage) -> bool:
    return _storage_of(value) is storage


def _storage_of(value: Any) -> Storage | None:
    """The storage of a tensor on the device; None for anything else."""
    if not is_device_tensor(value):
        return None
    try:
        return storage_of(cell_of(value))
    except AttributeError:  # a plain tensor that C++ made and nobody has used yet
        return None


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)) and len(value) <= _MAX_ITEMS:
        yield from ((f"[{i}]", x) for i, x in enumerate(value))
    elif isinstance(value, dict) and len(value) <= _MAX_ITEMS:
        yield from ((f"[{k!r}]", x) for k, x in value.items() if isinstance(k, (str, int)))
    else:
        yield from ((f".{k}", x) for k, x in _attributes(value).items())


def _in_module(name: str, module: torch.nn.Module, storage: Storage) -> str:
    for text, tensor in _tensors_of(name, module):
        if _holds(tensor, storage):
            return text
    for path, parameter in module.named_parameters():
        if parameter.grad is not None and _holds(parameter.grad, storage):
            return f"gradient of `{name}.{path}`"
    return ""


def _in_optimizer(name: str, optimizer: torch.optim.Optimizer, storage: Storage) -> str:
    for i, state in enumerate(optimizer.state.values()):
        for key, value in state.items() if isinstance(state, dict) else ():
            if _holds(value, storage):
                return f"state `{key}` of parameter {i} in `{name}` ({type(optimizer).__name__})"
    return ""


def _batch(frame: FrameType, variables: Mapping[str, Any], named: str, storage: Storage) -> str:
    """```a batch of `loader` (DataLoader, train.py:40)`` for what a loop around the frame's line was given."""
    file = frame.f_code.co_filename
    origin = storage.origin
    for loop in source.loops_around(file, frame.f_lineno):
        is_target = named.strip("`").partition("[")[0].partition(".")[0] in loop.targets
        moved_inside = (
            origin is not None
            and origin.file == file
            and loop.line in {around.line for around in source.loops_around(file, origin.line)}
        )
        if is_target or moved_inside or (origin is not None and not origin.file):
            for text in loop.sources:
                kind = _loader_kind(_look_up(text, variables))
                if kind:
                    return f"a batch of `{text}` ({kind}, {os.path.basename(file)}:{loop.line})"
        if is_target:
            return f"from the loop over `{loop.over}` ({os.path.basename(file)}:{loop.line})"
    return ""


def _look_up(dotted: str, variables: Mapping[str, Any]) -> Any:
    first, *rest = dotted.split(".")
    value = variables.get(first)
    for attribute in rest:
        value = getattr(value, "__dict__", {}).get(attribute)
    return value


def _loader_kind(value: Any) -> str:
    """The class of a loader of batches; empty for anything else."""
    kind = type(value)
    ours = kind.__name__ == "DeviceLoader" and kind.__module__ == "lazytpu.frontends.loader"
    return kind.__name__ if ours or isinstance(value, DataLoader) else ""
