"""Reading and printing tensors of the device, against the CPU."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from torch import nn

import lazytpu


def cuts() -> int:
    return lazytpu.metrics.counter("cut")


# --- reading ------------------------------------------------------------------------------------------------


def test_numbers(device):
    for value in (2.5, 3, True, 1 + 2j):
        on_device = torch.tensor([value], device=device)
        assert on_device.item() == value and type(on_device.item()) is type(value)
        assert on_device.tolist() == [value] and on_device[0].tolist() == value
    x = torch.tensor(3.75, device=device)
    assert float(x) == 3.75 and int(x) == 3 and bool(x) and complex(x) == 3.75
    assert [10, 20, 30][torch.tensor(1, device=device)] == 20 and list(range(torch.tensor(2, device=device))) == [0, 1]
    assert round(x.item(), 1) == 3.8 and abs(-x) == x and x == 3.75
    for text in ("bool(t)", "float(t)", "int(t)", "t.item()", "t.__index__()", "operator.index(t)"):
        import operator

        for t in (torch.ones(2), torch.ones(0)):
            errors = []
            for tensor in (t, t.to(device)):
                with pytest.raises((RuntimeError, TypeError, ValueError)) as caught:
                    eval(text, {"t": tensor, "operator": operator})
                errors.append((type(caught.value), str(caught.value)))
            assert errors[0] == errors[1], text


def test_containers(device):
    x = torch.arange(6, device=device).reshape(3, 2)
    assert len(x) == 3 and [row.tolist() for row in x] == [[0, 1], [2, 3], [4, 5]]
    assert all(row.is_tpu for row in x) and 4 in x and 7 not in x
    a, b, c = x
    assert b.tolist() == [2, 3] and hash(x) == id(x) and {x: 1}[x] == 1
    assert x.tolist() == [[0, 1], [2, 3], [4, 5]] and [r.item() for r in reversed(x[:, 0])] == [4, 2, 0]
    with pytest.raises(TypeError, match="len\\(\\) of a 0-d tensor"):
        len(x.sum())
    with pytest.raises(TypeError, match="iteration over a 0-d tensor"):
        iter(x.sum())


def test_numpy_raises_as_on_an_accelerator(device):
    x = torch.ones(2, device=device)
    message = (
        "can't convert tpu:0 device type tensor to numpy. Use Tensor.cpu\\(\\) to copy the tensor to host memory first"
    )
    for read in (x.numpy, lambda: np.asarray(x), lambda: np.stack([x, x])):
        with pytest.raises(TypeError, match=message):
            read()
    assert x.cpu().numpy().tolist() == x.numpy(force=True).tolist() == [1, 1]


def test_dlpack_exports_a_copy(device):
    x = torch.arange(4.0, device=device)
    for export in (np.from_dlpack, torch.from_dlpack, lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t))):
        out = export(x[1:])
        assert out.tolist() == [1, 2, 3]
        out[...] = 9
    assert x.tolist() == [0, 1, 2, 3]
    assert torch.from_dlpack(np.arange(3)).to(device).tolist() == [0, 1, 2]
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(torch.ones(2))).tolist() == [1, 1]
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(x.clone().requires_grad_())


@pytest.mark.parametrize(
    "read", ["x.item()", "x.cpu()", "bool(x)", "print(x, file=out)", "x.tolist()", "repr(x)", "f'{x:.3f}'"]
)
def test_a_read_cuts_once_and_the_next_not_at_all(device, read):
    x = torch.ones(1, device=device).mul(3).sum()
    before, out = cuts(), io.StringIO()
    eval(read, {"x": x, "out": out})
    assert cuts() == before + 1
    eval(read, {"x": x, "out": out})
    assert cuts() == before + 1


# --- printing -----------------------------------------------------------------------------------------------

PRINTED = {
    "vector": lambda: torch.tensor([1.0, 2.5, -3.0]),
    "scalar": lambda: torch.tensor(2.5),
    "integers": lambda: torch.arange(5),
    "bool": lambda: torch.tensor([True, False]),
    "empty": lambda: torch.empty(0),
    "empty_2d": lambda: torch.empty(0, 3),
    "empty_int": lambda: torch.empty(0, dtype=torch.int64),
    "large": lambda: torch.arange(3000.0).reshape(30, 100),
    "mixed": lambda: torch.tensor([1e-9, 1e9, float("nan"), float("inf")]),
    "half": lambda: torch.tensor([1.0, 0.1], dtype=torch.float16),
    "bfloat16": lambda: torch.tensor([1.0, 0.1], dtype=torch.bfloat16),
    "float64": lambda: torch.tensor([0.1], dtype=torch.float64),
    "int8": lambda: torch.tensor([[1, -2]], dtype=torch.int8),
    "complex": lambda: torch.tensor([1 + 2j, 0.5j]),
    "conjugate": lambda: torch.tensor([1 + 2j, 0.5j]).conj(),
    "float8": lambda: torch.tensor([1.0, 0.5]).to(torch.float8_e4m3fn),
    "3d": lambda: torch.arange(24.0).reshape(2, 3, 4) / 7,
    "view": lambda: (torch.arange(24.0).reshape(4, 6) / 3)[1:, ::2].t(),
    "requires_grad": lambda: torch.ones(2, requires_grad=True),
}
OPTIONS = [
    {},
    {"precision": 2},
    {"threshold": 5, "edgeitems": 1},
    {"linewidth": 24},
    {"sci_mode": True},
    {"sci_mode": False},
    {"profile": "full"},
    {"profile": "short"},
    {"edgeitems": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", PRINTED)
def test_print_is_that_of_torch_with_the_device(name, options, monkeypatch):
    monkeypatch.setattr(torch._C, "_get_default_device", lambda: "other")  # so torch names the device of a CPU tensor
    torch.set_printoptions(**options)
    try:
        expected, tensor = PRINTED[name](), PRINTED[name]().to("tpu")
        if name == "requires_grad":
            tensor = tensor.detach().requires_grad_()
        x = tensor + 0 if name == "vector" else tensor
        before = cuts()
        text = repr(x)
        assert cuts() <= before + 1
        assert text == repr(expected).replace("device='cpu'", "device='tpu:0'")
    finally:
        torch.set_printoptions(profile="default", sci_mode=None)


def test_print_shows_what_torch_shows_of_an_accelerator(device):
    x = torch.tensor([1.0, 2.0], device=device)
    assert repr(x) == str(x) == f"{x}" == "tensor([1., 2.], device='tpu:0')"
    assert repr(x.half()) == "tensor([1., 2.], device='tpu:0', dtype=torch.float16)"
    y = x.clone().requires_grad_()
    assert repr(y) == "tensor([1., 2.], device='tpu:0', requires_grad=True)"
    assert repr(y * 2) == "tensor([2., 4.], device='tpu:0', grad_fn=<MulBackward0>)"
    assert repr(nn.Parameter(x)) == "Parameter containing:\ntensor([1., 2.], device='tpu:0', requires_grad=True)"
    assert f"{x[0]:.2f} {x.sum():6.1f}|{torch.tensor(3, device=device):03d}" == "1.00    3.0|003"
    with pytest.raises(TypeError, match="unsupported format string"):
        format(x, ".2f")
    assert repr(torch.empty(0, 2, device=device)) == "tensor([], device='tpu:0', size=(0, 2))"
    assert repr(torch.Tensor.detach(x)) == "tensor([1., 2.], device='tpu:0')"  # a tensor that C++ made
    with torch.device("tpu"):
        assert repr(x) == "tensor([1., 2.], device='tpu:0')"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_print_of_a_dual_number_and_of_a_batch(device):
    import torch.autograd.forward_ad as forward

    with forward.dual_level():
        x = forward.make_dual(torch.ones(1, device=device), torch.full((1,), 2.0, device=device))
        assert repr(x) == "tensor([1.], device='tpu:0', tangent=tensor([2.], device='tpu:0'))"
    texts = []
    torch.vmap(lambda row: texts.append(repr(row)) or row)(torch.ones(2, 1, device=device))
    assert "BatchedTensor(lvl=1, bdim=0" in texts[0] and "device='tpu:0'" in texts[0]
