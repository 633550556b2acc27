"""Register the kernels of sparse tensors under torch's keys for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lazytpu.dispatch.sparse import compressed, conversions, coo, gradients, pointwise, products
from lazytpu.dispatch.sparse.parts import for_compressed, for_coo
from lazytpu.errors import UnsupportedOpError
from lazytpu.ir.op_schema import OpOverload
from lazytpu.location import site
from lazytpu.tensors.tensor import LazyTensor

KEYS: dict[str, dict[str, Callable[..., object]]] = {
    "SparsePrivateUse1": for_coo,
    "SparseCsrPrivateUse1": for_compressed,
}
MODULES = (compressed, conversions, coo, gradients, pointwise, products)  # whose kernels are in those tables

_libraries: list[torch.library.Library] = []


def register() -> None:
    """Register every kernel, and what raises where there is none."""
    coo.register_tables()
    pointwise.register_functions()
    compressed.register_tables()
    for key, kernels in KEYS.items():
        library = torch.library.Library("aten", "IMPL")
        for name, kernel in kernels.items():
            library.impl(name, kernel, key)
        rest = torch.library.Library("_", "IMPL")
        rest.fallback(_unsupported, key)
        _libraries.extend((library, rest))


def _unsupported(overload: OpOverload, *args: object, **kwargs: object) -> None:
    flat = [x for a in (*args, *kwargs.values()) for x in (a if isinstance(a, (list, tuple)) else (a,))]
    given = [f"{x.layout} {list(x.shape)}" for x in flat if isinstance(x, Tensor) and x.layout is not torch.strided]
    raise UnsupportedOpError(
        f"{overload._schema.name} does not take sparse tensors on {LazyTensor.device_type!r}",
        at=site.here().describe(),
        given=", ".join(given),
        fix="convert them with to_dense()",
    )
