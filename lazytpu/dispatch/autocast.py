"""``torch.autocast`` on this device: which ops cast their arguments, and to what.

The policies and their lists are those that torch documents and applies to CUDA; here they are data, and a
kernel on the key AutocastPrivateUse1 for each op.  The key is passed over by every other op, and by all of them
outside ``torch.autocast``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from lazytpu.ir.op_schema import OpOverload, overload_named
from lazytpu.tensors.tensor import LazyTensor

LOWER_PRECISION = """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
    baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
    lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data
""".split()
"""Run in the dtype of the autocast.  The last line is what CUDA has in cuDNN."""

FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
""".split()
"""Run in float32."""

FLOAT32_RESULT = """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""".split()
"""Take ``dtype=torch.float32`` where the user names no dtype."""

FLOAT32_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""The same, for ops that have another overload to name a dtype."""

WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
"""Run in float32 where any argument is float32, else in the dtype of the autocast."""

KEY = "AutocastPrivateUse1"
_EXCLUDED = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
_libraries: list[torch.library.Library] = []

Kernel = Callable[..., Any]


def _is_eligible(x: object) -> TypeGuard[torch.Tensor]:
    """Return whether autocast may cast ``x``: a floating-point tensor of ours, but float64 stays."""
    return (
        isinstance(x, torch.Tensor)
        and x.is_floating_point()
        and x.dtype != torch.float64
        and x.device.type == LazyTensor.device_type
    )


def _cast(x: object, dtype: torch.dtype) -> object:
    if isinstance(x, torch.Tensor):
        return x.to(dtype) if _is_eligible(x) else x
    if isinstance(x, (list, tuple)):
        return [_cast(e, dtype) for e in x]
    return x


def _autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype(LazyTensor.device_type)


def _casting(overload: OpOverload, dtype_of: Callable[[list[object]], torch.dtype]) -> Kernel:
    """Return a kernel that casts every argument to ``dtype_of(arguments)``."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            dtype = dtype_of([*args, *kwargs.values()])
            return overload(*[_cast(a, dtype) for a in args], **{k: _cast(v, dtype) for k, v in kwargs.items()})

    return kernel


def _widest(arguments: list[object]) -> torch.dtype:
    flat = [e for a in arguments for e in (a if isinstance(a, (list, tuple)) else [a])]
    return torch.float32 if any(_is_eligible(e) and e.dtype == torch.float32 for e in flat) else _autocast_dtype()


def _naming_float32(overload: OpOverload, position: int | None) -> Kernel:
    """Return a kernel that adds ``dtype=float32``; ``position`` is that of ``dtype`` where it is not keyword-only."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            given = args[position] if position is not None and len(args) > position else kwargs.get("dtype")
            if given is None and _is_eligible(args[0]):
                kwargs["dtype"] = torch.float32
                args = args[:position] if position is not None else args
            return overload(*args, **kwargs)

    return kernel


def _refuse(*_: object, **__: object) -> object:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    )


def _dtype_position(overload: OpOverload) -> int | None:
    positional = [a.name for a in overload._schema.arguments if not a.kwarg_only]
    return positional.index("dtype") if "dtype" in positional else None


def _kernels() -> dict[str, Kernel]:
    """Yield overloads and their kernels; an op that this torch does not have is left out."""
    found = {
        name: overload_named(name) for name in [*LOWER_PRECISION, *FLOAT32, *FLOAT32_RESULT, *WIDEST, *FLOAT32_NORM]
    }
    ops = {name: op for name, op in found.items() if op is not None}
    kernels: dict[str, Kernel] = {"binary_cross_entropy": _refuse}
    for name, op in ops.items():
        if name in FLOAT32_NORM:
            kernels[name] = _norm(op, overload_named(FLOAT32_NORM[name]))
        elif name in FLOAT32_RESULT:
            kernels[name] = _naming_float32(op, _dtype_position(op))
        elif name in FLOAT32:
            kernels[name] = _casting(op, lambda _: torch.float32)
        else:
            kernels[name] = _casting(op, _widest if name in WIDEST else lambda _: _autocast_dtype())
    return kernels


def _norm(overload: OpOverload, naming: Any) -> Kernel:
    def kernel(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            if not _is_eligible(tensor):
                return overload(tensor, *args, **kwargs)
            bound = _with_defaults(overload, args, kwargs)
            return naming(tensor, *bound, dtype=torch.float32)

    return kernel


def _with_defaults(overload: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> list[object]:
    """Return the arguments behind the first, in the order of the schema."""
    rest = overload._schema.arguments[1:]
    return [*args, *[kwargs.get(a.name, a.default_value) for a in rest[len(args) :]]]


def register() -> None:
    """Register the casts, and bfloat16 as the dtype of ``torch.autocast`` for this device."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, KEY)
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _kernels().items():
        library.impl(name, kernel, KEY)
    _libraries.extend((everything, library))
    torch.set_autocast_dtype(LazyTensor.device_type, torch.bfloat16)
