"""Indices that the recorded ops do not take as they are.

Torch allows indices on the CPU into a tensor on a device, where it refuses any other mix of devices.  And a mask in
``x[mask] = values`` is recorded as a choice between old and new only where ``values`` has no element of its own for
each place that is true: else the places have to be known, which is a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazytpu.ir.op_schema import OpOverload
from lazytpu.tensors.tensor import MixedDevicesError
from lazytpu.tracing.record import is_device_tensor

Kernel = Callable[..., Any]
Indices = Sequence[torch.Tensor | None]

_READING = {"index", "_unsafe_index"}
_WRITING = {"index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)


def taking_any(overload: OpOverload, kernel: Kernel) -> Kernel:
    """Return the kernel of an op; of one that indexes, a kernel that takes these indices, too."""
    name = overload._overloadpacket.__name__
    if name in _READING:
        return _taking_host_indices(kernel)
    if name not in _WRITING:
        return kernel
    inner = _taking_host_indices(kernel)

    def writing(
        tensor: torch.Tensor, indices: Indices, values: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        if is_device_tensor(tensor) and _each_place_has_its_value(tensor, indices, values):
            indices = _as_places(tensor, indices)
        return inner(tensor, indices, values, *args, **kwargs)

    return writing


def _taking_host_indices(kernel: Kernel) -> Kernel:
    def moving(tensor: torch.Tensor, indices: Indices, *args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(tensor, indices, *args, **kwargs)
        except MixedDevicesError:
            if not is_device_tensor(tensor) or not any(_is_on_the_host(i) for i in indices):
                raise
        moved = [i.to(tensor.device) if i is not None and _is_on_the_host(i) else i for i in indices]
        return kernel(tensor, moved, *args, **kwargs)

    return moving


def _is_on_the_host(index: torch.Tensor | None) -> bool:
    return index is not None and index.device.type == "cpu"


def _each_place_has_its_value(tensor: torch.Tensor, indices: Indices, values: torch.Tensor) -> bool:
    """Return whether a mask goes with other indices, or ``values`` is not one row for all places of it."""
    given = [(n, i) for n, i in enumerate(indices) if i is not None]
    if not any(i.dtype in _MASKS for _, i in given):
        return False
    if len(given) > 1:
        return True
    ((n, mask),) = given
    behind = tensor.dim() - n - mask.dim()
    return 0 <= behind < values.dim() and values.shape[values.dim() - behind - 1] != 1


def _as_places(tensor: torch.Tensor, indices: Indices) -> Indices:
    """Return the indices, with where masks are true in place of these.

    Raises:
        IndexError: a mask is of other sizes than the dimensions that it indexes.
    """
    places: list[torch.Tensor | None] = []
    for i in indices:
        if i is None or i.dtype not in _MASKS:
            places.append(i)
            continue
        for dim, (n, size) in enumerate(zip(i.shape, tensor.shape[len(places) :], strict=False)):
            if n != size:
                raise IndexError(
                    f"The shape of the mask {list(i.shape)} at index {dim} does not match the shape of the indexed "
                    f"tensor {list(tensor.shape)} at index {len(places) + dim}"
                )
        places += i.nonzero().unbind(1)
    return places
