"""Accelerate, with DDP or FSDP2: ``with_accelerate.py ddp|fsdp2 cpu|device``."""

import json
import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    """A feed-forward net behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


how, device = sys.argv[1:3]
plugin = None
if how == "fsdp2":
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
accelerator = Accelerator(cpu=device == "cpu", fsdp_plugin=plugin, gradient_accumulation_steps=2)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 4))
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator))
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, DataLoader(data, 4), schedule)
losses = []
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(net):
            loss = F.cross_entropy(net(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean())
right = 0
for x, y in loader:
    with torch.no_grad():
        found, wanted = accelerator.gather_for_metrics((net(x).argmax(-1), y))
    right += int((found == wanted).sum())
total = sum(value.float().abs().sum().item() for value in accelerator.get_state_dict(net).values())
if accelerator.is_main_process:
    print("RESULT", json.dumps([*(loss.item() for loss in losses[::4]), right, total]))
accelerator.end_training()
