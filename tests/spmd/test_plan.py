"""Plans: what a step needs on devices that are only described."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu import spmd
from lazytpu.debug.chips import chip_of
from lazytpu.debug.planned import Plan, Program
from lazytpu.debug.roofline import links_of
from lazytpu.errors import LazyTPUError
from lazytpu.lowering.target import Topology
from lazytpu.runtime import described
from lazytpu.runtime.ahead import compile_ahead
from lazytpu.spmd.plan import recorded
from tests.support.eight_devices import eight_devices

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
needs_gpu_compiler = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)), reason="needs jax's plugin for CUDA"
)


def program() -> Callable[[], None]:
    mesh = spmd.Mesh((8,), ("data",))
    with torch.device(lazytpu.device()):
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))
    spmd.fully_shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        x = spmd.mark_sharding(torch.ones(32, 64).to(lazytpu.device()), mesh, ("data",))
        loss = F.cross_entropy(model(x), torch.zeros(32, dtype=torch.int64).to(lazytpu.device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert loss.item() == 0.0

    return step


def here() -> Topology:
    """Return the eight virtual devices of this process, as if they were described."""
    return Topology("cpu:8", "cpu", tuple(jax.devices()))


@eight_devices
def test_a_step_is_recorded_and_compiled_without_running() -> None:
    state = lazytpu.random.get_rng_state()
    before = lazytpu.metrics.counter("execute"), lazytpu.metrics.counter("compile")
    graphs, reads = recorded(program, here(), 3)
    assert (lazytpu.metrics.counter("compile"), len(graphs)) == (before[1], 1)
    assert torch.equal(lazytpu.random.get_rng_state(), state)
    (place, count) = next(iter(reads.items()))
    assert count == 3 and place.startswith("test_plan.py:")
    found = Plan(here(), (Program(compile_ahead(graphs[0], here()), here()),), reads)
    weights = 64 * 256 + 256 + 256 * 16 + 16
    # parameters, exp_avg and exp_avg_sq in eight parts, and the batch; labels and step counters are small
    assert 0 <= found.memory.arguments - 4 * (3 * weights + 32 * 64) // 8 < 1024
    assert found.fits and found.flops >= 2 * 3 * 32 * (64 * 256 + 256 * 16) // 8 - 2 * 32 * 64 * 256 // 8
    assert {(c.kind, c.reason) for c in found.collectives} >= {("all-gather", "input"), ("all-reduce", "sum")}
    assert {c.axis for c in found.collectives} == {"data"}
    assert all(c.at.startswith("test_plan.py:") for c in found.collectives)
    text = str(found)
    assert "mesh (data=8)" in text and "all-gather over data (8 chips)" in text and "read      3 x at" in text
    assert json.loads(json.dumps(found.as_json()))["flops"] == found.flops


@eight_devices
def test_a_program_that_marks_its_steps_is_ended() -> None:
    counted = []

    def loop() -> None:
        x = torch.ones(8).to(lazytpu.device())
        for i in range(1000):
            x.mul_(2)
            lazytpu.mark_step()
            counted.append(i)

    graphs, _ = recorded(loop, here(), 2)
    assert [len(g.nodes) for g in graphs] == [1] and len(counted) == 2
    x = torch.ones(8).to(lazytpu.device())
    x.mul_(2)  # the same path: what a plan found for it is not used
    lazytpu.mark_step()
    assert x.tolist() == [2.0] * 8


@eight_devices
def test_tensors_from_outside_are_refused() -> None:
    outside = torch.ones(8).to(lazytpu.device())

    def step() -> None:
        outside.add_(1)
        lazytpu.mark_step()

    with pytest.raises(LazyTPUError, match="a tensor from outside"):
        recorded(step, here(), 1)
    assert outside.tolist() == [1.0] * 8 or outside.tolist() == [2.0] * 8
    kept: list[torch.Tensor] = []
    recorded(lambda: kept.append(torch.ones(3).to(lazytpu.device()) + 1), here(), 1)
    with pytest.raises(LazyTPUError, match="cannot use the contents"):
        kept[0].tolist()


def test_without_libtpu_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lazytpu\[tpu\]'"):
        described.topology("v5e:2x3")
    with pytest.raises(ValueError, match="one step or more"):
        spmd.plan(lambda: None, "v5e:2x2", steps=0)


@needs_libtpu
def test_a_plan_of_a_tpu(tmp_path: Path) -> None:
    example, out = Path(__file__).parents[2] / "examples" / "train_gpt_spmd.py", tmp_path / "plan.json"
    command = [sys.executable, "-m", "lazytpu", "plan", "--topology", "v5e:2x4", "--json", str(out), str(example)]
    done = subprocess.run([*command, "--how", "fully"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["chips"] == 8 and found["fits"] and found["mesh"] == [{"data": 8}]
    assert found["roofline"]["links_s"] > 0 and "bound by" in done.stdout
    assert {"all-gather", "all-reduce"} <= {row["kind"] for row in found["collectives"]}
    with pytest.raises(ValueError, match="XLA does not know the topology 'v9:1x1'"):
        described.topology("v9:1x1")


@needs_gpu_compiler
def test_a_plan_of_gpus() -> None:
    found = spmd.plan(program, "h100:2x4")
    assert found.fits and found.chip is not None and found.chip.name == "H100" and found.limit_bytes == 80e9
    assert {(c.kind, c.reason) for c in found.collectives} >= {("all-gather", "input"), ("reduce-scatter", "sum")}
    assert found.programs[0].links(found.chip) == {"data": 8}


@needs_gpu_compiler
def test_a_program_without_inputs_is_compiled_for_the_topology_and_its_convolutions_are_counted() -> None:
    held: list[torch.Tensor] = []

    def program() -> None:
        x = torch.ones(8, 64, 32, 32, device=lazytpu.device())
        held.append(F.conv2d(x, torch.ones(64, 64, 3, 3, device=lazytpu.device()), padding=1))

    found = spmd.plan(program, "h100:1")
    held.clear()
    assert "__cudnn$conv" in found.programs[0].compiled.text
    assert found.flops == 2 * 8 * 64 * 64 * (3 * 32 - 2) ** 2
    moved = 4 * (2 * 8 * 64 * 32 * 32 + 64 * 64 * 3 * 3)
    assert found.programs[0].moved_bytes >= moved


def test_a_group_of_gpus_sends_over_nvlink_on_a_host_and_over_its_network_cards_between_hosts() -> None:
    chip = chip_of("NVIDIA H100 80GB HBM3")
    assert chip is not None
    one, two = [(0, i) for i in range(8)], [(i // 8, i) for i in range(16)]
    assert [links_of(group, (2, 16), chip) for group in (one, two, two[::8])] == [18, 16, 2]


def test_without_the_plugin_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install jax-cuda12-plugin jax-cuda12-pjrt"):
        described.topology("h100:3")
