"""torch.compile(backend="lazytpu"): whole graphs, on the device and on the CPU, equal to eager."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.dispatch.cpu_fallback import FallbackWarning
from lazytpu.errors import UnsupportedOpError
from lazytpu.frontends.dynamo import capture
from lazytpu.frontends.dynamo.compiled import CompiledGraph
from lazytpu.frontends.dynamo.direct import direct_call
from tests.support.dynamo_marks import FRESH

ROOT = Path(__file__).parents[2]

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


def test_a_warm_call_takes_inputs_in_every_state(device, monkeypatch):
    layer = nn.Linear(4, 3).to(device)
    compiled = torch.compile(layer, backend="lazytpu")
    batch = torch.arange(8.0).reshape(2, 4)

    def check(x):
        wanted = F.linear(x.detach().cpu(), layer.weight.detach().cpu(), layer.bias.detach().cpu())
        assert torch.allclose(compiled(x).cpu(), wanted, atol=1e-6)

    with torch.no_grad():
        for _ in range(4):
            check(batch.to(device))
        before = [lazytpu.metrics.counter(name) for name in ("cache_hit", "execute", "compile")]
        compiled(batch.to(device))
        assert [lazytpu.metrics.counter(n) for n in ("cache_hit", "execute", "compile")] == [
            before[0] + 1,
            before[1] + 1,
            before[2],
        ]
        check(batch.to(device) * 2)  # pending
        for _ in range(4):
            check(batch.to(device).repeat(2, 1)[1:3])  # a view
        check(batch.to(device))
        check(batch.to(device).t().contiguous().t())  # other strides
        check(torch.zeros(2, 4, device=device))
        layer.weight.mul_(2)  # pending, not an argument of this step yet
        check(batch.to(device))
        layer.weight.data = torch.ones(3, 4).to(device)
        check(batch.to(device))
        moved = torch.zeros(2, device=device).resize_(2, 4)
        moved.copy_(batch)
        check(moved)
        monkeypatch.setattr(lazytpu.config, "matmul_precision", "default")
        check(batch.to(device))
        monkeypatch.setattr(lazytpu.config, "check_bounds", True)
        check(batch.to(device))


@pytest.mark.parametrize("wrap", [lazytpu.compile, lambda f: torch.compile(f, backend="lazytpu")])
def test_another_lowering_is_another_program(device, monkeypatch, wrap):
    convolve = wrap(lambda x, w: torch.nn.functional.conv2d(x, w) * 2)
    x, w = torch.ones(1, 2, 4, 4, device=device), torch.ones(2, 2, 3, 3, device=device)
    compiles = []
    for lowerings in ("auto", "auto", "xla_convolution", "xla_convolution", "auto"):
        monkeypatch.setattr(lazytpu.config, "lowerings", lowerings)
        before = lazytpu.metrics.counter("compile") + lazytpu.metrics.counter("disk_hit")
        assert convolve(x, w).sum().item() == 288
        compiles.append(lazytpu.metrics.counter("compile") + lazytpu.metrics.counter("disk_hit") - before)
    assert compiles[1] == compiles[3] == compiles[4] == 0 < compiles[2]


@pytest.mark.parametrize(
    ("function", "direct"),
    [
        (lambda x, y: (x @ y, x.sum()), True),
        (lambda x, y: (x.view(2, 2, 2) @ y[:2]).relu(), True),
        (lambda x, y: (x, x + y[0, 0]), True),  # Dynamo returns the argument
        (lambda x, y: (x.t(), y.exp()), False),  # shares memory with an argument
        (lambda x, y: (z := x * 2, z[0]), True),  # the graph sees to memory that its results share
        (lambda x, y: (x.add_(1), y + 1)[1], False),  # changes an argument
    ],
)
def test_the_wrapper_of_aotautograd_is_left_out_where_it_has_nothing_to_do(device, monkeypatch, function, direct):
    calls = []

    def spy(*args):
        calls.append(direct_call(*args))
        return calls[-1]

    monkeypatch.setattr(capture, "direct_call", spy)
    x, y = torch.randn(2, 4), torch.randn(4, 2)
    wanted = function(x.clone(), y.clone())
    on_device = x.to(device), y.to(device)
    with torch.no_grad():
        got = torch.compile(function, backend="lazytpu")(*on_device)
    assert [call is not None for call in calls] == [direct]
    torch.testing.assert_close(torch.utils._pytree.tree_map(lambda t: t.cpu(), got), wanted)
    if isinstance(got, tuple):
        got[0].zero_()  # is seen wherever the CPU sees it
        wanted[0].zero_()
        torch.testing.assert_close(got[1].cpu(), wanted[1])


def test_a_warm_training_call_starts_executables_alone(device, monkeypatch):
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = copy.deepcopy(eager).to(device)
    compiled = torch.compile(model, backend="lazytpu")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, eager)]
    slow, elsewhere = [], torch.zeros(3).to(device)
    call = CompiledGraph.__call__
    monkeypatch.setattr(CompiledGraph, "__call__", lambda graph, args: (slow.append(graph.kind), call(graph, args))[1])
    for i in range(8):
        if i == 4:
            lazytpu.mark_step()
            slow.clear()
        x = torch.randn(3, 4)
        elsewhere = elsewhere + 1  # stays pending through the calls
        for forward, optimizer, where in ((compiled, optimizers[0], device), (eager, optimizers[1], "cpu")):
            optimizer.zero_grad()
            loss = forward(x.to(where)).pow(2).sum()
            loss.backward()
            optimizer.step()
        if i >= 4:  # the weights are values of this step before
            lazytpu.mark_step()
    assert "forward" not in slow
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-5)
    assert elsewhere.cpu().tolist() == [8.0] * 3


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


def test_an_op_without_a_rule_runs_with_a_warning(device):
    def function(x):
        return torch.nonzero(x > 0).sum() + 1

    x = torch.tensor([1.0, -1.0, 2.0])
    ours = torch.compile(function, backend="lazytpu", fullgraph=True)
    with pytest.warns(FallbackWarning, match="run op by op"):
        assert ours(x.to(device)).item() == function(x).item()


def test_whole_makes_it_an_error(device):
    compiled = torch.compile(
        lambda x: torch.nonzero(x).sum(), backend="lazytpu", fullgraph=True, options={"whole": True}
    )
    with pytest.raises(UnsupportedOpError, match="not one program"):
        compiled(torch.ones(3).to(device))


def test_unknown_options_are_refused(device):
    for options, message in (
        ({"whol": True}, 'has the options "whole" and "pad" only'),
        ({"pad": 8}, "is True or a list"),
    ):
        compiled = torch.compile(lambda x: x + 1, backend="lazytpu", options=options)
        with pytest.raises(Exception, match=message):
            compiled(torch.ones(3).to(device))


def padded(function, pad=True):
    return torch.compile(function, backend="lazytpu", fullgraph=True, options={"pad": pad})


def varying(x, device):
    x = x.to(device)
    torch._dynamo.mark_dynamic(x, 0)
    return x


class Tokens(nn.Module):
    """An embedding, attention, a reshape that merges batch and length, and results with and without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.layer(self.embed(tokens))
        return self.head(x.mean(1)), x.reshape(-1, 8).softmax(-1), self.head.weight.sum()


@torch.no_grad()
def test_padded_batches_compile_few_programs_and_equal_eager(device):
    torch.manual_seed(0)
    for eager, batch in (
        (Tokens(), lambda n: torch.randint(0, 11, (n, 5))),
        (
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
            lambda n: torch.randn(n, 1, 6, 6),
        ),
    ):
        compiled = padded(copy.deepcopy(eager.eval()).to(device))
        lazytpu.metrics.reset()
        for n in (5, 8, 12):
            x = batch(n)
            ours, theirs = compiled(varying(x, device)), eager(x)
            pairs = zip(ours, theirs, strict=True) if isinstance(eager, Tokens) else [(ours, theirs)]
            for a, b in pairs:
                torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)
                assert a.stride() == b.stride()
        causes = [c.cause.text for c in events.compilations if "inference graph" in c.cause.text]
        assert len(causes) == 2, causes  # for 8 and for 16


@torch.no_grad()
def test_padding_to_given_sizes(device):
    compiled = padded(lambda x: x * 2, [4, 10])
    for n in (2, 3, 4, 7, 10, 13):
        x = torch.randn(n, 3)
        torch.testing.assert_close(compiled(varying(x, device)).cpu(), x * 2)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x - x.mean(0), "aten.mean.dim may mix its rows.*\n.*test_dynamo.py"),
        (lambda x: x @ x.t(), "2 sizes that vary"),
        (lambda x: x * x.shape[0], "aten.mul.Tensor may mix"),
        (lambda x: x + torch.arange(x.shape[0], device=x.device)[:, None], "aten.arange.default may mix"),
        (lambda x: torch.cat([x, x]), "aten.cat.default may mix"),
        (lambda x: x.t().reshape(-1, 1) * 2, "may mix"),
        (lambda x: F.batch_norm(x, None, None, training=True), "may mix"),
        (lambda x: F.dropout(x, 0.5), "native_dropout.default may mix"),
        (lambda x: x.add_(1), "aten.copy_.default may mix"),
        (lambda x: (x + 1, x.shape[0]), "the function returns a size"),
    ],
)
@torch.no_grad()
def test_padding_is_refused_where_rows_may_mix(device, function, why):
    with pytest.raises(Exception, match=f"the batch cannot be padded: .*{why}"):
        padded(function)(varying(torch.randn(5, 3), device))


def test_padding_is_refused_in_training(device):
    linear = nn.Linear(3, 2).to(device)
    with pytest.raises(Exception, match="is for calls that need no gradient"):
        padded(linear)(varying(torch.randn(5, 3), device))


def test_files_are_written_when_asked(device, tmp_path, monkeypatch):
    monkeypatch.setattr(lazytpu.config, "dump", str(tmp_path))
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh()).to(device)
    torch.compile(model, backend="lazytpu")(torch.randn(5, 7).to(device)).sum().backward()
    forward = next(p.parent for p in tmp_path.rglob("weights.npz"))
    assert {"fx.txt", "executable.bin", "stablehlo.mlir", "ir.txt"} <= {p.name for p in forward.iterdir()}
    assert "torch.ops.aten.addmm" in (forward / "fx.txt").read_text()
    assert "torch.compile" in (forward / "cause.txt").read_text()
    weights = np.load(forward / "weights.npz")
    assert sorted(weights) == ["0.bias", "0.weight"]
    np.testing.assert_array_equal(weights["0.weight"], model[0].weight.detach().cpu().numpy())
    assert len(list(tmp_path.rglob("fx.txt"))) == 2  # forward and backward
    manifest = json.loads((forward / "manifest.json").read_text())
    assert {*manifest["files"], "manifest.json"} == {p.name for p in forward.iterdir()}


def test_the_key_of_a_backward_graph_is_the_same_in_every_process(device):
    model = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 11), nn.GELU(), nn.Linear(11, 3), nn.Sigmoid())
    torch.compile(model.to(device), backend="lazytpu")(torch.randn(5, 7).to(device)).sum().backward()
    graphs = [e.graph for e in events.compilations if len(e.graph.donated) > 2]
    assert graphs
    assert all(list(graph.donated) == sorted(graph.donated) for graph in graphs), "not the order of a set"


def test_no_import_is_needed_and_none_is_made(tmp_path):
    program = """
import sys, torch
if sys.argv[1] == "imported":
    import lazytpu
    assert "torch._dynamo" not in sys.modules
x = torch.arange(3.0)
print(torch.compile(lambda x: x + 1, backend="lazytpu")(x).tolist(), "lazytpu" in sys.modules)
"""
    metadata = tmp_path / "lazytpu-0.dist-info"  # what an installed package has
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lazytpu\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[torch_dynamo_backends]\nlazytpu = lazytpu.frontends.dynamo:backend\n")
    for how, path in (("imported", str(ROOT)), ("entry point", f"{tmp_path}{os.pathsep}{ROOT}")):
        done = subprocess.run(
            [sys.executable, "-c", program, how],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n")[0] == "[1.0, 2.0, 3.0] True"


def test_the_entry_point_is_declared():
    assert 'lazytpu = "lazytpu.frontends.dynamo:backend"' in (ROOT / "pyproject.toml").read_text()


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
