"""`shard_map`: each device computes with its own part of a tensor."""

from __future__ import annotations

import pytest
import torch

import lazytpu
from lazytpu import spmd
from lazytpu.debug import hlo
from lazytpu.debug.collectives import collectives_of
from lazytpu.debug.graph_text import optimized_hlo_of
from lazytpu.diagnosis import events
from lazytpu.errors import LazyTPUError
from tests.support.eight_devices import eight_devices


def mesh() -> spmd.Mesh:
    return spmd.Mesh((2, 4), ("data", "model"))


def numbers(*size: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(size).numel())).reshape(size)


def on_device(*size: int) -> torch.Tensor:
    return numbers(*size).to(lazytpu.device())


@eight_devices
def test_a_layer_split_by_hand_has_the_numbers_and_gradients_of_the_whole() -> None:
    def layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return spmd.all_reduce((x @ up).tanh() @ down, "model")

    torch.manual_seed(0)
    plain = [torch.randn(size).requires_grad_() for size in ((8, 6), (6, 12), (12, 3))]
    parted = [x.detach().to(lazytpu.device()).requires_grad_() for x in plain]
    split = spmd.shard_map(layer, mesh(), [("data",), (None, "model"), ("model",)], ("data",))
    found, wanted = split(*parted), (plain[0] @ plain[1]).tanh() @ plain[2]
    assert spmd.sharding_of(found).spec == ("data", None)
    wanted.pow(2).sum().backward()
    found.pow(2).sum().backward()
    lazytpu.mark_step()
    event = events.compilations[-1]
    text = optimized_hlo_of(event.executable.compiled)
    sent = {c.kind for c in collectives_of(hlo.parse(text), event.graph.mesh, event.graph)}
    assert sent == {"all-reduce"}
    torch.testing.assert_close(found.cpu(), wanted)
    for x, y in zip(parted, plain, strict=True):
        torch.testing.assert_close(x.grad.cpu(), y.grad, rtol=1e-4, atol=1e-4)


@eight_devices
def test_devices_exchange_their_parts() -> None:
    def exchanges(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            spmd.permute(x, "data", [(0, 1), (1, 0)]) + spmd.axis_index("data"),
            spmd.all_gather(x, "model", 1),
            spmd.reduce_scatter(x, "model", -1),
            spmd.all_to_all(x, ("data", "model"), 1, 0),
            spmd.all_reduce(x, "data", "max"),
            spmd.all_reduce(x, "data", "mean"),
        )

    rows, both = ("data",), ("data", "model")
    specs = [rows, rows, both, (both,), (), ()]
    x = numbers(8, 8)
    found = spmd.shard_map(exchanges, mesh(), rows, specs)(x.to(lazytpu.device()))
    halves = x.chunk(2)
    assert torch.equal(found[0].cpu(), torch.cat([halves[1], halves[0] + 1]))
    assert torch.equal(found[1].cpu(), torch.cat([x] * 4, 1))
    assert torch.equal(found[2].cpu(), x * 4)
    columns = [torch.cat([half[:, i : i + 1] for half in halves for _ in range(4)]) for i in range(8)]
    assert torch.equal(found[3].cpu(), torch.cat(columns))
    assert torch.equal(found[4].cpu(), halves[1])
    assert torch.equal(found[5].cpu(), (halves[0] + halves[1]) / 2)


@eight_devices
def test_gradients_of_exchanges_are_their_transposes() -> None:
    x = on_device(4, 8).requires_grad_()
    weights = {name: torch.randn(size).to(lazytpu.device()) for name, size in (("g", (4, 8)), ("a", (4, 8)))}

    def weighted(x: torch.Tensor, g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        gathered = (spmd.all_gather(x, "model", 1) * g).sum()
        moved = (spmd.permute(x, "model", [(0, 1), (1, 2)]) * a).sum()
        swapped = (spmd.all_to_all(spmd.all_to_all(x, "data", 1, 0), "data", 0, 1) * a).sum()
        return spmd.all_reduce(gathered + moved + swapped, ("data", "model"))

    rows, both = ("data",), ("data", "model")
    loss = spmd.shard_map(weighted, mesh(), [both, rows, both], ())(x, weights["g"], weights["a"])
    loss.backward()
    g, a = weights["g"].cpu(), weights["a"].cpu()
    wanted = 4 * g + a  # all four devices along the axis gather all columns; two exchanges are none
    wanted[:, :4] += a[:, 2:6]  # the first device, with two columns, sends to the second, and that to the third
    torch.testing.assert_close(x.grad.cpu(), wanted)


@eight_devices
def test_parts_of_uneven_sizes_are_filled_up() -> None:
    x = on_device(13)
    doubled = spmd.shard_map(lambda part: part * 2, mesh(), (("data", "model"),), (("data", "model"),))(x)
    assert torch.equal(doubled.cpu(), torch.cat([numbers(13) * 2, torch.zeros(3)]))


@eight_devices
def test_in_place_writes_stay_inside() -> None:
    def written(x: torch.Tensor, step: int) -> torch.Tensor:
        torch._foreach_mul_([x], 3.0)
        x[:1] += 1
        return x + step

    x = on_device(4, 2)
    found = spmd.shard_map(written, mesh(), [("data",), None], ("data",))(x, 5)
    wanted = numbers(4, 2) * 3 + 5
    wanted[::2] += 1
    assert torch.equal(found.cpu(), wanted) and torch.equal(x.cpu(), numbers(4, 2))


@eight_devices
def test_a_part_is_there_in_the_next_step_and_cannot_be_read() -> None:
    kept: list[torch.Tensor] = []

    def keeps(part: torch.Tensor) -> torch.Tensor:
        kept.append(part + 1)
        return part * weight

    weight, split = on_device(2).requires_grad_(), spmd.shard_map(keeps, mesh(), ("data",), ("data",))
    x = split(on_device(4))
    x.sum().backward()
    lazytpu.mark_step()
    assert x.detach().tolist() == [0.0, 1.0, 0.0, 3.0] and spmd.sharding_of(kept[0]) is None
    for part in (kept[0], weight.grad):
        with pytest.raises(LazyTPUError) as caught:
            part.sum().item()
        lines = str(caught.value).splitlines()
        assert lines[0] == "this tensor is another one on each device, and cannot be read as one"
        assert lines[2:] == [
            "  with  f32[]",
            "  fix   return it from the function of shard_map (disable_manual_sharding in torch_xla); what needs a "
            "gradient is an argument of that function",
        ]
    with pytest.raises(LazyTPUError, match="has no sharding"):
        spmd.mark_sharding(kept[0], mesh(), ("data",))
    again = spmd.shard_map(lambda part: part + kept[0].mul_(2), mesh(), ("data",), ("data",))(on_device(4))
    assert again.tolist() == [2.0, 5.0, 8.0, 11.0]
    kept[0].copy_(torch.zeros(2))
    assert kept[0].tolist() == [0.0, 0.0]


@eight_devices
def test_what_is_read_before_backward_is_no_matter() -> None:
    losses = []
    for reads in (False, True):
        x = on_device(4, 4).requires_grad_()
        loss = spmd.shard_map(lambda part: spmd.all_reduce(part.exp().sum(), ("data", "model")), mesh(), ("data",), ())(
            x
        )
        if reads:
            assert loss.item() > 0
        loss.backward()
        losses.append(x.grad.cpu())
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0], 4 * numbers(4, 4).exp())


@eight_devices
def test_what_does_not_fit_is_refused() -> None:
    x = on_device(4, 4)
    with pytest.raises(RuntimeError, match="inside of a function that lazytpu.spmd.shard_map calls"):
        spmd.all_reduce(x, "data")
    refused = [
        (lambda p: spmd.all_reduce(p, "rows"), ValueError, "the mesh has no axis 'rows'"),
        (lambda p: spmd.all_reduce(p, "data", "product"), ValueError, "by sum, mean, min or max"),
        (lambda p: spmd.all_reduce(x, "data"), LazyTPUError, "this tensor is whole on each"),
        (lambda p: spmd.all_gather(p, "data", 2), IndexError, "dimension 2 of a part with 2 dimensions"),
        (lambda p: spmd.reduce_scatter(p, ("data", "model")), ValueError, "does not divide among 8 devices"),
        (lambda p: spmd.permute(p, "data", [(0, 2)]), ValueError, "between 2 devices"),
        (lambda p: (p, p), ValueError, "1 specs for 2 results"),
        (lambda p: x, LazyTPUError, "not a part"),
        (lambda p: spmd.shard_map(lambda q: q, mesh(), (), ())(p), LazyTPUError, "cannot be split again"),
    ]
    for function, error, message in refused:
        with pytest.raises(error, match=message):
            spmd.shard_map(function, mesh(), ("data",), ("data",))(x)
    with pytest.raises(ValueError, match="1 specs for 2 arguments"):
        spmd.shard_map(lambda a, b: a, mesh(), ("data",), ())(x, x)
    with pytest.raises(TypeError, match="not one on cpu"):
        spmd.shard_map(lambda a: a, mesh(), ("data",), ())(torch.ones(2))
    with pytest.raises(NotImplementedError, match="all_reduce by max has no gradient"):
        most = spmd.shard_map(lambda a: spmd.all_reduce(a, "data", "max"), mesh(), ("data",), ())
        most(x.requires_grad_()).sum().backward()


@eight_devices
def test_what_is_not_finite_is_found_where_the_parts_are_whole() -> None:
    split = spmd.shard_map(lambda part: part.log(), mesh(), ("data",), ("data",))
    found = lazytpu.debug.find_nan(lambda: split(on_device(4) - 1))
    assert found is not None and found.op == "lazytpu.from_parts"
