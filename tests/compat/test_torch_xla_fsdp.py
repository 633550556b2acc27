"""What torch_xla has for parameters that are split: the two wrappers, their policies, and its checkpoints."""

from __future__ import annotations

import functools
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lazytpu import compat, spmd
from tests.support.eight_devices import eight_devices

compat.install("torch_xla")

import torch_xla  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.distributed.spmd as xs  # type: ignore[import-not-found]  # noqa: E402
from torch_xla.distributed import fsdp  # type: ignore[import-not-found]  # noqa: E402
from torch_xla.distributed.fsdp import wrap  # type: ignore[import-not-found]  # noqa: E402
from torch_xla.experimental import distributed_checkpoint as saved  # type: ignore[import-not-found]  # noqa: E402
from torch_xla.experimental.distributed_checkpoint import _helpers as helpers  # type: ignore[import-not-found]  # noqa: E402
from torch_xla.experimental.spmd_fully_sharded_data_parallel import (  # type: ignore[import-not-found]  # noqa: E402
    SpmdFullyShardedDataParallel,
)

LAYERS = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def losses(net: Any, split: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    found = []
    for step in range(3):
        torch.manual_seed(step)
        x = split(torch.randn(16, 8).to(torch_xla.device()))
        loss = net(x).square().mean()
        loss.backward()
        getattr(net, "clip_grad_norm_", lambda n: torch.nn.utils.clip_grad_norm_(net.parameters(), n))(0.5)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        found.append(loss.item())
    return found


def along_rows(x: torch.Tensor) -> torch.Tensor:
    return xs.mark_sharding(x, xs.get_1d_mesh("fsdp"), ("fsdp", None))


@eight_devices
def test_numbers_of_both_wrappers_are_those_of_one_device() -> None:
    want = losses(model().to(torch_xla.device()), lambda x: x)
    full = fsdp.XlaFullyShardedDataParallel(model(), auto_wrap_policy=LAYERS, reshard_after_forward=False)
    assert isinstance(full.module[0], fsdp.XlaFullyShardedDataParallel) and isinstance(full[1], nn.ReLU)
    assert losses(full, along_rows) == pytest.approx(want, rel=1e-5)
    mesh = xs.Mesh(np.arange(8), (8, 1), ("fsdp", "tensor"))
    net = SpmdFullyShardedDataParallel(model(), mesh=mesh, auto_wrap_policy=LAYERS)
    assert losses(net, along_rows) == pytest.approx(want, rel=1e-5)
    for of in (full, net):
        weight = of.module[0].module.weight
        assert len({tuple(s.data.shape) for s in spmd.local_shards(weight)}) == 1
        assert spmd.local_shards(weight)[0].data.numel() == weight.numel() // 8
    assert net(along_rows(torch.ones(8, 8).to(torch_xla.device()))).sharding_spec.startswith("{devices=[8,1]")


@eight_devices
def test_computing_in_another_type() -> None:
    net = fsdp.XlaFullyShardedDataParallel(model(), compute_dtype=torch.bfloat16)
    out = net(torch.ones(2, 8).to(torch_xla.device()))
    out.float().sum().backward()
    assert (
        out.dtype is torch.bfloat16 and net.module[0].weight.dtype is net.module[0].weight.grad.dtype is torch.float32
    )
    want = model().bfloat16()(torch.ones(2, 8).bfloat16())
    torch.testing.assert_close(out.cpu(), want, atol=2e-2, rtol=2e-2)


@eight_devices
def test_a_saved_model_is_the_one_inside() -> None:
    net = fsdp.XlaFullyShardedDataParallel(model(), auto_wrap_policy=LAYERS)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"model": net.state_dict(), "shard_metadata": net.get_shard_metadata()}, f"{folder}/rank-0.pth")
        whole, path = fsdp.consolidate_sharded_model_checkpoints(f"{folder}/rank")
        again, _ = fsdp.consolidate_sharded_model_checkpoints(f"{folder}/rank", save_model=False)
        read = torch.load(path)["model"]
    for name, x in model().state_dict().items():
        assert all(torch.equal(state[name].cpu(), x) for state in (whole, again, read))
    with pytest.raises(NotImplementedError, match="with torch_xla"):
        fsdp.consolidate_sharded_state_dicts([{}, {}], {"world_size": 2})


@eight_devices
def test_a_manager_of_checkpoints() -> None:
    mesh = xs.Mesh(np.arange(8), (8,))
    weights = [xs.mark_sharding(torch.full((10, 2), float(i)).to(torch_xla.device()), mesh, (0, None)) for i in (1, 2)]
    with tempfile.TemporaryDirectory() as folder:
        manager = saved.CheckpointManager(folder, save_interval=10, max_to_keep=2, chkpt_on_preemption=False)
        assert not manager.save(5, {"w": weights[0]}) and manager.all_steps() == []
        assert all(manager.save(step, {"w": weights[0]}) for step in (10, 20)) and manager.save_async(
            30, {"w": weights[0]}
        )
        manager.join()
        assert manager.all_steps() == [20, 30]
        manager.restore(30, {"w": weights[1]})
        assert torch.equal(weights[1].cpu(), torch.ones(10, 2))
        with pytest.raises(FileNotFoundError):
            manager.restore(10, {"w": weights[1]})
    linear = nn.Linear(2, 2).to(torch_xla.device())
    before = linear.weight.tolist()
    optimizer = saved.prime_optimizer(torch.optim.AdamW(linear.parameters()))
    assert linear.weight.tolist() == before and linear.weight.grad is None
    assert set(optimizer.state[linear.weight]) == {"step", "exp_avg", "exp_avg_sq"}


@eight_devices
def test_planners_tell_what_is_split_and_take_parts_on_the_cpu() -> None:
    mesh = xs.Mesh(np.arange(8), (8,))
    split = xs.mark_sharding(torch.arange(20.0).reshape(10, 2).to(torch_xla.device()), mesh, (0, None))
    state = {"model": {"w": split, "b": torch.ones(3).to(torch_xla.device())}}
    on_cpu = helpers._sharded_cpu_state_dict(state)
    assert isinstance(on_cpu["model"]["w"], helpers._CpuShards) and helpers._is_sharded_tensor(on_cpu["model"]["w"])
    assert on_cpu["model"]["b"].device.type == "cpu" and not helpers._is_sharded_tensor(state["model"]["b"])
    split += 1  # what is on the CPU stays as it is
    planner = saved.SPMDSavePlanner()
    planner.set_up_planner(on_cpu)
    assert [*planner.sharded_state_dict] == ["model.w"] and [*planner.unsharded_state_dict] == ["model.b"]
    assert [item.index.index for item in planner.create_local_plan().items if item.index.fqn == "model.w"] == [
        0,
        1,
        2,
        3,
        4,
    ]
    with tempfile.TemporaryDirectory() as folder:
        spmd.checkpoint.save(on_cpu, f"{folder}/saved")
        spmd.checkpoint.load(state, f"{folder}/saved")
    assert torch.equal(split.cpu(), torch.arange(20.0).reshape(10, 2))


def test_a_signal_to_end_makes_a_manager_save(tmp_path: Path) -> None:
    manager = saved.CheckpointManager(tmp_path, save_interval=10)
    try:
        assert not manager.save(3, {"w": torch.ones(2)}) and not manager.reached_preemption(3)
        signal.raise_signal(signal.SIGTERM)
        assert torch_xla._XLAC._sync_point_reached(4) and manager.save(4, {"w": torch.ones(2)})
        assert manager.reached_preemption(4) and manager.all_steps() == [4]
    finally:
        torch_xla._XLAC._deactivate_preemption_sync_manager()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_policies() -> None:
    net = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(2, 2), nn.Linear(10, 20)))
    wrapped: list[nn.Module] = []

    def note(module: nn.Module) -> nn.Module:
        wrapped.append(module)
        return module

    wrap.wrap_submodules(net, functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=100), note)
    assert wrapped == [net[0], net[1][1]]
    wrapped.clear()
    by_name = functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: m is net[1])
    wrap.wrap_submodules(net, by_name, note)
    assert wrapped == [net[1]]
    wrapped.clear()
    wrap.wrap_submodules(net, wrap.always_wrap_policy, note)
    assert wrapped == [net[0], net[1][0], net[1][1], net[1]]
