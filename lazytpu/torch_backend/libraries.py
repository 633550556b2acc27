"""Say to libraries that know devices by a list of their own that there is one: Accelerate, Trainer, safetensors.

Lightning is in `lightning`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch

from lazytpu.config import config
from lazytpu.torch_backend import flex_attention, lightning, nested
from lazytpu.torch_backend.after_import import after_import
from lazytpu.tracing.step import mark_step


def register() -> None:
    """Wait for the libraries."""
    after_import("accelerate.state", _choose_the_device)
    after_import("accelerate.accelerator", _train_in_float16)
    after_import("accelerate.optimizer", _cut_after_steps)
    after_import("transformers.utils.import_utils", _have_flex_attention)
    after_import("safetensors", _read_to_the_device)
    after_import("safetensors.torch", _open_as_the_package_does)
    flex_attention.register()
    lightning.register()
    nested.register()


def _choose_the_device(state: ModuleType) -> None:
    """Make Accelerate take the device where it would take the CPU; ``Accelerator(cpu=True)`` still does.

    In a process that a launcher started with others, it would take each for the only one.
    """
    theirs, prepare = state.PartialState.default_device, state.PartialState._prepare_backend

    def default_device(self: object) -> torch.device:
        found: torch.device = theirs.fget(self)
        return torch.device(config.device_name, 0) if found.type == "cpu" else found

    def prepare_backend(self: Any, cpu: bool, *args: object, **kwargs: object) -> tuple[str | None, object]:
        backend, kind = prepare(self, cpu, *args, **kwargs)
        if cpu or kind != state.DistributedType.NO or "LOCAL_RANK" not in os.environ:
            return backend, kind
        self.device = torch.device(config.device_name, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(self.device)
        return backend or "lazytpu", state.DistributedType.MULTI_GPU  # of all kinds the one with nothing of its own

    state.PartialState.default_device = property(default_device, doc=theirs.__doc__)
    state.PartialState._prepare_backend = prepare_backend


class _State(Protocol):
    device: torch.device


class _Options(Protocol):
    def to_kwargs(self) -> dict[str, Any]: ...


class _Accelerator(Protocol):
    state: _State
    scaler_handler: _Options | None
    native_amp: bool
    scaler: object


def _train_in_float16(module: ModuleType) -> None:
    """Make Accelerate take the device for float16, which it refuses to all that are not on a list of its own.

    It is not told of the precision while it looks, and gets what it would have made then.
    """
    theirs, states = module.Accelerator.__init__, module.AcceleratorState
    precision = states.mixed_precision

    def is_ours(state: _State) -> bool:
        return state.device.type == config.device_name and bool(precision.fget(state) == "fp16")

    @functools.wraps(theirs)
    def __init__(self: _Accelerator, *args: object, **kwargs: object) -> None:
        states.mixed_precision = property(lambda state: "no" if is_ours(state) else precision.fget(state))
        try:
            theirs(self, *args, **kwargs)
        finally:
            states.mixed_precision = precision
        if is_ours(self.state):
            options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            made: Callable[..., object] = torch.amp.GradScaler
            self.native_amp, self.scaler = True, made(config.device_name, **options)

    module.Accelerator.__init__ = __init__


def _cut_after_steps(module: ModuleType) -> None:
    """End a step of the device where Accelerate has made one of the optimizer."""
    theirs = module.AcceleratedOptimizer.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = theirs(self, *args, **kwargs)
        if self.gradient_state.sync_gradients and self.accelerator_state.device.type == config.device_name:
            mark_step()
        return result

    module.AcceleratedOptimizer.step = step


def _have_flex_attention(module: ModuleType) -> None:
    """Let transformers take torch's ``flex_attention``, which it refuses to devices of this one's name."""
    vars(module)["is_torch_flex_attn_available"] = module.is_torch_available


class _Slices(Protocol):
    def __getitem__(self, index: object) -> torch.Tensor: ...


class _File(Protocol):
    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...
    def get_slice(self, name: str) -> _Slices: ...
    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...


def _read_to_the_device(module: ModuleType) -> None:
    """Make safetensors open files for the device, whose name it does not know: tensors are read and then moved."""
    theirs: Callable[..., _File] = module.safe_open

    def safe_open(filename: object, framework: str, device: object = "cpu", **options: object) -> _File:
        """Open a file of tensors."""
        if str(device).partition(":")[0] != config.device_name:
            return theirs(filename, framework, device, **options)
        return _MovedTensors(theirs(filename, framework, "cpu", **options), torch.device(str(device)))

    vars(module)["safe_open"] = safe_open


def _open_as_the_package_does(module: ModuleType) -> None:
    """Give safetensors.torch what the package has: it was imported before, if lazytpu came after it."""
    vars(module)["safe_open"] = sys.modules["safetensors"].safe_open


class _MovedTensors:
    """A file of tensors, opened for the CPU, that gives them on the device."""

    def __init__(self, opened: _File, device: torch.device) -> None:
        self._opened, self._device = opened, device

    def __getattr__(self, name: str) -> object:
        return getattr(self._opened, name)

    def __enter__(self) -> _MovedTensors:
        self._opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def keys(self) -> list[str]:
        return self._opened.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._opened.get_tensor(name).to(self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self.keys()}

    def get_slice(self, name: str) -> _Slices:
        return _MovedSlices(self._opened.get_slice(name), self._device)


class _MovedSlices:
    """A tensor of the file, of which parts are read to the device."""

    def __init__(self, slices: _Slices, device: torch.device) -> None:
        self._slices, self._device = slices, device

    def __getattr__(self, name: str) -> object:
        return getattr(self._slices, name)

    def __getitem__(self, index: object) -> torch.Tensor:
        return self._slices[index].to(self._device)
