"""Lightning takes the device: a copy in small of what it chooses by, and Lightning itself where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import run_code

ACCELERATORS = """
class Accelerator:
    pass
class Registry(dict):
    def register(self, name, accelerator, description=""):
        self[name] = accelerator
AcceleratorRegistry = ACCELERATOR_REGISTRY = Registry(cpu=Accelerator)
"""
DDP = """
import torch
class DDPStrategy:
    def __init__(self, device):
        self.root_device = torch.device(device)
    def optimizer_step(self, optimizer):
        return optimizer.step()
    def determine_ddp_device_ids(self):
        return [self.root_device.index]
"""
CONNECTOR = """
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
class SingleDeviceStrategy:
    strategy_name = "single_device"
    def __init__(self, device):
        self.device, self.root_device = device, torch.device(device)
    def optimizer_step(self, optimizer):
        return optimizer.step()
    def predict_step(self, x):
        return x + 1
class MixedPrecision:
    def __init__(self, precision, device):
        self.precision, self.device = precision, device
class _AcceleratorConnector:
    _num_nodes_flag = 1
    def __init__(self, accelerator, devices=1, precision="32-true"):
        self._precision_flag, self._precision_plugin_flag = precision, None
        name = self._choose_auto_accelerator() if accelerator == "auto" else accelerator
        self.accelerator = AcceleratorRegistry[name]()
        if name != "cpu":
            self._parallel_devices = self.accelerator.get_parallel_devices(self.accelerator.parse_devices(devices))
        self.strategy, self.precision_plugin = self._choose_strategy(), self._check_and_init_precision()
    @staticmethod
    def _choose_auto_accelerator():
        return "cpu"
    def _choose_strategy(self):
        return SingleDeviceStrategy(device="cpu")
    def _check_and_init_precision(self):
        return self._precision_plugin_flag or self._precision_flag
"""
PROGRAM = """
import lazytpu, torch
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector as Connector

for name, precision in (("lazytpu", "bf16-mixed"), ("auto", "32-true"), ("cpu", "32-true")):
    made = Connector(name, precision=precision)
    plugin = getattr(made.precision_plugin, "device", made.precision_plugin)
    print(type(made.accelerator).__name__, made.strategy.strategy_name, made.strategy.device, plugin)
net = torch.nn.Linear(2, 2).to("tpu")
net(torch.ones(1, 2, device="tpu")).sum().backward()
strategy, steps = Connector("auto").strategy, lazytpu.metrics.counter("step")
strategy.optimizer_step(torch.optim.SGD(net.parameters()))
print(lazytpu.metrics.counter("step") - steps, strategy.predict_step(torch.ones(1, device="tpu")).item())
try:
    Connector("lazytpu", devices=2)
except ValueError as error:
    print(error)

from lightning.pytorch.strategies.ddp import DDPStrategy
for device in ("tpu:0", "cuda:1"):
    strategy, steps = DDPStrategy(device), lazytpu.metrics.counter("step")
    strategy.optimizer_step(torch.optim.SGD(net.parameters()))
    print(lazytpu.metrics.counter("step") - steps, strategy.determine_ddp_device_ids())
lightning = type(Connector("lazytpu").accelerator)
lazytpu.torch_backend.rank_device.count = lambda: 2  # as a launcher of two processes makes it
print(lightning.auto_device_count(), lightning.parse_devices(2), lightning.parse_devices("-1"))
try:
    lightning.parse_devices(1)
except ValueError as error:
    print(error)
"""
REAL = """
import logging, sys, warnings
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import lazytpu, lightning, torch
from torch.utils.data import DataLoader, TensorDataset

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = torch.nn.Linear(4, 1), []
    def training_step(self, batch, index):
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.detach())
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

def fit(accelerator, epochs, checkpoint=None, **options):
    lightning.seed_everything(0, verbose=False)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    net, folder = Net(), sys.argv[1]
    trainer = lightning.Trainer(accelerator=accelerator, devices=1, max_epochs=epochs, default_root_dir=folder,
                                logger=False, enable_model_summary=False, **options)
    trainer.fit(net, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8), ckpt_path=checkpoint)
    return trainer, torch.stack(net.losses).cpu()

for options in ({"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}):
    wanted = fit("cpu", 2, enable_progress_bar=False, **options)[1]
    lazytpu.metrics.reset()
    torch.testing.assert_close(fit("lazytpu", 2, **options)[1], wanted, rtol=2e-2, atol=1e-5)
    assert lazytpu.metrics.counter("cut") <= 12 + 8, lazytpu.explain()  # a step each, some for each epoch
trainer, found = fit("auto", 4, enable_progress_bar=False, precision="16-mixed")
assert trainer.strategy.root_device == lazytpu.device() and found.isfinite().all()
assert trainer.precision_plugin.scaler.is_enabled()
whole = fit("lazytpu", 4, enable_progress_bar=False)[1]
trainer, start = fit("lazytpu", 2, enable_progress_bar=False)
trainer.save_checkpoint(sys.argv[1] + "/half.ckpt")
rest = fit("lazytpu", 4, sys.argv[1] + "/half.ckpt", enable_progress_bar=False)[1]
torch.testing.assert_close(torch.cat([start, rest]), whole)
fabric = lightning.Fabric(accelerator="auto", precision="bf16-mixed")
net = torch.nn.Linear(2, 1)
net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
fabric.backward(net(fabric.to_device(torch.ones(3, 2))).sum())
steps = lazytpu.metrics.counter("step")
optimizer.step()
assert lazytpu.metrics.counter("step") == steps + 1 and net.weight.device == lazytpu.device()
print("as on the CPU")
"""


def test_a_copy_in_small_takes_the_device(tmp_path: Path) -> None:
    for name, text in {
        "lightning/__init__": "",
        "lightning/pytorch/__init__": "",
        "lightning/pytorch/accelerators": ACCELERATORS,
        "lightning/pytorch/strategies/ddp": DDP,
        "lightning/pytorch/trainer/connectors/accelerator_connector": CONNECTOR,
    }.items():
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    done = run_code(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PROGRAM}")
    assert done.stdout.splitlines() == [
        "LazyTPUAccelerator single_lazytpu tpu:0 tpu",
        "LazyTPUAccelerator single_lazytpu tpu:0 32-true",
        "Accelerator single_device cpu 32-true",
        "1 2.0",
        "there is one device, tpu:0: give devices=1, not devices=2",
        "1 None",
        "0 [1]",
        "2 [0, 1] [0, 1]",
        "a launcher started 2 processes here: give devices=2, not devices=1",
    ], done.stderr


def test_lightning_trains_as_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    done = run_code(f"import sys; sys.argv = ['', {str(tmp_path)!r}]\n{REAL}")
    assert done.stdout.splitlines()[-1:] == ["as on the CPU"], done.stderr
