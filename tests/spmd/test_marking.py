"""Shardings on tensors: where they live, what they do to a graph, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch

import lazytpu
from lazytpu import spmd
from lazytpu.runtime import meshes
from tests.support.eight_devices import eight_devices


def mesh(*shape: int) -> spmd.Mesh:
    return spmd.Mesh(shape or (2, 4), ("data", "model")[: len(shape or (2, 4))])


def on_device(*size: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(size).numel())).reshape(size).to(lazytpu.device())


def spec_of(tensor: torch.Tensor) -> object:
    found = spmd.sharding_of(tensor)
    return None if found is None else found.spec


@eight_devices
def test_a_marked_tensor_keeps_its_contents_and_is_returned() -> None:
    x = on_device(8, 4)
    assert spmd.mark_sharding(x, mesh(), ("data", "model")) is x
    assert spec_of(x) == ("data", "model")
    assert torch.equal(x.cpu(), torch.arange(32.0).reshape(8, 4))


@eight_devices
def test_a_deep_copy_lies_as_the_original() -> None:
    x, net = on_device(8, 4), torch.nn.Linear(4, 8).to(lazytpu.device())
    spmd.mark_sharding(x, mesh(), ("data",))
    spmd.fully_shard(net, mesh(8))
    y, other = copy.deepcopy(x), copy.deepcopy(net)
    assert spec_of(y) == ("data", None) and spec_of(other.weight) == ("data", None)
    y += 1
    assert spec_of(y) == ("data", None) and torch.equal(y.cpu(), x.cpu() + 1)
    assert [tuple(shard.data.shape) for shard in spmd.local_shards(y)] == [(4, 4)] * 8
    assert [tuple(shard.data.shape) for shard in spmd.local_shards(other.weight)] == [(1, 4)] * 8


@eight_devices
def test_the_ir_shows_shardings_and_the_mesh() -> None:
    x = spmd.mark_sharding(on_device(8, 4), mesh(), ("data",))
    text = lazytpu.ir_text(x + 1)
    assert text.startswith("graph(%p0: f32[8,4] {data, -}, ")
    assert "  on mesh (data=2, model=4) of devices 0-7\n" in text


@eight_devices
def test_the_program_is_one_for_eight_devices() -> None:
    x = spmd.mark_sharding(on_device(8, 4), mesh(8), ("data",))
    total = (x * 2).sum()
    text = lazytpu.hlo_text(total, optimized=True)
    assert "num_partitions=8" in text and "all-reduce" in text
    assert total.item() == 31 * 32


@eight_devices
def test_wrong_specs_raise_before_anything_is_recorded() -> None:
    x = on_device(8, 4)
    about = "a tensor of shape [8, 4], spec {}, mesh (data=2, model=4) of devices 0-7"
    for spec, message in {
        ("rows",): "the mesh has no axis 'rows', but 'data', 'model': " + about,
        ("data", "data"): "the axis 'data' splits two dimensions, or one twice: " + about,
        ("data", None, None): "the spec has 3 entries for 2 dimensions: " + about,
    }.items():
        with pytest.raises(ValueError) as error:
            spmd.mark_sharding(x, mesh(), spec)
        assert str(error.value) == message.format(spec)
    with pytest.raises(TypeError, match="an entry of a spec must be None, the name of an axis"):
        spmd.mark_sharding(x, mesh(), (0,))
    assert spec_of(x) is None
    with pytest.raises(TypeError, match="takes a tensor on the device, not one on cpu"):
        spmd.mark_sharding(torch.ones(2), mesh(), ())


@eight_devices
def test_an_intermediate_result_and_its_gradient_are_laid_out() -> None:
    x = on_device(8, 4).requires_grad_()
    seen = []
    h = x * 3
    spmd.mark_sharding(h, mesh(), ("data", "model"))
    h.register_hook(lambda grad: seen.append(spec_of(grad)))
    (h * h).sum().backward()
    assert "lazytpu.shard(" in lazytpu.ir_text(h)
    assert spec_of(h) == ("data", "model") and seen == [("data", "model")]
    assert torch.equal(x.grad.cpu(), 18 * torch.arange(32.0).reshape(8, 4))


@eight_devices
def test_what_overwrites_a_tensor_lies_as_it_did() -> None:
    x = spmd.mark_sharding(on_device(8, 4), mesh(), ("data", "model"))
    x.add_(1)
    lazytpu.mark_step()
    assert spec_of(x) == ("data", "model") and lazytpu.metrics.counter("donated") == 1
    x.copy_(torch.ones(8, 4))
    assert spec_of(x) == ("data", "model")
    x.copy_(on_device(8, 4))  # takes over a buffer of one device
    lazytpu.mark_step()
    assert spec_of(x) == ("data", "model") and torch.equal(x.cpu(), torch.arange(32.0).reshape(8, 4))


@eight_devices
def test_a_view_has_the_sharding_of_its_storage() -> None:
    w = spmd.mark_sharding(on_device(8, 4), mesh(), ("data", "model"))
    assert spec_of(w.t()) == ("model", "data") and spec_of(w.detach()) == ("data", "model")
    assert spec_of(w[0]) is None and spec_of(w.view(4, 8)) is None
    assert spmd.visualize(w[0]) == "(4,) has no sharding: it is whole on one device or on each, or a view"
    v = on_device(4, 8)
    spmd.mark_sharding(v.t(), mesh(), ("data", "model"))
    assert spec_of(v) == ("model", "data")
    with pytest.raises(lazytpu.errors.LazyTPUError, match="a view that is only a part of its storage"):
        spmd.mark_sharding(on_device(8, 4)[:4], mesh(), ("data",))
    h = on_device(8, 4) * 2
    spmd.mark_sharding(h.view(4, 8), mesh(), ("data",))  # recorded, where it is computed
    assert torch.equal(h.cpu(), 2 * torch.arange(32.0).reshape(8, 4))


@eight_devices
def test_unmarked_tensors_count_as_replicated_and_go_on_alone() -> None:
    x, b = spmd.mark_sharding(on_device(8, 4), mesh(), ("data",)), on_device(4)
    assert torch.equal((x + b).cpu(), torch.arange(32.0).reshape(8, 4) + torch.arange(4.0))
    assert spec_of(b) is None
    assert "num_partitions" not in lazytpu.hlo_text(b + 1, optimized=True)
    assert torch.equal((b + 1).cpu(), torch.arange(4.0) + 1)  # from what all devices have, on one


@eight_devices
def test_sizes_that_do_not_divide_are_padded_and_told_as_they_are() -> None:
    x = spmd.mark_sharding(on_device(13, 3), mesh(8), ("data",))
    parts = spmd.local_shards(x)
    assert [tuple(part.data.shape) for part in parts] == [(2, 3)] * 6 + [(1, 3), (0, 3)]
    assert torch.equal(torch.cat([part.data for part in parts]), torch.arange(39.0).reshape(13, 3))
    before = x.cpu()
    x.mul_(2)
    mean = x.mean()
    lazytpu.mark_step()
    assert torch.equal(x.cpu(), 2 * before) and mean.item() == 38.0
    assert tuple(lazytpu.to_jax(x).shape) == (13, 3)
    assert len(spmd.local_shards(x)[0].data) == 2


@eight_devices
def test_gradients_that_are_views_lie_as_their_parameters() -> None:
    net = torch.nn.Linear(4, 16).to(lazytpu.device())  # whose bias gets a view of a sum that kept its dimension
    for p in net.parameters():
        spmd.mark_sharding(p, mesh(), ("model",))
    for _ in range(2):
        net.zero_grad()
        net(on_device(8, 4)).square().sum().backward()
        lazytpu.mark_step()
        assert spec_of(net.bias.grad) == ("model",) and spec_of(net.weight.grad) == ("model", None)
    assert spec_of(net.bias.detach()[None, :, None]) == (None, "model", None)
    assert spec_of(net.weight.detach().t()[:, None]) == (None, None, "model")
    assert spec_of(net.bias.detach().view(4, 4)) is None and spec_of(net.bias.detach()[:1]) is None


@eight_devices
def test_views_of_padded_tensors_are_read_as_they_are() -> None:
    x, whole = spmd.mark_sharding(on_device(7, 5), mesh(), ("data", "model")), torch.arange(35.0).reshape(7, 5)
    for of in (lambda t: t[2], lambda t: t[:, 1], lambda t: t.t(), lambda t: t.view(-1)[3::4]):
        assert torch.equal(of(x).cpu(), of(whole))


@eight_devices
def test_tensors_without_elements_are_split_like_others() -> None:
    x = spmd.mark_sharding(on_device(0, 8), mesh(), ("data", "model"))
    assert x.cpu().shape == (0, 8) and {part.data.shape for part in spmd.local_shards(x)} == {(0, 2)}
    assert (x + 1).cpu().shape == (0, 8)


@eight_devices
def test_replicated_results_of_several_ranks_share_a_graph() -> None:
    x = spmd.mark_sharding(on_device(8, 4), mesh(), ("data",))
    y = spmd.mark_sharding(on_device(8, 2, 2), mesh(), ("data",))
    one, other = spmd.replicate(x * 2, mesh()), spmd.replicate(y * 3, mesh())
    lazytpu.mark_step()
    assert spec_of(one) == (None, None) and spec_of(other) == (None, None, None)
    assert torch.equal(one.cpu(), 2 * torch.arange(32.0).reshape(8, 4))


@eight_devices
def test_a_parameter_on_a_mesh_stays_the_object_it_is_when_its_module_moves() -> None:
    model = spmd.fully_shard(torch.nn.Linear(8, 8), mesh(), "model")
    weight = model.weight
    assert model.cpu().weight is weight and weight.device.type == "cpu"


@eight_devices
def test_a_gradient_older_than_the_mark_is_laid_out_when_it_is_written() -> None:
    w = torch.nn.Parameter(on_device(7, 5))
    (w * 2).sum().backward()
    lazytpu.mark_step()
    spmd.mark_sharding(w, mesh(), ("model",))
    y = w + 1
    lazytpu.mark_step()
    assert spec_of(w.grad) is None and torch.equal((w.grad * y).cpu(), 2 * (torch.arange(35.0).reshape(7, 5) + 1))
    w.grad.add_(w.detach())
    lazytpu.mark_step()
    assert spec_of(w.grad) == ("model", None) and torch.equal(w.grad.cpu(), torch.arange(35.0).reshape(7, 5) + 2)


@eight_devices
def test_clear_sharding_and_replicate() -> None:
    x = spmd.mark_sharding(on_device(8, 4), mesh(), ("data", "model"))
    spmd.replicate(x, mesh())
    assert spec_of(x) == (None, None) and len(spmd.local_shards(x)) == 8
    assert spmd.clear_sharding(x) is x and spec_of(x) is None
    assert len(lazytpu.to_jax(x).sharding.device_set) == 1
    assert torch.equal(x.cpu(), torch.arange(32.0).reshape(8, 4))


@eight_devices
def test_local_shards_say_what_they_are() -> None:
    x = spmd.mark_sharding(on_device(8, 4), mesh(), ("data", "model"))
    whole = x.cpu()
    parts = spmd.local_shards(x)
    assert [part.device for part in parts] == list(range(8))
    assert parts[5].index == (slice(4, 8), slice(1, 2))
    assert all(torch.equal(part.data, whole[part.index]) for part in parts)
    parts = spmd.local_shards(x.t())
    assert all(part.data.shape == (1, 4) and torch.equal(part.data, whole.t()[part.index]) for part in parts)


@eight_devices
def test_visualize_draws_the_devices() -> None:
    x = spmd.mark_sharding(on_device(8, 4), mesh(), (None, "model"))
    assert spmd.visualize(x).splitlines() == [
        "(8, 4) {-, model} on mesh (data=2, model=4)",
        "┌──────┬──────┬──────┬──────┐",
        "│ 0, 4 │ 1, 5 │ 2, 6 │ 3, 7 │",
        "└──────┴──────┴──────┴──────┘",
    ]


@eight_devices
def test_another_sharding_is_another_graph_and_is_explained() -> None:
    x, wide = on_device(8, 4), mesh()
    for spec in (("data",), ("data",), (None, "model")):
        spmd.mark_sharding(x, wide, spec)
        _ = x.cos()
        lazytpu.mark_step()
    assert lazytpu.metrics.counter("compile") == 2
    assert "sharding of `x` was {data, -} and is {-, model}" in str(lazytpu.explain())


@eight_devices
def test_the_mesh_is_part_of_the_key() -> None:
    keys = set()
    for devices in (range(8), [1, 0, *range(2, 8)]):
        for names in (("data", "model"), ("a", "b")):
            grid = spmd.Mesh((2, 4), names, devices)
            x = spmd.mark_sharding(on_device(8, 4), grid, (names[0],))
            _ = x.sin()
            keys.add(lazytpu.ir_text(_))
            lazytpu.mark_step()
    assert len(keys) == 4 and lazytpu.metrics.counter("compile") == 4


@eight_devices
def test_one_graph_takes_one_set_of_devices() -> None:
    x = spmd.mark_sharding(on_device(8), mesh(8), ("data",))
    y = spmd.mark_sharding(on_device(8), spmd.Mesh((4,), ("data",), range(4)), ("data",))
    with pytest.raises(lazytpu.errors.LazyTPUError, match="two sets of devices") as error:
        _ = x + y
    assert "test_marking.py" in str(error.value) and "of devices 0-3" in str(error.value)


@eight_devices
def test_meshes_are_checked() -> None:
    for arguments, message in (
        (((2, 3), ("a", "b")), "a mesh of shape \\(2, 3\\) has 6 devices, not 8"),
        (((8,), ("a", "b")), "needs 1 different names of axes"),
        (((2,), ("a",), [0, 0]), "takes each device once"),
        (((2,), ("a",), [0, 99]), "takes each device once"),
    ):
        with pytest.raises(ValueError, match=message):
            spmd.Mesh(*arguments)
    assert spmd.HybridMesh((2, 4), axis_names=("data", "model")) == spmd.Mesh((2, 4), ("data", "model"))
    with pytest.raises(ValueError, match="a hybrid mesh of"):
        spmd.HybridMesh((2, 2), (2, 1))


@eight_devices
def test_parts_have_the_dtype_of_their_tensor() -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool):
        x = spmd.mark_sharding(torch.arange(11).to(dtype).to(lazytpu.device()), mesh(8), ("data",))
        shards = spmd.local_shards(x)
        assert {shard.data.dtype for shard in shards} == {dtype}
        whole = torch.cat([shard.data.to(torch.complex64) for shard in shards])
        assert torch.equal(whole, x.cpu().to(torch.complex64))


@eight_devices
def test_the_first_tensor_on_a_mesh_may_be_a_result() -> None:
    meshes.used.clear()  # as in a process that has marked nothing yet
    y = spmd.mark_sharding(on_device(8, 4) * 2, mesh(), ("data", "model"))
    assert torch.equal(y.cpu(), torch.arange(32.0).reshape(8, 4) * 2) and spec_of(y) == ("data", "model")


def test_a_string_is_no_spec() -> None:
    with pytest.raises(TypeError, match="a spec has an entry a dimension"):
        spmd.mark_sharding(on_device(8), spmd.Mesh((-1,), ("data",)), "data")
