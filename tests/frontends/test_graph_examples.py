"""The examples about whole graphs run and say what they should."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import lazytpu
from tests.support.dynamo_marks import QUIET

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = QUIET


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs an example and returns what it prints."""
    monkeypatch.setattr(lazytpu.config, "dump", "")
    lazytpu.metrics.reset()  # an example counts the ops that fell back

    def call(name: str, *arguments: list[str]) -> str:
        spec = spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        module.main(*arguments)
        return capsys.readouterr().out

    return call


def test_compile_model_learns(run, tmp_path):
    printed = run("compile_model", ["--steps", "21", "--dump", str(tmp_path)])
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < 0.5 * losses[0]
    assert list(tmp_path.rglob("weights.npz"))


def test_jit_newton_converges(run):
    gradients = [float(x) for x in re.findall(r"gradient +([\d.]+)", run("jit_newton"))]
    assert gradients[-1] < 1e-3 * gradients[0]


def test_jit_function_is_what_was_recorded(run):
    printed = run("jit_function")
    assert "probabilities (16, 5), rows sum to 1.0000" in printed
    assert float(re.search(r"to the recorded graph ([\d.e+-]+)", printed)[1]) < 1e-6
    assert "another batch (16, 5), 0 ops fell back" in printed


def test_control_flow_finds_the_eigenvalue(run):
    printed = run("control_flow")
    assert re.search(r"scan over 1000 steps: last [\d.]+, gradient [\d.]+", printed)
    assert 1 < int(re.search(r"after (\d+) turns", printed)[1]) < 500


def test_custom_op_equals_the_cpu(run):
    printed = run("custom_op")
    assert "example.leaky_square" in printed
    assert float(printed.split(":")[-1]) < 1e-6
