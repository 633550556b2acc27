"""Scripts written for torch_xla, torch_tpu and torch_mlu, run from end to end without an edit.

They are not part of this project and need torchvision and data, so they run only when asked for:

    LAZYTPU_SEEDS=DIR pytest -m seeds -n 0 tests/compat/test_seeds.py

DIR holds the scripts, and beside them ``data`` (MNIST and FashionMNIST as torchvision lays them out) and
``torch/hub/checkpoints`` (the weights of ResNet-18); ``LAZYTPU_SEEDS_DATA`` is another folder for these two.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = os.environ.get("LAZYTPU_SEEDS", "")
DATA = Path(os.environ.get("LAZYTPU_SEEDS_DATA", SCRIPTS)).absolute()

pytestmark = [
    pytest.mark.seeds,
    pytest.mark.skipif(not SCRIPTS, reason="LAZYTPU_SEEDS is not set: the folder of the scripts and their data"),
]

STABLEHLO = r"module @\w+[^\n]*\n\s+func\.func public @main\("
OUTPUT = {
    "pytorch_xla_hello": r"^xla:0\ntensor\(\[\[.*device='xla:0'\)\n",
    "pytorch_xla_mnist": r"tensor\(\[(\d,\s+){63}\d\], device='xla:0'\)",
    "pytorch_xla_stablehlo_add": STABLEHLO + r"%arg0: tensor<4x3x224x224xf32>",
    "pytorch_xla_stablehlo_resnet18": STABLEHLO,
    "torch_mlu_quantized_inference": r"tensor\(\[\[(\s*-?\d\.\d+,){9}\s*-?\d\.\d+\]\]\)",
    "torch_tpu_dynamo": r"^-?\d+\.\d+\n$",
}


def run(script: str, folder: Path) -> str:
    """What a script prints, run in a folder of its own."""
    file = Path(SCRIPTS).absolute() / f"{script}.py"
    if "torchvision" in file.read_text() and importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    if (DATA / "data").is_dir():
        (folder / "data").symlink_to(DATA / "data")
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCH_HOME": str(DATA / "torch"),
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # one script loads a whole module
    }
    command = [sys.executable, "-m", "lazytpu", "run", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    assert "ran on the CPU" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("script", OUTPUT)
def test_it_prints_what_it_should(script: str, tmp_path: Path) -> None:
    printed = run(script, tmp_path)
    assert re.search(OUTPUT[script], printed, re.S), printed


def test_training_with_adaptive_quantization(tmp_path: Path) -> None:
    accuracies = re.findall(r"Accuracy: \d+/\d+ \((\d+)%\)", run("torch_mlu_training", tmp_path))
    assert len(accuracies) == 10
    assert int(accuracies[-1]) > 50
    assert (tmp_path / "model.pth").exists()


def test_precisions_learn_in_the_order_of_their_digits(tmp_path: Path) -> None:
    """Steps of SGD smaller than half a unit of float16 are lost; mixed precision keeps them.

    The scripts draw their weights without a seed, so what tells with little data is how far the loss falls.
    """
    fallen = {}
    for precision in ("fp16", "fp32", "amp"):
        folder = tmp_path / precision
        folder.mkdir()
        printed = run(f"torch_tpu_{precision}", folder)
        assert "Using tpu device" in printed
        assert "Predicted: " in printed
        losses = [float(x) for x in re.findall(r"Accuracy: [\d.]+%, Avg loss: ([\d.]+)", printed)]
        assert len(losses) == 5
        fallen[precision] = losses[0] - losses[-1]
    assert 0 < fallen["fp32"]
    assert 0.5 * fallen["fp32"] < fallen["amp"] < 2 * fallen["fp32"]
    assert fallen["fp16"] < 0.8 * fallen["fp32"]


def test_what_of_them_works_is_known() -> None:
    for script in sorted(Path(SCRIPTS).glob("*.py")):
        command = [sys.executable, "-m", "lazytpu", "check", "--json", str(script)]
        variables = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        lacking = [finding["name"] for finding in json.loads(done.stdout) if finding["verdict"] == "lacks"]
        assert bool(lacking) == script.name.startswith("tensorflow"), (script, lacking)
