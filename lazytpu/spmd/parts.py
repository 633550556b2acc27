"""Let each device compute with its own part of tensors: `shard_map`, and what devices exchange inside of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np
import torch
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_flatten, tree_unflatten

from lazytpu.ir import sharding as ir
from lazytpu.ir.op_schema import Arg
from lazytpu.ir.sharding import Entry, Sharding
from lazytpu.spmd.mesh import as_mesh
from lazytpu.tracing import parts
from lazytpu.tracing.record import is_device_tensor

_ops = torch.ops.lazytpu
Axes = str | Sequence[str]
Spec = tuple[Entry, ...] | None
Specs = Spec | list[Spec]
_running: list[tuple[ir.Mesh, torch.Tensor | None]] = []  # meshes of the calls of `shard_map` that run, and a part


class _Exact(torch.autograd.Function):
    """A function with a gradient of its own, whose call has a type."""

    @classmethod
    def of(cls, *arguments: object) -> torch.Tensor:
        """Call it."""
        apply: Callable[..., torch.Tensor] = cls.apply
        return apply(*arguments)


class ToParts(_Exact):
    """The part of each device.  Its gradient is the whole of parts, summed over devices that have the same part."""

    @staticmethod
    def forward(ctx: Arg, x: torch.Tensor, sharding: Sharding) -> torch.Tensor:
        ctx.sharding, ctx.size = sharding, x.shape
        return parts.to_parts(x, sharding)

    @staticmethod
    def backward(ctx: Arg, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        rest = _unused(ctx.sharding)
        summed = Reduce.of(grad, "sum", groups_over(ctx.sharding.mesh, rest)) if rest else grad
        return FromParts.of(summed, ctx.sharding, ctx.size), None


class FromParts(_Exact):
    """The whole of parts; of those that several devices have alike, each has its share of the gradient."""

    @staticmethod
    def forward(ctx: Arg, x: torch.Tensor, sharding: Sharding, size: Sequence[int]) -> torch.Tensor:
        ctx.sharding = sharding
        return parts.from_parts(x, sharding, size)

    @staticmethod
    def backward(ctx: Arg, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        axes = ctx.sharding.mesh.axes
        count = prod([axes[name] for name in _unused(ctx.sharding)])
        return ToParts.of(grad if count == 1 else grad / count, ctx.sharding), None, None


class Reduce(_Exact):
    """Sum, least or greatest of the parts of a group."""

    @staticmethod
    def forward(ctx: Arg, x: torch.Tensor, reduction: str, groups: str) -> torch.Tensor:
        ctx.reduction, ctx.groups = reduction, groups
        return parts.collective(_ops.reduce_parts.default, x, reduction, groups)

    @staticmethod
    def backward(ctx: Arg, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.reduction != "sum":
            raise NotImplementedError(f"all_reduce by {ctx.reduction} has no gradient; detach() its operand")
        return Reduce.of(grad, "sum", ctx.groups), None, None


class Gather(_Exact):
    """The parts of a group side by side; its gradient is `Scatter`."""

    @staticmethod
    def forward(ctx: Arg, x: torch.Tensor, dim: int, groups: str) -> torch.Tensor:
        ctx.dim, ctx.groups = dim, groups
        return parts.collective(_ops.gather_parts.default, x, dim, groups)

    @staticmethod
    def backward(ctx: Arg, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return Scatter.of(grad, ctx.dim, ctx.groups), None, None


class Scatter(_Exact):
    """A share of the sum of the parts of a group; its gradient is `Gather`."""

    @staticmethod
    def forward(ctx: Arg, x: torch.Tensor, dim: int, groups: str) -> torch.Tensor:
        ctx.dim, ctx.groups = dim, groups
        _check_divides(x, dim, groups)
        return parts.collective(_ops.scatter_parts.default, x, dim, groups)

    @staticmethod
    def backward(ctx: Arg, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return Gather.of(grad, ctx.dim, ctx.groups), None, None


class Exchange(_Exact):
    """Each device's share of every part of a group, side by side; its gradient is the exchange back."""

    @staticmethod
    def forward(ctx: Arg, x: torch.Tensor, split: int, concat: int, groups: str) -> torch.Tensor:
        ctx.split, ctx.concat, ctx.groups = split, concat, groups
        _check_divides(x, split, groups)
        return parts.collective(_ops.exchange_parts.default, x, split, concat, groups)

    @staticmethod
    def backward(ctx: Arg, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return Exchange.of(grad, ctx.concat, ctx.split, ctx.groups), None, None, None


class Permute(_Exact):
    """What another device has, zeros where nobody sends; its gradient goes back."""

    @staticmethod
    def forward(ctx: Arg, x: torch.Tensor, moves: Sequence[int]) -> torch.Tensor:
        ctx.moves = moves
        return parts.collective(_ops.permute_parts.default, x, list(moves))

    @staticmethod
    def backward(ctx: Arg, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Permute.of(grad, [x for pair in zip(ctx.moves[1::2], ctx.moves[::2], strict=True) for x in pair]), None


def shard_map(function: Callable[..., object], mesh: ir.Mesh, in_specs: Specs, out_specs: Specs) -> Callable[..., Arg]:
    """Return a function that calls ``function`` once, with what each device has of the tensors.

    Inside, a tensor has the sizes of a part, and every device computes with its own: XLA divides nothing and sends
    nothing but what the collectives here say: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `permute`.
    It is differentiable.

    Args:
        function: takes tensors and returns a tensor, or a tuple or list of them.
        mesh: the devices.
        in_specs: a list of specs as for `mark_sharding`, one an argument; the spec itself where there is one argument.
            Arguments that are no tensors go in as they are; their specs may be None.
        out_specs: the spec of the result, or a list of specs, one a result.  Devices that a spec gives the same part
            must have computed it alike.

    Raises:
        ValueError: a spec does not fit, there are more or fewer specs than arguments or results.

    Note:
        Where the sizes of an argument do not divide, parts have zeros at the end.  A tensor that the function takes
        from elsewhere is whole on each device, and cannot have a gradient.

    Example:
        >>> def loss(x, w):  # doctest: +SKIP
        ...     return spmd.all_reduce((x @ w).sum(), "data")
        >>> spmd.shard_map(loss, mesh, [("data", None), ()], ())(x, w)  # doctest: +SKIP
    """
    grid = as_mesh(mesh)
    takes, gives = _specs(in_specs), _specs(out_specs)

    def mapped(*args: object) -> Arg:
        if len(takes) != len(args):
            raise ValueError(f"shard_map: {len(takes)} specs for {len(args)} arguments")
        given = [
            ToParts.of(x, ir.sharding(grid, spec, x.shape)) if isinstance(x, torch.Tensor) else x
            for x, spec in zip(map(_on_device, args), takes, strict=True)
        ]
        _running.append((grid, next((x for x in given if isinstance(x, torch.Tensor)), None)))
        try:
            results, tree = tree_flatten(function(*given))
        finally:
            _running.pop()
        if len(results) != len(gives):
            raise ValueError(f"shard_map: {len(gives)} specs for {len(results)} results")
        return tree_unflatten([whole(x, grid, spec) for x, spec in zip(results, gives, strict=True)], tree)

    apart = _disable_dynamo(mapped)

    def called(*args: object) -> Arg:
        return apart(*args) if "torch._dynamo" in sys.modules else mapped(*args)  # it takes seconds to import

    return called


def _specs(given: Specs) -> list[tuple[Entry, ...]]:
    """Return a list of specs; a tuple alone is one."""
    found = given if isinstance(given, list) else [given]
    return [() if spec is None else tuple(spec) for spec in found]


def _on_device(x: object) -> object:
    if isinstance(x, torch.Tensor) and not is_device_tensor(x):
        raise TypeError(f"shard_map takes tensors on the device, not one on {x.device}")
    return x


def whole(part: torch.Tensor, mesh: ir.Mesh, spec: Iterable[Entry], size: Sequence[int] | None = None) -> torch.Tensor:
    """Return the whole tensor that parts make.

    Args:
        size: of it; by default that of all parts together.

    Raises:
        ValueError: the spec does not fit, or a tensor of that size has other parts.
        LazyTPUError: it is no part.
    """
    lies = ir.sharding(mesh, spec, part.shape)
    full = [n * k for n, k in zip(part.shape, lies.parts, strict=True)] if size is None else list(size)
    return FromParts.of(part, lies, full)


def all_reduce(part: torch.Tensor, axis: Axes, reduction: str = "sum") -> torch.Tensor:
    """Return the sum (``mean``, ``min``, ``max``) of what the devices along an axis, or several, have.

    Raises:
        ValueError: the mesh has no such axis, or there is no such reduction.
        RuntimeError: no function of `shard_map` is running.
    """
    if reduction not in ("sum", "mean", "min", "max"):
        raise ValueError(f"all_reduce by sum, mean, min or max, not {reduction!r}")
    groups = _groups(axis)
    found = Reduce.of(part, "sum" if reduction == "mean" else reduction, groups)
    return found / len(groups.partition("|")[0].split(",")) if reduction == "mean" else found


def all_gather(part: torch.Tensor, axis: Axes, dim: int = 0) -> torch.Tensor:
    """Return what the devices along an axis have, side by side along a dimension.

    Raises:
        As `all_reduce`; IndexError: the part has no such dimension.
    """
    return Gather.of(part, _dim(part, dim), _groups(axis))


def reduce_scatter(part: torch.Tensor, axis: Axes, dim: int = 0) -> torch.Tensor:
    """Return a share, along a dimension, of the sum of what the devices along an axis have.

    Raises:
        As `all_gather`; ValueError: the dimension does not divide.
    """
    return Scatter.of(part, _dim(part, dim), _groups(axis))


def all_to_all(part: torch.Tensor, axis: Axes, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Split the part of each device along an axis, and return its share of all of them, side by side.

    Raises:
        As `reduce_scatter`.
    """
    return Exchange.of(part, _dim(part, split_dim), _dim(part, concat_dim), _groups(axis))


def permute(part: torch.Tensor, axis: Axes, moves: Iterable[tuple[int, int]]) -> torch.Tensor:
    """Return what another device along an axis has; zeros where no move ends.

    Args:
        moves: pairs of positions along the axis, from and to.

    Raises:
        As `all_reduce`; ValueError: a position is none of the axis, or two moves begin or end at one.
    """
    pairs = list(moves)
    members = [[int(i) for i in group.split(",")] for group in _groups(axis).split("|")]
    for side in zip(*pairs, strict=True):
        if len(set(side)) != len(side) or not set(side) <= set(range(len(members[0]))):
            raise ValueError(f"permute: moves {pairs} between {len(members[0])} devices")
    flat = [group[end] for group in members for pair in pairs for end in pair]
    return Permute.of(part, flat)


def axis_index(axis: Axes) -> torch.Tensor:
    """Return the position of each device along an axis, i64[].

    Raises:
        As `all_reduce`.
    """
    groups = _groups(axis)
    _, part = _running[-1]
    if part is None:
        raise RuntimeError("axis_index: the function of shard_map got no tensor")
    return parts.collective(_ops.place_of_part.default, part.detach(), groups)


def groups_over(mesh: ir.Mesh, axes: Sequence[str]) -> str:
    """Return the positions of the devices of a mesh that differ along some axes only: ``0,1|2,3``.

    Raises:
        ValueError: the mesh has no such axis.
    """
    missing = [name for name in axes if name not in mesh.axis_names]
    if missing:
        raise ValueError(f"the mesh has no axis {missing[0]!r}, but {', '.join(map(repr, mesh.axis_names))}")
    chosen = [mesh.axis_names.index(name) for name in axes]
    grid = np.moveaxis(np.arange(prod(mesh.shape)).reshape(mesh.shape), chosen, range(-len(chosen), 0))
    rows = grid.reshape(-1, prod([mesh.shape[i] for i in chosen]))
    return "|".join(",".join(map(str, row)) for row in rows.tolist())


def _groups(axis: Axes) -> str:
    if not _running:
        raise RuntimeError("devices exchange their parts inside of a function that lazytpu.spmd.shard_map calls")
    return groups_over(_running[-1][0], [axis] if isinstance(axis, str) else list(axis))


def _unused(sharding: Sharding) -> list[str]:
    used = {name for names in sharding.spec for name in names}
    return [name for name in sharding.mesh.axis_names if name not in used]


def _dim(x: torch.Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"dimension {dim} of a part with {x.dim()} dimensions")
    return dim % x.dim()


def _check_divides(x: torch.Tensor, dim: int, groups: str) -> None:
    count = len(groups.partition("|")[0].split(","))
    if x.shape[dim] % count:
        raise ValueError(f"dimension {dim} of a part of shape {list(x.shape)} does not divide among {count} devices")
