"""The example trains, on the device and on the CPU, and says what it did."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import lazytpu

FILE = Path(__file__).parents[1] / "examples/train_mnist.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = spec_from_file_location("train_mnist", FILE)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(example, capsys, monkeypatch):
    """Runs the example and returns what it prints."""
    monkeypatch.setattr(lazytpu.config, "dump", "")

    def call(*arguments: str) -> str:
        lazytpu.metrics.reset()
        example.main(arguments)
        return capsys.readouterr().out

    return call


def epochs(printed: str) -> list[tuple[float, float, float]]:
    """Loss, test loss and test accuracy of each epoch."""
    found = re.findall(r"epoch +\d+ +loss ([\d.]+) +test loss ([\d.]+) +test accuracy ([\d.]+)%", printed)
    return [(float(a), float(b), float(c)) for a, b, c in found]


@pytest.mark.parametrize("device", ["tpu", "cpu"])
def test_mlp_learns_digits(run, device):
    printed = run("--model", "mlp", "--epochs", "3", "--device", device, "--lr", "0.005")
    losses = [loss for loss, _, _ in epochs(printed)]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
    assert epochs(printed)[-1][2] > 90
    assert "66 training steps in" in printed


def test_both_devices_begin_alike(run):
    """Same seed, same weights, same batches: without dropout the losses of an epoch agree."""
    arguments = "--model", "mlp", "--epochs", "1", "--data", "synthetic"
    (on_device,), (on_cpu,) = epochs(run(*arguments)), epochs(run(*arguments, "--device", "cpu"))
    assert on_device == pytest.approx(on_cpu, rel=1e-3)


def test_cnn_compiles_once_and_dumps_its_graphs(run, tmp_path):
    printed = run("--data", "synthetic", "--epochs", "2", "--batch-size", "128", "--dump", str(tmp_path / "graphs"))
    assert len(epochs(printed)) == 2
    # The step with and without the optimizer's state, the test, and three ways to stack what is read.
    compiles, hits = map(int, re.search(r"(\d+) compiles, (\d+) cache hits", printed).groups())
    assert compiles <= 6
    assert hits >= 12
    assert re.search(r"compiling [\d.]+ s, running [\d.]+ s, recording [\d.]+ s", printed)
    folders = sorted(path for path in (tmp_path / "graphs").iterdir() if path.name.startswith("graph-"))
    assert len(folders) == compiles
    assert all("graph(" in (folder / "ir.txt").read_text() for folder in folders)
    assert any("CNN.conv1" in (folder / "ir.txt").read_text() for folder in folders)


def test_the_last_batch_is_padded(run):
    """1,437 and 360 images in batches of 100: the rest of neither makes another graph, nor counts in the test."""
    printed = run("--model", "mlp", "--epochs", "2", "--batch-size", "100")
    assert int(re.search(r"(\d+) compiles", printed)[1]) <= 6
    (_, _, accuracy) = epochs(printed)[-1]
    assert accuracy * 3.6 == pytest.approx(round(accuracy * 3.6), abs=0.02)  # a whole number of 360 images


def test_a_missing_torchvision_says_what_to_do(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(SystemExit, match="--data mnist needs torchvision.*\n.*--data digits"):
        example.load_data("mnist")
