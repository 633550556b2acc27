"""Be an accelerator of Lightning: ``Trainer(accelerator="lazytpu")``, and the one that ``"auto"`` chooses over the CPU.

Lightning's Trainer and its Fabric each have a registry of accelerators and a connector that chooses strategy and
precision, in packages of two names.  What is made for one pair suits the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import torch

from lazytpu.config import config
from lazytpu.torch_backend import rank_device, torch_module
from lazytpu.torch_backend.after_import import after_import
from lazytpu.tracing.step import mark_step

NAME = "lazytpu"
_FLAGS = ("_precision_flag", "_precision_input"), ("_precision_plugin_flag", "_precision_instance")
_EVALUATIONS = ("validation_step", "test_step", "predict_step")


def register() -> None:
    """Wait for Lightning, under each of its names."""
    for trainer, fabric in (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")):
        after_import(f"{trainer}.accelerators", _register_with_trainer)
        after_import(f"{fabric}.accelerators", _register_with_fabric)
        for package in (trainer, fabric):
            after_import(f"{package}.strategies.ddp", _suit_ddp)
        after_import(f"{trainer}.trainer.connectors.accelerator_connector", _connect_trainer)
        after_import(f"{fabric}.connector", _connect_fabric)


class _Device:
    """A lazy XLA device, as Lightning wants to know it."""

    def setup_device(self, device: torch.device) -> None:
        """Check that the device is this process's; it is ready once lazytpu is imported."""
        torch_module.set_device(device)

    def teardown(self) -> None:
        """Do nothing."""

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, int]:
        """Return what ``DeviceStatsMonitor`` logs: bytes on the device."""
        return dict(torch_module.memory_stats(device))

    @staticmethod
    def parse_devices(devices: object) -> list[int]:
        """Return the indices of the devices that ``devices=`` asks for: one, or one for each process of this host.

        Raises:
            ValueError: more or others are asked for.
        """
        n = rank_device.count()
        if devices in (n, -1, str(n), "-1", [*range(n)]) or n == 1 and devices == "0,":
            return [*range(n)]
        if n > 1:
            raise ValueError(f"a launcher started {n} processes here: give devices={n}, not devices={devices!r}")
        raise ValueError(f"there is one device, {config.device_name}:0: give devices=1, not devices={devices!r}")

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Return the devices of these indices."""
        return [torch.device(config.device_name, index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """Return how many devices ``devices="auto"`` takes."""
        return rank_device.count()

    @staticmethod
    def is_available() -> bool:
        """Return True: jax finds a device, if only the CPU."""
        return True

    @staticmethod
    def name() -> str:
        """Return the name for ``accelerator=``."""
        return NAME


class _Connector(Protocol):
    """What is used of Lightning's connectors."""

    accelerator: object
    _num_nodes_flag: int
    _parallel_devices: list[torch.device]


def _register_with_trainer(module: ModuleType) -> None:
    module.AcceleratorRegistry.register(NAME, _accelerator(module.Accelerator), description=_Device.__doc__)


def _register_with_fabric(module: ModuleType) -> None:
    module.ACCELERATOR_REGISTRY.register(NAME, _accelerator(module.Accelerator), description=_Device.__doc__)


def _accelerator(theirs: type) -> type:
    """Return the accelerator, which has to be a subclass of theirs."""
    return type("LazyTPUAccelerator", (_Device, theirs), {"__doc__": _Device.__doc__})


def _connect_trainer(module: ModuleType) -> None:
    _connect(module._AcceleratorConnector, module)


def _connect_fabric(module: ModuleType) -> None:
    _connect(module._Connector, module)


def _connect(connector: type, module: ModuleType) -> None:
    """Make a connector choose the accelerator for ``"auto"``, and its strategy and precision where it is chosen."""
    names = ("_choose_auto_accelerator", "_choose_strategy", "_check_and_init_precision")
    choose_accelerator, choose_strategy, init_precision = (getattr(connector, name) for name in names)
    strategy = _strategy(module.SingleDeviceStrategy)

    def auto_accelerator() -> str:
        found: str = choose_accelerator()
        return NAME if found == "cpu" else found

    def strategy_of(self: _Connector) -> object:
        if not isinstance(self.accelerator, _Device) or self._num_nodes_flag > 1 or len(self._parallel_devices) > 1:
            return choose_strategy(self)
        return strategy(device=self._parallel_devices[0])

    def precision_of(self: _Connector) -> object:
        wanted, given = (next(name for name in names if hasattr(self, name)) for names in _FLAGS)
        mixed = getattr(self, wanted) in ("16-mixed", "bf16-mixed") and getattr(self, given) is None
        if mixed and isinstance(self.accelerator, _Device):  # Lightning's own would be CUDA's
            setattr(self, given, module.MixedPrecision(getattr(self, wanted), config.device_name))
        return init_precision(self)

    for name, ours in zip(names, (staticmethod(auto_accelerator), strategy_of, precision_of), strict=True):
        setattr(connector, name, ours)


def _strategy(single_device: type) -> type:
    """Return the strategy for one device that ends a step with each one of the optimizer, or batch without one."""
    ends = ("optimizer_step", *(name for name in _EVALUATIONS if hasattr(single_device, name)))
    methods = {name: _ending_a_step(getattr(single_device, name)) for name in ends}
    return type("LazyTPUStrategy", (single_device,), {"strategy_name": f"single_{NAME}", **methods})


class _Distributed(Protocol):
    """What is used of Lightning's strategies."""

    root_device: torch.device


def _suit_ddp(module: ModuleType) -> None:
    """Make the strategy ``"ddp"`` end steps too, and leave out the stream of CUDA in which it would make the module."""
    ddp = module.DDPStrategy
    for name in ("optimizer_step", *_EVALUATIONS):
        if hasattr(ddp, name):
            setattr(ddp, name, _ending_a_step(getattr(ddp, name)))
    name = next(n for n in ("determine_ddp_device_ids", "_determine_ddp_device_ids") if hasattr(ddp, n))
    theirs = getattr(ddp, name)
    setattr(ddp, name, lambda self: None if self.root_device.type == config.device_name else theirs(self))


def _ending_a_step(theirs: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(theirs)
    def step(self: _Distributed, *args: object, **kwargs: object) -> object:
        result = theirs(self, *args, **kwargs)
        if self.root_device.type == config.device_name:
            mark_step()
        return result

    return step
