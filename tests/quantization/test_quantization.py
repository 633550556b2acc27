"""Quantized modules: exact where they are integers, close to the float module, the same on the device and the CPU."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazytpu
from lazytpu import compat, quantization
from lazytpu.compat.torch_mlu.core import mlu_model, mlu_quantize
from lazytpu.quantization import numbers

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(12, 7), (5, 12)),
    "linear_of_three": (lambda: nn.Linear(12, 7, bias=False), (2, 5, 12)),
    "linear_of_one": (lambda: nn.Linear(12, 7), (12,)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 8, 3), (2, 3, 9, 8)),
    "conv2d_strided": (lambda: nn.Conv2d(4, 8, (3, 2), stride=(2, 1), padding=(0, 1), dilation=(1, 2)), (2, 4, 9, 8)),
    "conv2d_grouped": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), (1, 4, 6, 6)),
    "conv2d_same": (lambda: nn.Conv2d(2, 3, 4, padding="same"), (2, 2, 7, 7)),
    "conv2d_without_batch": (lambda: nn.Conv2d(3, 8, 3), (3, 9, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1), (1, 2, 4, 4, 5)),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    return make().eval(), torch.randn(shape)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("name", LAYERS)
def test_integers_on_the_device_are_those_on_the_cpu(name: str, bits: int, device: torch.device) -> None:
    layer, x = made(name)
    quantized = quantization.quantize_dynamic(layer, bits)
    want = quantized(x)
    torch.testing.assert_close(quantized.to(device)(x.to(device)).cpu(), want, rtol=1e-6, atol=1e-6)
    assert want.shape == layer(x).shape
    error = (want - layer(x)).abs().max() / layer(x).abs().max()
    assert error < (0.03 if bits == 8 else 2e-4)


def test_sums_are_exact(device: torch.device) -> None:
    q = torch.full((2, 70_000), 127, dtype=torch.int8)
    assert numbers.integer_linear(q.to(device), q.to(device)).tolist() == [[127 * 127 * 70_000] * 2] * 2
    wide = torch.full((1, 3, 40, 40), 32767, dtype=torch.int16)
    weight = torch.full((1, 3, 3, 3), -32767, dtype=torch.int16)
    sums = numbers.integer_conv(wide.to(device), weight.to(device), [1, 1], [0, 0], [1, 1], 1)
    assert sums.dtype == torch.int64
    assert sums.unique().tolist() == [-27 * 32767 * 32767]


def test_products_are_integers_in_the_program(device: torch.device) -> None:
    for name in ("linear", "conv2d"):
        layer, x = made(name)
        text = lazytpu.stablehlo_text(quantization.quantize_dynamic(layer).to(device)(x.to(device)))
        products = [line for line in text.splitlines() if "= stablehlo.dot_general" in line]
        assert len(products) == 1
        assert "xi8>" in products[0].split("->")[0]
        assert "xi32>" in products[0].split("->")[1]


def test_torchs_own_product_of_integers_is_one(device: torch.device) -> None:
    q = torch.randint(-128, 128, (40, 24), dtype=torch.int8)
    y = torch._int_mm(q.to(device), q.to(device).t())
    (product,) = [line for line in lazytpu.stablehlo_text(y).splitlines() if "= stablehlo.dot_general" in line]
    assert "xi8>" in product.split("->")[0]
    assert torch.equal(y.cpu(), torch._int_mm(q, q.t()))


def test_the_compiled_program_has_integer_products(device: torch.device) -> None:
    layer, x = made("linear")
    text = lazytpu.hlo_text(quantization.quantize_dynamic(layer).to(device)(x.to(device)))
    (product,) = [line for line in text.splitlines() if " dot(" in line]
    assert re.search(r"= s32\[[\d,]+\]\S* dot\(", product)
    operands = re.search(r" dot\(([^)]*)\)", product)
    assert operands is not None
    for name in re.findall(r"%?([\w.\-]+)(?:,|$)", operands[1]):
        assert re.search(rf"^\s*(?:ROOT )?%?{re.escape(name)} = s8\[", text, re.M), name


@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The net of the example, trained on scikit-learn's digits; images for calibration, images and labels."""
    path = Path(__file__).parents[2] / "examples/train_mnist.py"
    spec = spec_from_file_location("train_mnist", path)
    assert spec is not None
    assert spec.loader is not None
    example = module_from_spec(spec)
    spec.loader.exec_module(example)
    train, test = example.load_data("digits")
    torch.manual_seed(0)
    net = example.CNN()
    x, y = train.tensors
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(2):
        for at in torch.randperm(len(x)).split(96):
            optimizer.zero_grad()
            torch.nn.functional.nll_loss(net(x[at]), y[at]).backward()
            optimizer.step()
    return net.eval(), x[:128], *test.tensors


@pytest.mark.parametrize("how", ["dynamic", "per_tensor", "static", "weights8", "weights4"])
def test_digits_are_read_as_well_as_in_floats(how: str, digits: Any, device: torch.device) -> None:
    net, sample, x, y = digits
    quantize = {
        "dynamic": lambda: quantization.quantize_dynamic(net),
        "per_tensor": lambda: quantization.quantize_dynamic(net, per_channel=False),
        "static": lambda: quantization.quantize_static(net, quantization.calibrate(net, [sample])),
        "weights8": lambda: quantization.quantize_weights(net),
        "weights4": lambda: quantization.quantize_weights(net, bits=4),
    }
    with torch.no_grad():
        floats = (net(x).argmax(1) == y).float().mean().item()
        integers = (quantize[how]().to(device)(x.to(device)).argmax(1).cpu() == y).float().mean().item()
    assert floats > 0.9
    assert integers > floats - 0.005


def test_the_device_holds_a_quarter_of_the_bytes(device: torch.device) -> None:
    def held(make: Any) -> tuple[int, nn.Module]:
        gc.collect()
        lazytpu.wait()
        before = torch.get_device_module(device).memory_allocated()
        net = make().to(device)
        lazytpu.wait()
        return torch.get_device_module(device).memory_allocated() - before, net

    source = nn.Linear(512, 512, bias=False)
    floats, kept = held(lambda: copy.deepcopy(source))
    integers, quantized = held(lambda: quantization.quantize_dynamic(source))
    assert floats == 4 * 512 * 512
    assert integers == 512 * 512 + 4 * 512  # and a scale for each row
    del kept, quantized


def convolution() -> tuple[nn.Module, torch.Tensor]:
    layer, x = made("conv2d")
    return quantization.quantize_dynamic(nn.Sequential(layer, nn.Flatten(), nn.Linear(8 * 42, 3))), x


def recurrence() -> tuple[nn.Module, torch.Tensor]:
    return quantization.quantize_dynamic(Net()), torch.randint(0, 20, (2, 3))


def weights_only() -> tuple[nn.Module, torch.Tensor]:
    return quantization.quantize_weights(nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3)), 4), torch.ones(
        2, 64
    )


@pytest.mark.parametrize("make", [convolution, recurrence, weights_only])
def test_a_quantized_model_is_saved_exported_and_packaged(make: Any, device: torch.device, tmp_path: Path) -> None:
    net, x = make()
    net = net.to(device).eval()
    want = net(x.to(device)).detach().cpu()
    torch.save(net, tmp_path / "net.pt")
    again = torch.load(tmp_path / "net.pt", weights_only=False)
    torch.testing.assert_close(again(x.to(device)).detach().cpu(), want)
    program = lazytpu.export.stablehlo(torch.export.export(net, (x.to(device),)))
    products = [
        line for line in program.text().splitlines() if "dot_general" in line or "stablehlo.convolution" in line
    ]
    assert products
    if make is not weights_only:
        assert all(
            "xi8>" in operands and "xi32>" in sums for operands, _, sums in (p.rpartition("->") for p in products)
        )
    torch.testing.assert_close(program(x.to(device)).cpu(), want, rtol=1e-4, atol=1e-4)
    lazytpu.export.package(net, (x.to(device),), tmp_path / "net.ltz")
    torch.testing.assert_close(lazytpu.load(tmp_path / "net.ltz")(x.to(device)).cpu(), want, rtol=1e-4, atol=1e-4)


def test_wrong_operands_are_refused(device: torch.device) -> None:
    q = torch.ones((2, 3), dtype=torch.int8, device=device)
    for wrong in (q.short(), q.float(), q[:, :2], q[0]):
        with pytest.raises(RuntimeError):
            numbers.integer_linear(q, wrong)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.rnn = nn.LSTM(8, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(32, 5)
        self.again = self.out

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.again(self.rnn(self.table(ids))[0])


def test_a_network_keeps_what_it_shares(device: torch.device) -> None:
    torch.manual_seed(0)
    net, ids = Net(), torch.randint(0, 20, (3, 6))
    quantized = quantization.quantize_dynamic(net)
    assert type(net.out) is nn.Linear
    assert quantized.out is quantized.again
    assert type(quantized.table) is quantization.QuantizedEmbedding
    assert type(quantized.rnn) is quantization.QuantizedLSTM
    torch.testing.assert_close(quantized(ids), net(ids), rtol=0, atol=0.05)
    torch.testing.assert_close(quantized.to(device)(ids.to(device)).cpu(), quantized.cpu()(ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("case", ["plain", "state", "lone"])
def test_lstm_as_torch(case: str, batch_first: bool) -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(6, 5, num_layers=2, bias=case != "state", batch_first=batch_first)
    x = torch.randn(4, 6) if case == "lone" else torch.randn(3, 4, 6)
    state = None
    if case == "state":
        state = tuple(torch.randn(2, 4 if not batch_first else 3, 5) for _ in range(2))
    want, (h, c) = lstm(x, state)
    got, (gh, gc) = quantization.QuantizedLSTM(lstm, bits=16)(x, state)
    for a, b in ((got, want), (gh, h), (gc, c)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)


def test_static_scales_come_from_sample_data(device: torch.device) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).to(device)
    data = [torch.randn(4, 1, 8, 8, device=device) for _ in range(3)]
    ranges = quantization.calibrate(net, data)
    assert set(ranges) == {"0", "3"}
    assert float(ranges["0"]) == max(float(x.abs().max()) for x in data)
    lazytpu.mark_step()
    quantized = quantization.quantize_static(net, ranges)
    lazytpu.mark_step()
    assert "aten.amax" in lazytpu.ir_text(quantization.quantize_dynamic(net)(data[0]))
    assert "aten.amax" not in lazytpu.ir_text(quantized(data[0]))
    torch.testing.assert_close(quantized(data[0]).cpu(), net(data[0]).detach().cpu(), rtol=0, atol=0.05)
    with pytest.raises(KeyError):
        quantization.quantize_static(net, {})


@pytest.mark.parametrize("bits", [8, 4])
def test_weight_only(bits: int, device: torch.device) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    x = torch.randn(16, 64)
    quantized = quantization.quantize_weights(net, bits)
    got = quantized.to(device)(x.to(device)).cpu()
    torch.testing.assert_close(got, net(x), rtol=0, atol=0.02 if bits == 8 else 0.2)
    size = sum(t.numel() * t.element_size() for name, t in quantized.state_dict().items() if name.endswith("weight"))
    assert size * (32 // bits) == 4 * (64 * 32 + 32 * 8)


def test_int4_packs_every_value() -> None:
    q = torch.tensor(list(itertools.product(range(-7, 8), repeat=2)), dtype=torch.int8)
    assert torch.equal(numbers.unpack_int4(numbers.pack_int4(q)), q)


def test_a_state_dict_is_a_quarter_and_loads(device: torch.device) -> None:
    layer, x = made("linear")
    quantized = quantization.quantize_dynamic(layer).to(device)
    assert quantized.state_dict()["weight"].dtype == torch.int8
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    other = quantization.quantize_dynamic(nn.Linear(12, 7))
    other.load_state_dict(torch.load(file, map_location="cpu"))
    torch.testing.assert_close(other(x), quantized(x.to(device)).cpu())


@pytest.mark.parametrize("bits", [8, 16, 31])
def test_training_with_rounding_follows_the_cpu(bits: int, device: torch.device) -> None:
    def train(on: Any) -> tuple[list[float], nn.Module]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
        net = quantization.prepare_training(net, bits).to(on)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x, y = torch.randn(16, 1, 6, 6).to(on), torch.randint(0, 3, (16,)).to(on)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, net

    ours, net = train(device)
    theirs, _ = train("cpu")
    assert ours == pytest.approx(theirs, rel=2e-2 if bits == 8 else 1e-3)  # a value on the edge rounds either way
    assert ours[-1] < ours[0]
    if bits == 31:
        with pytest.raises(ValueError, match="8 or 16"):
            quantization.convert(net)
        return
    x = torch.randn(4, 1, 6, 6, device=device)
    converted = quantization.convert(net)
    assert type(converted[0]) is quantization.QuantizedConv
    torch.testing.assert_close(converted(x), net.eval()(x), rtol=0, atol=1e-3 if bits == 16 else 0.02)


def test_rounding_passes_gradients_within_the_range() -> None:
    x = torch.tensor([-3.0, -0.4, 0.0, 0.7, 2.0], requires_grad=True)
    y = quantization.training.rounded(x, torch.tensor(1.0), 4)
    assert [round(v * 7) for v in y.tolist()] == [-7, -3, 0, 5, 7]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    "call",
    [
        lambda: quantization.quantize_dynamic(nn.Linear(2, 2), bits=4),
        lambda: quantization.quantize_weights(nn.Linear(2, 2), bits=3),
        lambda: quantization.quantize_weights(nn.Linear(2, 2), bits=4, group=3),
        lambda: quantization.prepare_training(nn.Linear(2, 2), bits=1),
        lambda: quantization.QuantizedConv(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")),
        lambda: mlu_quantize.quantize_dynamic_mlu(nn.Linear(2, 2), dtype="int4"),
        lambda: mlu_quantize.adaptive_quantize(nn.Linear(2, 2), 10, bitwidth=12),
        lambda: mlu_model.set_core_version("MLU1"),
        lambda: mlu_model.set_core_number(0),
    ],
)
def test_what_is_not_possible_is_refused(call: Any) -> None:
    with pytest.raises(ValueError, match=r"\w+"):
        call()


def test_as_torch_mlu_has_it(device: torch.device) -> None:
    compat.install("torch_mlu")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5)).eval()
    x = torch.rand(1, 1, 8, 8)
    spec = {"mean": [0], "std": [1 / 255], "firstconv": True}
    quantized = mlu_quantize.quantize_dynamic_mlu(net, spec, dtype="int8", gen_quant=True)
    want = quantized(x)
    torch.testing.assert_close(want, net(x), rtol=0, atol=0.02)
    on_device = quantized.to(mlu_model.mlu_device())
    torch.testing.assert_close(on_device(x.to(device)).cpu(), want)
    image = torch.randint(0, 256, (1, 1, 8, 8), dtype=torch.uint8)
    image[0, 0, 0, 0] = 255  # with an even maximum half of the bytes would lie between two integers
    as_bytes, as_floats = on_device(image.to(device)), on_device(image.float().to(device))
    assert (as_bytes - as_floats).abs().max() < 0.02 * as_floats.abs().max()

    trained = mlu_quantize.adaptive_quantize(net, steps_per_epoch=100, bitwidth=8)
    assert trained is net
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    trained(x).sum().backward()
    optimizer.step()
    trained.to(mlu_model.mlu_device())
    optimizer = mlu_model.to(optimizer, device)
    assert {s["momentum_buffer"].device for s in optimizer.state.values()} == {device}
