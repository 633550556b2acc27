"""What a Python function depends on besides its arguments, and whether it has changed.

A replay does not run the function, so everything that the function could look at has to be as it was: its closure,
the globals it names, the object it is bound to, and what is found in these: modules with their parameters, settings
and hooks, optimizers with their groups and state, functions, lists and dictionaries.  The same list tells of side
effects: what differs after a call was changed by the call.

The check compares identities, all in one go; names are looked for when something differs.
"""

from __future__ import annotations

import dis
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import nn

from lazytpu.frontends.replay.numbers import Setting

_SIMPLE = (int, float, complex, str, bytes, bool, torch.dtype, torch.device, torch.Size)
_CONTAINERS = (dict, list, tuple, set, deque)
_LIBRARIES = {"torch", "torchvision", "lazytpu", "jax", "numpy", "builtins"}
_MAX_ELEMENTS = 1000  # of a container that is looked into; of a longer one the length counts
_MAX_DEPTH = 6
# Modules whose attributes decide nothing, besides their parameters and submodules.
_PLAIN = {nn.Linear, nn.ReLU, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Tanh, nn.Sigmoid}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SCALER = ("_enabled", "_growth_factor", "_backoff_factor", "_growth_interval", "_scale", "_growth_tracker")
_contents = attrgetter("cell_contents")
_requires_grad = attrgetter("requires_grad")
_training = attrgetter("training")
_version = attrgetter("_version")
_Flags: TypeAlias = tuple[list[bool], list[int], list[int]]
_GONE = (KeyError, ValueError, AttributeError, RuntimeError)


class _Named:
    """The present values of attributes or names, under ``labels``."""

    def __init__(self, labels: list[str], read: Callable[[], list[Any]]) -> None:
        self.labels, self.read = labels, read

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read())


class Guards:
    """The context of a function as it was when this was made.

    Attributes:
        modules, optimizers, parameters: what was found there.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.modules: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._seen: dict[int, object] = {}
        self._watched: list[Iterable[object]] = []  # each gives what there is now whenever it is iterated over
        self._labels: list[Callable[[int], str]] = []
        self._groups: dict[int, tuple[int, int, list[str]]] = {}  # part of what is watched: optimizer, group, names
        self._visit(function, "", 0)
        found = [p for m in self.modules for p in m._parameters.values() if p is not None]
        found += [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        self.parameters: list[torch.Tensor] = list({id(p): p for p in found}.values())
        self._hooks = [hooks for m in self.modules for name in _HOOKS if (hooks := getattr(m, name)) is not None]
        parts = [list(part) for part in self._watched]
        self._sizes = list(map(len, parts))
        self._values = list(chain.from_iterable(parts))
        self._ids = list(map(id, self._values))
        self._host = [x for x in self._values if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
        self._flags = self._present_flags()
        starts = [0, *accumulate(self._sizes)]
        self._settings = {
            starts[part] + at: Setting(optimizer, group, name)
            for part, (optimizer, group, names) in self._groups.items()
            for at, name in enumerate(names)
        }

    def hold(self) -> bool:
        """Return whether everything is the same object as before, which is what is asked in each call."""
        try:
            return list(map(id, self._now())) == self._ids and self._present_flags() == self._flags
        except _GONE:
            return False

    def training(self) -> tuple[bool, ...]:
        """Return the ``training`` flag of every module."""
        return tuple(map(_training, self.modules))

    def changes(self) -> list[str]:
        """Return what differs from when this was made, in words; learn the identities anew where that is nothing."""
        try:
            now, flags = self._now(), self._present_flags()
            parts = [list(part) for part in self._watched]
        except _GONE as error:
            return [f"something that the function uses is gone ({error})"]
        found, start = [], 0
        for part, size, label in zip(parts, self._sizes, self._labels, strict=True):
            old = self._values[start : start + size]
            start += size
            if len(part) != size:
                found.append(f"the length of {label(-1)} ({size}, then {len(part)})")
            found += [
                _change(label(i), a, b) for i, (a, b) in enumerate(zip(old, part, strict=False)) if not _same(a, b)
            ]
        if flags[:2] != self._flags[:2]:
            found.append("requires_grad of a parameter, or the hooks of a module")
        if flags[2] != self._flags[2]:
            found.append("the contents of a tensor on the CPU")
        if not found:
            self._values, self._ids = now, list(map(id, now))
        return found

    def _now(self) -> list[object]:
        return list(chain.from_iterable(self._watched))

    def _present_flags(self) -> _Flags:
        versions = list(map(_version, self._host))
        return list(map(_requires_grad, self.parameters)), list(map(len, self._hooks)), versions

    def counters(self) -> list[tuple[torch.Tensor, float]]:
        """Return the step counters of optimizers that lie on the CPU, with their numbers."""
        states = [state for o in self.optimizers for state in o.state.values() if isinstance(state, dict)]
        steps = [state.get("step") for state in states]
        return [(x, x.item()) for x in steps if isinstance(x, torch.Tensor) and x.device.type == "cpu" and not x.dim()]

    def counted(self) -> None:
        """Take the versions of tensors on the CPU as they are now: their step counters have gone on."""
        self._flags = (*self._flags[:2], self._present_flags()[2])

    def changed_settings(self) -> list[Setting] | None:
        """Return the settings of optimizers that differ from when this was made; None where anything else does."""
        try:
            now, flags = self._now(), self._present_flags()
        except _GONE:
            return None
        if len(now) != len(self._values) or flags != self._flags:
            return None
        found: list[Setting] = []
        ids = list(map(id, now))
        for i in [i for i, (a, b) in enumerate(zip(ids, self._ids, strict=True)) if a != b]:
            old, new = self._values[i], now[i]
            if _same(old, new):
                continue
            setting = self._settings.get(i)
            if setting is None or type(old) is not type(new):
                return None
            if type(new) is tuple and type(old) is tuple and len(old) == len(new):
                differing = [j for j, (x, y) in enumerate(zip(old, new, strict=True)) if not _same(x, y)]
                if any(type(old[j]) is not float or type(new[j]) is not float for j in differing):
                    return None
                found += [setting._replace(position=j) for j in differing]
            elif type(new) is float:
                found.append(setting)
            else:
                return None
        return found

    def learn(self) -> None:
        """Take everything as it is now."""
        self._values = self._now()
        self._ids = list(map(id, self._values))

    # --- finding ---------------------------------------------------------------------------------------------

    def _visit(self, x: Any, name: str, depth: int) -> None:
        """Watch what ``x``, which the user calls ``name``, holds."""
        if x is None or isinstance(x, (*_SIMPLE, torch.Tensor, type)) or id(x) in self._seen or depth > _MAX_DEPTH:
            return
        self._seen[id(x)] = x
        if isinstance(x, nn.Module):
            self._module(x, name, depth)
        elif isinstance(x, torch.optim.Optimizer):
            self._optimizer(x, name)
        elif isinstance(x, torch.amp.GradScaler):
            self._attributes(x, _SCALER, name)
        elif isinstance(x, _CONTAINERS):
            self._container(x, name, depth)
        elif isinstance(x, types.MethodType):
            self._visit(x.__self__, "self", depth)
            self._visit(x.__func__, name, depth)
        elif isinstance(x, functools.partial):
            self._visit([x.func, x.args, x.keywords], name, depth)
        elif isinstance(x, types.FunctionType):
            self._function(x, depth)
        elif not isinstance(x, types.ModuleType) and hasattr(x, "__dict__") and not _of_library(type(x), ours=True):
            self._container(x.__dict__, name, depth)
            self._methods(type(x), depth)

    def _watch(self, part: Iterable[Any], label: Callable[[int], str]) -> None:
        self._watched.append(part)
        self._labels.append(label)

    def _module(self, module: nn.Module, name: str, depth: int) -> None:
        self.modules.append(module)
        for held in (module._parameters, module._buffers, module._modules):
            if held:
                self._watch(held.values(), functools.partial(_key_label, held, name + "."))
        if type(module) not in _PLAIN:
            public = [k for k in module.__dict__ if not k.startswith("_") and k != "training"]
            self._attributes(module, public, name)
            for key in public:
                self._visit(module.__dict__[key], f"{name}.{key}", depth + 1)
            self._methods(type(module), depth)
        for key, child in module._modules.items():
            self._visit(child, f"{name}.{key}" if name else key, 0)

    def _methods(self, cls: type, depth: int) -> None:
        for method in () if _of_library(cls) else vars(cls).values():
            if isinstance(method, types.FunctionType):
                self._visit(method, method.__name__, depth + 1)

    def _optimizer(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        self.optimizers.append(optimizer)
        self._attributes(optimizer, ("state", "param_groups"), name)
        for i, group in enumerate(optimizer.param_groups):
            self._groups[len(self._watched)] = len(self.optimizers) - 1, i, list(group)
            self._watch(group.values(), functools.partial(_key_label, group, f"{name}.param_groups[{i}]."))
            self._watch(group["params"], lambda j, i=i: f"{name}.param_groups[{i}]['params']")  # type: ignore[misc]
        states = optimizer.state
        self._watch(states.values(), lambda j: f"{name}.state")
        for state in states.values():
            if isinstance(state, dict):
                self._watch(state.values(), functools.partial(_key_label, state, f"{name}.state[...]."))

    def _container(self, x: Any, name: str, depth: int) -> None:
        if len(x) > _MAX_ELEMENTS:
            self._watch(_Named([name], lambda: [len(x)]), lambda i: f"len({name})")
            return
        if isinstance(x, dict):
            self._watch(x.values(), functools.partial(_key_label, x, name + "."))
            for key, value in list(x.items()):
                self._visit(value, f"{name}.{key}" if name else str(key), depth + 1)
        else:
            self._watch(x, lambda i: name if i < 0 else f"{name}[{i}]")
            for i, value in enumerate(list(x)):
                self._visit(value, f"{name}[{i}]", depth + 1)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        if _of_library(function, ours=True):
            return
        code = function.__code__
        cells = [(n, c) for n, c in zip(code.co_freevars, function.__closure__ or (), strict=True) if _is_bound(c)]
        if cells:
            labels, found = [n for n, _ in cells], [c for _, c in cells]
            self._watch(_Named(labels, lambda: list(map(_contents, found))), lambda i: labels[i])
            for n, c in cells:
                self._visit(c.cell_contents, n, depth + 1)
        self._names(function.__globals__, _globals_in(code), _names_in(code), "", depth)
        if function.__defaults__:
            self._visit(function.__defaults__, "a default", depth + 1)

    def _names(self, scope: dict[str, Any], read: set[str], names: set[str], prefix: str, depth: int) -> None:
        """Watch the names ``read`` of a module, and those of all ``names`` in the modules of the user's among them."""
        used = sorted(n for n in read if n in scope)
        if not used:
            return
        self._watch(_Named(used, lambda: [scope[n] for n in used]), lambda i: prefix + used[i])
        for n in used:
            value = scope[n]
            if isinstance(value, types.ModuleType):
                if value.__name__.partition(".")[0] not in _LIBRARIES and id(value) not in self._seen and not prefix:
                    self._seen[id(value)] = value
                    self._names(vars(value), names, names, f"{n}.", depth + 1)
            else:
                self._visit(value, prefix + n, depth + 1)

    def _attributes(self, x: Any, names: Iterable[str], name: str) -> None:
        held, names = vars(x), list(names)
        if names:
            self._watch(_Named(names, lambda: [held.get(n) for n in names]), lambda i: f"{name}.{names[i]}")


def _key_label(held: dict[Any, Any], prefix: str, i: int) -> str:
    if i < 0:
        return prefix.rstrip(".") or "a dictionary"
    keys = list(held)
    return f"{prefix}{keys[i] if i < len(keys) else '?'}"


def _is_bound(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a name that is not bound yet
        return False
    return True


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and the functions inside it."""
    return {name for inside in _codes_in(code) for name in inside.co_names}


def _globals_in(code: types.CodeType) -> set[str]:
    """Return the names of globals that a function and the functions inside it read."""
    reads = [i for inside in _codes_in(code) for i in dis.get_instructions(inside)]
    return {i.argval for i in reads if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _of_library(x: object, *, ours: bool = False) -> bool:
    """Return whether a class or function is one of a library, which changes nothing of what it computes."""
    module = getattr(x, "__module__", None) or ""
    if module == "torch.optim.lr_scheduler":
        return not ours
    return module.partition(".")[0] in _LIBRARIES


def _same(a: object, b: object) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _SIMPLE) and (a == b or a != a and b != b))


def _change(name: str, old: object, new: object) -> str:
    if isinstance(old, _SIMPLE) and isinstance(new, _SIMPLE):
        return f"{name} was {old!r} and is {new!r}"
    return f"{name} is another object"
