"""Libraries that choose a device by a list of their own take this one: a copy in small of Accelerate does."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import run_code

STATE = """
import torch
class PartialState:
    def __init__(self, cpu=False):
        self.device = torch.device("cpu") if cpu else self.default_device
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
        return self.optimizer.step(closure)
"""
PROGRAM = """
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
"""


def test_accelerate_takes_the_device_and_ends_its_steps(tmp_path: Path) -> None:
    package = tmp_path / "accelerate"
    package.mkdir()
    for name, text in (("__init__", ""), ("state", STATE), ("optimizer", OPTIMIZER)):
        (package / f"{name}.py").write_text(text)
    done = run_code(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}")
    assert done.stdout.split() == ["1", "0"], done.stderr
