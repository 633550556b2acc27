"""torch.compile(backend="lazytpu"): whole graphs, on the device and on the CPU, equal to eager."""

from __future__ import annotations

import copy

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazytpu
from tests.support.dynamo_marks import FRESH

pytestmark = FRESH


class Net(nn.Module):
    """A convolution, batch norm, a counter that is written in place, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = F.relu(self.norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


def batches(n):
    torch.manual_seed(0)
    return [(torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,))) for _ in range(n)]


def train(model, forward, data, device):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        lazytpu.mark_step()
        losses.append(loss.detach())
    return torch.stack([loss.cpu() for loss in losses])


@pytest.mark.parametrize("where", ["tpu", "cpu"])
def test_training_matches_eager(where):
    torch.manual_seed(1)
    eager = Net()
    model = copy.deepcopy(eager).to(where)
    data = batches(4)
    ours = train(model, torch.compile(model, backend="lazytpu"), data, where)
    torch.testing.assert_close(ours, train(eager, eager, data, "cpu"), rtol=1e-4, atol=1e-5)
    for (name, a), b in zip(model.state_dict().items(), eager.state_dict().values(), strict=True):
        assert a.device.type == where
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_inference_compiles_once_and_is_one_program(device):
    eager = Net().eval()
    compiled = torch.compile(copy.deepcopy(eager).to(device), backend="lazytpu", fullgraph=True)
    with torch.no_grad():
        for x, _ in batches(3):
            torch.testing.assert_close(compiled(x.to(device)).cpu(), eager(x), rtol=1e-4, atol=1e-5)
    assert lazytpu.metrics.counter("execute") == 3
    assert lazytpu.metrics.counter("cut") == 0


@pytest.mark.parametrize("dynamic", [False, None, True])
def test_a_changed_size_compiles_again(device, dynamic):
    linear = nn.Linear(5, 2)
    compiled = torch.compile(copy.deepcopy(linear).to(device), backend="lazytpu", dynamic=dynamic, fullgraph=True)
    for n in (3, 4, 7, 3, 4, 7):
        x = torch.randn(n, 5)
        theirs = linear(x)
        ours = compiled(x.to(device))
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)
        theirs.sum().backward()
        ours.sum().backward()
    torch.testing.assert_close(compiled.weight.grad.cpu(), linear.weight.grad, rtol=1e-4, atol=1e-4)
    lazytpu.metrics.reset()
    compiled(torch.randn(4, 5).to(device))
    assert lazytpu.metrics.counter("compile") == 0


def test_graph_breaks_are_tolerated(device):
    def function(x):
        y = x * 2
        if y.sum() > 0:
            return y + 1
        return y - 1

    compiled = torch.compile(function, backend="lazytpu")
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(compiled(x.to(device)).cpu(), function(x))


def test_arguments_and_views_of_them_are_written(device):
    def function(x, y):
        x.add_(1)
        y[1:] *= 2
        return x.sum() + y.sum()

    def run(where):
        base = torch.arange(6.0).to(where)
        x, y = torch.ones(3).to(where), base[2:5]
        call = function if where == "cpu" else torch.compile(function, backend="lazytpu", fullgraph=True)
        return [call(x, y), call(x, y), x, base]

    for ours, theirs in zip(run(device), run("cpu"), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def test_results_that_alias(device):
    def function(x):
        y = x * 2
        return y, y[1:], x, x.view(-1), y

    x = torch.arange(4.0)
    ours = torch.compile(function, backend="lazytpu", fullgraph=True)(x.to(device))
    for a, b in zip(ours, function(x), strict=True):
        torch.testing.assert_close(a.cpu(), b)
    ours[0].add_(1)
    torch.testing.assert_close(ours[1].cpu(), ours[0].cpu()[1:])


def test_inputs_in_every_state(device):
    compiled = torch.compile(lambda a, b, c, d: a + b.sum() + c + d, backend="lazytpu", fullgraph=True)
    base = torch.arange(12.0).reshape(3, 4)
    on = base.to(device)
    pending = on * 3
    ours = compiled(on.t()[1:3], on[1], pending[0, :3], torch.tensor(2.0))
    theirs = base.t()[1:3] + base[1].sum() + (base * 3)[0, :3] + 2.0
    torch.testing.assert_close(ours.cpu(), theirs)
    torch.testing.assert_close(pending.cpu(), base * 3)


def test_neither_jax_nor_this_package_is_traced_where_a_function_breaks(device):
    def function(x):
        y = x * 2
        chosen = y[y > 0]  # cuts, and makes a tensor from the host's
        return lazytpu.call_jax(_shifted, chosen).sum(), torch.nonzero(y).shape[0]

    x = torch.tensor([1.0, -1.0, 0.0, 3.0])
    compiled = torch.compile(function, backend="lazytpu")
    for _ in range(2):
        total, count = compiled(x.to(device))
        assert (total.item(), count) == (2 + 6 + 2 * 5, 3)


def test_kernels_are_not_traced_in_code_that_dynamo_runs_as_it_is(device):
    def function(x):
        return [torch.autograd.grad(f(x).sum(), x)[0] for f in (torch.abs, torch.sqrt, torch.relu, torch.sign)]

    x = torch.rand(4).requires_grad_()
    on = x.detach().to(device).requires_grad_()
    compiled = torch.compile(function, backend="lazytpu")
    for _ in range(2):
        torch.testing.assert_close([t.cpu() for t in compiled(on)], function(x))


def _shifted(x):
    return x + jnp.asarray(np.array([5.0], np.float32))  # numpy's calls are what Dynamo would trace


@pytest.mark.parametrize("where", ["tpu", "cpu"])
@pytest.mark.parametrize("drops", [lambda x: F.dropout(x * 2, 0.5).sin(), lambda x: (torch.rand_like(x) > 0.5) * x])
def test_checkpoints_draw_the_same_numbers_twice(where, drops):
    results = []
    for function in (drops, lambda x: checkpoint(drops, x, use_reentrant=False)):
        torch.manual_seed(3)
        x = torch.ones(64).to(where).requires_grad_()
        out = torch.compile(function, backend="lazytpu", fullgraph=True)(x)
        out.sum().backward()
        results.append((out.detach().cpu(), x.grad.cpu()))
    torch.testing.assert_close(results[1], results[0])
    assert 0 < results[0][1].count_nonzero() < 64


def test_random_numbers_are_those_of_the_recorded_path(device):
    def function(x):
        return F.dropout(x, 0.5) + torch.rand_like(x)

    compiled = torch.compile(function, backend="lazytpu", fullgraph=True)
    x = torch.ones(64).to(device)
    torch.manual_seed(5)
    first, second = compiled(x).cpu(), compiled(x).cpu()
    torch.manual_seed(5)
    recorded = function(x).cpu()
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, recorded)


def test_autocast(device):
    linear = nn.Linear(8, 8)
    ours = copy.deepcopy(linear).to(device)

    def function(x):
        with torch.autocast("tpu", dtype=torch.bfloat16):
            return ours(x)

    out = torch.compile(function, backend="lazytpu", fullgraph=True)(torch.ones(2, 8).to(device))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = linear(torch.ones(2, 8))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-2, atol=2e-2)


def test_saved_activations_are_donated_unless_the_graph_is_kept(device):
    def function(x, w):
        for _ in range(3):
            x = torch.tanh(x @ w)
        return x.sum()

    compiled = torch.compile(function, backend="lazytpu", fullgraph=True)
    x, w = torch.randn(8, 8).to(device), torch.randn(8, 8).to(device).requires_grad_()
    compiled(x, w).backward()
    lazytpu.metrics.reset()
    w.grad = None
    compiled(x, w).backward()
    once = w.grad.cpu()
    assert lazytpu.metrics.counter("donated") > 0
    w.grad = None
    loss = compiled(x, w)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(w.grad.cpu(), 2 * once)


def test_the_table_of_decompositions():
    table = lazytpu.lowering.decompositions()
    assert torch.ops.aten.relu.default not in table  # it has a rule
    assert all(callable(f) for f in table.values())
    assert len(table) > 100


def test_resnet50_trains_a_step_like_eager(device):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    eager = models.resnet50(num_classes=10)
    model = copy.deepcopy(eager).to(device)
    x, y = torch.randn(2, 3, 64, 64), torch.tensor([1, 7])
    compiled = torch.compile(model, backend="lazytpu")
    ours, theirs = F.cross_entropy(compiled(x.to(device)), y.to(device)), F.cross_entropy(eager(x), y)
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-3)
    ours.backward()
    theirs.backward()
    for a, b in ((model.fc, eager.fc), (model.layer4[2].conv3, eager.layer4[2].conv3)):
        torch.testing.assert_close(a.weight.grad.cpu(), b.weight.grad, rtol=1e-2, atol=1e-3)


def test_bert_trains_a_step_like_eager(device):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=200
    )
    eager = transformers.BertForSequenceClassification(config).eval()
    model = copy.deepcopy(eager).to(device)
    tokens, labels = torch.randint(0, 200, (2, 12)), torch.tensor([0, 1])
    compiled = torch.compile(model, backend="lazytpu")
    ours = compiled(input_ids=tokens.to(device), labels=labels.to(device)).loss
    theirs = eager(input_ids=tokens, labels=labels).loss
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)
    ours.backward()
    theirs.backward()
    for (name, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(
                a.grad.cpu(), b.grad, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
            )
