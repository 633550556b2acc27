"""Decide whether the program of a graph is the same in every process of this installation.

The disk cache finds a program by the text of its graph.  That is enough as long as every rule and decomposition
is this package's or torch's own, and every attribute is plain data: a function, or an object that prints as an
address, may be another thing in the next process.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import torch

from lazytpu.ir.graph import Graph
from lazytpu.ir.subgraph import Subgraph, has_body
from lazytpu.ir.tree import Node, Number, Value
from lazytpu.lowering.decompose import decomposition_of
from lazytpu.lowering.registry import lowered_ops, rule_of

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)
_RULES = ("lazytpu.lowering.", "lazytpu.frontends.jax.")
_NAMESPACES = ("aten", "higher_order")

# What turns a graph into a program, besides the rules: relative to the package.
_SOURCES = ("lowering", "passes", "ir", "runtime", "dtypes.py")


def is_portable(graph: Graph) -> bool:
    """Return whether equal texts of the graph mean equal programs, in any process with the same `sources_digest`."""
    own_rules_only = all(_is_own_rule(op) for op in lowered_ops())
    return all(_is_portable(node, own_rules_only) for node in graph.nodes)


def _is_portable(node: Node, own_rules_only: bool) -> bool:
    op = node.op.recorded
    if op.namespace not in _NAMESPACES and (has_body(node) or not _is_of_lowering(op)):
        return False
    if rule_of(op) is not None:
        known = own_rules_only or _is_own_rule(op)
    else:  # a decomposition ends in any rules
        known = own_rules_only and _is_decomposed_by_torch(op)
    return known and _is_plain(node.args) and _is_plain(list(node.kwargs.values()))


def _is_of_lowering(op: Any) -> bool:
    """Return whether an op is this package's own and its rule among those of `sources_digest`."""
    return op.namespace == "lazytpu" and getattr(rule_of(op), "__module__", "").startswith("lazytpu.lowering.")


def _is_own_rule(op: Any) -> bool:
    return getattr(rule_of(op), "__module__", "").startswith(_RULES)


def _is_decomposed_by_torch(op: Any) -> bool:
    found = decomposition_of(op)
    return found is not None and (getattr(found, "__module__", None) or "").startswith("torch.")


def _is_plain(x: Any) -> bool:
    if type(x) is Value or type(x) is Number or type(x) in _PLAIN:
        return True
    if isinstance(x, (list, tuple)):
        return all(_is_plain(e) for e in x)
    return type(x) is Subgraph and is_portable(x.graph)


@cache
def sources_digest() -> str:
    """Return a hash of the sources that turn graphs into programs; empty where there are none to read."""
    digest = hashlib.sha256()
    package = resources.files("lazytpu")
    found = 0
    for name in _SOURCES:
        for path, text in _python_files(package / name, name):
            digest.update(f"{path} {len(text)} ".encode() + text)
            found += 1
    return digest.hexdigest() if found > len(_SOURCES) else ""


def _python_files(place: Traversable, name: str) -> list[tuple[str, bytes]]:
    if place.is_dir():
        entries = sorted(place.iterdir(), key=lambda e: e.name)
        return [found for entry in entries for found in _python_files(entry, f"{name}/{entry.name}")]
    return [(name, place.read_bytes())] if name.endswith(".py") and place.is_file() else []
