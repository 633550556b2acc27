"""Planners for ``torch.distributed.checkpoint``: which part of which tensor each process writes and reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from lazytpu.spmd.tensor_parts import Box, Part, boxes, fill, parts_of
from lazytpu.tracing.record import is_device_tensor

State = dict[str, object]


class SavedTensor:
    """A tensor of the device as it is now, for a planner.

    Args:
        tensor: what is saved.
        on_host: copy its parts to the host now, not when they are written.

    Attributes:
        is_split: devices have different parts of it.
    """

    def __init__(self, tensor: torch.Tensor, on_host: bool = False) -> None:
        self._size = tensor.size()
        self._properties = TensorProperties(tensor.dtype, requires_grad=tensor.requires_grad)
        parts = parts_of(tensor)
        self.is_split = len(parts) > 1
        self._parts = {_offsets(part.box): part for part in parts if part.owned}
        self._host = {at: part.to_host() for at, part in self._parts.items()} if on_host else {}

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:  # torch's name
        return [
            WriteItem(
                MetadataIndex(fqn, offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(part.box), self._properties, self._size),
            )
            for number, (offsets, part) in enumerate(self._parts.items())
        ]

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """Return a part on the host."""
        assert index.offset is not None
        return self._host[index.offset] if self._host else self._parts[index.offset].to_host()


class SavedShard:
    """The part that this process has of a ``DTensor``, as it is now, for a planner."""

    def __init__(self, tensor: DTensor) -> None:
        self._items: list[WriteItem] = []
        if tensor.device_mesh.get_coordinate() is not None:
            self._items = tensor.__create_write_items__("", tensor)
        self._parts: list[Part] = parts_of(tensor.to_local().detach())

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:  # torch's name
        return [replace(item, index=replace(item.index, fqn=fqn)) for item in self._items]

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """Return the part on the host."""
        return self._parts[0].to_host()


class LoadedTensor:
    """A tensor of the device that is being loaded: parts on the host, until all of them have come.

    Attributes:
        is_split: devices have different parts of it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        parts = parts_of(tensor)
        self.is_split = len(parts) > 1
        self._boxes: dict[torch.Size, Box] = {_offsets(b): b for b, _ in boxes(parts)}
        self._host: dict[torch.Size, torch.Tensor] = {}

    def size(self) -> torch.Size:
        """Return the sizes of the tensor."""
        return self._tensor.size()

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(box) for box in self._boxes.values()]

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """Return a part on the host, to be written to."""
        offsets = torch.Size(index.offset or ())
        if offsets not in self._host:
            sizes = [s.stop - s.start for s in self._boxes[offsets]]
            self._host[offsets] = torch.empty(sizes, dtype=self._tensor.dtype)
        return self._host[offsets]

    def finish(self) -> None:
        """Move the parts to the devices."""
        fill(self._tensor, self._of)
        self._host.clear()

    def _of(self, box: Box) -> torch.Tensor:
        sizes = [s.stop - s.start for s in box]
        if 0 in sizes:
            return torch.empty(sizes, dtype=self._tensor.dtype)
        found = self._host.get(_offsets(box))
        if found is not None and list(found.shape) == sizes:
            return found
        whole = torch.empty(self._tensor.shape, dtype=self._tensor.dtype)  # a view that is filled through a copy
        for offsets, part in self._host.items():
            whole[self._boxes[offsets]] = part
        return whole[box]


class LoadedShard:
    """The part that this process has of a ``DTensor``, which is being loaded: on the host, until all of it has come."""

    def __init__(self, tensor: DTensor) -> None:
        self._tensor, self._local = tensor, tensor.to_local().detach()
        self._host: torch.Tensor | None = None

    def size(self) -> torch.Size:
        """Return the sizes of the whole tensor."""
        return self._tensor.size()

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        found: list[ChunkStorageMetadata] = []
        if self._tensor.device_mesh.get_coordinate() is not None:
            found = self._tensor.__create_chunk_list__()
        return [chunk for chunk in found if 0 not in chunk.sizes]

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """Return the part on the host, to be written to."""
        if self._host is None:
            self._host = torch.empty(self._local.shape, dtype=self._local.dtype)
        return self._host

    def finish(self) -> None:
        """Move the part to the device."""
        host, self._host = self._host, None
        if host is not None:
            fill(self._local, lambda box: host[box])


_Saved: TypeAlias = SavedTensor | SavedShard
_Loaded: TypeAlias = LoadedTensor | LoadedShard


def is_of_device(x: object) -> TypeGuard[torch.Tensor]:
    """Return whether something is a tensor of the device, or a ``DTensor`` of such parts."""
    return is_device_tensor(x.to_local() if type(x) is DTensor else x)


def _for_a_planner(x: object, part: Callable[[DTensor], object], whole: Callable[[torch.Tensor], object]) -> object:
    """Return what stands for a tensor of the device, by whether it is a ``DTensor``; anything else as it is."""
    if not is_of_device(x):
        return x
    return part(x) if type(x) is DTensor else whole(x)


class SavePlanner(DefaultSavePlanner):
    """Saves each part of a tensor once, from the process that has it first; for ``torch.distributed.checkpoint.save``.

    Of a ``DTensor`` each process saves its part.  Tensors that are not of the device are saved as
    ``DefaultSavePlanner`` does.
    """

    def set_up_planner(
        self, state_dict: State, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the state as it is now."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {k: _for_a_planner(v, SavedShard, SavedTensor) for k, v in self.state_dict.items()}

    def lookup_object(self, index: MetadataIndex) -> object:
        """Return what a write item is of."""
        found = self.state_dict[index.fqn]
        return found.part(index) if isinstance(found, _Saved) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """Loads into each device of a tensor the part it has, however the tensor was split when it was saved."""

    def set_up_planner(self, state_dict: State, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Take the tensors that are loaded into."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = {k: _for_a_planner(v, LoadedShard, LoadedTensor) for k, v in self.state_dict.items()}
        self._left: Counter[str] = Counter()

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Count what is to be read of each tensor."""
        self._left = Counter(item.dest_index.fqn for item in new_plan.items)
        saved = {} if self.metadata is None else self.metadata.state_dict_metadata
        for name, found in self.state_dict.items():
            if isinstance(found, _Loaded) and not self._left[name] and name in saved:
                found.finish()  # one without elements
        return super().finish_plan(new_plan)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return what a read item is written to."""
        found = self.state_dict[index.fqn]
        return found.part(index) if isinstance(found, _Loaded) else super().lookup_tensor(index)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Move a tensor to its devices once all of it was read."""
        name = read_item.dest_index.fqn
        self._left[name] -= 1
        found = self.state_dict[name]
        if isinstance(found, _Loaded) and not self._left[name]:
            found.finish()


class PreparedSavePlanner(SavePlanner):
    """A planner that took the state before it is written."""

    def prepare(self, state: State) -> None:
        """Take the state: of the device what it holds now."""
        super().set_up_planner(state)

    def set_up_planner(
        self, state_dict: State, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep what was taken."""
        self.is_coordinator = is_coordinator


def _offsets(box: Box) -> torch.Size:
    return torch.Size([s.start for s in box])


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(_offsets(box), torch.Size([s.stop - s.start for s in box]))
