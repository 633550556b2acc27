"""Draw in the terminal which device has which part of a tensor."""

from __future__ import annotations

from itertools import product

import torch

from lazytpu.spmd.marking import sharding_of


def visualize(tensor: torch.Tensor) -> str:
    """Print and return a drawing of which devices have which part of a tensor.

    The first two dimensions are drawn, rows down and columns across; parts along others are listed in the boxes.

    Example:
        >>> lazytpu.spmd.visualize(w)  # doctest: +SKIP
        f32[16,8] {data, model} on mesh (data=2, model=2)
        ┌──────┬──────┐
        │  0   │  1   │
        ├──────┼──────┤
        │  2   │  3   │
        └──────┴──────┘
    """
    text = drawing(tensor)
    print(text)
    return text


def drawing(tensor: torch.Tensor) -> str:
    """Return the drawing that `visualize` prints."""
    found = sharding_of(tensor)
    if found is None:
        return f"{tuple(tensor.shape)} has no sharding: it is whole on one device or on each, or a view"
    axes = dict(zip(found.mesh.axis_names, found.mesh.shape, strict=True))
    padded = (*found.spec, None, None)[: max(2, len(found.spec))]
    names = [(e,) if isinstance(e, str) else e if isinstance(e, tuple) else () for e in padded]
    boxes: dict[tuple[int, ...], list[int]] = {}
    for device, place in zip(found.mesh.devices, product(*[range(n) for n in axes.values()]), strict=True):
        at = dict(zip(axes, place, strict=True))
        part = []
        for entry in names:
            index = 0
            for name in entry:
                index = index * axes[name] + at[name]
            part.append(index)
        boxes.setdefault(tuple(part), []).append(device)
    rows, columns = (max(part[d] for part in boxes) + 1 for d in (0, 1))
    cells = [[", ".join(_inside(boxes, (i, j))) for j in range(columns)] for i in range(rows)]
    width = max(6, *[len(cell) + 2 for row in cells for cell in row])
    rule = [f"{a}{b.join(['─' * width] * columns)}{c}" for a, b, c in ("┌┬┐", "├┼┤", "└┴┘")]
    lines = [f"{tuple(tensor.shape)} {_spec(names, len(found.spec))} on mesh {found.mesh.describe()}", rule[0]]
    for i, row in enumerate(cells):
        lines += ["│" + "│".join(cell.center(width) for cell in row) + "│", rule[2] if i == rows - 1 else rule[1]]
    return "\n".join(lines)


def _inside(boxes: dict[tuple[int, ...], list[int]], at: tuple[int, int]) -> list[str]:
    found = sorted((part, devices) for part, devices in boxes.items() if part[:2] == at)
    if len(found) == 1:
        return [str(device) for device in found[0][1]]
    return [f"{list(part[2:])}: {' '.join(map(str, devices))}" for part, devices in found]


def _spec(names: list[tuple[str, ...]], ndim: int) -> str:
    return f"{{{', '.join('+'.join(entry) or '-' for entry in names[:ndim])}}}"
