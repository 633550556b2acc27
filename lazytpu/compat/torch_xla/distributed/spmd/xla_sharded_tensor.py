"""``torch_xla.distributed.spmd.xla_sharded_tensor``: what a marked tensor is there.

A tensor that is marked stays the tensor it is, and counts as an `XLAShardedTensor`.  What the functions that mark
return is another tensor of that class, which does all on the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import EllipsisType

import numpy as np
import torch
from torch._C import _TensorMeta
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.nn.functional import pad
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_map_only

import lazytpu
from lazytpu import spmd
from lazytpu.compat import names
from lazytpu.compat.torch_xla.core import world
from lazytpu.compat.torch_xla.distributed.spmd.mesh import entry_of
from lazytpu.compat.torch_xla.distributed.spmd.op_sharding import ShardingType, op_sharding_of, text_of
from lazytpu.ir.op_schema import Arg
from lazytpu.ir.sharding import Sharding
from lazytpu.ir.tree import trace
from lazytpu.passes import result_shardings
from lazytpu.spmd.tensor_parts import Box, fill
from lazytpu.tensors.storage import storage_of
from lazytpu.tensors.tensor import LazyTensor
from lazytpu.tracing.parts import is_part
from lazytpu.tracing.record import cell_of, is_device_tensor, load
from lazytpu.tracing.sharding import is_result, sharding_of

__getattr__ = names.missing_from(__name__)

_T: Arg = torch.Tensor
_Lazy: Arg = LazyTensor
_SPEC = "_lazytpu_spec"  # attribute of a tensor: how it lay when its DTensorSpec was made, and that


@dataclass
class XLAShard:
    """The part of a tensor that a device of this process has.

    Attributes:
        data: a copy on the CPU, filled up with zeros where the sizes do not divide.
        indices: what of the tensor it is; ``...`` for all of it.
        shard_device: the device.
        replica_id: how many devices before it have the same part.
        unpadded_data: the copy without the zeros.
    """

    data: torch.Tensor
    indices: list[slice] | EllipsisType
    shard_device: str
    replica_id: int
    _padding: list[int] = field(default_factory=list, repr=False)

    @property
    def unpadded_data(self) -> torch.Tensor:
        return self.data[tuple([slice(0, n - k) for n, k in zip(self.data.shape, self._padding, strict=True)])]


class NoPlacementsError(ValueError, AttributeError):
    """A tensor has no sharding; an AttributeError, too, for who asks ``getattr(x, "_spec", None)``, as torch does."""


class _Marked(_TensorMeta):
    def __instancecheck__(cls, x: object) -> bool:
        return type(x) is cls or (isinstance(x, torch.Tensor) and is_device_tensor(x) and sharding_of(x) is not None)

    def __call__(cls, elem: torch.Tensor, *_: object, requires_grad: bool = False, **sharded: object) -> torch.Tensor:
        moved = elem.to(LazyTensor.device_type)
        return as_sharded(moved.detach().requires_grad_() if requires_grad else moved)


class XLAShardedTensor(DTensor, metaclass=_Marked):
    """A tensor in the storage of another, and what is computed from it; any tensor with a sharding counts as one.

    One that was made of a leaf of autograd passes for that leaf: it has its gradient.
    """

    _given: torch.Tensor | None = None  # what it was made of, where it was not computed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Arg = (), kwargs: Arg = None
    ) -> object:
        stands_for = _STANDS_FOR.get(func)
        with torch._C.DisableTorchFunctionSubclass():
            if stands_for is not None:
                args, kwargs = tree_map_only(torch.Tensor, stands_for, (args, kwargs))
            found = _OURS.get(func, func)(*args, **(kwargs or {}))
            return found if func in get_default_nowrap_functions() else tree_map_only(torch.Tensor, _computed, found)

    @property
    def global_tensor(self) -> torch.Tensor:
        """The tensor it was made of, or one of the usual class with its contents."""
        if self._given is not None:
            return self._given
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(LazyTensor)

    @property
    def __tensor_flatten__(self) -> Arg:  # torch asks whether there is one, to take a DTensor apart
        raise AttributeError("an XLAShardedTensor has no local tensor")

    def to_local(self, **_: object) -> torch.Tensor:
        raise NotImplementedError("an XLAShardedTensor has local_shards, one for each device of this process")

    def full_tensor(self, **_: object) -> torch.Tensor:
        return self.global_tensor

    def __reduce_ex__(self, protocol: Arg) -> Arg:
        return self.global_tensor.__reduce_ex__(protocol)


for _name, _of in (
    ("__torch_dispatch__", torch._C._disabled_torch_dispatch_impl),
    ("_is_param", property(lambda tensor: isinstance(tensor._given, torch.nn.Parameter))),
    ("__repr__", lambda tensor: f"XLAShardedTensor({tensor.global_tensor})"),
):
    setattr(XLAShardedTensor, _name, _of)


def as_sharded(tensor: torch.Tensor) -> torch.Tensor:
    """Return an `XLAShardedTensor` made of a tensor of the device."""
    if type(tensor) is XLAShardedTensor:
        return tensor
    with torch.set_grad_enabled(torch.is_grad_enabled() or tensor.is_leaf):
        found = _computed(tensor)
    setattr(found, "_given", tensor)  # noqa: B010
    return found


def _computed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a result as an `XLAShardedTensor`, unless it is on the CPU."""
    if type(tensor) is XLAShardedTensor or not is_device_tensor(tensor):
        return tensor
    return tensor.as_subclass(XLAShardedTensor)


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return what an `XLAShardedTensor` was made of, or its contents; any other tensor as it is."""
    return tensor.global_tensor if type(tensor) is XLAShardedTensor else tensor


def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the leaf of autograd that an `XLAShardedTensor` was made of; any other tensor as it is."""
    given = tensor._given if type(tensor) is XLAShardedTensor else None
    return given if given is not None and given.is_leaf and tensor.grad_fn is not None else tensor


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    for each in {tensor, unwrapped(tensor)}:
        (_Lazy if type(each) is LazyTensor else _T).data.__set__(each, unwrapped(data))


_OURS: dict[object, Callable[..., object]] = {
    getattr(_T, name): getattr(LazyTensor, name)
    for name in "numpy untyped_storage data_ptr __format__ __deepcopy__ __dlpack__ __dlpack_device__".split()
}
"""What the tensors of the device have in place of functions of torch's."""

_STANDS_FOR: dict[object, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(_OURS, unwrapped),
    **dict.fromkeys((_T.grad.__get__, _T.grad.__set__, _T.grad.__delete__), leaf_of),
    **dict.fromkeys((_T.is_leaf.__get__, _T.grad_fn.__get__, _T.retains_grad.__get__), leaf_of),
    **dict.fromkeys((_T.requires_grad.__set__, _T.requires_grad_, _T.retain_grad), leaf_of),
    **dict.fromkeys((_T.register_hook, _T.register_post_accumulate_grad_hook), leaf_of),
    **dict.fromkeys((torch.autograd.grad, torch.autograd.backward), leaf_of),
}
"""Functions that take the tensor that an `XLAShardedTensor` stands for."""

_OURS[_T.data.__set__] = _set_data


def sharding_type_of(tensor: torch.Tensor) -> ShardingType | None:
    """Return how a tensor is spread; None for one without a sharding."""
    found = sharding_of(tensor)
    if found is None:
        return ShardingType.MANUAL if _is_part(tensor) else None
    return op_sharding_of(found.mesh, found.spec).sharding_type


def _is_part(tensor: torch.Tensor) -> bool:
    return trace.mesh is not None and is_part(tensor)


def sharding_spec_of(tensor: torch.Tensor) -> str:
    """Return how a tensor is spread as XLA writes it, such as ``{devices=[1,2]0,1}``.

    Empty where nobody has said how, and it is not computed yet or was moved here by a line of the script.
    """
    found = sharding_of(tensor)
    if found is None and _is_part(tensor):
        return "{manual}"
    if found is None and is_result(tensor) and trace.mesh is not None:
        found = result_shardings.of_pending(load(cell_of(tensor)), trace.mesh)
        found = None if found is None or found.is_replicated else found
    if found is None and world.is_spmd() and not is_result(tensor):
        origin = storage_of(cell_of(tensor)).origin
        return "" if origin is not None and origin.file else "{replicated}"
    return "" if found is None else text_of(found)


def local_shards_of(tensor: torch.Tensor) -> list[XLAShard]:
    """Return the parts of a tensor that this process has."""
    sharding = sharding_of(tensor)
    replicas = {} if sharding is None else _replicas(sharding)
    counts = (1,) * tensor.dim() if sharding is None else sharding.parts
    found = []
    for shard in spmd.local_shards(tensor):
        whole = all(count == 1 for count in counts)
        full = [-(-n // count) for n, count in zip(tensor.shape, counts, strict=True)]
        padding = [n - have for n, have in zip(full, shard.data.shape, strict=True)]
        found.append(
            XLAShard(
                pad(shard.data, [k for n in reversed(padding) for k in (0, n)]) if any(padding) else shard.data,
                ... if whole else [slice(s.start, s.stop, 1) for s in shard.index],
                f"{lazytpu.platform().upper()}:{shard.device}",
                replicas.get(shard.device, 0),
                padding,
            )
        )
    return found


def _replicas(sharding: Sharding) -> dict[int, int]:
    """Return for each device how many before it have the same part."""
    mesh, used = sharding.mesh, {name for names in sharding.spec for name in names}
    rest = [i for i, name in enumerate(mesh.axis_names) if name not in used]
    sizes = [mesh.shape[i] for i in rest]
    places = np.argwhere(np.ones(mesh.shape, bool))
    numbers = [int(np.ravel_multi_index([place[i] for i in rest], sizes)) if rest else 0 for place in places]
    return dict(zip(mesh.devices, numbers, strict=True))


def load_local_shards(tensor: torch.Tensor, shards: Sequence[XLAShard]) -> None:
    """Overwrite a tensor, which lies as before, with parts from the CPU.

    Args:
        shards: those of `local_shards_of`, all of them, with other contents.

    Raises:
        RuntimeError: the tensor is not split, or the parts are not its parts.
    """
    have = local_shards_of(tensor)
    if not have or have[0].indices is ...:
        raise RuntimeError("load_local_shards_ takes the parts of a tensor that is split; copy_ overwrites others")
    if [s.data.shape for s in have] != [s.data.shape for s in shards]:
        raise RuntimeError(
            f"load_local_shards_ takes {len(have)} parts of shape {list(have[0].data.shape)}, "
            f"not {len(shards)} of {[list(s.data.shape) for s in shards][:1]}"
        )
    given = {_box(mine): new for mine, new in zip(have, shards, strict=True)}

    def of_box(box: Box) -> torch.Tensor:
        part = given[tuple([(s.start, s.stop) for s in box])]
        return part.data[tuple([slice(0, s.stop - s.start) for s in box])].to(tensor.dtype)

    fill(tensor, of_box)


def _box(shard: XLAShard) -> tuple[tuple[int, int], ...]:
    assert not isinstance(shard.indices, EllipsisType)
    return tuple([(s.start, s.stop) for s in shard.indices])


def partition_spec_of(tensor: torch.Tensor) -> tuple[tuple[int, ...] | int | None, ...] | None:
    """Return for each dimension the numbers of the axes of the mesh that split it; None without a sharding."""
    found = sharding_of(tensor)
    if found is None:
        return None
    return tuple([entry_of(tuple([found.mesh.axis_names.index(name) for name in axes])) for axes in found.spec])


def mesh_shape_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the lengths of the axes of the mesh of a tensor; None without a sharding."""
    found = sharding_of(tensor)
    return None if found is None else found.mesh.shape


def placements_of(tensor: torch.Tensor) -> tuple[Placement, ...]:
    """Return for each axis of the mesh which dimension of a tensor it splits, as torch's placements.

    Raises:
        ValueError: the tensor has no sharding.
    """
    found = sharding_of(tensor)
    if found is None:
        raise NoPlacementsError(
            "Placements not available: XLAShardedTensor requires mesh_shape and partition_spec to be set. "
            "Use mark_sharding() to properly initialize sharding information."
        )
    places = {name: Shard(dim) for dim, axes in enumerate(found.spec) for name in axes}
    return tuple([places.get(name, Replicate()) for name in found.mesh.axis_names])


def spec_of(tensor: torch.Tensor) -> DTensorSpec:
    """Return the mesh and the placements of a tensor as torch's DTensor has them, the same object while it lies so.

    Raises:
        ValueError: the tensor has no sharding.
    """
    lies, made = sharding_of(tensor), cached_spec_of(tensor)
    if made is not None:
        return made
    placements = placements_of(tensor)
    assert lies is not None
    grid = torch.tensor(lies.mesh.devices).reshape(lies.mesh.shape)
    mesh = DeviceMesh(LazyTensor.device_type, grid)
    made = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))
    setattr(tensor, _SPEC, (lies, made))
    return made


def cached_spec_of(tensor: torch.Tensor) -> DTensorSpec | None:
    """Return what `spec_of` returned last, None where it was not called since the tensor lies as it does."""
    made: tuple[Sharding, DTensorSpec] | None = getattr(tensor, _SPEC, None)
    return made[1] if made is not None and made[0] is sharding_of(tensor) else None


def invalidate_spec_cache(tensor: torch.Tensor) -> None:
    """Forget what `spec_of` has returned."""
    setattr(tensor, _SPEC, None)


setattr(LazyTensor, "global_tensor", property(lambda tensor: tensor))  # noqa: B010
for _class in (LazyTensor, XLAShardedTensor):
    for _name, _get in (
        ("local_shards", local_shards_of),
        ("sharding_type", sharding_type_of),
        ("sharding_spec", sharding_spec_of),
        ("partition_spec", partition_spec_of),
        ("mesh_shape", mesh_shape_of),
        (
            "placements",
            lambda tensor: spec_of(tensor).placements if LazyTensor.device_type == "xla" else placements_of(tensor),
        ),
        ("_spec", spec_of),
        ("_cached_spec", cached_spec_of),
    ):
        setattr(_class, _name, property(_get))
    setattr(_class, "load_local_shards_", load_local_shards)  # noqa: B010
    setattr(_class, "invalidate_spec_cache", invalidate_spec_cache)  # noqa: B010

__all__ = ["ShardingType", "XLAShard", "XLAShardedTensor", "local_shards_of", "sharding_spec_of", "sharding_type_of"]
