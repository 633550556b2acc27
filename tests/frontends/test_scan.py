"""`lazytpu.scan_layers`: the loop is the layers one after the other, with gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu.errors import LazyTPUError


class Block(nn.Module):
    """A layer with what transformers have: normalisation, matmuls, a mask, numbers from Python and dropout."""

    def __init__(self, width: int = 8, rate: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.rate, self.scale = rate, 0.5
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        h = F.gelu(self.up(self.norm(x))) * self.scale + 2
        h = F.dropout(self.down(h), self.rate, self.training) + self.shift
        return x + (h if mask is None else h * mask)


def pair(n: int = 4, **options: Any) -> tuple[nn.ModuleList, nn.ModuleList]:
    torch.manual_seed(0)
    layers = nn.ModuleList([Block(**options) for _ in range(n)])
    return layers, copy.deepcopy(layers).to(lazytpu.device())


def close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("checkpoint", "masked"), [(False, True), (True, False)])
def test_results_and_gradients(checkpoint: bool, masked: bool) -> None:
    ref, layers = pair()
    x = torch.randn(3, 8)
    mask = torch.rand(3, 8) if masked else None
    given = [t.detach().to(lazytpu.device()).requires_grad_() for t in (x, mask) if t is not None]
    wanted = [t.detach().clone().requires_grad_() for t in (x, mask) if t is not None]
    for _ in range(3):
        y = lazytpu.scan_layers(layers, *given, checkpoint=checkpoint)
        z = lazytpu.scan_layers(ref, *wanted)
        close(y, z)
        y.square().sum().backward()
        z.square().sum().backward()
        lazytpu.mark_step()
    for p, q in zip([*layers.parameters(), *given], [*ref.parameters(), *wanted], strict=True):
        close(p.grad, q.grad)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_training(checkpoint: bool) -> None:
    ref, layers = pair()
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (ref, layers)]
    lazytpu.metrics.reset()
    for i in range(6):
        torch.manual_seed(i)
        x = torch.randn(3, 8)
        losses = []
        for net, opt in zip((ref, layers), optimizers, strict=True):
            opt.zero_grad()
            loss = lazytpu.scan_layers(net, x.to(net[0].shift.device), checkpoint=checkpoint).square().mean()
            loss.backward()
            opt.step()
            losses.append(loss)
        lazytpu.mark_step()
        close(losses[1], losses[0])
    assert lazytpu.metrics.counter("compile") == 2


def test_a_number_that_changes_compiles_nothing() -> None:
    ref, layers = pair()
    x = torch.randn(3, 8)
    for k in range(5):
        if k == 1:
            lazytpu.metrics.reset()
        for net in (ref, layers):
            for layer in net:
                layer.scale = 0.1 * k
        close(lazytpu.scan_layers(layers, x.to(lazytpu.device())), lazytpu.scan_layers(ref, x))
    assert (lazytpu.metrics.counter("compile"), lazytpu.metrics.counter("cache_hit")) == (0, 4)


def test_without_gradients_and_without_layers() -> None:
    ref, layers = pair()
    x = torch.randn(3, 8)
    with torch.no_grad():
        y = lazytpu.scan_layers(layers, x.to(lazytpu.device()))
        close(y, lazytpu.scan_layers(ref, x))
    assert not y.requires_grad
    assert lazytpu.scan_layers([], x) is x


@pytest.mark.parametrize("checkpoint", [False, True])
def test_dropout_differs_in_each_layer_and_is_the_same_backward(checkpoint: bool) -> None:
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.dropout(self.weight, 0.5)

    layers = nn.ModuleList([Drop() for _ in range(4)]).to(lazytpu.device())
    x = torch.zeros(64, device=lazytpu.device())
    masks = []
    for _ in range(2):
        layers.zero_grad()
        y = lazytpu.scan_layers(layers, x, checkpoint=checkpoint)
        y.sum().backward()
        close(y, sum(layer.weight.grad.cpu() for layer in layers))
        masks += [layer.weight.grad.cpu() for layer in layers]
    assert len({tuple(m.tolist()) for m in masks}) == 8


def test_a_tensor_from_outside() -> None:
    """It is the same for each layer, a value of the graph around it included."""
    outside = torch.randn(8)
    held = {"cpu": outside, "tpu": outside.to(lazytpu.device()) * 1}

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + held[x.device.type]

    ref = nn.ModuleList([Adds() for _ in range(3)])
    layers = copy.deepcopy(ref).to(lazytpu.device())
    x = torch.randn(8)
    y = lazytpu.scan_layers(layers, x.to(lazytpu.device()))
    y.sum().item()  # a cut between the passes
    y.sum().backward()
    z = lazytpu.scan_layers(ref, x)
    z.sum().backward()
    close(y, z)
    close(layers[1].weight.grad, ref[1].weight.grad)


def test_the_compiled_step_holds_it() -> None:
    ref, layers = pair(rate=0.0)
    optimizer, reference = torch.optim.SGD(layers.parameters(), 0.01), torch.optim.SGD(ref.parameters(), 0.01)
    lazytpu.metrics.reset()

    @lazytpu.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = lazytpu.scan_layers(layers, x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for i in range(8):
        torch.manual_seed(i)
        x = torch.randn(3, 8)
        reference.zero_grad()
        want = lazytpu.scan_layers(ref, x).square().mean()
        want.backward()
        reference.step()
        close(step(x.to(lazytpu.device())), want)
    assert lazytpu.metrics.counter("replay") >= 4, lazytpu.explain()


def test_the_graph_has_one_node_whatever_the_depth() -> None:
    texts = []
    for n in (2, 5):
        _, layers = pair(n)
        y = lazytpu.scan_layers(layers, torch.ones(3, 8, device=lazytpu.device()))
        texts.append(lazytpu.ir_text(y).count("aten.gelu"))
    assert texts == [1, 1]


# --- what is refused --------------------------------------------------------------------------------------------


def test_layers_that_differ() -> None:
    _, layers = pair()
    x = torch.ones(3, 8, device=lazytpu.device())
    layers[2].scale = 0.25
    with pytest.raises(ValueError, match=r"scale is 0.5 in layer 0 and 0.25 in layer 2"):
        lazytpu.scan_layers(layers, x)
    layers[2].scale = 0.5
    layers[1].up = nn.Linear(8, 16, bias=False).to(lazytpu.device())
    with pytest.raises(ValueError, match=r"up.bias is \(\(16,\), torch.float32, True\) in layer 0 and None in layer 1"):
        lazytpu.scan_layers(layers, x)
    layers[1].eval()
    with pytest.raises(ValueError, match="training is True in layer 0 and False in layer 1"):
        lazytpu.scan_layers(layers[:2], x)


def test_layers_that_cannot_be_a_loop() -> None:
    x = torch.ones(3, 8, device=lazytpu.device())
    outside = torch.ones(8, device=lazytpu.device(), requires_grad=True)
    memory: list[Any] = []
    total = torch.zeros(3, 8, device=lazytpu.device())
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda x: x.reshape(8, 3), ValueError, "gives"),
        (lambda x: (x, x), ValueError, "not a tensor"),
        (lambda x: x * x.sum().item(), LazyTPUError, "needs the value of a tensor"),
        (lambda x: x * outside, LazyTPUError, "needs a gradient and is not its own"),
        (lambda x: memory.append(x * 2) or x * 3, LazyTPUError, "keeps a tensor"),
        (lambda x: x.add_(1), LazyTPUError, "writes to a parameter, a buffer or an argument"),
        (lambda x: x + total.add_(x), LazyTPUError, "writes to a tensor that is not its own"),
    ]

    class Runs(nn.Module):
        def __init__(self, run: Any) -> None:
            super().__init__()
            self.weight, self.run = nn.Parameter(torch.ones(8)), run

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x * self.weight) if self.run is not cases[5][0] else self.run(x)

    for run, error, text in cases:
        layers = nn.ModuleList([Runs(run) for _ in range(2)]).to(lazytpu.device())
        with torch.no_grad() if run is cases[5][0] else torch.enable_grad(), pytest.raises(error, match=text):
            lazytpu.scan_layers(layers, x)
        memory.clear()
    assert (x.sum().item(), total.sum().item()) == (24.0, 0.0)


def test_layers_of_another_device_are_a_plain_loop() -> None:
    ref, _ = pair()
    x = torch.randn(3, 8, requires_grad=True)
    y, z = lazytpu.scan_layers(ref, x, checkpoint=True), x
    for layer in ref:
        z = layer(z)
    assert torch.equal(y, z)
