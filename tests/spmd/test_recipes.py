"""The recipes, on models in small: the numbers of one device, bytes and collectives as they should be."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu import spmd
from tests.support.eight_devices import eight_devices, eight_devices_alone

STEPS, MANY_STEPS = 5, 20
SIZES = {"f32": 4, "s32": 4, "f64": 8, "s64": 8, "u32": 4, "pred": 1, "u64": 8}
_COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
Recipe = Callable[[nn.Module], tuple[spmd.Mesh, str]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A block, or more, of width 32 over 96 tokens."""

    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(96, 32), nn.Embedding(16, 32)
        self.blocks = nn.Sequential(*[Block(32, 4) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 96, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))


class TwoBlocks(GPT):
    def __init__(self) -> None:
        super().__init__(2)


def batches(model: type[nn.Module], steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if issubclass(model, GPT):
        tokens = [torch.randint(96, (8, 17), generator=generator) for _ in range(steps)]
        return [(t[:, :-1], t[:, 1:]) for t in tokens]
    return [(torch.randn(16, 3, 12, 12, generator=generator), torch.arange(16) % 10) for _ in range(steps)]


def train(
    kind: type[nn.Module], recipe: Recipe | None, steps: int
) -> tuple[list[float], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind().to(lazytpu.device())
    mesh, axis = recipe(model) if recipe else (None, "")
    spec = (axis,) if axis else ()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for x, y in lazytpu.DeviceLoader(batches(kind, steps), mesh=mesh, spec=spec):
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if len(losses) == 3:
            before = lazytpu.metrics.counter("compile")
    assert lazytpu.metrics.counter("compile") == before, lazytpu.explain()
    return [loss.item() for loss in losses], model, optimizer


@cache
def on_one_device(kind: type[nn.Module], steps: int) -> list[float]:
    lazytpu.config.compile_after = 1000  # op by op, with the CPU's own kernels
    try:
        return train(kind, None, steps)[0]
    finally:
        lazytpu.config.compile_after = 1


def equal_to_one_device(
    kind: type[nn.Module], recipe: Recipe, steps: int = STEPS
) -> tuple[nn.Module, torch.optim.Optimizer]:
    want = on_one_device(kind, steps)
    got, model, optimizer = train(kind, recipe, steps)
    assert got == pytest.approx(want, rel=1e-5)
    return model, optimizer


def dp(model: nn.Module) -> tuple[spmd.Mesh, str]:
    mesh = spmd.Mesh((8,), ("data",))
    spmd.data_parallel(model, [], mesh)
    return mesh, "data"


def fsdp(model: nn.Module) -> tuple[spmd.Mesh, str]:
    mesh = spmd.Mesh((8,), ("data",))
    spmd.fully_shard(model, mesh)
    return mesh, "data"


def plan() -> dict[str, object]:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    return {
        "tokens": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.norm*": SequenceParallel(),
        **{f"blocks.*.{name}": ColwiseParallel() for name in "qkv"},
        "blocks.*.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(),
    }


def tp(model: nn.Module) -> tuple[spmd.Mesh, str]:
    mesh = spmd.Mesh((1, 8), ("data", "model"))
    spmd.parallelize(model, mesh, plan())
    return mesh, "data"


def dp_tp(model: nn.Module) -> tuple[spmd.Mesh, str]:
    mesh = spmd.Mesh((2, 4), ("data", "model"))
    spmd.parallelize(model, mesh, plan(), axis="model")
    return mesh, "data"


def fsdp_tp(model: nn.Module) -> tuple[spmd.Mesh, str]:
    mesh, axis = dp_tp(model)
    spmd.fully_shard(model, mesh, axis="data")
    return mesh, axis


def part(tensors: list[torch.Tensor]) -> float:
    """Return the share of tensors that one device has."""
    return sum(spmd.local_shards(t)[0].data.nbytes for t in tensors) / sum(t.nbytes for t in tensors)


def collectives(text: str) -> dict[str, int]:
    """Return the bytes that each kind of collective gives."""
    found: dict[str, int] = {}
    for types, kind in _COLLECTIVE.findall(text):
        for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", types):
            nbytes = SIZES[dtype] * prod(map(int, sizes.split(","))) if sizes else SIZES[dtype]
            found[kind] = found.get(kind, 0) + nbytes
    return found


def collectives_of_step(kind: type[nn.Module], recipe: Recipe) -> tuple[dict[str, int], int]:
    """Return the collectives of a step of SGD and the bytes of the parameters."""
    model = kind().to(lazytpu.device())
    mesh, axis = recipe(model)
    x, y = (spmd.mark_sharding(t.to(lazytpu.device()), mesh, (axis,)) for t in batches(kind)[0])
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return collectives(lazytpu.hlo_text(optimized=True)), sum(p.nbytes for p in model.parameters())


@eight_devices
def test_layers_parameters_and_batch_split_give_the_numbers_of_one_device() -> None:
    model, _ = equal_to_one_device(GPT, fsdp_tp)
    assert spmd.sharding_of(model.blocks[0].up.weight).spec == ("model", "data")
    assert spmd.sharding_of(model.blocks[0].down.weight).spec == ("data", "model")
    assert spmd.sharding_of(model.tokens.weight).spec == ("model", "data")


@eight_devices
def test_data_parallel_moves_gradients_once() -> None:
    found, nbytes = collectives_of_step(GPT, dp)
    assert found == {"all-reduce": nbytes + 8}  # and two numbers, for the loss


@eight_devices_alone
def test_fully_shard_gathers_parameters_twice_and_adds_gradients_once() -> None:
    found, nbytes = collectives_of_step(GPT, fsdp)
    assert found["all-gather"] <= 2 * nbytes
    assert found.get("all-reduce", 0) + found.get("reduce-scatter", 0) <= 1.01 * nbytes


@eight_devices
def test_a_convolutional_net_has_no_gather_of_activations() -> None:
    assert {*collectives_of_step(CNN, dp)[0]} == {"all-reduce"}


@eight_devices
def test_attention_over_batch_and_heads_needs_no_collective() -> None:
    mesh = spmd.Mesh((2, 4), ("data", "model"))
    q, k, v = (torch.randn(4, 4, 16, 8).to(lazytpu.device()).requires_grad_() for _ in range(3))
    for x in (q, k, v):
        spmd.mark_sharding(x, mesh, ("data", "model"))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.backward(torch.ones_like(out))
    assert collectives(lazytpu.hlo_text(optimized=True)) == {}


@eight_devices
def test_plans_that_do_not_fit_raise() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel

    mesh = spmd.Mesh((8,), ("model",))
    with pytest.raises(ValueError, match="the plan names 'middle', and Block has no such submodule"):
        spmd.parallelize(Block(8, 2), mesh, {"middle": ColwiseParallel()})
    with pytest.raises(NotImplementedError, match="for nn.Linear and nn.Embedding, not for LayerNorm"):
        spmd.parallelize(Block(8, 2), mesh, {"norm1": ColwiseParallel()})
    with pytest.raises(ValueError, match="the mesh has no axis 'data'"):
        spmd.fully_shard(Block(8, 2), mesh, "data")


@eight_devices
def test_plans_lay_out_what_goes_in_and_comes_out() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInputOutput

    layer = nn.Linear(8, 8).to(lazytpu.device())
    style = PrepareModuleInputOutput(
        input_layouts=(Replicate(),),
        desired_input_layouts=(Shard(0),),
        output_layouts=(Replicate(),),
        desired_output_layouts=(Shard(1),),
    )
    spmd.parallelize(layer, spmd.Mesh((8,), ("model",)), style)
    text = lazytpu.ir_text(layer(torch.ones(8, 8).to(lazytpu.device())))
    assert "{model, ...} on mesh" in text and "{..., model} on mesh" in text


@eight_devices
def test_the_last_batch_need_not_divide() -> None:
    mesh = spmd.Mesh((8,), ("data",))
    loader = torch.utils.data.DataLoader(torch.arange(21.0), batch_size=16)
    sums = [x.sum() for x in lazytpu.DeviceLoader(loader, mesh=mesh)]
    assert [s.item() for s in sums] == [120.0, 90.0]
    with pytest.raises(ValueError, match="the mesh has no axis 'rows'"):
        lazytpu.DeviceLoader(loader, mesh=mesh, spec=("rows",))


@eight_devices_alone
def test_all_recipes_on_all_models() -> None:
    for kind, recipes in {TwoBlocks: (dp, fsdp, tp, dp_tp, fsdp_tp), CNN: (dp, fsdp)}.items():
        for recipe in recipes:
            model, optimizer = equal_to_one_device(kind, recipe, MANY_STEPS)
            if (kind, recipe) == (TwoBlocks, fsdp):
                states = [s for state in optimizer.state.values() for s in state.values() if s.dim()]
                for tensors in (list(model.parameters()), [p.grad for p in model.parameters()], states):
                    assert part(tensors) <= 1.05 / 8
