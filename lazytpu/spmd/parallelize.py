"""`parallelize`: split layers over devices, as plans of ``torch.distributed.tensor.parallel`` say.

A style of torch's says how the parameters of a module lie, and how what goes in and comes out of it.  Here both become
shardings of whole tensors: the module computes what it did, and XLA adds the communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import nn

from lazytpu.ir.sharding import Entry
from lazytpu.ir.sharding import Mesh as AnyMesh
from lazytpu.spmd.marking import mark_sharding, sharding_of
from lazytpu.spmd.mesh import as_mesh
from lazytpu.spmd.recipes import axis_of
from lazytpu.tensors.tensor import LazyTensor
from lazytpu.tracing.record import is_device_tensor
from lazytpu.tracing.sharding import is_result

_M = TypeVar("_M", bound=nn.Module)
_BY_NAME = "desired_input_kwarg_layouts"
_DIMENSIONS = {  # of the weight and the bias, that a style splits
    ("ColwiseParallel", nn.Linear): (0, 0),
    ("ColwiseParallel", nn.Embedding): (1, None),
    ("RowwiseParallel", nn.Linear): (1, None),
    ("RowwiseParallel", nn.Embedding): (0, None),
}


def parallelize(module: _M, mesh: AnyMesh, plan: Mapping[str, object] | object, axis: str | None = None) -> _M:
    """Split layers over the devices along one axis of a mesh (tensor parallelism).

    Sizes stay those of the whole model: where a script for ``parallelize_module`` divides its number of heads by the
    number of devices, leave that out.

    Args:
        module: on the device, or moved there.
        mesh: the devices.
        plan: as of ``torch.distributed.tensor.parallel.parallelize_module``: the name of a submodule, in which ``*``
            matches, to its style, or a style for the module itself.  Styles are ``ColwiseParallel``,
            ``RowwiseParallel``, ``SequenceParallel`` and ``PrepareModuleInput``, ``Output`` and ``InputOutput``.
        axis: of the mesh, that layers are split over; the last one by default.

    Returns:
        The module itself.

    Raises:
        ValueError: a name matches no submodule, or the mesh has no such axis.
        NotImplementedError: a style is none of these, or not for this kind of module.

    Example:
        >>> plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}  # doctest: +SKIP
        >>> lazytpu.spmd.parallelize(model, mesh, plan, axis="model")  # doctest: +SKIP
    """
    grid = as_mesh(mesh)
    name = axis_of(grid, axis, -1)
    module.to(LazyTensor.device_type)
    if not isinstance(plan, Mapping):
        _apply(module, plan, grid, name)
        return module
    for path, style in plan.items():
        found = list(_matching(module, path))
        if not found:
            raise ValueError(f"the plan names {path!r}, and {type(module).__name__} has no such submodule")
        for inner in found:
            _apply(inner, style, grid, name)
    return module


def _matching(module: nn.Module, path: str) -> Iterator[nn.Module]:
    wanted = path.split(".") if path else []
    for name, inner in module.named_modules():
        parts = name.split(".") if name else []
        if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            yield inner


def _apply(module: nn.Module, style: object, mesh: AnyMesh, axis: str) -> None:
    kind = type(style).__name__
    if kind in ("ColwiseParallel", "RowwiseParallel"):
        _split_parameters(module, kind, mesh, axis)
        _mark_inputs(module, _layouts(style, "input_layouts"), mesh, axis)
        _mark_outputs(module, _layouts(style, "output_layouts"), mesh, axis)
    elif kind == "SequenceParallel":
        _mark_inputs(module, _layouts(style, "sequence_sharding"), mesh, axis)
        _mark_outputs(module, _layouts(style, "sequence_sharding"), mesh, axis)
    elif kind == "PrepareModuleInput":
        _prepare_inputs(module, style, mesh, axis)
    elif kind == "PrepareModuleOutput":
        _mark_outputs(module, _layouts(style, "desired_output_layouts"), mesh, axis)
    elif kind == "PrepareModuleInputOutput":
        _prepare_inputs(module, _part(style, "prepare_module_input"), mesh, axis)
        _mark_outputs(module, _layouts(_part(style, "prepare_module_output"), "desired_output_layouts"), mesh, axis)
    else:
        raise NotImplementedError(
            f"parallelize knows no style {kind}; mark its tensors with lazytpu.spmd.mark_sharding"
        )


def _part(style: object, name: str) -> object:
    """Return one of the styles that a style of torch's consists of."""
    return getattr(style, name)


def _layouts(style: object, name: str) -> Sequence[object]:
    """Return the placements that a style of torch's has under a name, none where that is None."""
    found: Sequence[object] | None = getattr(style, name)
    return () if found is None else found


def _split_parameters(module: nn.Module, kind: str, mesh: AnyMesh, axis: str) -> None:
    dimensions = next((d for (k, cls), d in _DIMENSIONS.items() if k == kind and isinstance(module, cls)), None)
    if dimensions is None:
        raise NotImplementedError(f"{kind} is for nn.Linear and nn.Embedding, not for {type(module).__name__}")
    for name, dimension in zip(("weight", "bias"), dimensions, strict=True):
        parameter = getattr(module, name, None)
        if parameter is None:
            continue
        found = sharding_of(parameter)
        spec: list[Entry] = [None] * parameter.dim() if found is None else list(found.spec)
        if dimension is not None:
            spec[dimension] = axis
        mark_sharding(parameter, mesh, spec)


def _prepare_inputs(module: nn.Module, style: object, mesh: AnyMesh, axis: str) -> None:
    _mark_inputs(module, _layouts(style, "desired_input_layouts"), mesh, axis)
    by_name: Mapping[str, object] = getattr(style, _BY_NAME) or {}
    if not by_name:
        return

    def mark(
        module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        return args, {k: _marked(x, by_name.get(k), mesh, axis) for k, x in kwargs.items()}

    module.register_forward_pre_hook(mark, with_kwargs=True)


def _mark_inputs(module: nn.Module, layouts: Sequence[object], mesh: AnyMesh, axis: str) -> None:
    if any(map(_dimension, layouts)):
        module.register_forward_pre_hook(lambda _, args: _each(args, layouts, mesh, axis))


def _mark_outputs(module: nn.Module, layouts: Sequence[object], mesh: AnyMesh, axis: str) -> None:
    def mark(module: nn.Module, args: object, output: object) -> object:
        if isinstance(output, tuple):
            return _each(output, layouts, mesh, axis)
        return _marked(output, layouts[0], mesh, axis)

    module.register_forward_hook(mark)


def _each(given: tuple[object, ...], layouts: Sequence[object], mesh: AnyMesh, axis: str) -> tuple[object, ...]:
    wanted = [*layouts, *[None] * (len(given) - len(layouts))]
    return tuple([_marked(x, layout, mesh, axis) for x, layout in zip(given, wanted, strict=False)])


def _dimension(layout: object) -> tuple[int] | None:
    """Return the dimension that a placement of torch's splits, in a tuple; None for one that splits none."""
    dimension = getattr(layout, "dim", None)
    return (dimension,) if isinstance(dimension, int) else None


def _marked(x: object, layout: object, mesh: AnyMesh, axis: str) -> object:
    """Return a tensor, split as a placement says along one axis; along the other axes it lies as it did.

    What is asked to be whole is gathered along its last dimension, the one that styles split.
    """
    if layout is None or not is_device_tensor(x):
        return x
    assert isinstance(x, torch.Tensor)
    split = _dimension(layout)
    spec: list[Entry] = [...] * x.dim()
    spec[-1 if split is None else split[0]] = None if split is None else axis
    return mark_sharding(x if is_result(x) else x.clone(), mesh, spec)  # a batch keeps the sharding it has
