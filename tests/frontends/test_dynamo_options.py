"""torch.compile(backend="lazytpu"): ops without a rule, options, padding, dumps, and the entry point."""

from __future__ import annotations

import copy
import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.dispatch.cpu_fallback import FallbackWarning
from lazytpu.errors import UnsupportedOpError
from lazytpu.runtime import executables
from tests.support.dynamo_marks import FRESH
from tests.support.processes import run_code, run_python

ROOT = Path(__file__).parents[2]

pytestmark = FRESH


def test_an_op_without_a_rule_runs_with_a_warning(device):
    def function(x):
        return torch.nonzero(x > 0).sum() + 1

    x = torch.tensor([1.0, -1.0, 2.0])
    ours = torch.compile(function, backend="lazytpu", fullgraph=True)
    with pytest.warns(FallbackWarning, match="run op by op"):
        assert ours(x.to(device)).item() == function(x).item()


def test_fullgraph_makes_it_an_error(device):
    compiled = torch.compile(
        lambda x: torch.nonzero(x).sum(), backend="lazytpu", fullgraph=True, options={"fullgraph": True}
    )
    with pytest.raises(UnsupportedOpError, match="not one program"):
        compiled(torch.ones(3).to(device))


def test_unknown_options_are_refused(device):
    for options, message in (
        ({"whole": True}, 'has the options "fullgraph" and "pad" only'),
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
        (lambda x: x - x.mean(0), "aten.mean.dim may mix its rows.*\n.*test_dynamo_options.py"),
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
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    for done in (run_code(program, "imported"), run_python("-c", program, "entry point", PYTHONPATH=path)):
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n")[0] == "[1.0, 2.0, 3.0] True"


def test_the_entry_point_is_declared():
    assert 'lazytpu = "lazytpu.frontends.dynamo:backend"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}, {"dynamic": True}, {"backend": "tpu"}])
def test_the_default_backend_takes_tensors_of_the_device(device: torch.device, options: dict[str, Any]) -> None:
    net = torch.nn.Linear(3, 2).to(device)
    compiled = torch.compile(net, **options)
    lazytpu.mark_step()
    executables.forget_executables()
    before = lazytpu.metrics.counter("compile")
    x = torch.ones(4, 3, device=device)
    torch.testing.assert_close(compiled(x), net(x))
    compiled(x).sum().backward()
    assert net.weight.grad is not None
    assert lazytpu.metrics.counter("compile") > before


def test_the_default_backend_of_the_cpu_is_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    inductor = importlib.import_module("torch._inductor.compile_fx")  # which warns, so not above
    monkeypatch.setattr(inductor, "compile_fx", lambda model, inputs, **options: seen.append(inputs) or model.forward)
    assert torch.compile(lambda a: a + 1)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(seen) == 1


def test_dynamo_may_be_imported_first() -> None:
    """Torch looks up there which tensors the first call of a compiled function may hold; padding calls ops in it."""
    code = """
        import torch._dynamo
        import torch._functorch._aot_autograd.runtime_wrappers as wrappers
        import lazytpu.tensors.tensor
        print(lazytpu.tensors.tensor.LazyTensor in wrappers.HANDLED_TYPES)
    """
    done = run_code(code)
    assert done.stdout == "True\n", done.stderr
