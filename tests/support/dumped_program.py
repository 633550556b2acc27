"""A small program that recompiles for a smaller batch, and its dump; made once a process, for several test modules."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parents[2]
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


def run_python(*arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with lazytpu importable."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False)


def dump_into(folder: Path, name: str) -> Path:
    """Runs the program with ``run --dump`` and returns the dump."""
    script = folder / "net.py"
    script.write_text(PROGRAM)
    done = run_python("-m", "lazytpu", "run", "--dump", name, "net.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / name


@cache
def the_dump() -> Path:
    """The dump of the program, which nobody may change."""
    return dump_into(Path(mkdtemp(prefix="lazytpu-test-")), "dump")
