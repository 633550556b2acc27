"""Checkpoints of what `torch.distributed` has split: loaded into another split, and by torch alone."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import lazytpu
from tests.support.ranks import on_ranks


def trained(split: Any, steps: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(lazytpu.device())
    split(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for step in range(steps):
        torch.manual_seed(step)
        F.cross_entropy(
            model(torch.randn(6, 6).to(lazytpu.device())), torch.arange(6).to(lazytpu.device()) % 3
        ).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@on_ranks(2)
def test_a_checkpoint_of_fsdp_loads_into_tensor_parallelism_and_by_torch_alone() -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.utils._pytree import tree_map

    from lazytpu.spmd import checkpoint

    mesh = init_device_mesh(lazytpu.device().type, (2,))

    def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "step": 3}

    def whole(state: Any) -> Any:
        return tree_map(lambda x: x.full_tensor().cpu() if hasattr(x, "full_tensor") else x, state)

    folders: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    model, optimizer = trained(lambda m: fully_shard(m, mesh=mesh), 2)
    state = state_of(model, optimizer)
    want = whole(state)
    manager = checkpoint.CheckpointManager(folder / "run", keep=1)
    for step in (1, 2):
        manager.save(step, state)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()  # after it was saved
    lazytpu.mark_step()
    manager.wait()
    assert manager.steps() == [2] if dist.get_rank() == 0 else manager.steps()[-1] == 2

    other, its = trained(lambda m: parallelize_module(m, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), 0)
    loaded = state_of(other, its) | {"step": 0}
    assert manager.load(loaded) == 2 and loaded["step"] == 3
    set_state_dict(other, its, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    found = whole(state_of(other, its))
    dist.barrier()
    if dist.get_rank() == 0:
        dcp_to_torch_save(folder / "run" / "step-000000002", folder / "read.pt")
        read = torch.load(folder / "read.pt")
        shutil.rmtree(folder)
        assert "cpu" in str(read["model"]["0.weight"].device)
        assert read["step"] == 3
        for have in (read, found):
            tensors = [tree_map(_on_host, [state["model"], state["optimizer"]["state"]]) for state in (have, want)]
            torch.testing.assert_close(*tensors, atol=0, rtol=0)


@on_ranks(2)
def test_a_state_is_saved_while_training_goes_on() -> None:
    from torch.distributed import checkpoint
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(lazytpu.device().type, (2,))
    folders: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    model, optimizer = trained(lambda m: fully_shard(m, mesh=mesh), 1)
    want = [p.full_tensor().detach().cpu() for p in model.parameters()]
    group = dist.new_group(backend="gloo")
    saving = checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=folders[0], process_group=group)
    model(torch.ones(6, 6).to(lazytpu.device())).sum().backward()
    optimizer.step()
    saving.result()
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=folders[0])
    assert all(torch.equal(p.full_tensor().cpu(), x) for p, x in zip(model.parameters(), want, strict=True))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])


def _on_host(x: Any) -> Any:
    return x.cpu() if isinstance(x, torch.Tensor) else x
