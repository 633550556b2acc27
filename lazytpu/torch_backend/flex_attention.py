"""``flex_attention`` on the device: torch's form of it in plain ops, of which autograd and XLA see each."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from torch import Tensor
from torch._C import DispatchKey

from lazytpu.tensors.tensor import LazyTensor
from lazytpu.torch_backend.after_import import after_import


def register() -> None:
    """Wait for torch's ``flex_attention``."""
    after_import("torch.nn.attention.flex_attention", _take_over)


def _take_over(module: ModuleType) -> None:
    from torch._higher_order_ops.flex_attention import flex_attention, sdpa_dense

    flex_attention.py_impl(DispatchKey.AutogradPrivateUse1)(sdpa_dense)
    theirs: Callable[[Tensor, Tensor, Tensor], None] = vars(module)["_validate_device"]

    def check(query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.device.type != LazyTensor.device_type:
            theirs(query, key, value)

    vars(module)["_validate_device"] = check
