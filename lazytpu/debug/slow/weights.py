"""What an op costs on the device, estimated from its FLOPs and bytes: good for shares of a step, not for seconds.

An op that XLA fuses with what makes its operands writes its result and reads nothing.  Ops that take much longer than
their bytes say have a factor of their own: how many bytes an element of theirs stands for.
"""

from __future__ import annotations

import torch

from lazytpu.debug.cost import flops_of
from lazytpu.ir.tree import Node, Value, operands
from lazytpu.runtime import client

# FLOPs in the time that a byte takes to memory and back.
_FLOPS_A_BYTE = {"cpu": 4.0, "gpu": 20.0, "tpu": 200.0}
_BYTES_AN_ELEMENT = {
    "sort": 400.0, "argsort": 400.0, "topk": 400.0, "msort": 400.0, "unique": 400.0, "cumsum": 40.0, "cumprod": 40.0,
    "scatter": 40.0, "scatter_add": 40.0, "index_put": 40.0, "index_add": 40.0, "embedding_dense_backward": 40.0,
    "gather": 20.0, "index": 20.0, "index_select": 20.0, "bernoulli": 30.0, "normal": 60.0, "randn": 60.0, "rand": 30.0,
    "native_dropout": 30.0, "exp": 20.0, "log": 20.0, "tanh": 20.0, "sigmoid": 20.0, "gelu": 30.0, "erf": 20.0,
    "sin": 20.0, "cos": 20.0, "pow": 20.0, "_softmax": 30.0, "_log_softmax": 30.0,
}  # fmt: skip
_SLOW_ON_CPUS = {torch.float64: 4.0, torch.complex128: 4.0, torch.float16: 2.0}
"""How much longer a product of the dtype takes than one of float32, as measured on a CPU."""


def device_cost(node: Node) -> float:
    """Return what an op costs, as the bytes that take as long."""
    if getattr(node.op.recorded, "is_view", False):
        return 0.0
    values = [v for v in node.values if v is not None]
    cost = float(sum(v.layout.nbytes for v in values))
    if torch.Tag.pointwise not in getattr(node.op.recorded, "tags", ()):
        cost += sum(x.layout.nbytes for x in operands(node) if type(x) is Value)
    name = str(node.op.name).partition(".")[2].partition(".")[0]
    factor = _BYTES_AN_ELEMENT.get(name, 0.0)
    if factor:
        elements = [v.layout for v in (*values, *operands(node)) if type(v) is Value]
        cost += factor * max((layout.nbytes / layout.dtype.itemsize for layout in elements), default=0.0)
    products = flops_of(node) / _FLOPS_A_BYTE.get(client.platform(), 4.0)
    return cost + products * slowness(values[0].layout.dtype if values else torch.float32)


def slowness(dtype: torch.dtype) -> float:
    """Return how much longer the device takes for a product of a dtype than for one of float32."""
    if client.platform() == "cpu":
        return _SLOW_ON_CPUS.get(dtype, 1.0)
    return 16.0 if dtype in (torch.float64, torch.complex128) else 1.0


def host_cost(node: Node) -> float:
    """Return what recording an op costs, as the number of small ops that take as long."""
    tensors = len(node.values) + sum(type(x) is Value for x in operands(node))
    return 1.0 + 0.25 * max(0, tensors - 3)
