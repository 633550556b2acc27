"""Moving a module between devices keeps the identity of its parameters.

Torch moves a parameter to a GPU by pointing the same object at new memory, so tied weights stay tied and an
optimizer made before the move goes on working.  For other devices it makes new parameters instead.  Here
the parameter is swapped in place, as ``torch.utils.swap_tensors`` does, which gives what the GPU gives.

And one choice that a module of torch makes by the name of its device is the one for the CPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import torch
from torch.nn import Module
from torch.nn.parameter import Parameter, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lazytpu.tensors.tensor import LazyTensor
from lazytpu.torch_backend.after_import import after_import
from lazytpu.tracing import shardings_kept

_Convert = Callable[[torch.Tensor], torch.Tensor]


def _swapping(convert: _Convert) -> _Convert:
    """``convert``, but a parameter that changes its device stays the object it is."""
    done: dict[int, torch.Tensor] = {}  # gradients that went along with their parameter

    @functools.wraps(convert)
    def converted(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in done:
            return tensor
        out = convert(tensor)
        if not _crosses(tensor, out):
            return out
        grad, tensor.grad = tensor.grad, None
        shardings_kept.forget(tensor)
        _swap(tensor, _parameter_like(tensor, out))
        if grad is not None:
            moved = tensor.grad = convert(grad)
            done[id(moved)] = moved
        return tensor

    converted.swaps = True  # type: ignore[attr-defined]
    return converted


def _crosses(tensor: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether a parameter leaves this device or comes to it; torch swaps those that hold other tensors."""
    devices = {tensor.device.type, out.device.type}
    ours: str = LazyTensor.device_type
    crosses = len(devices) == 2 and ours in devices and isinstance(tensor, Parameter)
    return crosses and not is_traceable_wrapper_subclass(out)


def _swap(parameter: Any, moved: torch.Tensor) -> None:
    """Give a parameter what another one is.

    Torch's form of it refuses one that a graph of autograd or a weak reference has.  The first is every weight of
    ``nn.utils.weight_norm``: such a graph is of the old device, and its backward pass raises.
    """
    if parameter.requires_grad and parameter._use_count() > 1:
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(_refuse)
    parameter.__class__, moved.__class__ = moved.__class__, parameter.__class__
    parameter.__dict__, moved.__dict__ = moved.__dict__, parameter.__dict__
    torch._C._swap_tensor_impl(parameter, moved)


def _refuse(_: object) -> None:
    raise RuntimeError("a module moved to another device between its forward and its backward pass")


def _parameter_like(tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, UninitializedParameter):
        make: Any = UninitializedParameter  # whose signature mypy takes from its base
        found: torch.Tensor = make(tensor.requires_grad, out.device, out.dtype)
        return found
    kind = type(tensor) if issubclass(type(tensor), Parameter) else Parameter
    made = cast(torch.Tensor, _new_parameter(kind, out, tensor.requires_grad))
    made.__dict__.update({name: value for name, value in tensor.__dict__.items() if name != "_is_param"})
    return made


_new_of_torch = Parameter.__new__


def _new_parameter(cls: type, data: torch.Tensor | None = None, requires_grad: bool = True) -> object:
    """Make a parameter; of a user's class, which torch keeps for tensors of its own class only."""
    if type(data) is LazyTensor and cls is not Parameter:
        return torch.Tensor._make_subclass(cls, data, requires_grad)
    return _new_of_torch(cls, data, requires_grad)


def register() -> None:
    """Wrap ``Module._apply``, which ``to``, ``cpu``, ``half`` and the others call, and a choice by device."""
    theirs: Any = Module._apply

    @functools.wraps(theirs)
    def _apply(self: Module, fn: _Convert, recurse: bool = True) -> object:
        return theirs(self, fn if getattr(fn, "swaps", False) else _swapping(fn), recurse)

    Module._apply = _apply  # type: ignore[method-assign]
    setattr(Parameter, "__new__", functools.wraps(_new_of_torch)(_new_parameter))  # noqa: B010
    after_import("torch.nn.modules.linear_cross_entropy_options", _choose_as_on_the_cpu)


def _choose_as_on_the_cpu(module: ModuleType) -> None:
    """``linear_cross_entropy`` accumulates half precision in float32, or not, by the name of the device."""
    options = module.LinearCrossEntropyOptions
    theirs: Any = options._adjust
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def _adjust(*args: Any, **kwargs: Any) -> object:
        bound = signature.bind(*args, **kwargs)
        device = bound.arguments.get("device")
        if device is not None and device.type == LazyTensor.device_type:
            bound.arguments["device"] = torch.device("cpu")
        return theirs(*bound.args, **bound.kwargs)

    options._adjust = _adjust
