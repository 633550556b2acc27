"""What is shown of a program over many devices: its HLO, its collectives with their lines, and a dump."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch
from torch import nn

import lazytpu
from lazytpu import spmd
from lazytpu.debug.folder import open_dump
from lazytpu.debug.report import write_report
from lazytpu.debug.report.collect import overview
from tests.support.eight_devices import eight_devices


def step(rows: int = 16) -> None:
    mesh = spmd.Mesh((2, 4), ("data", "model"))
    torch.manual_seed(0)
    up, down = (nn.Linear(*sizes, bias=False).to(lazytpu.device()) for sizes in ((32, 64), (64, 32)))
    spmd.mark_sharding(up.weight, mesh, ("model", None))
    spmd.mark_sharding(down.weight, mesh, (None, "model"))
    x = spmd.mark_sharding(torch.ones(rows, 32).to(lazytpu.device()), mesh, ("data", None))
    y = down(up(x).relu())  # one sum over "model"
    _ = y.softmax(0)  # along the batch, which is split
    lazytpu.mark_step()


@eight_devices
def test_explain_lists_collectives_with_their_lines() -> None:
    step()
    lines = lazytpu.explain().splitlines()
    start = lines.index("what the devices of a mesh send in a run of a program")
    head, *rows = lines[start + 1 : start + 6]
    assert re.fullmatch(r"  graph \d+ on mesh \(data=2, model=4\): \d+ collectives, [\d.]+ KB", head)
    (sums,) = [row for row in rows if "over model" in row]
    # 8 rows of 32 numbers on each device, at the line of `y`
    assert sums.startswith("    1 x all-reduce over model, 1.02 KB: sums over a dimension that is split, aten.")
    assert "test_inspection.py:27" in sums
    assert any("all-reduce over data" in row and "test_inspection.py:28" in row for row in rows)


@eight_devices
def test_what_nobody_asked_for_is_named() -> None:
    mesh = spmd.Mesh((8,), ("data",))
    x = spmd.mark_sharding(torch.ones(64, 24).to(lazytpu.device()), mesh, ("data",))
    y = spmd.mark_sharding(torch.ones(64, 24).to(lazytpu.device()), mesh, (None, "data"))
    _ = (x * 3).exp() @ torch.ones(24, 24).to(lazytpu.device()) * (y * 2).exp()  # two ways to lie meet
    lazytpu.mark_step()
    text = lazytpu.explain()
    assert re.search(
        r"x all-(to-all|gather) over data, [\d.]+ KB: nobody asked for, aten\.\S+ at test_inspection", text
    )


@eight_devices
def test_hlo_is_that_of_one_device_and_keeps_shardings() -> None:
    mesh = spmd.Mesh((8,), ("data",))
    x = spmd.mark_sharding(torch.ones(64, 24).to(lazytpu.device()), mesh, ("data",))
    x.copy_((x.T @ x)[:1].expand(64, 24))  # XLA alone would not split it
    text = lazytpu.hlo_text(optimized=True)
    assert "num_partitions=8" in text and re.search(r"entry_computation_layout=.*->\(?f32\[8,24\]", text)
    assert re.search(r"->\(?f32\[8,24\]", lazytpu.hlo_text(x, optimized=True))
    lazytpu.mark_step()


@eight_devices
def test_a_dump_and_its_report_have_the_mesh() -> None:
    with tempfile.TemporaryDirectory() as folder:
        lazytpu.config.dump = folder
        try:
            step(24)
        finally:
            lazytpu.config.dump = ""
        dump = open_dump(Path(folder))
        found = dump.graphs[-1].table("cost.json")["mesh"]
        shown = overview(dump, {})["graphs"][-1]["mesh"]
        write_report(dump, Path(folder) / "page.html", None, "")
        page = (Path(folder) / "page.html").read_text()
    assert found == shown and found["axes"] == {"data": 2, "model": 4} and found["devices"] == list(range(8))
    by_sharding = {row["sharding"]: row["bytes"] for row in found["inputs"]}
    assert by_sharding == {"{data, -}": 24 * 32 * 4 // 2, "{model, -}": 64 * 32, "{-, model}": 64 * 32}
    assert {(row["kind"], row["axis"], row["count"]) for row in found["collectives"]} >= {("all-reduce", "model", 1)}
    assert 'data-tab="mesh"' in page


@eight_devices
def test_the_memory_of_a_dump_is_that_of_one_device() -> None:
    x = spmd.mark_sharding(torch.ones(64, 24).to(lazytpu.device()), spmd.Mesh((8,), ("data",)), ("data",))
    lazytpu.mark_step()
    with tempfile.TemporaryDirectory() as folder:
        lazytpu.config.dump = folder
        try:
            x.mul_(2)
            lazytpu.mark_step()
        finally:
            lazytpu.config.dump = ""
        memory = open_dump(Path(folder)).graphs[-1].table("memory.json")
    assert memory["donated_bytes"] == 64 * 24 * 4 // 8
    assert memory["donated_bytes"] <= memory["arguments_bytes"]
    held = memory["arguments_bytes"] + memory["outputs_bytes"] - memory["aliased_bytes"]
    assert memory["peak_bytes"] == held + memory["temporaries_bytes"]
