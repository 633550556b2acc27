"""Scripts of torch_xla's SPMD under its own names."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from unittest import mock

import numpy as np
import pytest
import torch
from functorch.compile import aot_function, make_boxed_func  # type: ignore[attr-defined]
from torch import nn

import lazytpu
from lazytpu import compat, spmd
from lazytpu.runtime import meshes
from lazytpu.tensors import unsent
from tests.support.eight_devices import eight_devices

compat.install("torch_xla")

import torch_xla  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.core.world as world  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.core.xla_model as xm  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.debug.metrics as met  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.distributed.parallel_loader as pl  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.distributed.spmd as xs  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.distributed.xla_backend  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.runtime as xr  # type: ignore[import-not-found]  # noqa: E402


def grid() -> xs.Mesh:
    return xs.Mesh(np.arange(8), (4, 2), ("x", "y"))


def a_host_that_sends() -> AbstractContextManager[object]:
    """Return a context after which tensors do not wait on the host, whatever it has switched on."""
    return mock.patch.object(unsent, "choices", [])


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
def test_the_op_that_marks_takes_text() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.xla.dynamo_mark_sharding(x * 2, range(8), [8, 1], "('a', 'b')", "('a', None)") + 1

    found = function(on_device(8, 4))
    assert torch.equal(found.cpu(), 2 * on_device(8, 4).cpu() + 1)
    assert torch_xla._XLAC._get_xla_sharding_spec(found).startswith("{devices=[8,1]")
    assert torch.equal(function(torch.ones(8, 4)), torch.full((8, 4), 3.0))


@eight_devices
def test_marked_tensors() -> None:
    t = on_device(8, 4)
    assert not isinstance(t, xs.XLAShardedTensor)
    marked = xs.mark_sharding(t, grid(), (0, "y"))
    assert marked.global_tensor is t and isinstance(t, xs.XLAShardedTensor) and xr.is_spmd()
    assert torch_xla._XLAC._get_xla_sharding_spec(t) == "{devices=[4,2]0,1,2,3,4,5,6,7}"
    assert torch_xla._XLAC._get_xla_sharding_spec((t.clone() + 1).mT) == ""  # XLA chooses
    assert torch_xla._XLAC._get_xla_sharding_spec(t.clone() + 1) == "{devices=[4,2]0,1,2,3,4,5,6,7}"
    assert t.sharding_type == xs.ShardingType.TILED
    shards = t.local_shards
    assert [s.shard_device for s in shards[:2]] == ["CPU:0", "CPU:1"] and shards[3].indices == [
        slice(2, 4, 1),
        slice(2, 4, 1),
    ]
    assert all(torch.equal(s.unpadded_data, t.cpu()[s.indices]) for s in shards)
    part = xs.mark_sharding(on_device(8, 4), grid(), (0, None))
    assert part.sharding_type == xs.ShardingType.PARTIAL and [s.replica_id for s in part.local_shards[:2]] == [0, 1]
    whole = xs.mark_sharding(on_device(8), grid(), (None,))
    assert whole.sharding_type == xs.ShardingType.REPLICATED and whole.local_shards[0].indices is ...
    xs.clear_sharding(t)
    assert not isinstance(t, xs.XLAShardedTensor) and torch_xla._XLAC._get_xla_sharding_spec(t) == ""


@eight_devices
def test_what_is_said_of_a_tensor() -> None:
    info, t = torch_xla._XLAC._get_xla_tensor_debug_info, on_device(8, 4)
    assert "XLAData: XLAData {" in info(t) and "ShardingSpec: None" in info(t) and "NumShards: 1\n" in info(t)
    xs.mark_sharding(t, grid(), (0, "y"))
    assert "XLAData: XLAShardedData {\n  Data Device: SPMD:0\n  Data Shape: f32[8,4]" in info(t)
    assert "  OpSharding: {devices=[4,2]0,1,2,3,4,5,6,7}\n  NumShards: 8\n" in info(t)
    pending = t / 2
    assert "aten.div" in info(pending) and "XLAData: None" in info(pending)
    torch_xla.sync()
    assert "aten.div" not in info(pending) and "IR: xla::device_data" in info(pending)


@eight_devices
def test_what_is_counted_of_shardings() -> None:
    met.clear_all()
    mesh = grid()
    for spec in ((0, 1), (0, 1), (0, None)):
        xs.mark_sharding(on_device(8, 4), mesh, spec)
    assert met.counter_value("CreateOpSharding") == 2 and met.counter_value("VirtualDeviceUsage") == 3


@eight_devices
def test_tracers_of_torch_see_the_mark() -> None:
    graphs: list[str] = []

    def compiled(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph.code)
        return make_boxed_func(graph)

    x = on_device(8, 4).requires_grad_()
    traced = aot_function(lambda x: xs.mark_sharding_with_gradients(x.sin(), grid(), (0, None)) + 1, compiled)
    found = traced(x)
    found.sum().backward()
    torch_xla.sync()
    spec = torch_xla._XLAC._get_xla_sharding_spec
    assert spec(found) == spec(x.grad) and spec(x.grad).startswith("{devices=[4,1,2]")
    assert len(graphs) == 2 and all("lazytpu.shard" in code for code in graphs)
    assert torch.allclose(x.grad.cpu(), x.detach().cpu().cos())


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
def test_spmd_is_chosen_without_a_mark() -> None:
    with mock.patch.object(meshes, "used", []), mock.patch.object(world, "_asked", []), a_host_that_sends():
        os.environ.pop("XLA_USE_SPMD", None)
        assert not xr.is_spmd()
        spmd.use()
        assert xr.is_spmd() and xr.world_size() == 1
        xr.use_spmd()
        assert os.environ["XLA_USE_SPMD"] == "1" and xr.is_spmd()
        with pytest.raises(AssertionError, match="SPMD"):
            torch.distributed.init_process_group("xla", init_method="xla://")
        del os.environ["XLA_USE_SPMD"]
        assert not xr.is_spmd()


@eight_devices
def test_what_nobody_has_marked_is_replicated_once_it_is_computed() -> None:
    with a_host_that_sends():
        xr.use_spmd()
        spec, x = torch_xla._XLAC._get_xla_sharding_spec, on_device(8, 4)
        y = x + 1
        assert spec(x) == spec(y) == ""
        torch_xla.sync()
        assert spec(x) == "" and spec(y) == "{replicated}"
        (batch,) = pl.MpDeviceLoader([torch.ones(4, 4)], torch_xla.device(), input_sharding=None)
        assert spec(batch) == "{replicated}"


@eight_devices
def test_a_hybrid_mesh_goes_over_slices() -> None:
    places = [(0, 2, (0, 0)), (0, 1, (1, 0)), (0, 0, (0, 1)), (0, 3, (1, 1))]
    places += [(1, 4, (0, 0)), (1, 7, (1, 0)), (1, 6, (0, 1)), (1, 5, (1, 1))]
    found = [{"name": f"TPU:{i}", "coords": [*at, 0], "core_on_chip": 0, "slice_index": part} for part, i, at in places]
    with mock.patch("torch_xla.runtime.global_runtime_device_attributes", lambda: found):
        mesh = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1))
    assert mesh.get_logical_mesh().tolist() == [[2, 1], [0, 3], [4, 7], [6, 5]]
    assert [each["name"] for each in xr.global_runtime_device_attributes()] == [f"CPU:{i}" for i in range(8)]


@eight_devices
def test_torchs_placements() -> None:
    from torch.distributed.tensor import Replicate, Shard

    t = xs.xla_distribute_tensor(torch.ones(8, 4), grid().mesh, [Shard(0), Replicate()])
    assert lazytpu.spmd.sharding_of(t).spec == ("x", None)
    module = xs.xla_distribute_module(
        nn.Linear(4, 2), grid(), lambda name, m, mesh: xs.mark_sharding(m.weight, mesh, (1, None))
    )
    assert lazytpu.spmd.sharding_of(module.weight).spec == ("y", None)


@eight_devices
def test_parts_are_padded_and_can_be_overwritten() -> None:
    t = xs.mark_sharding(on_device(9), xs.get_1d_mesh(), (0,))
    shards = t.local_shards
    assert [s.data.tolist() for s in shards[3:6]] == [[6, 7], [8, 0], [0, 0]]
    assert [s.unpadded_data.tolist() for s in shards[3:6]] == [[6, 7], [8], []] and {s.replica_id for s in shards} == {
        0
    }
    for shard in shards:
        shard.data = shard.data + 1
    t.load_local_shards_(shards)
    assert t.tolist() == [*map(float, range(1, 10))] and t.sharding_spec == "{devices=[8]0,1,2,3,4,5,6,7}"
    with pytest.raises(RuntimeError, match="takes 8 parts of shape \\[2\\], not 7"):
        t.load_local_shards_(shards[:-1])
    with pytest.raises(RuntimeError, match="parts of a tensor that is split"):
        on_device(8).load_local_shards_([])
    build = torch_xla._XLAC._global_tensor_from_cpu_shards
    sharding = grid().get_op_sharding(("y", None))
    assert str(sharding) == "{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}"
    made = build([torch.full((2, 2), float(i % 2)) for i in range(8)], sharding, torch.Size([3, 2]))
    assert made.tolist() == [[0, 0], [0, 0], [1, 1]] and made.sharding_type == xs.ShardingType.PARTIAL
    with pytest.raises(RuntimeError, match="has none of shape"):
        build([torch.ones(2, 2)] * 8, sharding, torch.Size([2, 2]))


@eight_devices
def test_another_sharding_has_to_be_asked_for() -> None:
    t = xs.mark_sharding(on_device(8, 8), grid(), (0, None))
    xs.mark_sharding(t, grid(), ("x", None))
    with pytest.raises(RuntimeError, match="clear_sharding"):
        xs.mark_sharding(t, grid(), (None, 0))
    assert xs.annotate_custom_sharding(t, grid(), (None, 0)).partition_spec == (None, 0)
    leaf = on_device(8, 8).requires_grad_()
    made = xs.mark_sharding_with_gradients(leaf, grid(), (0, 1))
    (made * 2).sum().backward()
    assert made is not leaf and leaf.grad.partition_spec == made.partition_spec == (0, 1)
    _, other = xs.shard_as(made, on_device(8, 8))
    assert other.partition_spec == (0, 1)


@eight_devices
def test_meshes_and_redistribution_of_torch() -> None:
    from torch.distributed.tensor import DeviceMesh, Partial, Replicate, Shard

    mesh = xs.api.convert_to_xla_mesh(DeviceMesh("xla", torch.arange(8).reshape(2, 4), mesh_dim_names=("a", "b")))
    assert (
        mesh.mesh_shape == (2, 4)
        and mesh.axis_names == ("a", "b")
        and xs.Mesh.from_str(str(mesh)).shape() == mesh.shape()
    )
    assert mesh.get_jax_mesh().axis_names == ("a", "b")
    t = xs.xla_distribute_tensor(torch.ones(8, 4), mesh, [Shard(1), Shard(0)])
    assert t.partition_spec == (1, 0) and t.placements == (Shard(1), Shard(0)) and t.mesh_shape == (2, 4)
    assert t.redistribute(mesh, [Replicate(), Shard(1)]).placements == (Replicate(), Shard(1))
    for placements, error in (
        ([Shard(0)], ValueError),
        ([Shard(2), Replicate()], IndexError),
        ([Partial()] * 2, NotImplementedError),
    ):
        with pytest.raises(error):
            t.redistribute(mesh, placements)


def test_processes_find_each_other_by_the_url_of_torch_xla() -> None:
    import torch.distributed as dist
    import torch_xla.distributed.xla_backend  # type: ignore[import-not-found]

    dist.init_process_group("xla", init_method="xla://")
    try:
        x = torch.ones(2).to(torch_xla.device())
        dist.all_reduce(x)
        assert x.tolist() == [1.0, 1.0] and dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


@eight_devices
def test_manual_sharding() -> None:
    mesh, everybody = grid(), [list(range(8))]
    xs.set_global_mesh(mesh)
    x = on_device(8, 8)
    part = xs.enable_manual_sharding(x, ("x", "y")).global_tensor
    assert part.shape == (2, 4) and part.sharding_type == xs.ShardingType.MANUAL and part.sharding_spec == "{manual}"
    gathered = xm.all_gather(part, 1, [[0, 1], [2, 3], [4, 5], [6, 7]])
    scattered = xm.reduce_scatter(xm.REDUCE_SUM, gathered, 1.0, -1, 2, [[0, 1], [2, 3], [4, 5], [6, 7]])
    whole = on_device(8, 8).cpu()
    assert torch.equal(xs.disable_manual_sharding(scattered, ("x", "y"), x.shape).cpu(), 2 * whole)
    part = xs.enable_manual_sharding(x, ("x", "y"))
    total = xm.all_reduce(xm.REDUCE_SUM, part, 0.5, everybody)
    blocks = whole.reshape(4, 2, 2, 4).transpose(1, 2)
    assert torch.equal(xs.disable_manual_sharding(total, (None, None), (2, 4)).cpu(), blocks.sum((0, 1)) / 2)
    moved = xm.collective_permute(xs.enable_manual_sharding(x, ("x", "y")), [[i, (i + 2) % 8] for i in range(8)])
    assert torch.equal(xs.disable_manual_sharding(moved, ("x", "y"), x.shape).cpu(), whole.roll(2, 0))
    with pytest.raises(RuntimeError, match="whole on each device"):
        xs.disable_manual_sharding(x, ("x", "y"), x.shape)
    with pytest.raises(ValueError, match="each of 8 devices is in one group"):
        xm.all_reduce(xm.REDUCE_SUM, xs.enable_manual_sharding(x, ("x", "y")), 1.0, [[0, 1]])


@eight_devices
def test_a_whole_result_can_be_each_devices_own() -> None:
    x = on_device(8, 4)
    with pytest.raises(RuntimeError, match="whole on each device"):
        xs._mark_manual_sharding(x)
    part = xs._mark_manual_sharding(x + 1)
    assert part.shape == (8, 4) and part.sharding_spec == "{manual}"
    whole = torch_xla._XLAC._spmd_shard_to_full_shape(part, torch_xla._XLAC.OpSharding([]), part.shape, part.dtype)
    assert torch.equal(whole.cpu(), x.cpu() + 1)
