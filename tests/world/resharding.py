"""Pass one training state on through checkpoints, from mesh to mesh and between both views, bit for bit.

    python -m tests.world.resharding            # all of the chain, some minutes

Each link of the chain is a program in its own processes: it loads the checkpoint of the one before into a model of its
own, and saves that.  The first one trains.  Each checkpoint, read by torch alone, is compared with the state of the
first program, gathered by torch.  The sizes 13 and 7 divide by nothing.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import keystr, tree_flatten_with_path

from tests.support.worlds import run_world

CODE = """
import os, sys
how, before, after, want = sys.argv[1:]
import torch, torch.nn.functional as F
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils._pytree import tree_map

view, _, layout = how.partition(" ")
device = torch.device("cpu")
if view != "CPU":
    import lazytpu
    from lazytpu import spmd
    device = lazytpu.device()
if view in ("local", "planners"):
    dist.init_process_group()
if view in ("CPU", "planners"):  # torch's own, not ours
    import torch.distributed.checkpoint as checkpoint
    save = lambda state, at: checkpoint.save(state, checkpoint_id=at)
    load = lambda state, at: checkpoint.load(state, checkpoint_id=at)
else:
    from lazytpu.spmd.checkpoint import load, save
torch.manual_seed(len(before))  # what is loaded has to change it
model = nn.Sequential(nn.Linear(16, 13), nn.ReLU(), nn.BatchNorm1d(13), nn.Linear(13, 7)).to(device)

def spread():
    if view == "global":
        if layout == "FSDP":
            spmd.fully_shard(model, spmd.Mesh((-1,), ("data",)))
        elif layout == "TP":
            mesh = spmd.Mesh((2, -1), ("data", "model"))
            spmd.mark_sharding(model[0].weight, mesh, ("model", "data"))
            spmd.mark_sharding(model[0].bias, mesh, ("model",))
            spmd.mark_sharding(model[3].weight, mesh, (None, "model"))
    elif view != "CPU":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        n = dist.get_world_size()
        plan = {"0": ColwiseParallel(), "3": RowwiseParallel()}
        if layout == "FSDP":
            fully_shard(model, mesh=init_device_mesh(device.type, (n,)))
        elif layout == "TP":
            parallelize_module(model, init_device_mesh(device.type, (n,)), plan)
        elif layout == "FSDP x TP":
            mesh = init_device_mesh(device.type, (2, n // 2), mesh_dim_names=("data", "model"))
            parallelize_module(model, mesh["model"], plan)
            fully_shard(model, mesh=mesh["data"])

spread()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
if before == "-":
    for step in range(2):
        torch.manual_seed(step)
        x, y = torch.randn(8, 16).to(device), (torch.arange(8) % 7).to(device)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

def state_of():
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "step": 2 if before == "-" else 0}

state = state_of()
if before != "-":
    load(state, before)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step = state["step"]
    state = state_of() | {"step": step}

if before == "-":
    whole = tree_map(lambda x: x.full_tensor().cpu() if hasattr(x, "full_tensor") else x, state)
    whole = tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, whole)  # of a mesh: all have to read
    if os.environ["RANK"] == "0":
        torch.save(whole, want)
save(state, after)
print("saved", flush=True)
"""


@dataclass(frozen=True)
class Link:
    """A program of the chain.

    Attributes:
        processes: how many.
        devices: of each.
        how: the view, and how the state lies.
    """

    processes: int
    devices: int
    how: str


CHAIN = [
    Link(4, 1, "local FSDP"),
    Link(2, 1, "local TP"),
    Link(1, 1, "CPU"),
    Link(1, 8, "global FSDP"),
    Link(2, 4, "global TP"),
    Link(4, 1, "planners FSDP x TP"),
    Link(1, 1, "global one device"),
    Link(4, 1, "global FSDP"),
    Link(2, 1, "planners FSDP"),
    Link(1, 8, "global TP"),
    Link(1, 1, "CPU again"),
    Link(4, 1, "local FSDP"),
]


def differences(want: Path, saved: Path) -> list[str]:
    """Return which values of a checkpoint are not those that are wanted."""
    as_file = saved.with_suffix(".pt")
    dcp_to_torch_save(saved, as_file)
    wanted, found = flat(torch.load(want)), flat(torch.load(as_file))
    if wanted.keys() != found.keys():
        return [f"only in one: {wanted.keys() ^ found.keys()}"]
    return [f"{name} was {wanted[name]} and is {x}" for name, x in found.items() if not same(x, wanted[name])]


def flat(state: Any) -> dict[str, Any]:
    """Return a state by name, without what only says how the optimizer computes."""
    return {keystr(path): x for path, x in tree_flatten_with_path(state)[0] if "foreach" not in keystr(path)}


def same(x: Any, y: Any) -> bool:
    """Return whether two values are equal bit for bit."""
    return torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else bool(x == y)


def run(folder: Path, say: bool = False) -> list[str]:
    """Run the chain; return what went wrong, at most one thing, since the rest has nothing to load."""
    before = "-"
    for i, link in enumerate(CHAIN):
        start = time.perf_counter()
        after = folder / f"{i}"
        flags = f"--xla_force_host_platform_device_count={link.devices} --xla_backend_optimization_level=0"
        settings = {"XLA_FLAGS": flags, "LAZYTPU_DISK_CACHE": "0", "LAZYTPU_COMPILE_AFTER": "3"}
        done = run_world(CODE, link.processes, link.how, before, after, folder / "want.pt", **settings)
        found = [d.stderr for d in done if d.returncode or d.stdout != "saved\n"]
        found = found or differences(folder / "want.pt", after)
        if say:
            text = found[0] if found else "equal"
            took = time.perf_counter() - start
            print(f"{link.processes} x {link.devices} {link.how:20} {text} ({took:.0f} s)", flush=True)
        if found:
            return [f"{link}: {found[0]}"]
        before = str(after)
    return []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        sys.exit(bool(run(Path(made), say=True)))
