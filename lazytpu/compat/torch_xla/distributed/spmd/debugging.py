"""``torch_xla.distributed.spmd.debugging``: draw which device has which part, with ``rich``."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

import lazytpu
from lazytpu.compat import names
from lazytpu.compat.torch_xla.distributed.spmd.op_sharding import op_sharding_of
from lazytpu.compat.torch_xla.distributed.spmd.xla_sharded_tensor import sharding_spec_of
from lazytpu.ir.op_schema import Arg
from lazytpu.runtime import meshes
from lazytpu.tracing.sharding import sharding_of

if TYPE_CHECKING:
    from rich.table import Table

__getattr__ = names.missing_from(__name__)

_TEXT = re.compile(r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))( last_tile_dim_replicate)?\}")
_COLORS = ("blue", "green", "red", "magenta", "cyan", "yellow", "white", "bright_black")


def visualize_tensor_sharding(t: torch.Tensor, **kwargs: Arg) -> Table:
    """Print and return a table of which devices have which part of a tensor; see `visualize_sharding`."""
    return visualize_sharding(sharding_spec_of(t) or "{replicated}", **kwargs)


def visualize_sharding(
    sharding: str, use_color: bool = True, scale: float = 1.0, min_width: int = 9, max_width: int = 80
) -> Table:
    """Print and return a table of which devices have which part of a tensor of one or two dimensions.

    Args:
        sharding: as XLA writes it, such as ``{devices=[2,4]0,1,2,3,4,5,6,7}``.
        use_color: a color for each part, where the terminal has colors.
        scale, min_width, max_width: not looked at: parts are as wide as their text.

    Raises:
        ValueError: it is no sharding, or of more dimensions.
        ImportError: there is no ``rich``.
    """
    try:
        from rich import align, box, console, padding, style, table
    except ImportError:
        raise ImportError(
            "visualize_sharding draws with rich: pip install rich, or use lazytpu.spmd.visualize"
        ) from None

    colored = use_color and bool(console.Console().color_system)
    found = table.Table(
        show_header=False,
        show_lines=not colored,
        padding=0,
        highlight=not colored,
        pad_edge=False,
        box=None if colored else box.SQUARE,
    )
    for i, row in enumerate(_rows(sharding)):
        cells = []
        for j, text in enumerate(row):
            shade = _COLORS[(i * len(row) + j) % len(_COLORS)] if colored else None
            centered = align.Align(text, "center", vertical="middle")
            cells.append(padding.Padding(centered, (1, 1, 1, 1), style=style.Style(bgcolor=shade)))
        found.add_row(*cells)
    console.Console().print(found)
    return found


def construct_v1_sharding_str(t: torch.Tensor) -> str:
    """Return how a tensor lies, with its devices listed one by one; empty without a sharding."""
    found = sharding_of(t)
    return "" if found is None else str(op_sharding_of(found.mesh, found.spec))


def _rows(sharding: str) -> list[list[str]]:
    """Return the text of each part, such as ``TPU 3`` or ``TPU [2, 3]`` for two devices with the same."""
    platform = lazytpu.platform().upper()
    if sharding == "{replicated}":
        return [[f"{platform} {list(meshes.devices())}"]]
    tiles, shared = _tiles(sharding)
    dims = tiles.ndim - shared
    if dims not in (1, 2):
        raise ValueError(f"tables have one or two dimensions, not {dims}: {sharding}")
    grid = tiles.reshape(*([1] * (2 - dims)), *tiles.shape[:dims], -1)
    return [[f"{platform} {cell.tolist() if shared else int(cell[0])}" for cell in row] for row in grid]


def _tiles(sharding: str) -> tuple[NDArray[np.int64], bool]:
    """Return the devices in the grid that a text describes, and whether those along the last axis have the same."""
    match = _TEXT.fullmatch(sharding)
    if match is None:
        raise ValueError(f"{sharding!r} is no sharding as XLA writes it")
    shape = _numbers(match[1])
    if match[2]:
        counted = np.arange(prod(shape)).reshape(_numbers(match[2]))
        ids = counted.transpose(_numbers(match[3])) if match[3] else counted
    else:
        ids = np.array(_numbers(match[4]))
    return ids.reshape(shape), bool(match[5])


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
