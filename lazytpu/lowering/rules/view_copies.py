"""``aten.select_copy`` and its kind: view ops that give a new tensor, which is the same where values have no memory."""

import torch

from lazytpu.lowering.registry import lowers, rule_of

aten = torch.ops.aten


def _arguments(op):
    return [(a.name, str(a.type)) for a in op._schema.arguments]


def _pairs():
    """Return overloads of ``aten.*_copy`` without a rule, each with the rule of the view op of the same arguments."""
    for full in torch._C._dispatch_get_all_op_names():
        packet, _, name = full.removeprefix("aten::").partition(".")
        if not full.startswith("aten::") or not packet.endswith("_copy"):
            continue
        copy = getattr(getattr(aten, packet), name or "default")
        view = getattr(getattr(aten, packet.removesuffix("_copy"), None), name or "default", None)
        if view is None or rule_of(copy) is not None or rule_of(view) is None:
            continue
        if _arguments(copy) == _arguments(view):
            yield copy, rule_of(view)


for _copy, _rule in list(_pairs()):
    lowers(_copy)(_rule)
