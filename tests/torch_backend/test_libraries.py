"""Libraries that know devices by a list of their own take this one: a copy in small of Accelerate, and safetensors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.support.processes import run_code

STATE = """
import torch
class DistributedType:
    NO, MULTI_GPU = "NO", "MULTI_GPU"
class PartialState:
    def __init__(self, cpu=False):
        self.device = None
        self.backend, self.distributed_type = self._prepare_backend(cpu, False, None)
        self.device = self.device or (torch.device("cpu") if cpu else self.default_device)
    def _prepare_backend(self, cpu, sagemaker_dp=False, backend=None):
        return None, DistributedType.NO
    @property
    def default_device(self):
        return torch.device("cpu")
"""
OPTIMIZER = """
from accelerate.state import PartialState
class Gradients:
    sync_gradients = True
class AcceleratedOptimizer:
    def __init__(self, optimizer, cpu=False):
        self.optimizer, self.gradient_state, self.accelerator_state = optimizer, Gradients(), PartialState(cpu)
    def step(self, closure=None):
        if self.gradient_state.sync_gradients:
            return self.optimizer.step(closure)
"""
ACCELERATOR = """
from accelerate.state import PartialState
class AcceleratorState(PartialState):
    def __init__(self, cpu, precision):
        super().__init__(cpu)
        self._precision = precision
    @property
    def mixed_precision(self):
        return self._precision
class Options:
    def to_kwargs(self):
        return {"init_scale": 8.0}
class Accelerator:
    def __init__(self, cpu=False, mixed_precision="no", scaler_handler=None):
        self.state, self.scaler_handler = AcceleratorState(cpu, mixed_precision), scaler_handler
        self.native_amp, self.scaler = self.state.mixed_precision == "bf16", None
        if self.state.mixed_precision == "fp16" and self.state.device.type not in ("cpu", "cuda"):
            raise ValueError("fp16 mixed precision requires a device in ...")
"""
HALVES = """
import lazytpu
from accelerate.accelerator import Accelerator, Options

for precision, cpu in (("no", False), ("bf16", False), ("fp16", False), ("fp16", True)):
    made = Accelerator(cpu, precision, Options())
    scale = made.scaler and made.scaler.get_scale()
    print(made.state.mixed_precision, made.native_amp, made.scaler and made.scaler._device, scale)
print(Accelerator(mixed_precision="fp16").scaler.get_scale())
"""
PROGRAM = """
import os
import lazytpu, torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState

assert PartialState().device == lazytpu.device() and PartialState(cpu=True).device.type == "cpu"
for cpu in (False, True):
    net = torch.nn.Linear(2, 2).to(PartialState(cpu).device)
    made = AcceleratedOptimizer(torch.optim.SGD(net.parameters()), cpu)
    steps = lazytpu.metrics.counter("step")
    for sync in (False, True):
        net(torch.ones(1, 2, device=PartialState(cpu).device)).sum().backward()
        made.gradient_state.sync_gradients = sync
        made.step()
    print(lazytpu.metrics.counter("step") - steps)

import os
os.environ["LOCAL_RANK"] = "0"
for cpu in (False, True):
    state = PartialState(cpu)
    print(state.backend, state.distributed_type, state.device)
"""


def _with_accelerate(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    package = folder / "accelerate"
    package.mkdir()
    files = {"__init__": "", "state": STATE, "optimizer": OPTIMIZER, "accelerator": ACCELERATOR}
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    return run_code(f"import sys; sys.path.insert(0, {str(folder)!r})\n{program}")


def test_accelerate_trains_in_float16(tmp_path: Path) -> None:
    done = _with_accelerate(tmp_path, HALVES)
    ours = ["no False None None", "bf16 True None None", "fp16 True tpu 8.0", "fp16 False None None", "65536.0"]
    assert done.stdout.splitlines() == ours, done.stderr


def test_accelerate_takes_the_device_and_ends_its_steps(tmp_path: Path) -> None:
    done = _with_accelerate(tmp_path, PROGRAM)
    launched = ["lazytpu MULTI_GPU tpu:0", "None NO cpu"]  # a process among others, and one that asks for the CPU
    assert done.stdout.splitlines() == ["1", "0", *launched], done.stderr


@pytest.mark.parametrize("name", ["tpu", "tpu:0", "cpu"])
def test_safetensors_reads_to_the_device(name: str, tmp_path: Path) -> None:
    host = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.int64)}
    safetensors.torch.save_file(host, tmp_path / "file")
    kind = torch.device(name).type
    loaded = safetensors.torch.load_file(tmp_path / "file", device=name)
    assert loaded.keys() == host.keys() and all(t.device.type == kind for t in loaded.values())
    with safetensors.safe_open(tmp_path / "file", framework="pt", device=name) as file:
        part = file.get_slice("a")
        assert part.get_shape() == [2, 3] and sorted(file.keys()) == ["a", "b"]
        got = part[:, 1:]
        assert got.device.type == kind and got.tolist() == [[1, 2], [4, 5]]
        assert file.get_tensor("b").device.type == kind


def test_loggers_tell_a_tensor_by_the_name_of_its_class(device: torch.device) -> None:
    kind = type(torch.ones(2, device=device))
    assert kind.__module__.startswith("torch") and "Tensor" in kind.__name__
