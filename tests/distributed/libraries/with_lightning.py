"""Lightning, with DDP: ``with_lightning.py ddp cpu|device``."""

import json
import sys
import tempfile

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    """A small net that keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


how, device = sys.argv[1:3]
lightning.seed_everything(0)
x = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
data, net = TensorDataset(x, x.sum(1, keepdim=True)), Net()
trainer = lightning.Trainer(
    accelerator="cpu" if device == "cpu" else "lazytpu",
    devices=2,
    strategy=how,
    max_epochs=2,
    gradient_clip_val=1.0,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
    default_root_dir=tempfile.mkdtemp(),
)
trainer.fit(net, DataLoader(data, 8), DataLoader(data, 16))
if trainer.is_global_zero:
    total = sum(p.abs().sum().item() for p in net.parameters())
    losses = [loss.item() for loss in net.losses[::3]]
    print("RESULT", json.dumps([*losses, trainer.callback_metrics["val"].item(), total]))
