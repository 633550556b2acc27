"""What ``print`` shows of a device tensor: torch's own formatting of its values, with the device.

The values are copied to the CPU first, so that printing costs one cut at most, whatever it shows.
"""

from __future__ import annotations

import torch
from torch import _tensor_str as fmt


def represent(tensor: torch.Tensor) -> str:
    """``tensor([1., 2.], device='tpu:0')``, as torch prints tensors of any accelerator."""
    prefix = "Parameter containing:\n" if isinstance(tensor, torch.nn.Parameter) else ""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        value, tangent = torch.autograd.forward_ad.unpack_dual(tensor)
        body, suffixes = _contents(value) if value.layout is torch.strided else _sparse_contents(value)
        suffixes += _gradient(tensor)
    if tangent is not None:
        suffixes.append(f"tangent={tangent}")
    text: str = fmt._add_suffixes("tensor(" + body, suffixes, len("tensor("), force_newline=tensor.is_sparse)
    return prefix + text


def _contents(tensor: torch.Tensor) -> tuple[str, list[str]]:
    """Return the values, and what torch tells of the tensor behind them."""
    suffixes = [f"device='{tensor.device}'"]
    if tensor.numel() == 0:
        body, shows_size, shows_dtype = "[]", tensor.dim() != 1, tensor.dtype != torch.get_default_dtype()
    else:
        body = fmt._tensor_str(tensor.detach().cpu(), len("tensor("))
        shows_size, shows_dtype = not fmt.PRINT_OPTS.edgeitems, tensor.dtype not in _implied()
    if shows_size:
        suffixes.append(f"size={tuple(tensor.shape)}")
    if shows_dtype:
        suffixes.append(f"dtype={tensor.dtype}")
    return body, suffixes


_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}


def _sparse_contents(tensor: torch.Tensor) -> tuple[str, list[str]]:
    """Indices and values of a sparse tensor, and what torch tells behind them."""
    host, start, parts = tensor.detach().cpu(), len("tensor("), []
    for name in _PARTS[tensor.layout]:
        part, prefix = getattr(host, name)(), f"{name.lstrip('_')}=tensor("
        size = "" if part.numel() else f", size={tuple(part.shape)}"
        parts.append(f"{prefix}{fmt._tensor_str(part, start + len(prefix))}{size})")
    suffixes = [f"device='{tensor.device}'", f"size={tuple(tensor.shape)}", f"nnz={host._nnz()}"]
    suffixes += [] if tensor.dtype in _implied() else [f"dtype={tensor.dtype}"]
    return (",\n" + " " * start).join(parts), [*suffixes, f"layout={tensor.layout}"]


def _implied() -> set[torch.dtype]:
    """Return the dtypes that the printed values tell by themselves."""
    default = torch.get_default_dtype()
    complex_default = torch.complex128 if default == torch.float64 else torch.complex64
    return {default, complex_default, torch.int64, torch.bool}


def _gradient(tensor: torch.Tensor) -> list[str]:
    try:
        function = tensor.grad_fn
    except RuntimeError:  # a view made and then written without gradients, which torch refuses to differentiate
        return ["grad_fn=<Invalid>"]
    if function is None:
        return ["requires_grad=True"] if tensor.requires_grad else []
    name = type(function).__name__
    return [f"grad_fn=<{function.name().rsplit('::', 1)[-1] if name == 'CppFunction' else name}>"]
