"""What torch_xla's SPMD makes of tensors: `XLAShardedTensor`, tensors that wait on the host, automatic shardings."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import lazytpu
from lazytpu import compat, spmd
from lazytpu.tensors import unsent
from tests.support.eight_devices import eight_devices

compat.install("torch_xla")

import torch_xla  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.core.world as world  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.core.xla_builder as xb  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.core.xla_model as xm  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.debug.metrics as met  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.distributed.spmd as xs  # type: ignore[import-not-found]  # noqa: E402
import torch_xla.runtime as xr  # type: ignore[import-not-found]  # noqa: E402

info = torch_xla._XLAC._get_xla_tensor_debug_info
spec_of = torch_xla._XLAC._get_xla_sharding_spec
MODEL = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def line() -> xs.Mesh:
    return xs.get_1d_mesh("d")


@contextmanager
def spmd_chosen(**options: bool) -> Iterator[None]:
    """Have `use_spmd` in effect inside."""
    with mock.patch.dict(os.environ), mock.patch.object(unsent, "choices", []), mock.patch.object(world, "_asked", []):
        xr.use_spmd(**options)
        yield


def marked(*size: int) -> torch.Tensor:
    found: torch.Tensor = xs.mark_sharding(torch.randn(size).to(torch_xla.device()), line(), ("d", None))
    return found


@eight_devices
def test_what_is_marked_comes_back_as_another_tensor() -> None:
    t = torch.randn(8, 4).to(torch_xla.device())
    w = xs.mark_sharding(t, line(), ("d", None))
    assert type(w) is xs.XLAShardedTensor and isinstance(w, DTensor) and w.global_tensor is t and w is not t
    assert xs.unwrap_sharded_tensor(w) is t and xs.mark_sharding(w, line(), ("d", None)) is w
    assert "XLAShardedTensor" in str(w + 1) and "XLAShardedTensor" not in str(t + 1) and type(w.cpu()) is torch.Tensor
    assert w.placements == t.placements == (Shard(0),) and w.sharding_spec == t.sharding_spec == spec_of(w)
    w[0] = 5
    assert w.add_(1) is w and torch.equal(t.cpu(), w.cpu()) and t[0].tolist() == [6] * 4
    w.data = torch.ones(8, 4).to(torch_xla.device())
    assert torch.equal(t.cpu(), torch.ones(8, 4)) and (w + 0).sum().item() == (t + 0).sum().item() == 32
    assert type(xs.wrap_as_sharded_tensor(t)) is type(xs.wrap_if_sharded(w + 1)) is xs.XLAShardedTensor
    with pytest.raises(NotImplementedError, match="local_shards"):
        w.to_local()


@eight_devices
def test_one_that_is_made_of_a_leaf_has_its_gradient() -> None:
    layer = nn.Linear(4, 8).to(torch_xla.device())
    weight = layer.weight
    w = xs.mark_sharding(weight, line(), ("d", None))
    assert isinstance(w, nn.Parameter) and w.is_leaf and w.requires_grad and w.grad_fn is None
    (w * 2).sum().backward()
    assert w.grad is weight.grad and torch.equal(w.grad.cpu(), torch.full((8, 4), 2.0))
    (other,) = torch.autograd.grad((weight * 3).sum(), w)
    assert torch.equal(other.cpu(), torch.full((8, 4), 3.0))
    layer.weight = w
    assert spec_of(xs.annotate_custom_sharding(w, line(), (None, None))) == "{replicated}"
    xs.annotate_custom_sharding(w, line(), ("d", None))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    before = weight.detach().cpu()
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(2, 4, device=torch_xla.device())).sum().backward()
        optimizer.step()
        torch_xla.sync()
    assert not torch.equal(weight.cpu(), before) and spec_of(weight) == spec_of(w) == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    own = xs.XLAShardedTensor(torch.ones(4).to(torch_xla.device()), requires_grad=True)
    own.sum().backward()
    assert own.grad.tolist() == [1.0] * 4 and not own.requires_grad_(False).requires_grad


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


@eight_devices
def test_functions_of_torch_take_a_sharded_tensor() -> None:
    w = marked(8, 4).requires_grad_()
    Doubled.apply(w).sum().backward()
    assert w.grad is not None and torch.equal(w.grad.cpu(), torch.full((8, 4), 2.0))
    w.grad = None
    torch.utils.checkpoint.checkpoint(torch.sin, w, use_reentrant=True).sum().backward()
    assert torch.allclose(w.grad.cpu(), w.detach().cpu().cos())
    file = io.BytesIO()
    torch.save({"w": w}, file)
    file.seek(0)
    assert all(torch.equal(x.cpu(), w.detach().cpu()) for x in (torch.load(file)["w"], copy.deepcopy(w)))
    want = (w @ w.mT).sum().item()
    assert torch.compile(lambda x: (x @ x.mT).sum(), backend="openxla")(w).item() == pytest.approx(want)
    replayed = lazytpu.compile(lambda x: (x @ x.mT).sum())
    assert [replayed(w).item() for _ in range(3)] == pytest.approx([want] * 3)


@eight_devices
def test_a_tensor_waits_on_the_host_until_it_is_used() -> None:
    with spmd_chosen():
        met.clear_all()
        source = torch.randn(8, 8)
        want = source.clone()
        used, split, kept = (source.to(torch_xla.device()) for _ in range(3))
        source.zero_()
        for t in (used, split):
            assert "IR: None\nXLAData: None\nShardingSpec: None\nTensor on host: with size [8, 8]" in info(t)
        assert "TransferToDeviceTime" not in met.metric_names()
        xs.mark_sharding(split, line(), ("d", None))
        assert "XLAData: XLAShardedData" in info(split) and "Tensor on host: None" in info(split)
        assert met.metric_data("TransferToDeviceTime")[0] == 1 and met.metric_data("OutboundData")[1] == 256
        total = used + used
        assert "IR: xla::device_data" in info(used) and "Tensor on host: None" in info(used)
        assert torch.equal(total.cpu(), want * 2) and torch.equal(split.cpu(), want) and torch.equal(kept.cpu(), want)


@eight_devices
def test_what_waits_on_the_host_may_be_written_split_unevenly_and_be_a_view() -> None:
    with spmd_chosen():
        zeroed, added, uneven, half = (torch.ones(10, 3).to(torch_xla.device()) for _ in range(4))
        zeroed.zero_()
        added += 1
        xs.mark_sharding(uneven, line(), ("d", None))
        assert spmd.local_shards(uneven)[5].data.shape == (0, 3)
        torch._foreach_mul_([zeroed, half[2:4]], 3.0)
        assert [x.sum().item() for x in (zeroed, added, uneven, half)] == [0, 60, 30, 42]
        waiting = torch.ones(8, 1).to(torch_xla.device())
        assert spmd.sharding_of(xs.shard_as(waiting, uneven)[0]) is not None
        assert lazytpu.compile(lambda x: x + 1)(torch.ones(2).to(torch_xla.device())).tolist() == [2, 2]
        assert copy.deepcopy(torch.ones(2).to(torch_xla.device())).tolist() == [1, 1]
        (batch,) = lazytpu.DeviceLoader([torch.ones(2)])  # its thread sends
        assert "Tensor on host: None" in info(batch)


@eight_devices
def test_tensors_that_nobody_has_marked_are_split_by_their_sizes() -> None:
    x, y = torch.randn(24, 16), torch.randint(0, 4, (24,))
    losses = []
    for options in ({}, {"auto": True}):
        with spmd_chosen(**options):
            met.clear_all()
            model = copy.deepcopy(MODEL).to(torch_xla.device())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            batch, classes = x.to(torch_xla.device()), y.to(torch_xla.device())
            assert torch_xla._XLAC._xla_get_auto_sharding() == bool(options)
            for _ in range(4):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(batch), classes)
                loss.backward()
                optimizer.step()
                torch_xla.sync()
                losses.append(loss.item())
            compiled = met.counter_value("CompileWithAutoSharding")
            assert compiled is not None and compiled <= 3 if options else compiled is None
            if options:
                assert spec_of(batch).startswith("{devices=[8,1]") and spec_of(model[0].weight).startswith(
                    "{devices=[8,1]"
                )
                assert spec_of(model[2].weight).startswith("{devices=[1,8]") and spec_of(model[2].bias) in (
                    "",
                    "{replicated}",
                )
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-5)


@eight_devices
def test_the_mesh_of_automatic_shardings() -> None:
    hash_of, x = torch_xla._XLAC._get_graph_hash, torch.ones(4, 6).to(torch_xla.device())
    plain = hash_of([x + 0])
    with spmd_chosen(auto=True):
        alone = hash_of([x + 0])
        os.environ["XLA_AUTO_SPMD_MESH"] = "2,4"
        assert len({plain, alone, hash_of([x + 0])}) == 3 and hash_of([x + 0]) == hash_of([x + 0])
        t = torch.ones(4, 6).to(torch_xla.device())
        assert (t + 0).sum().item() == 24 and spmd.sharding_of(t).spec == ("axis1", "axis0")  # type: ignore[union-attr]
        os.environ["XLA_AUTO_SPMD_MESH"] = "3,3"
        with pytest.raises(ValueError, match="9 devices"):
            torch.ones(9).to(torch_xla.device()) + 1
    with spmd_chosen():
        model = xs.xla_distribute_module(nn.Linear(8, 8), None, xs.auto_policy)
        assert torch_xla._XLAC._xla_get_auto_sharding()
        model(torch.ones(2, 8).to(torch_xla.device()))
        assert spec_of(model.weight).startswith("{devices=[8,1]")


@eight_devices
def test_hlo_has_manual_shardings_in_torch_xlas_notation() -> None:
    xs.set_global_mesh(line())
    x = torch.zeros(8, 2).to(torch_xla.device())
    part = xs.enable_manual_sharding(x, ("d", None)) + 1
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([part])
    assert 'custom_call_target="SPMDFullToShardShape", sharding={manual}' in hlo
    assert "sdy" in lazytpu.hlo_text(part)
    assert xs.disable_manual_sharding(part, ("d", None), (8, 2)).sum().item() == 16


@eight_devices
def test_a_lowering_context_knows_the_tensors_of_parameters() -> None:
    met.clear_all()
    a, b = marked(8, 4), torch.ones(4).to(torch_xla.device())
    result = a * 0.5 + b
    context = torch_xla._XLAC.lowering.LoweringContext("MyCustomName")
    context.build([result])
    a += 1  # of the same step
    torch_xla.sync()
    found = xb.get_computation_hlo(xb.computation_from_module_proto("again", context.hlo()))
    assert "HloModule MyCustomName" in context.hlo_text() and "parameter(2)" in found and "parameter(3)" not in found
    assert "parameter(0), sharding={devices=[8,1]<=[8]}" in found
    assert not met.metric_data("TransferFromDeviceTime") and not met.counter_value("ReplicateShardedData")
    mapping = context.device_parameter_id_tensor_mapping()
    numbers = {context.tensor_parameter_id(t) for t in (a, b)}
    assert numbers == {0, 1} and context.tensor_parameter_id(result) == -1 and sorted(mapping) == [0, 1, 2]
    assert torch.equal(mapping[context.tensor_parameter_id(a)].cpu() + 1, a.cpu()) and mapping[2].tolist() == [0.5]
    assert met.counter_value("ReplicateShardedData") == 2
    assert [x.device.type for x in context.parameter_id_tensor_mapping().values()] == ["cpu"] * 3


@eight_devices
def test_donations_are_counted_for_each_graph() -> None:
    met.clear_all()
    w = marked(8, 4)
    w += 1
    torch_xla.sync()
    assert met.metric_data("InputOutputAliasCount")[:2] == (1, 1.0) and "InputOutputAliasCount" in met.metrics_report()
    met.clear_all()
    assert met.metric_data("InputOutputAliasCount") is None


def test_classes_may_be_floating_point_numbers() -> None:
    x, y = torch.randn(6, 3, 2), torch.randint(0, 3, (6, 2))
    want = x.clone().requires_grad_()
    F.cross_entropy(want, y, ignore_index=1).backward()
    got = x.to(torch_xla.device()).requires_grad_()
    F.cross_entropy(got, y.to(torch_xla.device()).float(), ignore_index=1).backward()
    torch.testing.assert_close(got.grad.cpu(), want.grad)  # type: ignore[union-attr]
    with torch.inference_mode():
        loss = F.nll_loss(x.log_softmax(1).to(torch_xla.device()), y.to(torch_xla.device()).double())
    torch.testing.assert_close(loss.cpu(), F.nll_loss(x.log_softmax(1), y))
    with pytest.raises(RuntimeError, match="expected target dtype"):
        F.cross_entropy(x, y.float())


@eight_devices
def test_distribute_tensor_and_redistribute_give_sharded_tensors() -> None:
    w = xs.xla_distribute_tensor(
        torch.randn(8, 4, device=torch_xla.device(), requires_grad=True), spmd.Mesh((8,), ("d",)), [Shard(0)]
    )
    assert type(w) is xs.XLAShardedTensor and w.is_leaf and w.global_tensor.requires_grad
    assert w.local_shards[0].data.shape == (1, 4)
    whole = w.redistribute(spmd.Mesh((8,), ("d",)), [Replicate()])
    assert whole.placements == (Replicate(),) and xm.is_xla_tensor(whole)
