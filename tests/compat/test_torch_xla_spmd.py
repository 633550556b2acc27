"""Scripts of torch_xla's SPMD under its own names."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import lazytpu
from lazytpu import compat
from tests.support.eight_devices import eight_devices

compat.install("torch_xla")

import torch_xla  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.core.xla_model as xm  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.distributed.parallel_loader as pl  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.distributed.spmd as xs  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.runtime as xr  # type: ignore[import-not-found]  # noqa: E402


def grid() -> xs.Mesh:
    return xs.Mesh(np.arange(8), (4, 2), ("x", "y"))


def on_device(*size: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(size).numel())).reshape(size).to(torch_xla.device())


@eight_devices
def test_a_mesh_says_what_it_is() -> None:
    mesh = grid()
    assert mesh.size() == 8 and dict(mesh.shape()) == {"x": 4, "y": 2} and mesh.get_axis_name_idx("y") == 1
    assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert xs.get_1d_mesh("data").mesh_shape == (8,) and xr.global_runtime_device_count() == 8
    xs.set_global_mesh(mesh)
    assert xs.get_global_mesh() is mesh
    with pytest.raises(AssertionError):
        xs.Mesh(np.arange(8), (4, 3))


@eight_devices
def test_marked_tensors() -> None:
    t = on_device(8, 4)
    assert not isinstance(t, xs.XLAShardedTensor)
    marked = xs.mark_sharding(t, grid(), (0, "y"))
    assert marked.global_tensor is t and isinstance(t, xs.XLAShardedTensor) and xr.is_spmd()
    assert torch_xla._XLAC._get_xla_sharding_spec(t).startswith("{devices=[4,2]")
    assert t.sharding_type == xs.ShardingType.TILED
    shards = t.local_shards
    assert [s.shard_device for s in shards[:2]] == ["CPU:0", "CPU:1"] and shards[3].indices == [
        slice(2, 4),
        slice(2, 4),
    ]
    assert all(torch.equal(s.unpadded_data, t.cpu()[s.indices]) for s in shards)
    part = xs.mark_sharding(on_device(8, 4), grid(), (0, None))
    assert part.sharding_type == xs.ShardingType.PARTIAL and [s.replica_id for s in part.local_shards[:2]] == [0, 1]
    whole = xs.mark_sharding(on_device(8), grid(), (None,))
    assert whole.sharding_type == xs.ShardingType.REPLICATED and whole.local_shards[0].indices is ...
    xs.clear_sharding(t)
    assert not isinstance(t, xs.XLAShardedTensor) and torch_xla._XLAC._get_xla_sharding_spec(t) == ""


@eight_devices
def test_wrong_specs() -> None:
    with pytest.raises(AssertionError, match="Partition spec length \\(1\\) should be equal to the input rank \\(2\\)"):
        xs.mark_sharding(on_device(8, 4), grid(), (0,))
    with pytest.raises(AssertionError, match="out of bound index"):
        xs.mark_sharding(on_device(8, 4), grid(), (0, 2))
    with pytest.raises(AssertionError, match="at most once"):
        xs.mark_sharding(on_device(8, 4), grid(), (0, "x"))
    with pytest.raises(ValueError, match="Axis name z is not defined"):
        xs.mark_sharding(on_device(8, 4), grid(), ("z", None))


@eight_devices
def test_a_training_loop_with_a_sharded_loader() -> None:
    xr.use_spmd()
    model = nn.Linear(4, 2).to(xm.xla_device())
    xs.mark_sharding(model.weight, grid(), ("y", None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.ones(8, 4) for _ in range(3)]
    seen = []
    spec = xs.ShardingSpec(grid(), ("x", None))
    for batch in pl.MpDeviceLoader(batches, xm.xla_device(), input_sharding=spec):
        seen.append(lazytpu.spmd.sharding_of(batch).spec)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        xm.optimizer_step(optimizer)
    assert seen == [("x", None)] * 3
    assert lazytpu.spmd.sharding_of(model.weight).spec == ("y", None)
    assert len(spec.mesh.device_ids) == 8 and not spec.can_apply(torch.ones(3))


@eight_devices
def test_torchs_placements() -> None:
    from torch.distributed.tensor import Replicate, Shard

    t = xs.xla_distribute_tensor(torch.ones(8, 4), grid().mesh, [Shard(0), Replicate()])
    assert lazytpu.spmd.sharding_of(t).spec == ("x", None)
    module = xs.xla_distribute_module(
        nn.Linear(4, 2), grid(), lambda name, m, mesh: xs.mark_sharding(m.weight, mesh, (1, None))
    )
    assert lazytpu.spmd.sharding_of(module.weight).spec == ("y", None)
