"""What `lazytpu.config.dump` has besides for a graph of torch.compile: FX graph, executable and weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lazytpu.config import config
from lazytpu.debug.dump import add_to_manifest
from lazytpu.diagnosis.events import Compilation
from lazytpu.dtypes import short_name
from lazytpu.runtime import transfers
from lazytpu.runtime.client import Buffer

FILES = {
    "fx.txt": "the graph as AOTAutograd gave it",
    "executable.bin": "XLA's executable for this device",
    "weights.npz": "parameters and buffers of the first call",
}

_KEYS = re.compile(r"\['([^']+)'\]")
_WEIGHTS = re.compile(r"_parameters|_buffers")


def weight_names(module: torch.fx.GraphModule) -> list[str]:
    """Return for each argument of a graph of Dynamo's the name of its parameter or buffer, else an empty string."""
    names = []
    for node in module.graph.find_nodes(op="placeholder"):
        source = getattr(getattr(node.meta.get("grapharg"), "source", None), "name", "")
        text = source() if callable(source) else str(source)  # a property from torch 2.10 on
        found = _KEYS.findall(text)
        found = found[1:] if text.startswith("L[") and len(found) > 1 else found  # the first is a local variable
        names.append(".".join(found) or str(node.target) if _WEIGHTS.search(text or str(node.target)) else "")
    return names


def positions_of(module: torch.fx.GraphModule, names: Sequence[str]) -> dict[str, int]:
    """Return the weights' positions among the arguments of a graph that AOTAutograd made of the one above."""
    positions = {}
    for position, node in enumerate(module.graph.find_nodes(op="placeholder")):
        index = getattr(node.meta.get("desc"), "idx", position)
        if index < len(names) and names[index]:
            positions[names[index]] = position
    return positions


def dump(
    event: Compilation, module: torch.fx.GraphModule, weights: Mapping[str, int], buffers: Sequence[Buffer]
) -> None:
    """Write `FILES` beside the files of a compiled graph, and add them to its manifest.

    Args:
        weights: names to positions among ``buffers``, which are those of the arguments of the first call.
    """
    folder = Path(config.dump) / f"graph-{event.number:03d}-{event.graph.key[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[Path], object]] = {
        "fx.txt": lambda path: path.write_text(module.print_readable(print_output=False) + "\n"),
        "executable.bin": lambda path: path.write_bytes(event.executable.compiled.runtime_executable().serialize()),
    }
    if weights:
        arrays: dict[str, Any] = {name: _array(buffers[at]) for name, at in weights.items()}
        makers["weights.npz"] = lambda path: np.savez(path, **arrays)
    missing = {}
    for name, make in makers.items():
        try:
            make(folder / name)
        except Exception as error:  # a platform that serializes nothing, say; the run goes on
            missing[name] = f"{type(error).__name__}: {error}"
    add_to_manifest(folder, {name: FILES[name] for name in makers if name not in missing}, missing)


def _array(buffer: Buffer) -> np.ndarray[Any, Any]:
    """Return the contents as numpy knows them; bfloat16 and the 8-bit floats, which it does not, as float32."""
    host = transfers.to_host(buffer)
    if short_name(host.dtype).startswith(("bf16", "f8")):
        host = host.float()
    return host.numpy().copy()
