"""Say to libraries that choose a device by a list of their own that there is one: Accelerate, and with it Trainer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from lazytpu.config import config
from lazytpu.torch_backend.after_import import after_import
from lazytpu.tracing.step import mark_step


def register() -> None:
    """Wait for the libraries."""
    after_import("accelerate.state", _choose_the_device)
    after_import("accelerate.optimizer", _cut_after_steps)


def _choose_the_device(state: ModuleType) -> None:
    """Make Accelerate take the device where it would take the CPU; ``Accelerator(cpu=True)`` still does."""
    theirs = state.PartialState.default_device

    def default_device(self: object) -> torch.device:
        found: torch.device = theirs.fget(self)
        return torch.device(config.device_name, 0) if found.type == "cpu" else found

    state.PartialState.default_device = property(default_device, doc=theirs.__doc__)


def _cut_after_steps(module: ModuleType) -> None:
    """End a step of the device where Accelerate has made one of the optimizer."""
    theirs = module.AcceleratedOptimizer.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = theirs(self, *args, **kwargs)
        if self.gradient_state.sync_gradients and self.accelerator_state.device.type == config.device_name:
            mark_step()
        return result

    module.AcceleratedOptimizer.step = step
