"""Which torch and jax this package runs on.  Checked before anything of theirs that is private is touched."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator

import jax
import torch

from lazytpu.errors import VersionError

SUPPORTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch": ((2, 10), (2, 16)),
    "jax": ((0, 9), (0, 13)),
}
"""Package to (first supported version, first one that is not)."""

PRIVATE_TORCH = (
    "Tensor._make_subclass",
    "_C.DisableTorchFunction",
    "_C.DisableTorchFunctionSubclass",
    "_C.Generator",
    "_TorchCompileInductorWrapper.__call__",
    "_C.DispatchKey",
    "_C.DispatchKeySet",
    "_C._EnableTorchFunction",
    "_C._ExcludeDispatchKeyGuard",
    "_C._ImperativeEngine",
    "_C._acc.DeviceGuard",
    "_C._acc.PrivateUse1Hooks",
    "_C._acc.create_empty_tensor",
    "_C._acc.register_python_privateuseone_device_guard",
    "_C._acc.register_python_privateuseone_hook",
    "_C._accelerator_synchronizeDevice",
    "_C._are_functorch_transforms_active",
    "_C._autograd.DeviceType.PrivateUse1",
    "_C._autograd._get_current_graph_task_keep_graph",
    "_C._autograd._profiler_enabled",
    "_C._current_autograd_node",
    "_C._current_graph_task_id",
    "_C._DisableAutocast",
    "_C._disabled_torch_dispatch_impl",
    "_C._disabled_torch_function_impl",
    "_C._dispatch_get_all_op_names",
    "_C._dispatch_has_kernel",
    "_C._dispatch_has_kernel_for_dispatch_key",
    "_C._dynamo.guards._reinterpret_tensor",
    "_C._functorch.is_functorch_wrapped_tensor",
    "_C._get_privateuse1_backend_name",
    "_C._is_tracing",
    "_C._len_torch_dispatch_stack",
    "_C._set_only_lift_cpu_tensors",
    "_C._swap_tensor_impl",
    "_C._to_dlpack",
    "_check",
    "_compile._disable_dynamo",
    "_decomp.decomposition_table",
    "_decomp.global_decomposition_table",
    "_dispatch.python.enable_python_dispatcher",
    "_foreach_add_",
    "_guards.TracingContext",
    "_higher_order_ops.associative_scan.associative_scan_op",
    "_higher_order_ops.cond.cond_op",
    "_higher_order_ops.effects.with_effects",
    "_higher_order_ops.map.map_impl",
    "_higher_order_ops.scan.scan_op",
    "_higher_order_ops.while_loop.while_loop_dense",
    "_higher_order_ops.while_loop.while_loop_op",
    "_higher_order_ops.while_loop.while_loop_stack_output_op",
    "_is_functional_tensor",
    "_neg_view",
    "_ops.HigherOrderOperator",
    "_ops.OpOverload",
    "_pack_padded_sequence",
    "_register_device_module",
    "_subclasses.fake_tensor.FakeTensor",
    "_subclasses.fake_tensor.FakeTensorMode",
    "_subclasses.functional_tensor.FunctionalTensor",
    "_subclasses.functional_tensor.FunctionalTensorMode",
    "_subclasses.functional_tensor.dispatch_functionalize",
    "_tensor._rebuild_from_type_v2",
    "_tensor_str._add_suffixes",
    "_tensor_str._tensor_str",
    "_utils._rebuild_parameter",
    "_utils._rebuild_parameter_with_state",
    "_utils._rebuild_sparse_tensor",
    "_utils._rebuild_tensor_v2",
    "_utils._rebuild_tensor_v3",
    "_utils.get_tensor_metadata",
    "autograd._get_sequence_nr",
    "autograd.forward_ad._current_level",
    "fx.experimental.proxy_tensor.HANDLED_TYPES",
    "nn.Module._apply",
    "nn.Module._call_impl",
    "ops.aten.as_strided.default._handle.redispatch_boxed",
    "optim.optimizer._foreach_supported_types",
    "serialization.register_package",
    "storage._new_dtypes",
    "utils._python_dispatch._get_current_dispatch_mode_stack",
    "utils._python_dispatch.is_traceable_wrapper_subclass",
    "utils._pytree.tree_flatten",
    "utils._pytree.tree_leaves",
    "utils._pytree.tree_map",
    "utils._pytree.tree_map_only",
    "utils._pytree.tree_unflatten",
    "utils._pytree.treespec_dumps",
)
"""Every private name of torch that the package uses, below ``torch``."""

PRIVATE_WHEN_USED = (
    "_C._distributed_c10d",
    "_dynamo",
    "_functorch._aot_autograd",
    "_functorch.partitioners",
    "_higher_order_ops.flex_attention",
    "distributed._state_dict_utils",
    "distributed.fsdp._flat_param",
    "distributed.fsdp._fully_shard",
    "distributed.fsdp._state_dict_utils",
    "distributed.tensor._api",
    "distributed.tensor.debug._comm_mode",
    "distributed.tensor._dtensor_spec",
    "nested._internal.ops",
    "ops._c10d_functional",
    "utils._sympy.interp",
    "utils._sympy.reference",
)
"""More of them, in parts of torch that take a second to import, or are not always there: not looked at here."""

PASSING_OPS = {
    "aten.cholesky.default": "until 2.13",
    "aten._foreach_clone.default": "from 2.12",
    "aten._foreach_mm.default": "from 2.12",
    "aten._foreach_powsum.Scalar": "from 2.11",
    "aten.linalg__powsum.default": "from 2.11",
}
"""Overloads that not every supported torch has, and which have them."""


def check() -> None:
    """Check the installed torch and jax.

    Raises:
        VersionError: one of them is outside `SUPPORTED`, or torch lacks something of `PRIVATE_TORCH`.
    """
    check_version("torch", torch.__version__)
    check_version("jax", jax.__version__)
    check_private(torch.__version__)


def check_version(package: str, version: str) -> None:
    """Raise `VersionError` unless ``version`` of ``package`` is supported."""
    first, beyond = SUPPORTED[package]
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if not first <= numbers < beyond:
        wanted = f"{package}>={_text(first)},<{_text(beyond)}"
        raise VersionError(
            f"{package} {version} is not supported", given=f"this lazytpu needs {wanted}", fix=f"pip install '{wanted}'"
        )


def check_private(version: str) -> None:
    """Raise `VersionError` for the first name of `PRIVATE_TORCH` that torch does not have."""
    for path in PRIVATE_TORCH:
        try:
            pkgutil.resolve_name(f"torch.{path}")
        except (ImportError, AttributeError):
            raise VersionError(
                f"torch {version} has no torch.{path}, which lazytpu builds on",
                fix="install another version of torch, or a lazytpu made for this one",
            ) from None


def passing_op(name: str) -> Iterator[torch._ops.OpOverload]:
    """Return the overload of that name, which is one of `PASSING_OPS`, or nothing if this torch does not have it."""
    if name not in PASSING_OPS:
        raise KeyError(f"{name} is not listed in PASSING_OPS")
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    if found is not None:
        yield found


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
