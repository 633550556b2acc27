"""A program of `lazytpu.spmd` over two processes of four devices computes what it does on eight devices of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.processes import start_code
from tests.support.worlds import run_world, start_world
from tests.support.xla_flags import devices

PROGRAM = """
    import json, sys
    import torch, torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import lazytpu
    from lazytpu import spmd
    from lazytpu.runtime import world
    from lazytpu.spmd import checkpoint

    BOTH = ("data", "model")
    found = {}

    def train(model, batches, mesh, spec):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            lazytpu.mark_step()
            losses.append(loss.item())
        return losses

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 10)).to(lazytpu.device())

    torch.manual_seed(1)
    data = TensorDataset(torch.randn(45, 16), torch.randint(10, (45,)))
    hybrid = world.size() > 1 and spmd.HybridMesh((1, 4), (2, 1), BOTH)
    mesh = hybrid or spmd.Mesh((2, 4), BOTH)
    assert not hybrid or hybrid.devices == spmd.Mesh((2, 4), BOTH).devices
    net = model()
    for p in net.parameters():
        spmd.mark_sharding(p, mesh, (BOTH,))
    batches = lazytpu.DeviceLoader(DataLoader(data, 16), mesh=mesh, spec=(BOTH,))  # the last one has 13 examples
    found["fully sharded"] = train(net, batches, mesh, (BOTH,))
    found["compiled"] = lazytpu.metrics.counter("compile")
    weight = net[2].weight
    found["whole"] = weight.detach().cpu().sum(1).tolist()
    shards = spmd.local_shards(weight)
    found["shards"] = [[s.index[0].start, s.data.sum(1).tolist()] for s in shards]
    torch.save(net.state_dict(), sys.argv[1])
    found["saved"] = torch.load(sys.argv[1])["2.bias"].cpu().tolist()
    checkpoint.save({"net": net.state_dict(), "step": 3}, sys.argv[1] + ".checkpoint")
    other = {"net": model().state_dict(), "step": 0}
    for x in other["net"].values():
        spmd.mark_sharding(x, mesh, ("model",))
    running = checkpoint.async_save(other, sys.argv[1] + ".others")
    checkpoint.load(other, sys.argv[1] + ".checkpoint")
    running.result()
    found["loaded"] = [other["step"], *other["net"]["2.weight"].cpu().sum(1).tolist()]
    try:
        checkpoint.save({f"of {world.rank()}": (lambda: 0) if world.rank() else 3}, sys.argv[1] + ".unwritten")
    except Exception as error:
        found["failed"] = str(error)

    net = model()
    spmd.mark_sharding(net[0].weight, mesh, ("model",)); spmd.mark_sharding(net[2].weight, mesh, (None, "model"))
    if world.size() > 1:  # each process reads its half of a batch
        first = 8 * world.rank()
        rows, size = [*range(first, first + 8), *range(first + 16, first + 24)], 8
    else:
        rows, size = range(32), 16
    loader = DataLoader(torch.utils.data.Subset(data, rows), size)
    batches = lazytpu.DeviceLoader(loader, mesh=mesh, spec=("data",), parts=world.size() > 1)
    found["in parts"] = train(net, batches, mesh, ("data",))
    net = model()
    spmd.fully_shard(net, mesh, axis="data")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    @lazytpu.compile
    def step(x, y):
        loss = F.cross_entropy(net(x), y)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        return loss.detach()

    before, (x, y) = lazytpu.metrics.counter("replay"), [t.to(lazytpu.device()) for t in data[:16]]
    found["replayed"] = [step(x, y).item() for _ in range(6)]
    found["replays"] = lazytpu.metrics.counter("replay") - before
    one = spmd.clear_sharding(weight.detach().clone() * 1)
    found["cleared"] = one.cpu().sum(1).tolist()
    print(json.dumps(found))
"""
SETTINGS = {"LAZYTPU_COMPILE_AFTER": "1", "LAZYTPU_DISK_CACHE": "0"}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs write."""
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def results(kept: Path) -> list[dict[str, Any]]:
    """What one process of eight devices found, and each of two of four."""
    alone = start_code(PROGRAM, kept / "alone.pt", XLA_FLAGS=devices(8), **SETTINGS)
    both = start_world(PROGRAM, 2, kept / "both.pt", XLA_FLAGS=devices(4), **SETTINGS)
    done = [running.wait() for running in (alone, *both)]
    assert all(d.returncode == 0 for d in done), "\n".join(d.stderr for d in done)
    assert all(len(d.stdout.splitlines()) == 1 for d in done), "Gloo writes to the standard output"
    return [json.loads(d.stdout) for d in done]


@pytest.mark.parametrize("name", ["fully sharded", "in parts", "replayed", "whole", "saved", "loaded", "cleared"])
def test_numbers_are_those_of_one_process(results: list[dict[str, Any]], name: str) -> None:
    alone, *both = results
    for found in both:
        assert found[name] == pytest.approx(alone[name], rel=1e-5, abs=1e-6)
    assert both[0] == both[1] | {"shards": both[0]["shards"], "failed": both[0]["failed"]}
    assert both[0]["compiled"] == alone["compiled"] and both[0]["replays"] == alone["replays"] >= 3


def test_each_process_has_its_shards(results: list[dict[str, Any]]) -> None:
    alone, first, second = (found["shards"] for found in results)
    assert [start for start, _ in first + second] == [start for start, _ in alone] == [0, 2, 4, 6, 8, 10, 10, 10]
    assert sum((rows for _, rows in first + second), []) == pytest.approx(
        sum((rows for _, rows in alone), []), rel=1e-5
    )


def test_a_checkpoint_of_two_processes_is_one_that_torch_reads(results: list[dict[str, Any]], kept: Path) -> None:
    for name in ("alone.pt", "both.pt"):
        dcp_to_torch_save(kept / f"{name}.checkpoint", kept / "read.pt")
        found, want = torch.load(kept / "read.pt"), torch.load(kept / name, map_location="cpu")
        assert found["step"] == 3
        assert all(torch.equal(x, want[name]) for name, x in found["net"].items())
        assert (kept / f"{name}.others").exists()
    written = {path.name[:4] for path in (kept / "both.pt.checkpoint").glob("*.distcp")}
    assert written == {"__0_", "__1_"}, "both processes write"


def test_all_processes_hear_that_one_could_not_save(results: list[dict[str, Any]], kept: Path) -> None:
    alone, first, second = results
    assert "failed" not in alone
    assert first["failed"].startswith("rank 1 could not save the checkpoint") and "pickle" in first["failed"]
    assert second["failed"].startswith("Can't pickle")
    assert not (kept / "both.pt.unwritten").exists() and not [*kept.glob(".both*")]


def test_a_second_run_of_a_world_starts_without_xla(tmp_path: Path) -> None:
    code = """
        import torch, lazytpu
        from lazytpu import spmd
        x = spmd.mark_sharding(torch.ones(8, 4).to(lazytpu.device()), spmd.Mesh((4,), ("data",)), ("data",))
        print((x @ x.T).sum().item(), lazytpu.metrics.counter("compile"), lazytpu.metrics.counter("disk_hit"))
        torch.distributed.init_process_group()
        y = torch.ones(3, device=lazytpu.device())
        torch.distributed.all_reduce(y)
        print(y[0].item(), lazytpu.metrics.counter("compile"), lazytpu.metrics.counter("disk_hit"))
    """
    settings = {**SETTINGS, "LAZYTPU_DISK_CACHE": "1", "LAZYTPU_DISK_CACHE_DIR": str(tmp_path), "XLA_FLAGS": devices(2)}
    printed = [[done.stdout for done in run_world(code, 2, **settings)] for _ in range(2)]
    assert printed == [["256.0 1 0\n2.0 2 0\n"] * 2, ["256.0 0 1\n2.0 0 2\n"] * 2]
