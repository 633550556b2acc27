"""Register the device and every kernel with torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import backend_registration

from lazytpu.config import config
from lazytpu.dispatch import (
    autocast,
    collectives,
    composites,
    cpu_fallback,
    custom_ops,
    extensions,
    foreach_kernels,
    generated,
    geometry,
    half_fft,
    indices,
    products,
    recurrent,
)
from lazytpu.dispatch.general import functional, in_place, view
from lazytpu.dispatch.handwritten import special
from lazytpu.dispatch.outputs import with_out
from lazytpu.dispatch.sparse import registration as sparse
from lazytpu.errors import VersionError
from lazytpu.ir.op_schema import OpOverload, aten, functional_variant, op_of, overload_named
from lazytpu.lowering.decompose import can_lower
from lazytpu.lowering.registry import rule_of
from lazytpu.runtime.host.garbage import paused
from lazytpu.tensors.tensor import LazyTensor
from lazytpu.torch_backend import (
    accelerator,
    data_parallel,
    fork,
    generator,
    libraries,
    loops,
    module_moves,
    saving,
    shields,
    streams,
    tensor_types,
    torch_module,
)
from lazytpu.tracing import meta_kernels, scalar_checks

KEY = "PrivateUse1"
_libraries: list[torch.library.Library] = []

# C++ must keep its own kernels for these: saved tensors and FakeTensor use them.
_LEAVE_TO_TORCH = {"detach", "alias", "detach_", "record_stream", "rename", "rename_"}

# Nor do these need a kernel: torch composes them of others, or they look at no values.
_LEAVE_TO_TORCH |= {"_stack", "_print", "sym_constrain_range", "sym_constrain_range_for_size"}
_LEAVE_TO_TORCH |= {"_assert_tensor_metadata", "_assert_scalar", "_functional_assert_scalar"}


# Views that change the dtype or torch's lazy bits, which `as_strided` cannot.
_NOT_STRIDED = {"_conj", "_neg_view", "view.dtype", "view_as_real", "view_as_complex"}


@paused()  # a quarter of the import's time otherwise: it would go through all that torch and jax have made
def register() -> None:
    """Make torch know the device and every kernel; called once, by ``import lazytpu``.

    Raises:
        VersionError: another backend has taken torch's slot for devices, PrivateUse1.
    """
    name = config.device_name
    _claim(name)
    LazyTensor.device_type = name
    backend_registration.rename_privateuse1_backend(name)
    if not hasattr(torch.Tensor, f"is_{name}"):  # torch has its own for its own names, such as "xla"
        backend_registration.generate_methods_for_privateuse1_backend()
    else:  # which is about another slot of torch's
        setattr(LazyTensor, f"is_{name}", True)
    torch._register_device_module(name, torch_module)
    # Loggers and the like tell tensors by the name of their class, to need no torch: torch.….…Tensor
    LazyTensor.__module__ = f"torch.{name}"
    vars(torch_module)["LazyTensor"] = LazyTensor
    sys.modules[f"torch.{name}.amp"] = torch_module.amp  # for `from torch.tpu.amp import autocast`
    tensor_types.register(torch_module)
    accelerator.register()
    data_parallel.register()
    meta_kernels.register()
    _register_kernels()
    sparse.register()
    recurrent.register()
    custom_ops.register()
    extensions.register()
    collectives.register()
    autocast.register()
    saving.register()
    module_moves.register()
    streams.register()
    fork.register()
    generator.register()
    libraries.register()
    loops.register()
    shields.open_until_dynamo_comes()
    _foreach_supported_types.append(LazyTensor)
    proxy_tensor.HANDLED_TYPES += (LazyTensor,)  # type: ignore[assignment] # make_fx, with which torch.func.linearize traces


def _claim(name: str) -> None:
    """Raise `VersionError` when torch's slot for devices is not free."""
    current = torch._C._get_privateuse1_backend_name()
    if current != "privateuseone" or hasattr(torch, name):
        taken = name if hasattr(torch, name) else current
        raise VersionError(
            f"torch's slot for devices, PrivateUse1, is taken by another backend, {taken!r}",
            fix=f"import lazytpu in a process that does not import the package that provides {taken!r}",
        )


def _register_kernels() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that some of its kernels are overridden
        for full in torch._C._dispatch_get_all_op_names():
            overload = _device_overload(full)
            if overload is not None:
                kernel = indices.taking_any(overload, scalar_checks.checked(overload, kernel_for(overload)))
                if any(a.name == "device" for a in overload._schema.arguments):
                    kernel = _on_a_device_there_is(kernel)
                library.impl(full.removeprefix("aten::"), kernel, KEY)
        for key in (KEY, f"Autograd{KEY}"):
            library.impl("scaled_dot_product_attention", composites.scaled_dot_product_attention, key)
            library.impl("tensor_split.tensor_indices_or_sections", composites.tensor_split, key)
            for name, transform in half_fft.kernels():
                library.impl(name, transform, key)
        library.impl("linear", kernel_for(aten.linear.default), KEY)
        library.impl("linear", products.linear, f"Autograd{KEY}")
        through, below = products.matmul(*map(kernel_for, (aten.matmul.default, aten.mm.default)))
        library.impl("matmul", through, f"Autograd{KEY}")
        library.impl("matmul", below, KEY)
        library.impl("matmul_backward", products.matmul_backward, f"Autograd{KEY}")


def _on_a_device_there_is(kernel: Any) -> Any:
    """Return the kernel of an op that is told the device, which refuses ``tpu:1``."""

    def checked(*args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
        if device is None:
            return kernel(*args, **kwargs)
        if device.index and device.type == config.device_name:
            torch_module.check_index(device)
        return kernel(*args, device=device, **kwargs)

    return checked


def _device_overload(full: str) -> OpOverload | None:
    """Return the overload of a name, if it needs a kernel of ours."""
    if not full.startswith("aten::"):
        return None
    if full[6:].partition(".")[0] in _LEAVE_TO_TORCH:
        return None
    overload = overload_named(full[6:])
    if torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd"):
        # The CPU has kernels for a few all the same (`silu_backward`), which round once and not after each step.
        fused = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU")
        return overload if fused and overload is not None and rule_of(overload) is not None else None
    return None if overload is not None and _answers_in_cpp(full, overload) else overload


def _answers_in_cpp(full: str, overload: OpOverload) -> bool:
    """Return whether torch has a kernel for every device that gives no tensor (`allclose`, `is_same_size`)."""
    if full.removeprefix("aten::") in special or any("Tensor" in str(r.type) for r in overload._schema.returns):
        return False
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeExplicitAutograd")
    return bool(overload._schema.returns) and bool(composite)


def kernel_for(overload: OpOverload) -> Any:
    """Return the kernel of one overload."""
    name = overload.name().removeprefix("aten::")
    if name in special:
        return special[name]
    if name in cpu_fallback.DATA_DEPENDENT:
        return cpu_fallback.data_dependent(overload)
    if any(a.is_out for a in overload._schema.arguments):
        return _made_when_called(lambda: _with_out(overload))
    op = op_of(overload)
    if torch.Tag.inplace_view in overload.tags:
        return geometry.in_place_view(overload)
    if overload is aten._unsafe_view.default:  # shares memory, too; only autograd does not know
        return kernel_for(aten.view.default)
    if overload.is_view:
        general = view(overload)
        return (
            generated.view(op, general)
            if generated.can_generate(op) and op.returns == 1 and name not in _NOT_STRIDED
            else general
        )
    if overload._schema.is_mutable:
        variant = functional_variant(overload)
        if variant is None or not can_lower(variant):
            return cpu_fallback.fallback(overload)
        general = scalar_checks.checked_when_new(overload, in_place(overload, variant))
        op = op_of(overload, variant)
        if not _writes_first_only(overload):
            return general
        if not overload._schema.returns:
            return foreach_kernels.in_place(op, general) if foreach_kernels.can_take(op) else general
        return (
            generated.in_place(op, general)
            if generated.can_generate(op) and len(overload._schema.returns) == 1
            else general
        )
    if not can_lower(overload):
        return cpu_fallback.fallback(overload)
    general = scalar_checks.checked_when_new(overload, functional(overload))
    if foreach_kernels.can_take(op) and op.returns is None:
        return foreach_kernels.functional(op, general)
    fast = generated.can_generate(op, new=True) and _returns_tensors(overload)
    made = generated.functional(op, general) if fast else general
    if overload is aten.convolution.default:
        return composites.convolution(made)
    return made


def _returns_tensors(overload: OpOverload) -> bool:
    returns = [str(r.type) for r in overload._schema.returns]
    return bool(returns) and set(returns) == {"Tensor"}


def _with_out(overload: OpOverload) -> object:
    variant = functional_variant(overload)
    return with_out(overload, variant) if variant is not None else cpu_fallback.fallback(overload)


def _made_when_called(make: Callable[[], object]) -> object:
    """Return a kernel that is made at its first call, as there are many that nobody calls."""
    made: list[Any] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(make())
        return made[0](*args, **kwargs)

    return kernel


def _writes_first_only(overload: OpOverload) -> bool:
    written = [a.alias_info is not None and a.alias_info.is_write for a in overload._schema.arguments]
    return written[0] and sum(written) == 1
