"""``torch_xla.distributed.parallel_loader``: loaders that move batches in the background, by `lazytpu.DeviceLoader`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, cast

import torch
from torch.types import Device
from torch.utils._pytree import tree_map_only

from lazytpu.compat import names
from lazytpu.compat.torch_xla.core import xla_model
from lazytpu.compat.torch_xla.distributed.spmd import ShardingSpec
from lazytpu.frontends.loader import DeviceLoader
from lazytpu.runtime import meshes

__getattr__ = names.missing_from(__name__)
Batch: TypeAlias = object  # a pytree of tensors


class MpDeviceLoader:
    """Iterates a loader with batches on the device; each new batch ends a step and runs its closures.

    Args:
        loader: an iterable of batches.
        device: where they go.
        kwargs: ``device_prefetch_size`` is how many may wait on the device; ``batches_per_execution`` may be 1.
    """

    def __init__(self, loader: Iterable[Batch], device: Device, **kwargs: object) -> None:
        self._loader, self._device = loader, device
        self._batches = _device_loader(loader, device, kwargs)

    def __iter__(self) -> Iterator[Batch]:
        return PerDeviceLoader(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class PerDeviceLoader:
    """One pass over a loader, for one device."""

    def __init__(self, loader: DeviceLoader) -> None:
        self._loader = loader
        self._iterator: Iterator[Batch] | None = None

    def __iter__(self) -> PerDeviceLoader:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = iter(self._loader)
            xla_model.mark_step()  # the ops before the first batch are a step of their own
        try:
            batch = next(self._iterator)
        except StopIteration:
            xla_model._run_step_closures()
            raise
        xla_model._run_step_closures()
        return batch

    next = __next__

    def __len__(self) -> int:
        return len(self._loader)


class ParallelLoader:
    """A loader for several devices, of which this process has one."""

    def __init__(self, loader: Iterable[Batch], devices: Sequence[torch.device | str], **kwargs: object) -> None:
        if len(devices) != 1:
            raise ValueError(f"this process has one device, not {len(devices)}")
        self._device = torch.device(devices[0])
        self._batches = _device_loader(loader, devices[0], kwargs)

    def per_device_loader(self, device: torch.device | str) -> PerDeviceLoader:
        """Return one pass over the loader with batches on ``device``."""
        if torch.device(device).type != self._device.type:
            raise ValueError(f"this loader is for {self._device}, not {device}")
        return PerDeviceLoader(self._batches)

    def next_item(self, device: torch.device | str) -> Batch:
        """Return the first batch of a new pass."""
        return next(self.per_device_loader(device), None)

    def close(self) -> None:
        """Do nothing: a pass that is no longer referenced stops its thread."""


_ACCEPTED = {
    "batchdim",
    "loader_prefetch_size",
    "device_prefetch_size",
    "host_to_device_transfer_threads",
    "batches_per_execution",
    "fixed_batch_size",
}


def _device_loader(loader: Iterable[Batch], device: Device, options: dict[str, object]) -> DeviceLoader:
    if options.get("batches_per_execution", 1) != 1:
        raise ValueError("batches_per_execution: each batch ends a step")
    unknown = options.keys() - _ACCEPTED - {"input_sharding"}
    if unknown:
        raise TypeError(f"unexpected keyword argument {sorted(unknown)[0]!r}")
    where = torch.device(device) if isinstance(device, int) else device
    prefetch = cast(int, options.get("device_prefetch_size", 2))
    return _ShardedLoader(loader, where, prefetch, options.get("input_sharding"))


class _ShardedLoader(DeviceLoader):
    """A loader that splits what is of as many dimensions as its sharding says.

    Args:
        sharding: a ``ShardingSpec``, a dictionary of them by the keys of a batch, or None.
    """

    def __init__(
        self, loader: Iterable[Batch], device: torch.device | str | None, prefetch: int, sharding: object
    ) -> None:
        super().__init__(loader, device, prefetch)
        self._sharding = sharding

    def _to_device(self, batch: Batch) -> Batch:
        if not isinstance(self._sharding, dict):
            return self._placed(batch, self._sharding)
        if not isinstance(batch, dict):
            raise ValueError(f"input_sharding is a dictionary, and a batch is a {type(batch).__name__}")
        lacking = batch.keys() - self._sharding.keys()
        if lacking:
            raise KeyError(f"input_sharding lacks {sorted(lacking)} of the batch")
        return {key: self._placed(x, self._sharding[key]) for key, x in batch.items()}

    def _placed(self, batch: Batch, sharding: object) -> Batch:
        if not isinstance(sharding, ShardingSpec):
            return super()._to_device(batch)

        def of_parts(t: torch.Tensor) -> torch.Tensor:
            found = sharding.placed(t) if t.device.type == "cpu" and sharding.can_apply(t) else None
            return t if found is None else found

        found: Batch = super()._to_device(tree_map_only(torch.Tensor, of_parts, batch))
        if not (sharding.minibatch and meshes.over_processes(sharding.mesh.mesh)):
            xla_model._apply_sharding(found, sharding)
        return found
