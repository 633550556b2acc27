"""Tensors and modules on the device: making, moving, reading and printing them, against the CPU."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

import lazytpu
from lazytpu.tensors.tensor import LazyTensor
from tests.support.lockstep import differences

DEVICES = ["tpu", "tpu:0", torch.device("tpu"), torch.device("tpu", 0), lazytpu.device(), 0]


def cuts() -> int:
    return lazytpu.metrics.counter("cut")


# --- factories ----------------------------------------------------------------------------------------------

FACTORIES = {
    "tensor": lambda d: torch.tensor([[1, 2.5], [3, 4]], device=d),
    "tensor_dtype": lambda d: torch.tensor([1, 2], dtype=torch.float16, device=d),
    "tensor_bool": lambda d: torch.tensor([True, False], device=d),
    "tensor_complex": lambda d: torch.tensor([1 + 2j], device=d),
    "tensor_scalar": lambda d: torch.tensor(3, device=d),
    "tensor_empty": lambda d: torch.tensor([], device=d),
    "tensor_of_numpy": lambda d: torch.tensor(np.arange(6.0).reshape(2, 3), device=d),
    "tensor_requires_grad": lambda d: torch.tensor([1.0], device=d, requires_grad=True),
    "as_tensor": lambda d: torch.as_tensor([1, 2], device=d),
    "as_tensor_of_numpy": lambda d: torch.as_tensor(np.float32([1, 2]), device=d),
    "asarray": lambda d: torch.asarray([1, 2.0], device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(2.0, device=d),
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones((2, 0), device=d, dtype=torch.int8),
    "full": lambda d: torch.full((2,), 7, device=d),
    "full_bool": lambda d: torch.full((2,), True, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange_step": lambda d: torch.arange(1, 2, 0.25, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "logspace": lambda d: torch.logspace(0, 2, 3, device=d),
    "eye": lambda d: torch.eye(2, 3, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "length_one": lambda d: torch.empty_strided((1, 3), (7, 1), device=d).fill_(2),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2, 3).t(), device=d),
    "ones_like": lambda d: torch.ones_like(torch.ones(2, device=d), dtype=torch.int64),
    "full_like": lambda d: torch.full_like(torch.ones(2, device=d), 3),
    "new_zeros": lambda d: torch.ones(2, device=d).new_zeros(3),
    "new_ones": lambda d: torch.ones(2, device=d).new_ones((2, 2), dtype=torch.bool),
    "new_full": lambda d: torch.ones(2, device=d).new_full((2,), 5),
    "new_tensor": lambda d: torch.ones(2, device=d).new_tensor([1, 2]),
    "new_from_cpu": lambda d: torch.ones(2).new_zeros(3, device=d),
    "empty_filled": lambda d: torch.empty(2, 3, device=d).fill_(1.5),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(2),
    "empty_permuted": lambda d: torch.empty_permuted((2, 3), (1, 0), device=d).fill_(2),
    "empty_channels_last": lambda d: torch.empty(1, 2, 3, 4, device=d, memory_format=torch.channels_last).zero_(),
    "empty_like": lambda d: torch.empty_like(torch.ones(3, 2, device=d).t()).fill_(1),
    "complex": lambda d: torch.complex(torch.ones(2, device=d), torch.zeros(2, device=d)),
    "from_numpy": lambda d: torch.from_numpy(np.arange(3)).to(d),
    "block_diag": lambda d: torch.block_diag(torch.ones(1, 1, device=d), torch.ones(2, 2, device=d)),
    "meshgrid": lambda d: torch.meshgrid(torch.arange(2, device=d), torch.arange(3, device=d), indexing="ij")[1],
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factory(name):
    got = FACTORIES[name]("tpu")
    assert type(got) is LazyTensor and got.device == lazytpu.device()
    expected = FACTORIES[name]("cpu")
    assert list(differences(expected, got)) == []


@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_ways_to_name_the_device(device):
    for made in (torch.ones(2, device=device), torch.ones(2).to(device), torch.tensor([1.0], device=device)):
        assert made.device == torch.device("tpu:0") and made.get_device() == 0


@pytest.mark.parametrize(
    "draw",
    [
        lambda d: torch.rand(1000, device=d),
        lambda d: torch.randn(1000, device=d),
        lambda d: torch.randint(0, 5, (1000,), device=d),
        lambda d: torch.randperm(1000, device=d),
        lambda d: torch.rand_like(torch.ones(1000, device=d)),
        lambda d: torch.randn_like(torch.ones(1000, device=d)),
        lambda d: torch.empty(1000, device=d).uniform_(-1, 1),
        lambda d: torch.empty(1000, device=d).normal_(),
        lambda d: torch.bernoulli(torch.full((1000,), 0.5, device=d)),
    ],
)
def test_random_factories_repeat_with_their_seed(draw):
    torch.manual_seed(1)
    first, second = draw("tpu"), draw("tpu")
    torch.manual_seed(1)
    assert torch.equal(draw("tpu"), first) and not torch.equal(first, second)
    expected = draw("cpu")
    assert (first.shape, first.dtype) == (expected.shape, expected.dtype)
    assert abs(first.double().mean().item() - expected.double().mean().item()) < 0.2 * (1 + expected.double().std())


# --- moving -------------------------------------------------------------------------------------------------


def other(device):
    return torch.ones(1, dtype=torch.float64, device=device)


MOVES = {
    "device": lambda t, d: t.to(d),
    "keyword": lambda t, d: t.to(device=d),
    "device_dtype": lambda t, d: t.to(d, torch.float16),
    "dtype": lambda t, d: t.to(torch.float64),
    "same_dtype": lambda t, d: t.to(torch.float32),
    "other": lambda t, d: t.to(other(d)),
    "non_blocking": lambda t, d: t.to(d, non_blocking=True),
    "copy": lambda t, d: t.to(d, copy=True),
    "copy_dtype": lambda t, d: t.to(torch.float32, copy=True),
    "memory_format": lambda t, d: t.to(d, memory_format=torch.channels_last),
    "contiguous_format": lambda t, d: t.to(d, torch.float64, memory_format=torch.contiguous_format),
    "type": lambda t, d: t.to(d).type(torch.int32),
    "type_as": lambda t, d: t.type_as(other(d)),
    "half": lambda t, d: t.to(d).half(),
    "bfloat16": lambda t, d: t.bfloat16().to(d),
    "clone": lambda t, d: t.to(d).clone(),
    "contiguous": lambda t, d: t.to(d).contiguous(),
}
SOURCES = {
    "plain": lambda: torch.arange(24.0).reshape(1, 2, 3, 4),
    "transposed": lambda: torch.arange(24.0).reshape(1, 4, 3, 2).transpose(1, 3),
    "channels_last": lambda: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "sliced": lambda: torch.arange(96.0).reshape(2, 4, 3, 4)[1:, ::2],
    "expanded": lambda: torch.arange(6.0).reshape(1, 2, 3, 1).expand(1, 2, 3, 4),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("move", MOVES)
def test_to(move, source):
    expected = MOVES[move](SOURCES[source](), "cpu")
    from_cpu = MOVES[move](SOURCES[source](), "tpu")
    if from_cpu.is_tpu:
        assert from_cpu.stride() == expected.stride() or source in ("sliced", "expanded")
        assert from_cpu.dtype == expected.dtype and torch.equal(from_cpu.cpu(), expected)
    on_device = MOVES[move](SOURCES[source]().tpu(), "tpu")
    assert on_device.is_tpu and on_device.dtype == expected.dtype and torch.equal(on_device.cpu(), expected)
    back = MOVES[move](SOURCES[source]().tpu(), "cpu")
    assert back.dtype == expected.dtype and torch.equal(back.cpu(), expected)


def test_to_without_a_change_is_the_same_tensor(device):
    x = torch.ones(2, device=device)
    assert x.to(device) is x and x.to(torch.float32) is x and x.tpu() is x and x.to(x) is x and x.contiguous() is x
    assert x.to(device, copy=True) is not x
    y = torch.ones(2)
    assert y.cpu() is y and y.to(device) is not y


def test_a_move_is_differentiable(device):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (x.to(device).double() * torch.tensor([3.0, 4.0], device=device)).sum().cpu().backward()
    assert x.grad.tolist() == [3.0, 4.0] and x.grad.device.type == "cpu"
    y = torch.tensor([1.0], device=device, requires_grad=True)
    (y.cpu() * 5).sum().backward()
    assert y.grad.is_tpu and y.grad.tolist() == [5.0]


def test_what_the_user_overwrites_after_a_move_changes_nothing(device):
    for n in (3, 1 << 16):
        host = torch.ones(n)
        moved, non_blocking = host.to(device), host.to(device, non_blocking=True)
        host.zero_()
        assert moved.sum().item() == non_blocking.sum().item() == n
        back = moved.cpu()
        back.zero_()
        assert moved.sum().item() == n


def test_methods_named_after_the_device(device):
    x = torch.ones(2)
    assert (
        not x.is_tpu
        and x.tpu().is_tpu
        and x.tpu(0).is_tpu
        and x.tpu("tpu:0").is_tpu
        and x.tpu(non_blocking=True).is_tpu
    )
    assert nn.Linear(2, 2).tpu().weight.is_tpu
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 1), [3, 2]).tpu()
    assert packed.data.is_tpu and packed.is_tpu
    x = x.to(device)
    assert (
        x.type() == "torch.tpu.FloatTensor"
        and torch.ones(1, dtype=torch.int64, device=device).type() == "torch.tpu.LongTensor"
    )
    assert not x.type("torch.FloatTensor").is_tpu and torch.ones(2).type("torch.tpu.FloatTensor").is_tpu
    assert not x.is_cuda and not x.is_cpu and not x.is_meta


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


# --- attributes ---------------------------------------------------------------------------------------------


def test_storage(device):
    x = torch.arange(6.0, device=device).reshape(2, 3)
    storage = x.untyped_storage()
    assert storage.nbytes() == len(storage) == storage.size() == 24 and storage.device == device
    assert x[1:].untyped_storage().data_ptr() == storage.data_ptr() == x.data_ptr() != 0
    assert x[1].data_ptr() == x.data_ptr() + 12 and x.detach().data_ptr() == x.data_ptr()
    assert x.clone().data_ptr() != x.data_ptr() and torch.empty(0, device=device).data_ptr() == 0
    addresses = sorted((t.data_ptr(), t.nbytes) for t in [torch.ones(100, device=device) for _ in range(20)])
    assert all(a + n <= b for (a, n), (b, _) in zip(addresses, addresses[1:], strict=False))
    assert bytes(storage.tolist()) == bytes(storage.cpu().tolist()) == x.cpu().numpy().tobytes()
    copied = storage.clone()
    x.zero_()
    assert torch.empty(0, device=device).set_(copied, 0, (6,), (1,)).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(NotImplementedError, match="to change it, use the tensor"):
        storage.fill_(0)
    moved = torch.arange(3.0).untyped_storage().tpu()
    assert torch.empty(0, device=device).set_(moved, 0, (3,), (1,)).tolist() == [0, 1, 2]
    assert x.element_size() == 4 and x.nbytes == 24 and x.itemsize == 4


def test_swap_tensors(device):
    a, b = torch.ones(2, device=device), torch.zeros(3, dtype=torch.int64)
    ida, idb = id(a), id(b)
    torch.utils.swap_tensors(a, b)
    assert (id(a), id(b)) == (ida, idb)
    assert a.tolist() == [0, 0, 0] and a.device.type == "cpu" and b.tolist() == [1, 1] and b.is_tpu
    b.add_(1)
    assert b.tolist() == [2, 2]


def test_copy(device):
    x = torch.ones(2, device=device)
    x.note = "kept"
    y = copy.copy(x)
    assert y is not x and y.note == "kept"
    y.add_(1)
    assert x.tolist() == [2, 2]
    z = copy.deepcopy(x)
    z.add_(1)
    assert x.tolist() == [2, 2] and z.tolist() == [3, 3] and z.note == "kept"


def deepcopies(device):
    x = torch.arange(6.0, device=device)
    tied = nn.Parameter(torch.ones(2, device=device))
    leaf = torch.ones(2, device=device, requires_grad=True)
    (leaf * 3).sum().backward()
    given = {"x": x, "part": x[1:3], "t": x.reshape(2, 3).t(), "again": x, "p": [tied, tied], "leaf": leaf}
    given["c"] = torch.tensor([1 + 2j], device=device).conj()
    out = copy.deepcopy(given)
    out["part"].mul_(10)
    with torch.no_grad():
        out["p"][0].add_(1)
    assert out["x"] is out["again"]
    return (
        [given[k] for k in ("x", "part", "t", "leaf", "c")],
        [out[k] for k in ("x", "part", "t", "leaf", "c")],
        [
            given["p"][0],
            *out["p"],
            out["leaf"].grad,
        ],
    )


def test_deepcopy_keeps_aliases():
    expected, got = deepcopies("cpu"), deepcopies("tpu")
    assert list(differences([e[:3] for e in expected[:2]], [g[:3] for g in got[:2]])) == []
    assert list(differences(expected[2], got[2])) == []
    assert got[1][4].resolve_conj().tolist() == [1 - 2j]
    assert got[2][1] is got[2][2] and isinstance(got[2][1], nn.Parameter)


def test_deepcopy_of_what_is_no_leaf(device):
    errors = []
    for x in (torch.ones(2, requires_grad=True) * 2, torch.ones(2, requires_grad=True, device=device) * 2):
        with pytest.raises(RuntimeError) as caught:
            copy.deepcopy(x)
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and "graph leaves" in errors[0]


def test_deepcopy_of_a_tensor_that_cpp_made(device):
    x = torch.Tensor.detach(torch.ones(2, device=device))
    assert type(x) is torch.Tensor
    y = copy.deepcopy(x)
    y.add_(1)
    assert x.tolist() == [1, 1] and y.tolist() == [2, 2]


def test_deepcopy_takes_no_memory_until_a_write(device):
    x = torch.zeros(1 << 16, device=device)
    lazytpu.wait()
    before = torch.tpu.memory_allocated()
    y = copy.deepcopy(x)
    lazytpu.wait()
    assert torch.tpu.memory_allocated() == before
    y.add_(1)
    x.sub_(1)
    assert y.sum().item() == 1 << 16 and x.sum().item() == -(1 << 16)


# --- parameters and modules ---------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("hidden_away", torch.ones(1), persistent=False)
        self.register_parameter("nothing", None)

    def forward(self, tokens):
        return self.head(self.norm(self.hidden(self.embedding(tokens))) * self.scale * self.hidden_away)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_parameter(device):
    x = torch.ones(2, device=device)
    p = nn.Parameter(x)
    assert isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor) and not isinstance(x, nn.Parameter)
    assert p.requires_grad and p.is_leaf and p.data_ptr() == x.data_ptr() and p.is_tpu
    assert not nn.Parameter(x, requires_grad=False).requires_grad
    assert isinstance(nn.Parameter(torch.Tensor.detach(x)), nn.Parameter)
    module = nn.Module()
    module.p = p
    assert dict(module.named_parameters()) == {"p": p}
    module.b = nn.Buffer(x)
    assert dict(module.named_buffers())["b"].data_ptr() == x.data_ptr() and isinstance(module.b, nn.Buffer)
    assert (
        isinstance(p * 1, torch.Tensor) and not isinstance(p * 1, nn.Parameter) and not isinstance(p.data, nn.Parameter)
    )
    from_plain = nn.Parameter(torch.Tensor.detach(x))
    from_plain.data.add_(1)
    assert x.tolist() == [2, 2] and repr(from_plain).startswith(
        "Parameter containing:\ntensor([2., 2.], device='tpu:0'"
    )


def test_module_moves_whole():
    model = net()
    parameters, optimizer = list(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    assert model.to("tpu") is model
    assert all(t.is_tpu for t in (*model.parameters(), *model.buffers()))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))  # as on a GPU
    assert model.head.weight is model.embedding.weight
    assert all(isinstance(p, nn.Parameter) for p in parameters)
    model(torch.arange(5, device="tpu")).sum().backward()
    optimizer.step()
    expected = net()
    expected_optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected(torch.arange(5)).sum().backward()
    expected_optimizer.step()
    torch.testing.assert_close(list(model.cpu().parameters()), list(expected.parameters()))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert type(model.head.weight) is nn.Parameter and model.head.weight is model.embedding.weight
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


@pytest.mark.parametrize("change", ["half", "bfloat16", "float", "double"])
def test_module_changes_its_dtype(change):
    model, expected = getattr(net().to("tpu"), change)(), getattr(net(), change)()
    assert model.head.weight is model.embedding.weight
    for (name, got), want in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert (got.dtype, got.device.type) == (want.dtype, "tpu"), name
        assert torch.equal(got.cpu(), want), name
    both = net().to("tpu", torch.bfloat16)
    assert both.hidden.weight.dtype == torch.bfloat16 and both.norm.num_batches_tracked.dtype == torch.int64
    assert both.hidden.weight.is_tpu


def test_module_to_empty_and_meta():
    with torch.device("meta"):
        model = net()
    model.to_empty(device="tpu")
    assert all(p.is_tpu for p in model.parameters()) and model.head.weight is model.embedding.weight
    model.load_state_dict(net().state_dict())
    assert torch.equal(model.hidden.weight.cpu(), net().hidden.weight)


def test_module_keeps_gradients_attributes_and_hooks_when_it_moves():
    model, seen = nn.Linear(2, 1), []
    model.weight.tag = "kept"
    model.weight.requires_grad_(True)
    model.bias.requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    model.register_forward_hook(lambda m, args, out: seen.append(out.device.type))
    model.to("tpu")
    assert model.weight.grad.is_tpu and model.weight.grad.tolist() == [[1, 1]] and not model.bias.requires_grad
    assert model.weight.tag == "kept"
    model(torch.ones(1, 2, device="tpu")).sum().backward()
    assert model.weight.grad.tolist() == [[2, 2]] and seen == ["tpu"]


@pytest.mark.parametrize(
    "make", [lambda: nn.LazyLinear(3), lambda: nn.LazyLinear(3, device="tpu"), lambda: nn.LazyConv1d(3, 1)]
)
def test_lazy_modules(make):
    model = make().to("tpu")
    x = torch.ones(2, 4, device="tpu") if isinstance(model, nn.LazyLinear) else torch.ones(2, 4, 5, device="tpu")
    model(x).sum().backward()
    assert isinstance(model.weight, nn.Parameter) and model.weight.is_tpu and model.weight.grad.is_tpu
    assert model.weight.shape[1] == 4 and "device='tpu:0'" in repr(model.weight)
    copied = copy.deepcopy(model)
    assert torch.equal(copied.weight, model.weight) and copied.weight is not model.weight


def test_lazy_batch_norm():
    model = nn.LazyBatchNorm1d().to("tpu")
    model(torch.arange(8.0, device="tpu").reshape(2, 4))
    assert model.running_mean.is_tpu and model.running_mean.tolist() == pytest.approx([0.2, 0.3, 0.4, 0.5])


def test_state_dict():
    source, target = net().to("tpu"), net().to("tpu")
    with torch.no_grad():
        for p in source.parameters():
            p.add_(1)
    state = source.state_dict()
    assert all(t.is_tpu for t in state.values()) and "hidden_away" not in state
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
    parameters = list(target.parameters())
    assert target.load_state_dict(state) == nn.modules.module._IncompatibleKeys([], [])
    assert all(a is b for a, b in zip(parameters, target.parameters(), strict=True))
    assert torch.equal(target.hidden.weight, source.hidden.weight) and target.hidden.weight is not source.hidden.weight
    with torch.no_grad():
        target.hidden.weight.zero_()
    assert not torch.equal(target.hidden.weight, source.hidden.weight)
    on_cpu = net()
    on_cpu.load_state_dict(state)
    assert torch.equal(on_cpu.hidden.weight, source.hidden.weight.cpu()) and on_cpu.hidden.weight.device.type == "cpu"
    target.load_state_dict(net().state_dict())
    assert target.hidden.weight.is_tpu and torch.equal(target.hidden.weight.cpu(), net().hidden.weight)


def test_load_state_dict_errors_and_assign():
    target, state = net().to("tpu"), net().to("tpu").state_dict()
    state["extra"] = state.pop("hidden.weight")
    assert target.load_state_dict(state, strict=False) == nn.modules.module._IncompatibleKeys(
        ["hidden.weight"], ["extra"]
    )
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_state_dict(state)
    state = {**net().state_dict(), "hidden.bias": torch.ones(7)}
    with pytest.raises(RuntimeError, match="size mismatch for hidden.bias"):
        target.load_state_dict(state)
    half = net().half().to("tpu").state_dict()
    target.load_state_dict(half, assign=True)
    assert target.hidden.weight.dtype == torch.float16 and isinstance(target.hidden.weight, nn.Parameter)
    assert target.hidden.weight.data_ptr() == half["hidden.weight"].data_ptr() and target.hidden.weight.requires_grad


def test_deepcopy_of_a_module():
    model = net().to("tpu")
    model(torch.arange(5, device="tpu")).sum().backward()
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embedding.weight is not model.head.weight
    assert copied.head.weight.grad is None  # as torch's parameters
    assert copy.deepcopy(net()).head.weight.grad is None
    with torch.no_grad():
        copied.hidden.weight.zero_()
    assert model.hidden.weight.abs().sum().item() > 0
    copied(torch.arange(5, device="tpu")).sum().backward()
    assert copied.head.weight.grad is not None and copied.scale.is_tpu
