"""The directives ``ops-table`` and ``known-table``: what becomes of each aten op, read from the registered kernels
and rules, and what is known not to pass, read from ``tests/support/op_status.py``."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import lazytpu  # noqa: F401  registers the kernels
from lazytpu.dispatch.cpu_fallback import DATA_DEPENDENT
from lazytpu.dispatch.handwritten import special
from lazytpu.ir.op_schema import OpOverload, functional_variant
from lazytpu.lowering.decompose import can_lower
from lazytpu.lowering.registry import rule_of

HEADINGS = {
    "rule": "Lowered by a rule",
    "decomposed": "Decomposed by torch into ops that have a rule",
    "kernel": "Written in other ops, or nothing to compute",
    "view": "Views: nothing is computed until they are read",
    "cut": "Cuts: the shape of the result depends on values, so the graph runs first",
}
# Why an op has no lowering: the first pattern that its name matches.
REASONS = {
    r"^_test_|^_foobar": "for torch's own tests",
    r"sparse|csr|csc|coo|coalesce|_spsolve|_spdiags|hspmm|_nnz|indices_copy|values_copy|_dim[IV]|cslt": (
        "an op of sparse tensors that the device does not have; docs/how-to/sparse-tensors.md has those it has"
    ),
    r"nested|jagged|padded": "nested tensors: the device has dense ones",
    r"quantize|^q_|qscheme|int_repr|affine_quant|_tensor_affine|quantized|_fused_moving_avg": (
        "tensors of a quantized dtype; torch.ops.quantized_decomposed, on plain ones, is lowered"
    ),
    r"cudnn|miopen|mps|mkldnn|nnpack|triton|int4pack|int8pack|_4bit|_fill_mem_eff|_mixed_dtypes": (
        "a form for one kind of hardware that torch does not choose for this device"
    ),
    r"flash_att|efficient_att|_fused_sdp": (
        "a form of attention for other devices; scaled_dot_product_attention is lowered"
    ),
    r"batch_norm_(elemt|stats|gather|backward_|update)|slow_conv|conv_depthwise|_conv3d": (
        "a step of an op for other devices; the op itself is lowered"
    ),
    r"": "rare: no rule has been written",
}


def status_of(overload: OpOverload) -> str:
    """Which of `HEADINGS` an overload belongs to, or ``fallback``."""
    name = overload._schema.name.removeprefix("aten::")
    full = name + (f".{overload._schema.overload_name}" if overload._schema.overload_name else "")
    if full in DATA_DEPENDENT:
        return "cut"
    if full in special:
        return "kernel"
    if overload.is_view or torch.Tag.inplace_view in overload.tags:
        return "view"
    if overload._schema.is_mutable:
        twin = functional_variant(overload)
        return "fallback" if twin is None else status_of(twin)
    if rule_of(overload) is not None:
        return "rule"
    return "decomposed" if can_lower(overload) else "fallback"


def statuses() -> dict[str, str]:
    """Each aten op that has a kernel of its own here, and its status: the best of its overloads'."""
    order = [*HEADINGS, "fallback"]
    found: dict[str, str] = {}
    for full in torch._C._dispatch_get_all_op_names():
        overload = sys.modules["lazytpu.dispatch.registration"]._device_overload(full)
        if overload is not None:
            name = overload._schema.name.removeprefix("aten::")
            found[name] = min(found.get(name, "fallback"), status_of(overload), key=order.index)
    return {name: status for name, status in found.items() if not (name.endswith("_") and name[:-1] in found)}


def reason_for(name: str) -> str:
    """Why an op runs on the CPU."""
    return next(reason for pattern, reason in REASONS.items() if re.search(pattern, name))


class OpsTable(SphinxDirective):
    """A definition list: each status, and each reason for a fallback, with its ops."""

    def run(self) -> list[nodes.Node]:
        found = statuses()
        groups = {heading: [n for n in found if found[n] == status] for status, heading in HEADINGS.items()}
        for reason in REASONS.values():
            names = [n for n in found if found[n] == "fallback" and reason_for(n) == reason]
            groups[f"Runs on the CPU, a fallback: {reason}"] = names
        made = nodes.definition_list()
        for heading, names in groups.items():
            text = nodes.paragraph()
            for i, name in enumerate(sorted(names, key=lambda n: n.strip("_"))):
                text += [nodes.Text(" " if i else ""), nodes.literal("", name)]
            term = nodes.term("", f"{heading} ({len(names)})")
            made += nodes.definition_list_item("", term, nodes.definition("", text))
        return [made]


class KnownTable(SphinxDirective):
    """A definition list of ``tests/support/op_status.py``."""

    def run(self) -> list[nodes.Node]:
        table = _op_status()
        self.env.note_dependency(table.__file__)
        made = nodes.definition_list()
        for entry in (*table.KNOWN, *table.ELSEWHERE):
            term = nodes.term(
                "", "", *[n for op in entry.ops.split() for n in (nodes.literal("", op), nodes.Text(" "))]
            )
            rare = ", for some inputs" if entry.rare else ""
            about = f"{entry.checks}, {entry.dtypes.replace(' ', ', ')} dtype{rare}: {entry.reason}."
            made += nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", about)))
        for pattern, reason in table.BY_VALUE.items():
            term = nodes.term("", "", nodes.Text("errors about values: "), nodes.literal("", pattern))
            made += nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", f"{reason}.")))
        return [made]


def _op_status() -> Any:
    path = Path(__file__).parents[2] / "tests" / "support" / "op_status.py"
    spec = importlib.util.spec_from_file_location("op_status", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules["op_status"] = module  # its dataclass looks it up there
    spec.loader.exec_module(module)
    return module


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("ops-table", OpsTable)
    app.add_directive("known-table", KnownTable)
    return {"parallel_read_safe": True}
