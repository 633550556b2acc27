"""Checkpoints of the global view: saved from one mesh, loaded on another, on one device and on the CPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils._pytree import tree_flatten

import lazytpu
from lazytpu import spmd
from lazytpu.spmd import checkpoint
from lazytpu.spmd.tensor_parts import fill
from tests.support.eight_devices import eight_devices
from tests.support.processes import run_code


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def net(device: object) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 20), nn.ReLU(), nn.BatchNorm1d(20), nn.Linear(20, 10)).to(device)  # type: ignore[arg-type]


def fully(model: nn.Module) -> None:
    spmd.fully_shard(model, spmd.Mesh((8,), ("data",)))  # 20 and 10 do not divide: padded


def layers(model: nn.Sequential) -> None:
    mesh = spmd.Mesh((2, 4), ("data", "model"))
    spmd.mark_sharding(model[0].weight, mesh, ("model", "data"))
    spmd.mark_sharding(model[0].bias, mesh, ("model",))
    spmd.mark_sharding(model[3].weight, mesh, (None, "model"))


def trained(spread: Any, device: object, steps: int = 2) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = net(device)
    if spread is not None:
        spread(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        F.cross_entropy(model(torch.randn(8, 16).to(device)), torch.arange(8).to(device)).backward()  # type: ignore[call-overload]
        optimizer.step()
        optimizer.zero_grad()
        lazytpu.mark_step()
    return model, optimizer


def values(state: object) -> list[Any]:
    return [x.detach().cpu().clone() if isinstance(x, torch.Tensor) else x for x in tree_flatten(state)[0]]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) and x.dtype == y.dtype if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "step": 7}


@eight_devices
def test_from_one_mesh_to_another_to_one_device_to_the_cpu_and_back() -> None:
    model, optimizer = trained(fully, lazytpu.device())
    state = state_of(model, optimizer)
    want = values(state)
    with folder() as at:
        checkpoint.save(state, at / "a")
        places = [(layers, lazytpu.device()), (None, lazytpu.device()), (None, "cpu"), (fully, lazytpu.device())]
        for i, (spread, device) in enumerate(places):
            other, its = trained(spread, device, steps=1)
            before = None if spread is None else [spmd.sharding_of(p) for p in other.parameters()]
            loaded = state_of(other, its)
            loaded["step"] = 0
            assert not same(values(loaded), want)
            checkpoint.load(loaded, at / ("a" if not i else f"b{i - 1}"))
            set_state_dict(other, its, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            found = state_of(other, its) | {"step": loaded["step"]}
            assert same(values(found), want)
            if before is not None:
                assert [spmd.sharding_of(p) for p in other.parameters()] == before
            checkpoint.save(found, at / f"b{i}")  # the next one loads what this one saved


@eight_devices
def test_each_part_is_saved_once() -> None:
    mesh = spmd.Mesh((2, 4), ("data", "model"))
    x = spmd.mark_sharding(torch.arange(24.0).reshape(6, 4).to(lazytpu.device()), mesh, ("model", None))
    y = spmd.replicate(torch.ones(5).to(lazytpu.device()), mesh)
    with folder() as at:
        checkpoint.save({"x": x, "y": y, "z": x.t(), "part": x[1:, 2:]}, at / "a")
        found = torch_checkpoint.FileSystemReader(at / "a").read_metadata().state_dict_metadata
        assert {n: [(*c.offsets, *c.sizes) for c in m.chunks] for n, m in found.items()} == {
            "x": [(0, 0, 2, 4), (2, 0, 2, 4), (4, 0, 2, 4)],  # the fourth has padding only
            "y": [(0, 5)],
            "z": [(0, 0, 4, 2), (0, 2, 4, 2), (0, 4, 4, 2)],
            "part": [(0, 0, 5, 2)],
        }
        plain = {"x": torch.zeros(6, 4), "z": torch.zeros(4, 6), "part": torch.zeros(5, 2)}
        torch_checkpoint.load(plain, checkpoint_id=at / "a")  # torch's own planner
        assert torch.equal(plain["x"], x.cpu()) and torch.equal(plain["z"], x.cpu().t())
        assert torch.equal(plain["part"], x.cpu()[1:, 2:])
        z = torch.zeros(6, 4).to(lazytpu.device())
        spmd.mark_sharding(z, mesh, ("data", "model"))
        checkpoint.load({"z": z.t()}, at / "a")
        assert torch.equal(z.cpu(), x.cpu()) and spmd.sharding_of(z).spec == ("data", "model")


@eight_devices
def test_a_checkpoint_on_a_thread_has_the_state_of_its_call() -> None:
    x = spmd.mark_sharding(torch.ones(64, 8).to(lazytpu.device()), spmd.Mesh((8,), ("data",)), ("data",))
    y = torch.ones(3)
    with folder() as at:
        running = checkpoint.async_save({"x": x, "y": y}, at / "a")
        for _ in range(5):  # in place, and donated where nobody else holds the memory
            x.mul_(2)
            y.mul_(2)
            lazytpu.mark_step()
        running.result()
        found = {"x": torch.zeros(64, 8), "y": torch.zeros(3)}
        checkpoint.load(found, at / "a")
    assert torch.equal(found["x"], torch.ones(64, 8)) and torch.equal(found["y"], torch.ones(3))
    assert torch.equal(x.cpu(), torch.full((64, 8), 32.0))


def test_a_thread_that_saves_leaves_the_step_whole() -> None:
    x = torch.arange(12.0).to(lazytpu.device())
    lazytpu.mark_step(wait=True)
    with folder() as at:
        y = x * 2  # of the step that is recorded
        cuts = lazytpu.metrics.counter("cut")
        checkpoint.async_save({"x": x}, at / "a").result()
        assert lazytpu.metrics.counter("cut") == cuts
        found = {"x": torch.zeros(12)}
        checkpoint.load(found, at / "a")
        assert found["x"].equal(torch.arange(12.0))
    assert y.cpu().equal(torch.arange(12.0) * 2)


@eight_devices
def test_a_manager_keeps_the_last_ones() -> None:
    x = torch.zeros(4).to(lazytpu.device())
    with folder() as at:
        manager = checkpoint.CheckpointManager(at, keep=2)
        assert manager.load({"x": x}) == 0
        for step in range(1, 6):
            x.add_(1)
            manager.save(step, {"x": x})
        manager.wait()
        assert manager.steps() == [4, 5] and len(list(at.iterdir())) == 2
        (at / ".step-000000006.unfinished").mkdir()  # of a process that was killed
        again = checkpoint.CheckpointManager(at, keep=2, wait=True)
        assert again.load({"x": x.zero_()}, 4) == 4 and x.tolist() == [4.0] * 4
        assert again.load({"x": x}) == 5 and x.tolist() == [5.0] * 4
        again.save(6, {"x": x})
        assert again.steps() == [5, 6] and len(list(at.iterdir())) == 2
        with pytest.raises(FileExistsError):
            again.save(6, {"x": x})
        with pytest.raises(FileNotFoundError, match="no checkpoint of step 1, but of"):
            again.load({"x": x}, 1)
        with pytest.raises(RuntimeError, match="Missing key"):
            again.load({"w": x})
        with pytest.raises(ValueError, match="Size mismatch"):
            again.load({"x": torch.zeros(5).to(lazytpu.device())})


@eight_devices
def test_gathered_state_loads_without_lazytpu() -> None:
    model, _ = trained(fully, lazytpu.device(), 1)
    with folder() as at:
        torch.save(checkpoint.gather(model.state_dict()), at / "state.pt")
        code = f"""
            import sys, torch
            state = torch.load({str(at / "state.pt")!r})
            devices = {{x.device.type for x in state.values()}}
            print("lazytpu" in sys.modules, devices, state["0.weight"].double().sum().item())
        """
        done = run_code(code)
    want = model[0].weight.detach().cpu().double().sum().item()
    assert done.stdout.split() == ["False", "{'cpu'}", str(want)], done.stderr


@eight_devices
def test_safetensors_are_loaded_into_parts() -> None:
    torch.manual_seed(1)
    want = net("cpu").state_dict()
    with folder() as at:
        names = list(want)
        first, second = ({f"m.{n}": want[n].contiguous() for n in part} for part in (names[:3], names[3:]))
        save_file(first, at / "a.safetensors")
        save_file(second, at / "b.safetensors")
        index = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
        (at / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        for spread in (fully, layers, None):
            model = net(lazytpu.device())
            if spread is not None:
                spread(model)
            before = [spmd.sharding_of(p) for p in model.parameters()]
            assert spmd.load_safetensors(model, at, rename="m.{}".format) == []
            assert same(values(model.state_dict()), values(want))
            assert [spmd.sharding_of(p) for p in model.parameters()] == before
        with pytest.raises(KeyError, match=r"has no 0\.weight"):
            spmd.load_safetensors(model, at)
        assert "0.weight" in spmd.load_safetensors(model, at, strict=False)
        with pytest.raises(ValueError, match=r"weight is \(3, 3\), in a\.safetensors \(20,\)"):
            spmd.load_safetensors(nn.Linear(3, 3), at, rename=lambda n: "m.0.bias")
    with folder() as at, pytest.raises(FileNotFoundError, match="has neither"):
        spmd.load_safetensors(net("cpu"), at)


@eight_devices
def test_tied_weights_are_loaded_by_any_of_their_names() -> None:
    for saved in ("0.weight", "1.weight"):
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)).to(lazytpu.device())
        model[1].weight = model[0].weight
        with folder() as at:
            save_file({saved: torch.arange(128.0).reshape(16, 8)}, at / "model.safetensors")
            assert spmd.load_safetensors(model, at) == []
        assert model[1].weight.flatten().tolist() == list(range(128))


@eight_devices
def test_each_part_is_asked_for_once() -> None:
    x = spmd.mark_sharding(torch.zeros(10, 3).to(lazytpu.device()), spmd.Mesh((2, 4), ("data", "model")), ("model",))
    want, asked = torch.arange(30.0).reshape(10, 3), []

    def part(box: tuple[slice, ...]) -> torch.Tensor:
        asked.append(box)
        return want[box]

    fill(x, part)
    assert len(asked) == 4 and torch.equal(x.cpu(), want)
