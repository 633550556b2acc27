"""Meshes and shardings: which part of a tensor lies on which device.  No jax here, as in all of this folder.

A sharding is interned, so that identity is equality: it stands on the type of an input of the graph (`Value.sharding`),
and paths of the trace tree part where it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from types import EllipsisType

Entry = str | tuple[str, ...] | EllipsisType | None
"""What a spec says of one dimension: not split, over one axis of the mesh, or over several, the first one outermost.

``...`` leaves a dimension of an intermediate result to XLA.
"""

OPEN = ("...",)
"""What stands for ``...`` in a sharding."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """Devices in a grid whose axes have names.

    Attributes:
        shape: length of each axis.
        axis_names: their names.
        devices: ids of the devices, in row-major order.
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    devices: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def _parts(self) -> tuple[object, ...]:
        return self.shape, self.axis_names, self.devices

    @property
    def axes(self) -> dict[str, int]:
        """The axes and their lengths."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    def describe(self) -> str:
        """Return ``(data=2, model=4)``."""
        return f"({', '.join(f'{name}={n}' for name, n in self.axes.items())})"

    def describe_devices(self) -> str:
        """Return the devices in order: ``0-7``, or ``0-3, 8, 4``."""
        runs = [[d for _, d in run] for _, run in groupby(enumerate(self.devices), lambda pair: pair[1] - pair[0])]
        return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

    def __str__(self) -> str:
        return f"mesh {self.describe()} of devices {self.describe_devices()}"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Sharding:
    """How a tensor lies on a mesh.  Made by `sharding`, one object for equal ones.

    Attributes:
        mesh: the devices.
        spec: for each dimension of the tensor the axes of the mesh that it is split over.
        own: the tensor is another one on each device (`lazytpu.spmd.shard_map`): its array has one dimension more in
            front, along which the devices lie.
    """

    mesh: Mesh
    spec: tuple[tuple[str, ...], ...]
    own: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether every device has all of the tensor."""
        return not self.own and not any(self.spec)

    @property
    def is_open(self) -> bool:
        """Whether XLA chooses some of it."""
        return OPEN in self.spec

    @property
    def parts(self) -> tuple[int, ...]:
        """Into how many parts each dimension is split."""
        if self.own:
            return len(self.mesh.devices), *[1] * len(self.spec)
        axes = self.mesh.axes
        return tuple(1 if names == OPEN else prod(axes[name] for name in names) for names in self.spec)

    def padded(self, size: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes that the parts have together: those of a tensor, rounded up to what can be split evenly."""
        if self.own:
            return len(self.mesh.devices), *size
        return tuple(-(-n // k) * k for n, k in zip(size, self.parts, strict=True))

    def entries(self) -> tuple[Entry, ...]:
        """Return the spec as a caller writes it."""
        return tuple(
            ... if names == OPEN else None if not names else names[0] if len(names) == 1 else names
            for names in self.spec
        )

    def describe(self) -> str:
        """Return ``{data, -, model+expert}``, or ``{replicated}``."""
        if self.own:
            return "{each device its own}"
        if self.is_replicated:
            return "{replicated}"
        return f"{{{', '.join('+'.join(names) or '-' for names in self.spec)}}}"

    def __str__(self) -> str:
        return f"{self.describe()} on {self.mesh}"


_known: dict[tuple[object, ...], Sharding] = {}
_named: dict[tuple[str, int], Sharding] = {}  # by text and number of dimensions, which {replicated} leaves out


def sharding(mesh: Mesh, spec: Iterable[Entry], size: Sequence[int]) -> Sharding:
    """Return the sharding that a spec describes.

    Args:
        mesh: the devices.
        spec: one entry a dimension; dimensions behind the last entry are not split.
        size: of the tensor.

    Raises:
        ValueError: the spec has too many entries, an axis that the mesh has not, or one axis twice.
        TypeError: an entry is none of None, a name, a tuple of names and ``...``.
    """
    given = tuple(spec)
    about = f"a tensor of shape {list(size)}, spec {given}, {mesh}"
    if len(given) > len(size):
        raise ValueError(f"the spec has {len(given)} entries for {len(size)} dimensions: {about}")
    entries = [*map(_axes_of, given)]
    seen: set[str] = set()
    for name in (name for entry in entries if entry != OPEN for name in entry):
        if name not in mesh.axis_names:
            raise ValueError(f"the mesh has no axis {name!r}, but {', '.join(map(repr, mesh.axis_names))}: {about}")
        if name in seen:
            raise ValueError(f"the axis {name!r} splits two dimensions, or one twice: {about}")
        seen.add(name)
    full = (*entries, *[()] * (len(size) - len(entries)))
    return interned(mesh, full)


def interned(mesh: Mesh, spec: tuple[tuple[str, ...], ...], own: bool = False) -> Sharding:
    """Return the one sharding of this mesh and spec."""
    key = (mesh._parts(), spec, own)
    found = _known.get(key)
    if found is None:
        found = _known.setdefault(key, Sharding(Mesh(mesh.shape, mesh.axis_names, mesh.devices), spec, own))
        _named[str(found), len(spec)] = found
    return found


def named_sharding(name: str, ndim: int) -> Sharding:
    """Return the sharding of ``ndim`` dimensions whose text this is, as an op of a graph refers to it."""
    return _named[name, ndim]


def _axes_of(entry: object) -> tuple[str, ...]:
    if entry is None:
        return ()
    if entry is ...:
        return OPEN
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, (tuple, list)) and all(isinstance(name, str) for name in entry):
        return tuple(entry)
    raise TypeError(f"an entry of a spec must be None, the name of an axis, a tuple of names or ..., not {entry!r}")
