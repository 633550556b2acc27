"""A small program that recompiles for a smaller batch, and its dump; made once a process, for several test modules."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tests.support.processes import run_lazytpu

PROGRAM = """\
import torch
import lazytpu


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.head = torch.nn.Linear(4 * 6 * 6, 5)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).flatten(1))


torch.manual_seed(0)
net = Net().to(lazytpu.device())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for size in (6, 6, 6, 3):
    x = torch.ones(size, 1, 8, 8).to(lazytpu.device())
    y = net(x)
    loss = y.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    lazytpu.mark_step()
print(loss.item())
"""
FORWARD_LINE, CALL_LINE, OUTSIDE_LINE = 12, 20, 21


def dump_into(folder: Path, name: str) -> Path:
    """Runs the program with ``run --dump`` and returns the dump."""
    script = folder / "net.py"
    script.write_text(PROGRAM)
    done = run_lazytpu("run", "--dump", name, "net.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / name


@cache
def the_dump() -> Path:
    """The dump of the program, which nobody may change."""
    return dump_into(Path(mkdtemp(prefix="lazytpu-test-")), "dump")
