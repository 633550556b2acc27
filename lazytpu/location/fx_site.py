"""The user's line and module of a node of an FX graph, from the stack that torch wrote down for it."""

from __future__ import annotations

import os
import re

import torch

from lazytpu.ir.site import UNKNOWN, Site

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_ROOT = re.compile(r"L\['\w+'\]")
_PATH = re.compile(r"L\['\w+'\]|\._modules|getattr\(|\)|[\[\]'\" ]")
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def site_of(node: torch.fx.Node) -> Site:
    """Return where the op of a node stands in the user's program."""
    frames = [m for m in _FRAME.finditer(node.meta.get("stack_trace") or "") if not m["file"].startswith(_TORCH)]
    module = _module_path(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {})
    if not frames and not module:
        return UNKNOWN
    backward = "fwd_nn_module_stack" in node.meta or node.meta.get("partitioner_tag") == "is_backward"
    file, line = (frames[-1]["file"], int(frames[-1]["line"])) if frames else ("", 0)
    return Site(file, line, module, backward)


def _module_path(stack: dict[str, tuple[object, object]]) -> str:
    """``Net.head.0`` from the modules that were being called, the outermost first."""
    entries = list(stack.values())
    if not entries:
        return ""
    (outer, kind), inner = entries[0], entries[-1][0]
    whole = _ROOT.fullmatch(str(outer))
    name = (kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]) if whole else ""
    path = re.sub(r"\.+", ".", _PATH.sub(".", str(inner))).strip(".")
    return ".".join(filter(None, (name, path)))
