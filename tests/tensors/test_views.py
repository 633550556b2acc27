"""Every view op x every kind of write through it, with the base read afterwards, against eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazytpu
from lazytpu.ir.tree import trace
from tests.support.lockstep import differences, outcome

pytestmark = pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")

Base = Callable[[], torch.Tensor]
View = Callable[[torch.Tensor], torch.Tensor]
Write = Callable[[torch.Tensor], Any]


def f234() -> torch.Tensor:
    return torch.arange(24.0).reshape(2, 3, 4).clone()


def f34() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4).clone()


def f1314() -> torch.Tensor:
    return torch.arange(12.0).reshape(1, 3, 1, 4).clone()


def f44() -> torch.Tensor:
    return torch.arange(16.0).reshape(4, 4).clone()


def f6() -> torch.Tensor:
    return torch.arange(6.0)


def f() -> torch.Tensor:
    return torch.tensor(3.0)


def i34() -> torch.Tensor:
    return torch.arange(12).reshape(3, 4).clone()


def transposed() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4).t().clone()


def channels_last() -> torch.Tensor:
    return torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last)


def c34() -> torch.Tensor:
    return torch.complex(f34(), f34() + 100)


def pairs() -> torch.Tensor:
    return torch.arange(24.0).reshape(3, 4, 2).clone()


VIEWS: dict[str, tuple[Base, View]] = {
    "itself": (f234, lambda x: x),
    "view": (f234, lambda x: x.view(6, 4)),
    "view_minus_one": (f234, lambda x: x.view(-1)),
    "view_same": (f234, lambda x: x.view(2, 3, 4)),
    "view_as": (f234, lambda x: x.view_as(torch.empty(4, 6))),
    "view_of_transposed": (transposed, lambda x: x.view(2, 2, 3)),
    "reshape": (f234, lambda x: x.reshape(4, 6)),
    "reshape_copies": (f234, lambda x: x.transpose(0, 1).reshape(4, 6)),
    "reshape_as": (f234, lambda x: x.reshape_as(torch.empty(3, 8))),
    "flatten": (f234, lambda x: x.flatten(1)),
    "unflatten": (f34, lambda x: x.unflatten(1, (2, 2))),
    "ravel": (f234, lambda x: x.ravel()),
    "t": (f34, lambda x: x.t()),
    "t_of_vector": (f6, lambda x: x.t()),
    "T": (f34, lambda x: x.T),
    "mT": (f234, lambda x: x.mT),
    "H": (f34, lambda x: x.H),
    "mH": (f234, lambda x: x.mH),
    "adjoint": (f234, lambda x: x.adjoint()),
    "transpose": (f234, lambda x: x.transpose(0, 2)),
    "transpose_negative": (f234, lambda x: x.transpose(-1, -2)),
    "swapaxes": (f234, lambda x: x.swapaxes(1, 0)),
    "swapdims": (f234, lambda x: x.swapdims(1, -1)),
    "permute": (f234, lambda x: x.permute(2, 0, 1)),
    "permute_negative": (f234, lambda x: x.permute(-1, 0, -2)),
    "movedim": (f234, lambda x: x.movedim(0, -1)),
    "moveaxis": (f234, lambda x: x.moveaxis((0, 1), (1, 2))),
    "narrow": (f234, lambda x: x.narrow(2, 1, 2)),
    "narrow_negative": (f234, lambda x: x.narrow(-2, -2, 1)),
    "select": (f234, lambda x: x.select(1, 2)),
    "select_negative": (f234, lambda x: x.select(-1, -3)),
    "slice": (f234, lambda x: x[:, 1:]),
    "slice_step": (f234, lambda x: x[..., ::2]),
    "slice_negative": (f234, lambda x: x[:, -2:-1, -3:]),
    "slice_beyond": (f234, lambda x: x[:, 1:99]),
    "slice_empty": (f234, lambda x: x[:, 2:1]),
    "slice_step_uneven": (f6, lambda x: x[1:6:3]),
    "index_int": (f234, lambda x: x[1]),
    "index_ints": (f234, lambda x: x[1, -1, 0]),
    "index_none": (f234, lambda x: x[:, None, 1]),
    "index_ellipsis": (f234, lambda x: x[..., 1]),
    "index_all": (f234, lambda x: x[...]),
    "index_chain": (f234, lambda x: x[1][1:][:, ::3]),
    "squeeze": (f1314, lambda x: x.squeeze()),
    "squeeze_dim": (f1314, lambda x: x.squeeze(2)),
    "squeeze_dim_kept": (f1314, lambda x: x.squeeze(1)),
    "squeeze_dims": (f1314, lambda x: x.squeeze((0, -2))),
    "unsqueeze": (f34, lambda x: x.unsqueeze(1)),
    "unsqueeze_negative": (f34, lambda x: x.unsqueeze(-1)),
    "unsqueeze_scalar": (f, lambda x: x.unsqueeze(0)),
    "expand_new_dim": (f34, lambda x: x.expand(1, 3, 4)),
    "expand_overlapping": (f1314, lambda x: x.expand(2, 3, 5, 4)),
    "expand_minus_one": (f1314, lambda x: x.expand(-1, 3, 2, -1)),
    "expand_as": (f1314, lambda x: x.expand_as(torch.empty(2, 3, 1, 4))),
    "expand_then_select": (f1314, lambda x: x.expand(2, 3, 5, 4)[1, :, 0]),
    "broadcast_to": (f6, lambda x: x.broadcast_to(2, 6)),
    "diagonal": (f44, lambda x: x.diagonal()),
    "diagonal_offset": (f234, lambda x: x.diagonal(1, 1, 2)),
    "diagonal_below": (f34, lambda x: x.diagonal(-1)),
    "diagonal_outside": (f34, lambda x: x.diagonal(9)),
    "unfold": (f6, lambda x: x.unfold(0, 2, 2)),
    "unfold_inner": (f34, lambda x: x.unfold(1, 2, 2)),
    "unfold_gap": (f6, lambda x: x.unfold(0, 2, 3)),
    "unfold_overlapping": (f6, lambda x: x.unfold(0, 3, 1)),
    "as_strided": (f234, lambda x: x.as_strided((2, 3), (6, 2), 1)),
    "as_strided_no_offset": (f234, lambda x: x[1].as_strided((3,), (2,))),
    "as_strided_of_view": (f234, lambda x: x.transpose(0, 1)[1].as_strided((4,), (5,), 3)),
    "as_strided_overlapping": (f6, lambda x: x.as_strided((3, 3), (1, 1))),
    "as_strided_of_transposed": (transposed, lambda x: x.as_strided((5,), (2,), 1)),
    "split": (f34, lambda x: x.split(2, 1)[1]),
    "split_uneven": (f34, lambda x: x.split(2)[1]),
    "split_with_sizes": (f34, lambda x: x.split([1, 3], 1)[1]),
    "split_zero": (f34, lambda x: x.split([0, 4], -1)[1]),
    "chunk": (f234, lambda x: x.chunk(2, -1)[1]),
    "tensor_split": (f234, lambda x: x.tensor_split(3, 2)[1]),
    "tensor_split_indices": (f234, lambda x: x.tensor_split((1, 3), 2)[1]),
    "hsplit": (f34, lambda x: x.hsplit(2)[1]),
    "vsplit": (f44, lambda x: x.vsplit((1, 3))[1]),
    "dsplit": (f234, lambda x: x.dsplit(2)[0]),
    "unbind": (f234, lambda x: x.unbind()[1]),
    "unbind_dim": (f234, lambda x: x.unbind(-1)[2]),
    "iteration": (f234, lambda x: list(x)[1]),
    "view_dtype_same": (i34, lambda x: x.view(torch.int64)),
    "view_dtype_smaller": (i34, lambda x: x.view(torch.int32)),
    "view_dtype_smaller_of_slice": (i34, lambda x: x[1:].view(torch.int16)),
    "view_dtype_larger": (lambda: i34().int(), lambda x: x.view(torch.int64)),
    "view_dtype_float_bits": (lambda: f34() + 1, lambda x: x.view(torch.int32)),
    "view_dtype_and_back": (i34, lambda x: x.view(torch.int32).view(torch.int64)[1]),
    "view_as_real": (c34, lambda x: torch.view_as_real(x)),
    "view_as_complex": (pairs, lambda x: torch.view_as_complex(x)),
    "real": (c34, lambda x: x.real),
    "real_of_real": (f34, lambda x: x.real),
    "imag": (c34, lambda x: x.imag),
    "conj": (c34, lambda x: x.conj()),
    "conj_of_conj": (c34, lambda x: x.conj().conj()),
    "conj_of_slice": (c34, lambda x: x[1:].t().conj()),
    "slice_of_conj": (c34, lambda x: x.conj()[:, 1]),
    "adjoint_complex": (c34, lambda x: x.adjoint()),
    "neg_view": (f34, lambda x: torch._neg_view(x)),
    "imag_of_conj": (c34, lambda x: x.conj().imag),
    "real_of_conj": (c34, lambda x: x.conj().real),
    "slice_of_neg": (c34, lambda x: x.conj().imag[1:].t()),
    "conj_of_neg": (c34, lambda x: torch._neg_view(x.conj())),
    "detach": (f34, lambda x: x.detach()),
    "data": (f34, lambda x: x.data),
    "alias": (f34, lambda x: torch.ops.aten.alias(x)),
    "of_channels_last": (channels_last, lambda x: x.permute(0, 2, 3, 1)),
    "flat_of_channels_last": (channels_last, lambda x: x.permute(0, 2, 3, 1).view(-1)[3:]),
    "view_of_channels_last": (channels_last, lambda x: x.view(2, 3, 8)),
    "slice_of_channels_last": (channels_last, lambda x: x[:, 1:, :, ::2]),
    "deep": (f234, lambda x: x.transpose(0, 1)[1:].unsqueeze(0).squeeze(0).permute(2, 1, 0)[::2, 1].view(2, 2)),
    "deep_flat": (f234, lambda x: x.view(4, 6).t()[1:5].diagonal()[1:]),
    "scalar": (f, lambda x: x.view(())),
    "empty": (lambda: torch.empty(0, 3), lambda x: x.t()),
}


def ones(v: torch.Tensor, shape: Any = None, dtype: torch.dtype | None = None, on: Any = None) -> torch.Tensor:
    """Values that differ from element to element, made on the CPU and moved to where they are wanted."""
    shape = v.shape if shape is None else shape
    made = (torch.arange(1, 1 + torch.Size(shape).numel()) * 3 % 17 - 5).reshape(shape)
    return made.to(v.dtype if dtype is None else dtype).to(v.device if on is None else on)


WRITES: dict[str, Write] = {
    "add_": lambda v: v.add_(2),
    "add_tensor": lambda v: v.add_(ones(v), alpha=2),
    "mul_by_itself": lambda v: v.mul_(v),
    "eq_": lambda v: v.eq_(4),
    "copy_": lambda v: v.copy_(ones(v)),
    "copy_from_cpu": lambda v: v.copy_(ones(v, on="cpu")),
    "copy_from_cpu_dtype": lambda v: v.copy_(ones(v, dtype=torch.float64, on="cpu")),
    "copy_broadcast": lambda v: v.copy_(ones(v, shape=v.shape[1:])),
    "copy_dtype": lambda v: v.copy_(ones(v, dtype=torch.int8)),
    "fill_": lambda v: v.fill_(5),
    "zero_": lambda v: v.zero_(),
    "setitem": lambda v: v.__setitem__(0, 9),
    "index_put_": lambda v: v.index_put_((zero(v),), ones(v, shape=())) if len_of(v) else None,
    "masked_fill_": lambda v: v.masked_fill_(ones(v, dtype=torch.int64) > 3, 8),
    "scatter_": lambda v: v.scatter_(0, torch.zeros_like(v, dtype=torch.int64)[:1], 6),
    "out": lambda v: torch.add(ones(v), 1, out=v),
    "out_dtype": lambda v: torch.add(ones(v, dtype=torch.int16), 1, out=v),
    "detach": lambda v: v.detach().add_(1),
    "data": lambda v: v.data.add_(1),
    "through_a_view": lambda v: v.unsqueeze(0).select(0, 0).sub_(3),
    "after_a_cut": lambda v: (lazytpu.mark_step(), v.add_(1)),
}

# More ways to write, through a few views: they differ in the op, not in how the result gets into the base.
MORE_WRITES: dict[str, Write] = {
    "iadd": lambda v: v.__iadd__(1),
    "clamp_": lambda v: v.clamp_(2, 7),
    "copy_itself": lambda v: v.copy_(v),
    "copy_cpu_broadcast": lambda v: v.copy_(ones(v, shape=v.shape[1:], on="cpu")),
    "copy_wrong_shape": lambda v: v.copy_(ones(v, shape=(7, 7))),
    "copy_cpu_wrong_shape": lambda v: v.copy_(ones(v, shape=(7, 7), on="cpu")),
    "copy_strided": lambda v: v.copy_(ones(v, shape=(*v.shape, 2))[..., 1]),
    "fill_tensor": lambda v: v.fill_(ones(v, shape=())),
    "fill_cpu_tensor": lambda v: v.fill_(ones(v, shape=(), on="cpu")),
    "fill_vector": lambda v: v.fill_(ones(v, shape=(2,))),
    "fill_diagonal_": lambda v: v.fill_diagonal_(3),
    "setitem_all": lambda v: v.__setitem__(..., ones(v, shape=())),
    "setitem_mask": lambda v: v.__setitem__(ones(v, dtype=torch.int64) > 3, 7),
    "index_put_accumulate": lambda v: v.index_put_((zero(v),), ones(v, shape=()), accumulate=True),
    "masked_fill_tensor": lambda v: v.masked_fill_(v == v, ones(v, shape=())),
    "masked_scatter_": lambda v: v.masked_scatter_(ones(v, dtype=torch.int64) > 3, ones(v)),
    "scatter_add_": lambda v: v.scatter_add_(0, torch.zeros_like(v, dtype=torch.int64), ones(v)),
    "index_fill_": lambda v: v.index_fill_(-1, zero(v), 4),
    "index_copy_": lambda v: v.index_copy_(0, zero(v), ones(v)[:1]),
    "out_of_itself": lambda v: torch.mul(v, v, out=v),
    "out_sum": lambda v: torch.sum(ones(v, shape=(*v.shape, 3)), -1, out=v),
    "out_bad_dtype": lambda v: torch.add(ones(v, dtype=torch.complex128), 1, out=v),
    "addcmul_": lambda v: v.addcmul_(ones(v), v, value=2),
    "lerp_": lambda v: v.lerp_(ones(v), 0.5),
    "tril_": lambda v: v.tril_(),
    "add_wrong_shape": lambda v: v.add_(ones(v, shape=(7, 7))),
    "add_complex": lambda v: v.add_(1j),
    "add_grows": lambda v: v.add_(ones(v, shape=(2, *v.shape))),
    "twice": lambda v: v.add_(1).mul_(2),
}
MORE_VIEWS = ("itself", "transpose", "select", "expand_overlapping", "as_strided", "slice_of_channels_last")


# What these put where elements overlap does not depend on the order in which a kernel visits them.
SETTING = [
    key for key in WRITES if key.startswith(("copy", "fill", "zero", "setitem", "index", "masked", "scatter", "out"))
]
UNORDERED = {"expand_overlapping": {"index_put_accumulate", "out_sum"}}


def zero(v: torch.Tensor) -> torch.Tensor:
    """An index that stands for the first element."""
    return torch.tensor([0], device=v.device)


def len_of(v: torch.Tensor) -> int:
    """Elements of the first dimension: what lies beyond raises on the CPU, but is not seen before the device runs."""
    return v.shape[0] if v.dim() else 0


def run(name: str, write: Write, device: torch.device | str) -> tuple[list[torch.Tensor], Exception | None]:
    """The base, a view made before the write, the written view, another after it, and what was raised."""
    base, view = VIEWS[name]
    x = base().to(device)
    before, copy = view(x), x.clone()
    written = view(x)
    _, error = outcome(lambda: write(written))
    return [x, before, written, view(x), copy], error


def compare(name: str, writes: dict[str, Write], device: torch.device) -> None:
    got = {key: run(name, write, device) for key, write in writes.items()}
    found = []
    for key, write in writes.items():
        expected = run(name, write, "cpu")
        found += [f"{key}: {text}" for text in differences(expected, got[key])]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", VIEWS)
def test_write_through_view(name: str, device: torch.device) -> None:
    overlapping = name in ("unfold_overlapping", "as_strided_overlapping")
    compare(name, {key: WRITES[key] for key in SETTING} if overlapping else WRITES, device)


@pytest.mark.parametrize("name", MORE_VIEWS)
def test_more_writes(name: str, device: torch.device) -> None:
    compare(name, {k: w for k, w in MORE_WRITES.items() if k not in UNORDERED.get(name, ())}, device)


@pytest.mark.parametrize("offset", [None, 1])
def test_copies_by_stride_see_the_memory_around_a_view(offset: int | None, device: torch.device) -> None:
    def run(on: Any) -> Any:
        view = torch.arange(20.0).to(on)[2:].as_strided((3, 2), (4, 2), 3)
        written = torch.as_strided_scatter(view, torch.full((2, 2), -1.0).to(on), (2, 2), (3, 1), offset)
        return torch.as_strided_copy(view, (2, 2), (3, 1), offset), written, written.stride()

    assert list(differences(run("cpu"), run(device), loosely=True)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d", "conv3d"])
def test_convolutions_keep_channels_last_as_the_cpu_does(device, name, dtype):
    n = int(name[-2])
    last = torch.channels_last if n == 2 else torch.channels_last_3d
    for of_x, of_w, of_grad in itertools.product((torch.contiguous_format, last), repeat=3):
        strides = []
        for where in ("cpu", device):
            x = torch.ones(2, 4, *[5] * n, dtype=dtype).to(where, memory_format=of_x).requires_grad_()
            w = torch.ones(4, 4, *[3] * n, dtype=dtype).to(where, memory_format=of_w).requires_grad_()
            y = getattr(torch.nn.functional, name)(x, w)
            gradients = torch.autograd.grad(y, (x, w), torch.ones_like(y).contiguous(memory_format=of_grad))
            strides.append([t.stride() for t in (y, *gradients)])
        assert strides[0] == strides[1]


def test_views_in_inference_mode_are_what_their_base_is(device: torch.device) -> None:
    def run(on: Any) -> list[bool]:
        weight, x = torch.ones(2, 3).to(on), torch.ones(4, 4).to(on)
        with torch.inference_mode():
            made = [v for _ in range(2) for v in (weight.view(6), x[1:, 2:], (x * 2)[:, 1:])]  # known the second time
            made[1].add_(1)
        return [v.is_inference() for v in made]

    assert run(device) == run("cpu") == [False, False, True] * 2


def test_a_part_copied_onto_itself_is_not_recorded(device: torch.device) -> None:
    x = torch.arange(12.0).view(3, 4).to(device)
    lazytpu.mark_step()
    x[:, 1:3] += 1
    version = x._version
    in_place = trace.cursor.depth
    x[:, 1:3] = x[:, 1:3]
    assert trace.cursor.depth == in_place and x._version == version + 1
    assert x[0].tolist() == [0, 2, 3, 3]


def test_unsafe_parts_share_memory(device: torch.device) -> None:
    x = torch.zeros(6, device=device)
    first, last = x.unsafe_chunk(2)
    first.add_(1)
    x.unsafe_split_with_sizes([2, 4])[1][3] = 5
    assert x.tolist() == [1, 1, 1, 0, 0, 5] and last.tolist() == [0, 0, 5]


def test_a_write_after_all_of_the_memory_was_seen_through_windows(device: torch.device) -> None:
    """The layout of the whole vector was made by a view that is itself written through that vector."""
    x = torch.arange(35.0).view(5, 7)
    y = x.to(device)
    for t in (x, y):
        t.unfold(1, 7, 7).view(35)
        t.unfold(0, 2, 2).mul_(2)
    assert torch.equal(y.cpu(), x)
