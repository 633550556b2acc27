"""The parts of a tensor of the device: to save each once, and to load each where it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lazytpu.dtypes import host_array, host_tensor
from lazytpu.runtime import meshes
from lazytpu.runtime.client import Buffer
from lazytpu.tensors.storage import resolve, write_buffer
from lazytpu.tracing import reading, sharding
from lazytpu.tracing.record import cell_of, lock

Box = tuple[slice, ...]
"""What of a tensor a part is: a slice a dimension."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor.

    Attributes:
        box: what of it.
        owned: this process is the one to save it.
        contents: of the storage, on a device of this process; None where another process has them.
        order: which dimension of the storage each one of the tensor is.
        dtype: of the tensor.
    """

    box: Box
    owned: bool
    contents: Buffer | None
    order: tuple[int, ...]
    dtype: torch.dtype

    def to_host(self) -> torch.Tensor:
        """Return the contents as a CPU tensor of its own memory."""
        assert self.contents is not None
        places = {d: self.box[i] for i, d in enumerate(self.order)}
        host = host_tensor(np.array(meshes.contents_of(self.contents, tuple([places[d] for d in range(len(places))]))))
        return host.to(self.dtype).permute(self.order).contiguous()


def parts_of(tensor: torch.Tensor) -> list[Part]:
    """Return the different parts of a tensor of the device; what computes it runs.

    Its present contents stay as they are, whatever is written to the tensor afterwards.
    """
    with lock:
        storage, layout = resolve(cell_of(tensor))
        order = sharding.permutation(storage.layout, layout)
        if order is None:  # other elements or dimensions than the storage has
            with torch.no_grad():
                tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
            storage, layout = resolve(cell_of(tensor))
            order = list(range(tensor.dim()))
        buffer = reading.buffer_of(storage, "checkpoint")
        storage.shared = True  # a step that overwrites the tensor leaves the buffer alone
    found = meshes.boxes_of(buffer, storage.layout.size)
    return [
        Part(tuple([box[d] for d in order]), owned, contents, tuple(order), tensor.dtype)
        for box, owned, contents in found
    ]


def fill(tensor: torch.Tensor, part: Callable[[Box], torch.Tensor]) -> None:
    """Overwrite a tensor of the device, which lies as before, with parts from the host.

    Args:
        tensor: all of its storage, or a permutation of it; another view is filled through a copy of all of it.
        part: gives the contents of a part of it, a CPU tensor of its dtype.
    """
    with lock:
        storage, layout = resolve(cell_of(tensor))
        order = sharding.permutation(storage.layout, layout)
        if order is None:
            whole = part(tuple([slice(0, n) for n in tensor.shape]))
            with torch.no_grad():
                tensor.copy_(whole)
            return
        like = reading.buffer_of(storage, "checkpoint")
        back = [order.index(d) for d in range(len(order))]  # which dimension of the tensor each of the storage is

        def of_storage(box: Box) -> NDArray[np.generic]:
            return host_array(part(tuple([box[d] for d in order])).permute(back))

        write_buffer(storage, meshes.assembled(like, storage.layout.size, of_storage))
    torch.autograd.graph.increment_version(tensor)


def boxes(parts: list[Part]) -> Iterator[tuple[Box, Part]]:
    """Yield the parts that this process has, with what they are of the tensor."""
    return ((part.box, part) for part in parts if part.contents is not None)
